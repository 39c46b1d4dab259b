"""Spells `unit_lower_inverse` out in ordinary ops, for a backend that has no instruction or library call for it."""

from __future__ import annotations

from k3dsl.frontend.builder import Builder
from k3dsl.frontend.functions import arange, dot, where, zeros
from k3dsl.frontend.tile import Tile
from k3dsl.ir.graph import Kernel, Op, Region, Value
from k3dsl.ir.types import f32

SUBSTITUTION_BLOCK = 16


def expand_inverses(kernel: Kernel) -> Kernel:
    """Replaces every unit_lower_inverse by its method's steps. Rewrites the kernel in place and returns it."""
    builder = Builder({t.name: t for t in kernel.tensors})
    _expand(kernel.body, builder)
    return kernel


def _expand(region: Region, builder: Builder) -> None:
    out: list[Op] = []
    replaced: dict[int, Value] = {}
    for op in region.ops:
        op.operands = [replaced.get(id(v), v) for v in op.operands]
        for inner in op.regions:
            _substitute(inner, replaced)
            _expand(inner, builder)
        if op.opcode != "unit_lower_inverse":
            out.append(op)
            continue
        scratch = Region()
        with builder.active(), builder.region(scratch):
            a = Tile(op.operands[0])
            form = _doubling if op.attrs["method"] == "doubling" else _substitution
            x = form(a.to(f32), op.attrs["precision"]).to(a.dtype)
        for made in scratch.ops:
            made.loc = op.loc
        x.value.name = op.result.name
        replaced[id(op.result)] = x.value
        out.extend(scratch.ops)
    region.ops = out
    region.yields = [replaced.get(id(v), v) for v in region.yields]


def _substitute(region: Region, replaced: dict[int, Value]) -> None:
    for op in region.ops:
        op.operands = [replaced.get(id(v), v) for v in op.operands]
        for inner in op.regions:
            _substitute(inner, replaced)
    region.yields = [replaced.get(id(v), v) for v in region.yields]


def _narrow(precision: str, x: Tile) -> tuple[Tile, str | None]:
    from k3dsl.ir.types import bf16, f16

    if precision in ("bf16", "fp16"):
        return x.to(bf16 if precision == "bf16" else f16), None
    return x, precision


def _product(a: Tile, b: Tile, precision: str) -> Tile:
    x, p = _narrow(precision, a)
    y, _ = _narrow(precision, b)
    return dot(x, y, precision=p)


def _grid(a: Tile) -> tuple[Tile, Tile]:
    """Row and column numbers that broadcast against a's last two axes."""
    n = a.shape[-1]
    lead = (1,) * (len(a.shape) - 2)
    return arange(n).reshape(*lead, n, 1), arange(n).reshape(*lead, 1, n)


def _merge(x: Tile, a: Tile, rows: Tile, cols: Tile, block: int, precision: str) -> Tile:
    """Joins inverses of diagonal blocks of `block` rows to blocks of twice as many: X - X M X, M the block below."""
    below = (rows // block == cols // block + 1) & (rows // (2 * block) == cols // (2 * block))
    m = where(below, a, 0.0)
    return x - _product(_product(x, m, precision), x, precision)


def _doubling(a: Tile, precision: str) -> Tile:
    """Inverse of I + L from 2-row blocks upwards. Each merge is exact up to rounding, so alike keys do no harm."""
    rows, cols = _grid(a)
    n = a.shape[-1]
    one = where(rows == cols, 1.0, 0.0)
    x = one - where((rows // 2 == cols // 2) & (rows > cols), a, 0.0)
    block = 2
    while block < n:
        x = _merge(x, a, rows, cols, block, precision)
        block *= 2
    return x


def _substitution(a: Tile, precision: str) -> Tile:
    """Forward substitution of all 16-row diagonal blocks side by side in fp32, then merges."""
    n, size = a.shape[-1], SUBSTITUTION_BLOCK
    if n <= size:
        return _substitute_rows(a)
    blocks = n // size
    batch = a.type.size // (n * n)
    ids = arange(blocks)
    diagonal = ids.reshape(1, blocks, 1, 1, 1) == ids.reshape(1, 1, 1, blocks, 1)
    d = where(diagonal, a.reshape(batch, blocks, size, blocks, size), 0.0).sum(3)
    x3 = _substitute_rows(d.reshape(batch * blocks, size, size))
    x = where(diagonal, x3.reshape(batch, blocks, size, 1, size), 0.0).reshape(*a.shape)
    rows, cols = _grid(a)
    block = size
    while block < n:
        x = _merge(x, a, rows, cols, block, precision)
        block *= 2
    return x


def _substitute_rows(a: Tile) -> Tile:
    """x_i = e_i - sum_{j<i} a_ij x_j, one row of every block at a time."""
    n = a.shape[-1]
    rows, cols = _grid(a)
    lower = where(rows > cols, a, 0.0)
    x = where(rows == cols, 1.0, 0.0) + zeros(a.shape, f32)
    axis = len(a.shape) - 1
    for s in range(n - 1):
        column = lower.select(axis, s)
        row = x.select(axis - 1, s)
        x = x - _outer(column, row)
    return x


def _outer(column: Tile, row: Tile) -> Tile:
    return column.reshape(*column.shape, 1) * row.reshape(*row.shape[:-1], 1, row.shape[-1])
