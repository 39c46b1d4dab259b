"""Loops, conditions and assumptions on the torch backend, also where programs differ."""

from __future__ import annotations

import math

import pytest
import torch
from evaluation import poisoned, run

from k3dsl.errors import EvaluationError
from k3dsl.language import (
    In,
    InOut,
    Out,
    Scalar,
    Sym,
    arange,
    assume,
    bf16,
    cdiv,
    cumsum,
    dot,
    exp,
    f32,
    i32,
    kernel,
    loop,
    maximum,
    program_id,
    span,
    when,
    where,
    zeros,
)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("start", "stop", "step"), [(0, 5, 1), (2, 11, 3), (2, 10, 3), (3, 3, 1), (5, 2, 2), (-4, 3, 2)]
)
def test_a_loop_visits_what_pythons_range_visits(start, stop, step, reverse):
    @kernel(grid=lambda d, c: (2,))
    def visit(d, c, y=Out("2 2", i32)):
        @loop(stop, init=(zeros((), i32), zeros((), i32)), start=start, step=step, reverse=reverse)
        def state(i, n, digest):
            return n + 1, digest * 31 + i

        y[program_id(0), 0] = state[0]
        y[program_id(0), 1] = state[1]

    y = poisoned(2, 2, dtype=torch.int32)
    run(visit, {"y": y})
    visited = list(range(start, stop, step))
    digest = 0
    for i in reversed(visited) if reverse else visited:
        digest = digest * 31 + i
    assert y.tolist() == [[len(visited), digest]] * 2


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("slab_bytes", [1, 2**28])
def test_trip_counts_may_differ_between_programs(reverse, slab_bytes):
    """Each program reads, carries and writes only for its own iterations; the others' reads would be out of bounds."""

    @kernel(grid=lambda d, c: (d.N,))
    def sums(d, c, first=In("N", i32), last=In("N", i32), x=In("T 3"), y=Out("N 3"), seen=Out("T 3"), n=Out("N", i32)):
        p = program_id(0)

        @loop(last[p], init=(zeros((3,)), zeros((), i32)), start=first[p], step=2, reverse=reverse)
        def state(i, acc, count):
            row = x[i, :]
            seen[i, :] = row * (p + 1)
            return acc * 0.5 + row, count + 1

        y[p, :] = state[0]
        n[p] = state[1]

    first = torch.tensor([0, 3, 9, 4, 12, 20], dtype=torch.int32)
    last = torch.tensor([3, 4, 12, 9, 12, 14], dtype=torch.int32)
    x = torch.randn(12, 3)
    y, seen, n = poisoned(6, 3), poisoned(12, 3), poisoned(6, dtype=torch.int32)
    run(sums, {"first": first, "last": last, "x": x, "y": y, "seen": seen, "n": n}, {"N": Sym("N"), "T": Sym("T")},
        slab_bytes=slab_bytes)  # fmt: skip
    want_seen = poisoned(12, 3)
    for p in range(6):
        acc, visited = torch.zeros(3), list(range(int(first[p]), int(last[p]), 2))
        for i in reversed(visited) if reverse else visited:
            acc = acc * 0.5 + x[i]
            want_seen[i] = x[i] * (p + 1)
        torch.testing.assert_close(y[p], acc)
        assert n[p] == len(visited)
    assert torch.equal(seen.nan_to_num(-9), want_seen.nan_to_num(-9))


def test_loops_nest_and_an_inner_trip_count_may_depend_on_the_outer_index():
    @kernel(grid=lambda d, c: (3,))
    def triangle(d, c, y=Out("3", i32)):
        p = program_id(0)

        @loop(4, init=zeros((), i32))
        def total(i, acc):
            @loop(i + p, init=acc)
            def inner(j, a):
                return a + i * 10 + j

            return inner

        y[p] = total

    y = poisoned(3, dtype=torch.int32)
    run(triangle, {"y": y})
    assert y.tolist() == [sum(i * 10 + j for i in range(4) for j in range(i + p)) for p in range(3)]


def test_a_carry_that_the_body_does_not_change_and_carries_that_swap():
    @kernel(grid=lambda d, c: (2,))
    def swap(d, c, n=In("2", i32), y=Out("2 3 2")):
        p = program_id(0)
        init = (zeros((2,)) + p, zeros((2,)) + 10.0, zeros((2,)) + 5.0)

        @loop(n[p], init=init)
        def state(i, a, b, k):
            return b, a, k

        for j in range(3):
            y[p, j, :] = state[j]

    y = poisoned(2, 3, 2)
    run(swap, {"n": torch.tensor([3, 2], dtype=torch.int32), "y": y})
    assert y[:, :, 0].tolist() == [[10, 0, 5], [1, 10, 5]]


def test_when_runs_only_the_programs_for_which_it_holds():
    @kernel(grid=lambda d, c: (4,))
    def guarded(d, c, x=In("3"), y=Out("4"), z=Out("4")):
        p = program_id(0)

        @when(p < 3)
        def _():
            y[p] = x[p]  # of program 3 this would be out of bounds

            @when(p > 0)
            def _():
                z[p] = x[p - 1]

        @when(p == 7)
        def _():
            y[p + 100] = 0.0

    x, y, z = torch.tensor([5.0, 6.0, 7.0]), poisoned(4), poisoned(4)
    run(guarded, {"x": x, "y": y, "z": z})
    assert y.nan_to_num(-1).tolist() == [5, 6, 7, -1]
    assert z.nan_to_num(-1).tolist() == [-1, 5, 6, -1]


def test_when_inside_a_loop_inside_when():
    @kernel(grid=lambda d, c: (3, 2))
    def nested(d, c, count=In("3", i32), y=Out("3 2 6", i32)):
        p, q = program_id(0), program_id(1)

        @when(q == 1)
        def _():
            @loop(count[p])
            def _(i):
                @when((i + p) % 2 == 0)
                def _():
                    y[p, q, i] = i * 10 + p

    y = poisoned(3, 2, 6, dtype=torch.int32)
    count = [6, 0, 3]
    run(nested, {"count": torch.tensor(count, dtype=torch.int32), "y": y})
    for p in range(3):
        for i in range(6):
            assert y[p, 0, i] == 77
            assert y[p, 1, i] == (i * 10 + p if i < count[p] and (i + p) % 2 == 0 else 77)


def test_a_condition_may_come_from_a_reduction():
    @kernel(grid=lambda d, c: (3,))
    def positive(d, c, x=In("3 4"), y=Out("3", i32)):
        t = x[program_id(0), :]

        @when((t > 0).any(0))
        def _():
            y[program_id(0)] = 1

    y = poisoned(3, dtype=torch.int32)
    run(positive, {"x": torch.tensor([[0, 0, 0, 1], [-1, 0, 0, 0], [2, 2, 2, 2.0]]), "y": y})
    assert y.tolist() == [1, 77, 1]


def test_runtime_scalars_reach_the_kernel():
    @kernel(grid=lambda d, c: (2,))
    def scale(d, c, x=In("2 4"), y=Out("2 4"), factor=Scalar(f32), n=Scalar(i32)):
        y[program_id(0), :] = where(arange(4) < n, x[program_id(0), :] * factor, 0.0)

    x, y = torch.randn(2, 4), poisoned(2, 4)
    run(scale, {"x": x, "y": y}, scalars={"factor": 2.5, "n": 3})
    assert torch.equal(y[:, :3], x[:, :3] * 2.5)
    assert y[:, 3].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("facts", "value", "text"),
    [
        ({"divisible_by": 16}, 24, "assumed to be divisible by 16, but the value is 24 in program (1)"),
        ({"min": 30}, 24, "assumed to be at least 30, but the value is 24 in program (1)"),
        ({"max": 20}, 24, "assumed to be at most 20, but the value is 24 in program (1)"),
    ],
)
def test_an_assumption_that_does_not_hold_is_an_error(facts, value, text):
    @kernel(grid=lambda d, c: (2,))
    def trust(d, c, x=In("2", i32), y=Out("2", i32)):
        n = x[program_id(0)]
        y[program_id(0)] = assume(n, **facts)

    good = facts.get("min", facts.get("max", facts.get("divisible_by")))
    y = poisoned(2, dtype=torch.int32)
    run(trust, {"x": torch.full((2,), good, dtype=torch.int32), "y": y})
    assert y.tolist() == [good] * 2
    with pytest.raises(EvaluationError) as error:
        run(trust, {"x": torch.tensor([good, value], dtype=torch.int32), "y": y})
    assert text in str(error.value)
    assert "test_torch_backend_control.py" in str(error.value)


# Small complete kernels.


def test_causal_attention_with_a_trip_count_for_each_block():
    @kernel(grid=lambda d, c: (cdiv(d.T, c.B), d.H))
    def attention(d, c, q=In("T H D"), k=In("T H D"), v=In("T H D"), o=Out("T H D")):
        block, head = program_id(0), program_id(1)
        rows = span(block * c.B, c.B, end=d.T)
        query = q[rows, head, :]
        init = (zeros((c.B, d.D)), zeros((c.B,)) - 1e30, zeros((c.B,)))

        @loop(block + 1, init=init)
        def state(i, acc, top, total):
            columns = span(i * c.B, c.B, end=d.T)
            s = dot(query, k[columns, head, :].T) * d.D**-0.5
            causal = (block * c.B + arange(c.B))[:, None] >= (i * c.B + arange(c.B))[None, :]
            s = where(causal, s, -1e30)
            new = maximum(top, s.max(1))
            p, scale = exp(s - new[:, None]), exp(top - new)
            acc = dot(p.to(v.dtype), v[columns, head, :], acc=acc * scale[:, None])
            return acc, new, total * scale + p.sum(1)

        o[rows, head, :] = (state[0] / state[2][:, None]).to(o.dtype)

    t, h, d = 45, 2, 16
    q, k, v = (torch.randn(t, h, d, generator=torch.Generator().manual_seed(s)) for s in range(3))
    o = poisoned(t, h, d)
    run(attention, {"q": q, "k": k, "v": v, "o": o}, {"T": Sym("T"), "H": h, "D": d}, {"B": 16})
    scores = torch.einsum("thd,shd->hts", q.double(), k.double()) / math.sqrt(d)
    scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -math.inf)
    want = torch.einsum("hts,shd->thd", scores.softmax(-1), v.double())
    torch.testing.assert_close(o.double(), want, rtol=1e-5, atol=1e-5)


def test_a_segmented_sum_with_ragged_segments():
    @kernel(grid=lambda d, c: (d.N,))
    def segments(d, c, cu_seqlens=In("N+1", i32), x=In("T D", bf16), y=Out("N D", f32)):
        p = program_id(0)
        begin, end = cu_seqlens[p], cu_seqlens[p + 1]

        @loop(cdiv(end - begin, c.B), init=zeros((d.D,)))
        def total(i, acc):
            return acc + x[span(begin + i * c.B, c.B, end=end), :].to(f32).sum(0)

        y[p, :] = total

    lengths = [5, 0, 1, 17, 8]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    x, y = torch.randn(31, 6).bfloat16(), poisoned(5, 6)
    run(segments, {"cu_seqlens": cu, "x": x, "y": y}, {"N": Sym("N"), "T": Sym("T"), "D": 6}, {"B": 4})
    want = torch.stack([x[cu[n] : cu[n + 1]].double().sum(0) for n in range(5)])
    torch.testing.assert_close(y.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunked_recurrence_equals_the_step_by_step_one(dtype):
    """h[t] = decay h[t-1] + k[t] v[t]^T, o[t] = q[t] h[t], state kept over chunks and updated in place."""

    @kernel(grid=lambda d, c: (d.H,))
    def linear_attention(d, c, q=In("T H D"), k=In("T H D"), v=In("T H D"), o=Out("T H D"), state=InOut("H D D", f32)):
        h = program_id(0)

        @loop(cdiv(d.T, c.C), init=state[h, :, :])
        def last(i, s):
            rows = span(i * c.C, c.C, end=d.T)
            a, b, x = q[rows, h, :], k[rows, h, :], v[rows, h, :]
            lower = arange(c.C)[:, None] >= arange(c.C)[None, :]
            inside = dot(where(lower, dot(a, b.T), 0.0).to(x.dtype), x)
            o[rows, h, :] = (dot(a, s.to(a.dtype)) + inside).to(o.dtype)
            return dot(b.T, x, acc=s)

        state[h, :, :] = last

    t, heads, d = 21, 3, 8
    q, k, v = (torch.randn(t, heads, d, generator=torch.Generator().manual_seed(s)).to(dtype) for s in range(3))
    o, state = poisoned(t, heads, d, dtype=dtype), torch.randn(heads, d, d, generator=torch.Generator().manual_seed(3))
    h, want = state.double(), torch.zeros(t, heads, d, dtype=torch.float64)
    for i in range(t):
        h = h + torch.einsum("hk,hv->hkv", k[i].double(), v[i].double())
        want[i] = torch.einsum("hk,hkv->hv", q[i].double(), h)
    run(
        linear_attention,
        {"q": q, "k": k, "v": v, "o": o, "state": state},
        {"T": Sym("T"), "H": heads, "D": d},
        {"C": 8},
    )
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert (o.double() - want).norm() < limit * want.norm()
    assert (state.double() - h).norm() < 1e-5 * h.norm()


def test_an_inclusive_scan_over_a_ragged_row():
    @kernel(grid=lambda d, c: (d.N,))
    def rows(d, c, x=In("N L"), y=Out("N L")):
        columns = span(0, c.B, end=d.L)
        y[program_id(0), columns] = cumsum(x[program_id(0), columns], 0)

    x, y = torch.randn(4, 13), poisoned(4, 13)
    run(rows, {"x": x, "y": y}, {"N": Sym("N"), "L": Sym("L")}, {"B": 16})
    torch.testing.assert_close(y, x.cumsum(1))
