"""A pipelined step in TileLang: what it waits for before its tiles are refilled, and products that run beside each other."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("tilelang")

from tilelang_text import cuda, printed

from k3dsl.backends.tilelang import nvcc
from k3dsl.backends.tilelang.legality import check
from k3dsl.backends.tilelang.overlap import overlapped
from k3dsl.backends.tilelang.schedule import TileLangSchedule
from k3dsl.errors import ArgumentError
from k3dsl.language import In, Kernel, Out, arange, bf16, dot, f32, kernel, loop, span, where, zeros
from k3dsl.passes.simplify import simplify
from k3dsl.runtime import backends
from k3dsl.targets import get_target

FENCE = "tl.fence_proxy_async()"


def step(k: Kernel, **schedule) -> list[str]:
    """The lines of a kernel's pipelined step, without comments and margin."""
    text = printed(k, stages={"steps": 2}, **schedule).text
    lines = text[text.index("for _step in") :].splitlines()[1:]
    depth = len(lines[0]) - len(lines[0].lstrip())
    inside = []
    for line in lines:
        if len(line) - len(line.lstrip()) < depth:
            break
        inside.append(line[depth:])
    return [line for line in inside if not line.strip().startswith("#")]


# ---- before a tile is refilled -----------------------------------------------------------------------------------------


def product_of(rows: int, dtype) -> Kernel:
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, a=In(f"{rows} 512", dtype), b=In("32 512", dtype), o=Out(f"{rows} 32", f32)):
        @loop(8, init=zeros((rows, 32), f32), label="steps")
        def total(i, acc):
            cols = span(i * 64, 64)
            return dot(a[:, cols], b[:, cols].T, acc=acc)

        o[:, :] = total

    return k


@pytest.mark.parametrize(
    ("rows", "dtype", "form", "fenced"),
    [(64, bf16, "wgmma", False), (16, bf16, "mma_sync", True), (16, f32, None, True)],
    ids=["wgmma", "mma.sync", "multiply-adds"],
)
def test_reads_by_threads_are_done_before_a_tile_is_refilled(rows, dtype, form, fenced):
    lines = step(product_of(rows, dtype))
    assert (FENCE in lines) == fenced
    generated = cuda(printed(product_of(rows, dtype), stages={"steps": 2}))
    consumer = generated[generated.index("warpgroup_reg_alloc") :]
    assert form is None or f"{form}" in consumer
    # from the last read of a tile to the barrier that gives the slot back
    given_back = consumer.index("].arrive();")
    if fenced:
        fence = consumer.index("tl::fence_proxy_async();")
        assert max(m.start() for m in re.finditer(r"_shared", consumer[:given_back])) < fence < given_back
    else:
        assert "warpgroup_wait<0>();" in consumer[:given_back]


def test_without_a_warp_group_that_copies_no_tile_is_refilled_behind_the_threads():
    assert FENCE not in printed(product_of(16, f32), stages={"steps": 2}, warp_specialize=False).text


@kernel(grid=lambda d, c: (1,))
def scaled(d, c, a=In("8 64 64", bf16), b=In("8 64 64", bf16), w=In("8 64", f32), o=Out("64 64", f32)):
    """The vector goes into the accumulator that wgmma then takes from registers."""

    @loop(8, init=zeros((64, 64), f32), label="steps")
    def total(i, acc):
        return dot(a[i], b[i], acc=acc * w[i][None, :])

    o[:, :] = total


@kernel(grid=lambda d, c: (1,))
def scaled_after(d, c, a=In("8 64 64", bf16), b=In("8 64 64", bf16), w=In("8 64", f32), o=Out("64 64", f32)):
    """The vector is read behind the last product."""

    @loop(8, init=zeros((64, 64), f32), label="steps")
    def total(i, acc):
        return dot(a[i], b[i], acc=acc) * w[i][None, :]

    o[:, :] = total


def test_a_read_whose_result_a_product_takes_is_done_when_the_product_is():
    assert FENCE not in step(scaled)
    assert step(scaled_after)[-1] == FENCE


# ---- one number a row ----------------------------------------------------------------------------------------------------


@kernel(grid=lambda d, c: (1,))
def norms_on_a_diagonal(d, c, q=In("32 128", bf16), k=In("32 128", bf16), o=Out("32 32", f32)):
    """A row sum over a tile of loads, which then meets a product of another shape."""
    qf, kf = q[:, :].to(f32), k[:, :].to(f32)
    own = (qf * kf).sum(1)
    i, j = arange(32)[:, None], arange(32)[None, :]
    low = where(i > j, dot((qf * 0.5).to(bf16), (kf * 0.5).to(bf16).T), 0.0)
    o[:, :] = low + where(i == j, own[:, None], 0.0)


def test_one_number_a_row_goes_through_shared_memory_to_a_tile_in_another_layout():
    text = printed(norms_on_a_diagonal).text
    assert re.search(r"tl\.reduce_sum\(\w+, (own), dim=1\)\n\s+tl\.copy\(\1, (own_shared)\)", text)
    assert "tl.if_then_else(i == j, own_shared[i], tl.float32(0.0))" in text
    assert "mma_sync<" in cuda(printed(norms_on_a_diagonal))


@kernel(grid=lambda d, c: (1,))
def gram_of_unit_rows(d, c, x=In("16 64", f32), o=Out("16 16", f32)):
    t = x[:, :]
    norm = (t * t).sum(1)
    o[:, :] = dot(t, t.T) / (norm[:, None] * norm[None, :])


def test_one_number_a_row_that_is_read_as_one_a_column_too_is_in_shared_memory():
    text = printed(gram_of_unit_rows).text
    assert "norm_shared[i] * norm_shared[j]" in text
    assert cuda(printed(gram_of_unit_rows))


# ---- products beside each other ----------------------------------------------------------------------------------------


@kernel(grid=lambda d, c: (1,))
def recurrence(
    d, c, x=In("8 64 64", bf16), w=In("8 64 64", bf16), q=In("8 64 64", bf16), a=In("8 64", f32),
    o=Out("8 64 64", f32), last=Out("64 64", f32),
):  # fmt: skip
    """s <- s diag(a) + r x with r = x - s w, and o = s q + r q: two products of the state, then two of r."""

    @loop(8, init=zeros((64, 64), f32), label="steps")
    def state(i, s):
        x_i, q_i = x[i], q[i]
        sb = s.to(bf16)
        r = (dot(x_i.T, w[i]) - dot(sb, w[i])).to(bf16)
        o[i] = dot(r, q_i, acc=dot(sb, q_i))
        return dot(r, x_i, acc=s * a[i][None, :])

    last[:, :] = state


def test_products_are_issued_early_and_waited_for_where_they_are_needed():
    lines = step(recurrence, overlap=True)
    kinds = ["product" if "tl.wgmma_gemm(" in line else line for line in lines if not line.startswith(" ")]
    loops = "for i, j in tl.Parallel(64, 64):"
    assert kinds == [
        "product",  # x w
        loops,  # the state as an operand
        "product",  # s w
        "product",  # s q
        loops,  # the decay, while they run
        "tl.wait_wgmma(1)",  # s q goes on
        loops,  # r
        "product",  # + r q
        "product",  # r x
        "tl.wait_wgmma(1)",
        loops,  # the output, while the state's product runs
        "tl.wait_wgmma(0)",
    ]
    assert not any("tl.gemm(" in line for line in lines)
    generated = cuda(printed(recurrence, stages={"steps": 2}, overlap=True))
    waits = re.findall(r"tl::(?:wait_wgmma|warpgroup_wait)<(\d)>\(\)|(\]\.arrive\(\);)", generated)
    assert [number or "given back" for number, _ in waits] == ["1", "1", "0", "given back"]


def test_the_statements_are_the_same_in_another_order():
    plain, overlap = step(recurrence), step(recurrence, overlap=True)
    same = [line.replace("wgmma_gemm", "gemm") for line in overlap if "wait_wgmma" not in line]
    assert sorted(same) == sorted(plain)


@pytest.mark.slow
def test_ptxas_overlaps_them(tmp_path):
    if nvcc.find() is None:
        pytest.skip("nvcc is not installed")
    source = printed(recurrence, stages={"steps": 2}, overlap=True)
    assert backends.build(source, get_target("sm_90a")).inspection.instructions["wgmma"] == 20


def lines(*texts: str) -> list[str]:
    return [f"    {t}" for t in texts]


def test_what_touches_a_product_in_flight_waits_for_it_and_for_those_before():
    first, second = "tl.gemm(a, b, c, clear_accum=True)", "tl.gemm(a, d, e, clear_accum=True)"
    use = ["for i in tl.Parallel(8):", "    out[i] = e[i]"]
    assert overlapped(lines(first, second, *use)) == lines(
        "tl.wgmma_gemm(a, b, c, clear_accum=True)",
        "tl.wgmma_gemm(a, d, e, clear_accum=True)",
        "tl.wait_wgmma(0)",
        *use,
    )
    # an operand that is written again, and an accumulator that is started again
    again = ["for i in tl.Parallel(8):", "    a[i] = x[i]"]
    found = overlapped(lines(first, *again, second))
    assert found == lines(first.replace("gemm", "wgmma_gemm"), "tl.wait_wgmma(0)", *again,
                          second.replace("gemm", "wgmma_gemm"), "tl.wait_wgmma(0)")  # fmt: skip
    assert "    tl.wait_wgmma(0)" in overlapped(lines(first, first))[1:2]


@pytest.mark.parametrize(
    ("write", "read"),
    [
        ("tl.copy(e[i:i + 64], late, disable_tma=True)", "d[0] = late[0]"),
        ("tl.copy(e[i:i + 64], late, disable_tma=True, coalesced_width=8)", "d[0] = late[0]"),
        ("tl.copy(t, o[0, i:i + 64, c])", "d[0] = o[0, 0, 0]"),
        ("tl.copy(t[i, 0:8], o[i, 0:64])", "d[0] = o[0, 0]"),
        ("tl.copy(late, d)", "late[0] = 0"),
        ("tl.reduce_max(t, late, dim=1)", "d[0] = late[0]"),
        ("tl.fill(late, tl.float32(0.0))", "d[0] = late[0]"),
    ],
)
def test_nothing_is_read_before_a_statement_that_writes_it(write: str, read: str) -> None:
    """A product needs what is read, and so would have it early."""
    first, second = "tl.gemm(a, b, c, clear_accum=True)", "tl.gemm(a, d, e2, clear_accum=True)"
    for order in ((first, write, read, second), (write, first, second, read), (write, read, first, second)):
        found = overlapped(lines(*order))
        assert found.index(f"    {write}") < found.index(f"    {read}")


def test_a_statement_of_an_unknown_kind_keeps_its_place():
    first, second = "tl.gemm(a, b, c, clear_accum=True)", "tl.gemm(a, d, e, clear_accum=True)"
    found = overlapped(lines(first, "tl.atomic_add(x[0], 1.0)", second))
    assert [line.split("(")[0].strip() for line in found] == [
        "tl.wgmma_gemm", "tl.atomic_add", "tl.wgmma_gemm", "tl.wait_wgmma",
    ]  # fmt: skip
    below = lines(first, second, "if x == 0:", "    tl.gemm(a, b, c)")
    assert overlapped(below) == below


def test_overlap_without_such_a_loop_is_refused():
    target, ir = get_target("sm_90a"), simplify(recurrence.trace({}, {}))
    schedule = TileLangSchedule(stages={"steps": 2}, overlap=True)
    assert check(ir, schedule, target) == []
    for other in ({"overlap": True}, {"overlap": True, "stages": {"steps": 2}, "warp_specialize": False}):
        (reason,) = check(ir, TileLangSchedule(**other), target)
        assert reason.code == "overlap"
        assert "a warp group of their own" in reason.message
    with pytest.raises(ArgumentError, match="overlap must be true or false, got 1"):
        TileLangSchedule(overlap=1)
