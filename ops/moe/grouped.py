"""Kernels of the experts: the gated activation, grouped products over blocks of rows, and the weighted sum per token."""

from __future__ import annotations

from k3dsl.language import (
    In,
    Out,
    cdiv,
    dequantize_mxfp4,
    dot,
    f32,
    i32,
    kernel,
    loop,
    program_id,
    sigmoid,
    span,
    tanh,
    u8,
    when,
    where,
    zeros,
)


def activated(c, gate, up):
    """SiTU-GLU, [beta tanh(g / beta) sigmoid(g)] [l tanh(u / l)], or SwiGLU, g sigmoid(g) u, of fp32 tiles."""
    if c.activation == "silu":
        return gate * sigmoid(gate) * up
    left = c.beta * tanh(gate * (1 / c.beta)) * sigmoid(gate)
    return left * (c.linear_beta * tanh(up * (1 / c.linear_beta)))


@kernel(grid=lambda d, c: (cdiv(d.R, c.rows), cdiv(d.I, c.block)))
def situ(d, c, gate=In("R I"), up=In("R I"), y=Out("R I")):
    """The gated activation of two tensors, fp32 inside, rounded once."""
    rows, cols = span(program_id(0) * c.rows, c.rows, end=d.R), span(program_id(1) * c.block, c.block, end=d.I)
    y[rows, cols] = activated(c, gate[rows, cols].to(f32), up[rows, cols].to(f32)).to(y.dtype)


@kernel(grid=lambda d, c: (cdiv(d.R, c.rows), cdiv(d.I, c.block)))
def situ_backward(d, c, gate=In("R I"), up=In("R I"), grad=In("R I"), grad_gate=Out("R I"), grad_up=Out("R I")):
    """With t = tanh(g / beta), s = sigmoid(g), r = tanh(u / l): the left factor's derivative is (1 - t^2) s + beta t s (1 - s),
    the right one's 1 - r^2. Of SwiGLU: s + g s (1 - s), and 1."""
    rows, cols = span(program_id(0) * c.rows, c.rows, end=d.R), span(program_id(1) * c.block, c.block, end=d.I)
    g, u, dy = (t[rows, cols].to(f32) for t in (gate, up, grad))
    s = sigmoid(g)
    if c.activation == "silu":
        grad_gate[rows, cols] = (dy * (s + g * s * (1.0 - s)) * u).to(grad_gate.dtype)
        grad_up[rows, cols] = (dy * (g * s)).to(grad_up.dtype)
    else:
        t, r = tanh(g * (1 / c.beta)), tanh(u * (1 / c.linear_beta))
        left, right = c.beta * t * s, c.linear_beta * r
        slope = (1.0 - t * t) * s + left * (1.0 - s)
        grad_gate[rows, cols] = (dy * slope * right).to(grad_gate.dtype)
        grad_up[rows, cols] = (dy * left * (1.0 - r * r)).to(grad_up.dtype)


# ---- grouped products --------------------------------------------------------------------------------------------------
# Rows are in the order of their experts; a block is block_m rows of one expert, listed in a table with expert -1 past its
# end. Programs of one expert are neighbours in the grid, so that its weights are read once into the L2 cache; of those,
# `group` blocks of rows run through each block of columns together.


def block_of(d, c, columns):
    """(number of the row block, number of the column block) of this program."""
    across = cdiv(columns, c.block_n)
    if c.group == 1:
        return program_id(0) // across, program_id(0) % across
    gang, rest = program_id(0) // (c.group * across), program_id(0) % (c.group * across)
    return gang * c.group + rest % c.group, rest // c.group


def programs(d, c, columns):
    """Programs of a grouped product; the last gang may have row blocks to spare."""
    return cdiv(d.bound, c.group) * c.group * cdiv(columns, c.block_n)


def expert_of(d, c, block, block_expert):
    """The expert of a row block, -1 for a block that is not there."""
    if c.group == 1:
        return block_expert[block]
    last = where(block < d.bound, block, d.bound - 1)
    return where(block < d.bound, block_expert[last], -1)


LANE_COLUMNS = 128
"""Columns that are put in lane order among themselves."""


def lane_order(c, tile, axis):
    """With c.lane_order, columns (an axis of a tile, of a multiple of 128) in the order that both sides of a product have.

    In 16 columns of its operand in registers, wgmma takes columns 2t, 2t + 1, 2t + 8 and 2t + 9 of a row from lane t of four.
    A sum does not ask for an order of its terms. So of every 128 columns, lane t gets columns 32t to 32t + 31: 16 bytes of
    packed codes side by side, which are one load, and one scale. Of column 32t + 4q + 2e + n the place is 16q + 8n + 2t + e:
    two codes from the same half of neighbouring bytes share a register.
    """
    if not c.lane_order:
        return tile
    before, after = tile.shape[:axis], tile.shape[axis + 1 :]
    parts = tile.reshape(*before, tile.shape[axis] // LANE_COLUMNS, 4, 8, 2, 2, *after)
    n = len(before)
    order = (*range(n), n, n + 2, n + 4, n + 1, n + 3, *range(n + 5, n + 5 + len(after)))
    return parts.permute(*order).reshape(*tile.shape)


def weight_tile(c, weight, scale, expert, rows, i, width):
    """The i-th block_k columns of rows of an expert's weight, dequantised if it has scales. width: columns in all."""
    k = c.block_k
    if scale is None:
        return weight[expert, rows, span(i * k, k, end=width)]
    packed = weight[expert, rows, span(i * (k // 2), k // 2, end=width // 2)]
    scales = scale[expert, rows, span(i * (k // 32), k // 32, end=width // 32)]
    return lane_order(c, dequantize_mxfp4(packed, scales), 1)


def multiply(c, rows, weight, acc):
    """acc + rows weight^T; with swap_ab its transpose, so that few rows are columns of the instruction instead."""
    if c.swap_ab:
        return dot(weight, rows.T, acc=acc, precision=c.precision)
    return dot(rows, weight.T, acc=acc, precision=c.precision)


@kernel(grid=lambda d, c: (cdiv(d.T * d.K, c.gather_rows), cdiv(d.D, c.gather_columns)))
def gather(d, c, x=In("T D"), order=In("T*K", i32), expert_offsets=In("E+1", i32), xs=Out("T*K D")):
    """Rows of x in the order of their experts, so that the products take them a block at a time."""
    rows = span(program_id(0) * c.gather_rows, c.gather_rows, end=expert_offsets[d.E])
    cols = span(program_id(1) * c.gather_columns, c.gather_columns, end=d.D)
    xs[rows, cols] = lane_order(c, x[order[rows] // d.K, cols], 1)


@kernel(grid=lambda d, c: (programs(d, c, d.I),))
def gate_up(
    d,
    c,
    x=In("T D", optional=True),
    xs=In("T*K D", optional=True),
    w_gate=In("E I DP"),
    w_up=In("E I DP"),
    gate_scale=In("E I D//32", u8, optional=True),
    up_scale=In("E I D//32", u8, optional=True),
    order=In("T*K", i32, optional=True),
    expert_offsets=In("E+1", i32),
    block_expert=In("bound", i32),
    block_row=In("bound", i32),
    h=Out("T*K I"),
):
    """h = the gated activation of x w_gate^T and x w_up^T, rows of x by expert: gathered here, or before (xs). With
    c.lane_order the columns of xs and of h are in that order."""
    block, column = block_of(d, c, d.I)
    expert = expert_of(d, c, block, block_expert)

    @when(expert >= 0)
    def _():
        first = block_row[block]
        rows = span(first, c.block_m, end=expert_offsets[expert + 1])
        cols = span(column * c.block_n, c.block_n, end=d.I)
        if xs is None:  # a row past the expert's last reads token 0: rows do not mix, and it is not written
            source, taken = x, order[rows] // d.K
        else:  # there it is the next one's, or was never written
            source, taken = xs, span(first, c.block_m, end=d.T * d.K)
        shape = (c.block_n, c.block_m) if c.swap_ab else (c.block_m, c.block_n)

        @loop(cdiv(d.D, c.block_k), init=(zeros(shape, f32), zeros(shape, f32)), label="k")
        def products(i, gate, up):
            tile = source[taken, span(i * c.block_k, c.block_k, end=d.D)]
            left = weight_tile(c, w_gate, gate_scale, expert, cols, i, d.D)
            right = weight_tile(c, w_up, up_scale, expert, cols, i, d.D)
            return multiply(c, tile, left, gate), multiply(c, tile, right, up)

        y = activated(c, products[0], products[1]).to(h.dtype)
        h[rows, cols] = lane_order(c, y, 0).T if c.swap_ab else lane_order(c, y, 1)


@kernel(grid=lambda d, c: (programs(d, c, d.D),))
def down(
    d,
    c,
    h=In("T*K I"),
    w_down=In("E D IP"),
    down_scale=In("E D I//32", u8, optional=True),
    expert_offsets=In("E+1", i32),
    block_expert=In("bound", i32),
    block_row=In("bound", i32),
    y=Out("T*K D"),
):
    """y = h w_down^T, rounded to the tokens' dtype; rows by expert."""
    block, column = block_of(d, c, d.D)
    expert = expert_of(d, c, block, block_expert)

    @when(expert >= 0)
    def _():
        first = block_row[block]
        rows = span(first, c.block_m, end=expert_offsets[expert + 1])
        # rows past the expert's last are the next one's, or were never written: rows do not mix, and these are not stored
        taken = span(first, c.block_m, end=d.T * d.K)
        cols = span(column * c.block_n, c.block_n, end=d.D)
        shape = (c.block_n, c.block_m) if c.swap_ab else (c.block_m, c.block_n)

        @loop(cdiv(d.I, c.block_k), init=zeros(shape, f32), label="k")
        def product(i, acc):
            weight = weight_tile(c, w_down, down_scale, expert, cols, i, d.I)
            return multiply(c, h[taken, span(i * c.block_k, c.block_k, end=d.I)], weight, acc)

        out = product.to(y.dtype)
        y[rows, cols] = out.T if c.swap_ab else out


@kernel(grid=lambda d, c: (d.T, cdiv(d.D, c.block_d)))
def combine(d, c, y=In("T*K D"), slots=In("T*K", i32), weights=In("T K", f32), out=Out("T D")):
    """out[t] = sum over j of weights[t, j] y[slots[t, j]], in the order of j, in fp32; slot -1 counts as nothing."""
    token = program_id(0)
    cols = span(program_id(1) * c.block_d, c.block_d, end=d.D)
    total = zeros((c.block_d,), f32)
    for j in range(d.K):
        slot = slots[token * d.K + j]
        there = slot >= 0
        term = weights[token, j] * y[where(there, slot, 0), cols].to(f32)
        total = where(there, total + term, total)
    out[token, cols] = total.to(out.dtype)
