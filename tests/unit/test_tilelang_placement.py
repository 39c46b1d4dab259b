"""Where the TileLang backend keeps each tile, shown on small kernels, and the page that explains it."""

from __future__ import annotations

import pytest

pytest.importorskip("tilelang")

from tilelang_text import placed, traced
from typer.testing import CliRunner

from k3dsl.backends.tilelang.explain import explain
from k3dsl.backends.tilelang.schedule import TileLangSchedule
from k3dsl.cli.main import app
from k3dsl.language import (
    In,
    InOut,
    Kernel,
    Out,
    Sym,
    bf16,
    cdiv,
    cumsum,
    dot,
    exp2,
    f32,
    i32,
    kernel,
    loop,
    program_id,
    span,
    zeros,
)
from k3dsl.targets import get_target


def kinds(k: Kernel, dims=None, **schedule) -> dict[str, list[str]]:
    """'kind: why' of each tile, by the opcode that makes it."""
    placement, tiles = placed(k, dims, **schedule)
    homes = {code: [placement.of(v) for v in found] for code, found in tiles.items()}
    return {code: [f"{h.kind}: {h.why}" for h in found] for code, found in homes.items()}


# ---- elementwise -----------------------------------------------------------------------------------------------------


def test_a_chain_that_is_read_once_is_folded_into_its_reader():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("16 64", f32), o=Out("16 64", f32)):
        o[:, :] = exp2(-abs(x[:, :])) * 2.0

    assert {h for found in kinds(k).values() for h in found} <= {
        "inline: read once",
        "inline: a way to index its operand",
    }


def test_a_costly_tile_with_two_readers_is_computed_once_in_registers():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("16 64", f32), o=Out("16 64", f32), p=Out("16 64", f32)):
        t = exp2(-abs(x[:, :]))
        o[:, :], p[:, :] = t, t + 1.0

    assert kinds(k)["exp2"] == ["fragment: computed once for several loops"]


def test_a_cheap_tile_with_two_readers_is_computed_twice():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("16 64", f32), o=Out("16 64", f32), p=Out("16 64", f32)):
        t = x[:, :]
        u = t + 1.0
        o[:, :], p[:, :] = u * t, u

    assert kinds(k)["add"] == ["inline: cheaper to compute again than to keep"]


def test_a_tile_read_at_other_places_than_it_is_made_lives_in_shared_memory():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("16 64", f32), o=Out("64", f32), p=Out("16 64", f32)):
        t = exp2(-abs(x[:, :]))
        o[:] = t.select(0, 3)
        p[:, :] = t

    assert kinds(k)["exp2"] == ["both: computed once for several loops, and read at other places than it is made"]


def test_a_vector_that_several_loops_read_lives_in_shared_memory():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, w=In("64", f32), x=In("16 64", f32), o=Out("16 64", f32), p=Out("64", f32)):
        scale = w[:]
        o[:, :] = x[:, :] * scale[None, :]
        p[:] = scale

    assert kinds(k)["load"][0] == "shared: a vector read by several loops"


# ---- reductions and scans --------------------------------------------------------------------------------------------


def test_what_a_row_is_reduced_to_stays_with_the_row_and_what_a_column_is_does_not():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("16 64", f32), o=Out("16 64", f32), p=Out("16 64", f32)):
        t = x[:, :]
        o[:, :] = t - t.max(1, keepdim=True)
        p[:, :] = t - t.sum(0, keepdim=True)

    assert kinds(k)["reduce"] == ["fragment: reduced", "shared: one number a column, which every row reads"]
    assert kinds(k)["load"] == ["fragment: read by several loops"]


def test_a_scan_lives_in_shared_memory():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("16 64", f32), o=Out("16 64", f32)):
        o[:, :] = cumsum(x[:, :], axis=0)

    assert kinds(k)["scan"] == ["shared: scan exchanges elements between threads"]


@pytest.mark.parametrize(("width", "stored"), [(48, 64), (5, 32), (64, 64), (3 * 1024, 3 * 1024)])
def test_reduced_axes_are_stored_in_widths_that_tilelang_reduces(width, stored):
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In(f"4 {width}", f32), o=Out("4", f32)):
        o[:] = x[:, :].sum(1)

    placement, _ = placed(k, threads=128)
    assert placement.extent(width) == stored
    assert placement.extent(4) == 4


# ---- products --------------------------------------------------------------------------------------------------------


@kernel(grid=lambda d, c: (cdiv(d.M, 128),))
def chained(d, c, q=In("M 64", bf16), k=In("64 64", bf16), v=In("64 32", bf16), o=Out("M 32", f32)):
    """(q k) v, the first product rounded on the way."""
    rows = span(program_id(0) * 128, 128, end=d.M)
    o[rows, :] = dot(dot(q[rows, :], k[:, :]).to(bf16), v[:, :])


M = {"M": Sym("M", divisible_by=128)}


def test_operands_from_memory_are_shared_and_products_are_fragments():
    found = kinds(chained, M)
    assert found["load"] == ["shared: operand of a product"] * 3
    assert found["dot"] == ["fragment: accumulator of a product"] * 2


def test_a_rounded_accumulator_is_a_left_operand_in_registers_while_each_row_is_in_one_warp():
    assert kinds(chained, M, threads=256)["cast"] == ["fragment: left operand, in the accumulator's layout"]
    placement, _ = placed(chained, M, threads=256)
    assert [(p.form, p.policy, p.warps, p.a_fragment) for p in placement.dots.values()] == [
        ("wgmma", "row", (8, 1), False),
        ("wgmma", "row", (8, 1), True),
    ]


@pytest.mark.parametrize("fields", [{"threads": 256, "policy": {"d0": "col", "d1": "col"}}, {"threads": 512}])
def test_warps_that_divide_the_columns_pass_it_through_shared_memory(fields):
    assert kinds(chained, M, **fields)["cast"] == ["shared: left operand of a product"]


def test_a_right_operand_and_a_transposed_left_one_live_in_shared_memory():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("64 64", bf16), o=Out("64 64", f32), p=Out("64 64", f32)):
        t = dot(x[:, :], x[:, :]).to(bf16)
        u = dot(x[:, :].T, x[:, :]).to(bf16)
        o[:, :] = dot(x[:, :], t)
        p[:, :] = dot(u.T, x[:, :])

    assert kinds(k)["cast"] == ["shared: right operand of a product", "shared: left operand, transposed"]
    assert set(kinds(k)["permute"]) == {"inline: a transposed operand"}


@pytest.mark.parametrize(
    ("shape", "target", "threads", "form", "why"),
    [
        ((128, 64, 64), "sm_90a", 128, "wgmma", ""),
        ((32, 64, 64), "sm_90a", 128, "mma", "wgmma needs M to be a multiple of 64, it is 32"),
        ((128, 64, 64), "sm_90a", 64, "mma", "wgmma needs threads in whole warp groups of 128, there are 64"),
        ((128, 64, 64), "sm_80", 128, "mma", ""),
        ((64, 64, 8), "sm_90a", 128, "fma", "K = 8 is no multiple of 16"),
        ((8, 64, 64), "sm_90a", 128, "fma", "4 warps do not divide 8 x 64 into 16 x 8 tiles"),
    ],
)
def test_a_product_is_as_fast_as_its_extents_and_threads_allow(shape, target, threads, form, why):
    m, n, depth = shape

    @kernel(grid=lambda d, c: (1,))
    def k(d, c, a=In(f"{m} {depth}", bf16), b=In(f"{depth} {n}", bf16), o=Out(f"{m} {n}", f32)):
        o[:, :] = dot(a[:, :], b[:, :])

    placement, _ = placed(k, target=target, threads=threads)
    (plan,) = placement.dots.values()
    assert (plan.form, plan.why) == (form, why)


# ---- loops -----------------------------------------------------------------------------------------------------------


@kernel(grid=lambda d, c: (1,))
def recurrence(d, c, w=In("n 64 64", bf16), decay=In("n 64", f32), o=Out("n 64 64", f32), end=Out("64 64", f32)):
    """Carries a state that each step reads as a left operand."""

    @loop(d.n, init=zeros((64, 64)), label="steps")
    def state(i, s):
        rounded, step = s.to(bf16), w[i]
        o[i] = dot(rounded, step)
        return dot(rounded, step, acc=s * decay[i][None, :])

    end[:, :] = state


N = {"n": Sym("n", min=1)}


def test_a_pipeline_reads_ahead_everything_that_a_step_reads_vectors_too():
    placement, tiles = placed(recurrence, N, stages={"steps": 3})
    (loads,) = placement.hoisted.values()
    assert [o.attrs["tensor"] for o in loads] == ["w", "decay"]
    assert [placement.of(v).kind for v in tiles["load"]] == ["shared", "shared"]
    assert kinds(recurrence, N)["load"] == ["shared: operand of a product", "inline: read once"]


def test_a_loop_that_is_known_to_run_once_has_no_pipeline():
    assert placed(recurrence, {"n": 2}, stages={"steps": 3})[0].hoisted
    assert not placed(recurrence, {"n": 1}, stages={"steps": 3})[0].hoisted


def test_what_the_kernel_writes_is_not_read_ahead():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=InOut("n 64", f32), o=Out("64", f32)):
        @loop(d.n, init=zeros((64,)), label="steps")
        def total(i, s):
            return s + x[i]

        o[:] = total

    assert not any(placed(k, N, stages={"steps": 3})[0].hoisted.values())


def test_a_carried_state_is_in_registers_and_also_shared_where_a_product_needs_it_so():
    @kernel(grid=lambda d, c: (1,))
    def right(d, c, x=In("n 64 64", bf16), s0=In("64 64", bf16), o=Out("n 64 64", f32)):
        @loop(d.n, init=s0[:, :], label="steps")
        def state(i, s):
            y = dot(x[i], s)
            o[i] = y
            return y.to(bf16)

    assert kinds(recurrence, N)["carry"] == ["fragment: carried by a loop"]
    assert kinds(right, N)["carry"] == ["both: carried, and right operand of a product"]


def test_a_state_is_updated_where_it_is_when_nothing_reads_it_later():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, a=In("n 64 64", bf16), o=Out("64 64", f32)):
        @loop(d.n, init=zeros((64, 64)), label="steps")
        def total(i, s):
            return dot(a[i], a[i], acc=s)

        o[:, :] = total

    placement, tiles = placed(k, N)
    assert (
        placement.buffer(tiles["dot"][0]) is placement.buffer(tiles["carry"][0]) is placement.buffer(tiles["loop"][0])
    )


# ---- the page --------------------------------------------------------------------------------------------------------


def test_placement_explains_itself():
    page = explain(traced(recurrence, N), TileLangSchedule(stages={"steps": 3}), get_target("sm_90a")).splitlines()
    assert page[0] == "placement of recurrence for sm_90a: 128 threads and a warp group that copies"
    columns = [" ".join(line.split()) for line in page]
    assert any(
        "step_shared load bf16[64,64] shared operand of a product tests/unit/test_tile" in line for line in columns
    )
    assert any(
        "rounded cast bf16[64,64] fragment left operand, in the accumulator's layout" in line for line in columns
    )
    assert any("d0 64 x 64 x 64 wgmma policy row, 4 x 1 warps left operand in reg" in line for line in columns)
    per_step = 2 * 64 * 64 + 4 * 64
    assert f"loop steps: 3 stages of {per_step} bytes" in page
    assert f"decay_shared from decay {4 * 64}" in columns
    assert any(f"at least {3 * per_step} bytes at a time" in line and "may have 232448" in line for line in page)


def test_the_page_of_a_kernel_that_is_refused_says_why():
    page = explain(traced(chained, M), TileLangSchedule(), get_target("gfx942"))
    assert page == "refused: the TileLang backend generates no code for gfx942; use Triton"
    page = explain(traced(recurrence, N), TileLangSchedule(stages={"steps": 16}), get_target("sm_120a"))
    assert "refused: " in page.splitlines()[-1]
    assert "bytes of shared memory" in page.splitlines()[-1]


def test_integers_and_unused_arguments_do_not_disturb_it():
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, ids=In("16", i32), x=In("50 64", f32), o=Out("16 64", f32)):
        o[:, :] = x[ids[:], :]

    assert kinds(k)["load"] == ["inline: read once", "inline: read once"]


def test_the_command_line_shows_it():
    shown = CliRunner().invoke(app, ["show", "matmul", "--stage", "placement", "--target", "sm_90a"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("placement of matmul for sm_90a: 256 threads and a warp group that copies")
