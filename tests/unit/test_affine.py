"""What is proved of index arithmetic holds in every program and every step: shown by running all of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_examples import traced_scan
from ir_generate import cdiv_of, index_kernels
from ir_numpy import interpret

from k3dsl.ir.graph import Kernel, Op, walk
from k3dsl.ir.symbols import Expr, Sym, cdiv, floordiv, larger, mod, smaller
from k3dsl.language import In, Out, assume, f32, i32, i64, kernel, loop, minimum, program_id, span
from k3dsl.passes.affine import IndexAnalysis, affine, proved_divisor, span_in_bounds
from k3dsl.passes.simplify import simplify

DIM_VALUES = (0, 1, 4, 7, 8, 9, 16, 24, 31, 40)


def loads(kernel: Kernel) -> list[Op]:
    return [op for op in walk(kernel.body) if op.opcode == "load"]


def possible_dims(kernel: Kernel) -> list[dict[str, int]]:
    """Values of T and n that the facts allow."""
    sym = {s.name: s for s in kernel.dims}
    allowed = {n: [v for v in DIM_VALUES if v >= s.min and v % s.divisible_by == 0] for n, s in sym.items()}
    pairs = [{"T": t, "n": n} for t in allowed["T"] for n in allowed["n"] if n <= 4]
    return random.Random(len(kernel.body.ops)).sample(pairs, min(len(pairs), 5))


# -- soundness --------------------------------------------------------------------------------------------------------


def check_against_all_programs(kernel: Kernel) -> int:
    """Asserts what was proved of each span, in each program that each choice of dims gives. Returns how many were proved."""
    analysis = IndexAnalysis(kernel)
    claims = {
        id(op): (analysis.span_in_bounds(op, 0), analysis.proved_divisor(op.operands[op.index[0].start or 0]))
        for op in walk(kernel.body)
        if op.index
    }
    for dims in possible_dims(kernel):

        def visit(op: Op, values: dict[int, Any], dims: Mapping[str, int] = dims) -> None:
            if not op.index:
                return
            inside, divisor = claims[id(op)]
            index = op.index[0]
            start = int(values[id(op.operands[index.start])])
            end = dims["T"] if index.end is None else int(values[id(op.operands[index.end])])
            if inside:
                assert start >= 0, (dims, start)
                assert start + index.shape[0] <= end, (dims, start, end)
            assert start == 0 if divisor == 0 else start % divisor == 0

        size = 4096
        tensors = {"x": np.zeros(size, np.int64), "o": np.zeros(size, np.int64)}
        interpret(kernel, dims, Everywhere.around(tensors), visit)
    return sum(inside for inside, _ in claims.values())


class Everywhere(np.ndarray):
    """A tensor that can be read and written at any place, in bounds or not: places wrap around."""

    @staticmethod
    def around(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: t.view(Everywhere) for name, t in tensors.items()}

    def __getitem__(self, at: Any) -> Any:
        return np.ndarray.__getitem__(self, tuple(np.mod(a, n) for a, n in zip(at, self.shape, strict=True)))

    def __setitem__(self, at: Any, value: Any) -> None:
        np.ndarray.__setitem__(self, tuple(np.mod(a, n) for a, n in zip(at, self.shape, strict=True)), value)


def test_what_is_proved_holds_in_every_program() -> None:
    proved = 0

    @settings(max_examples=90)
    @given(index_kernels())
    def check(kernel: Kernel) -> None:
        nonlocal proved
        proved += check_against_all_programs(kernel)
        check_against_all_programs(simplify(kernel))

    check()
    assert proved > 20, "the generated kernels leave nothing to prove"


Value = Callable[[Mapping[str, int]], int]
Pair = tuple[Expr, Value]
OPERATIONS: dict[str, tuple[Callable[[Expr, Expr], Expr], Callable[[int, int], int]]] = {
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "sub": (lambda a, b: a - b, lambda a, b: a - b),
    "mul": (lambda a, b: a * b, lambda a, b: a * b),
    "min": (smaller, min),
    "max": (larger, max),
    "floordiv": (floordiv, lambda a, b: a // b),
    "cdiv": (cdiv, lambda a, b: -(-a // b)),
    "mod": (mod, lambda a, b: a % b),
}


def expression(draw: Any, symbols: list[Sym], depth: int) -> Pair:
    """A random expression, and the function of the symbols that it stands for, in plain Python."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        s, k, c = draw(st.sampled_from(symbols)), draw(st.integers(-3, 4)), draw(st.integers(-5, 9))
        return Expr.of(s) * k + c, lambda dims: dims[s.name] * k + c
    (a, f), (b, g) = expression(draw, symbols, depth - 1), expression(draw, symbols, depth - 1)
    name = draw(st.sampled_from(list(OPERATIONS)))
    if name in ("floordiv", "cdiv", "mod") and draw(st.integers(0, 4)):
        n = draw(st.sampled_from([1, 2, 3, 4, 8]))
        b, g = Expr.of(n), lambda dims: n
    on_expr, on_int = OPERATIONS[name]
    return on_expr(a, b), lambda dims: on_int(f(dims), g(dims))


@settings(max_examples=200)
@given(st.data())
def test_expressions_mean_what_python_means_and_their_bounds_hold(data: st.DataObject) -> None:
    symbols = [Sym("a", 1, -3, 4), Sym("b", 2, 0, 6), Sym("c", 1, 2, 5), Sym("d", 8, -16, 16)]
    e, value_of = expression(data.draw, symbols, 3)
    low, high = e.bounds()
    chosen = random.Random(0)
    for _ in range(40):
        dims = {s.name: chosen.choice([v for v in range(s.min, s.max + 1) if v % s.divisible_by == 0]) for s in symbols}
        try:
            value = value_of(dims)
        except ZeroDivisionError:
            continue
        assert e.evaluate(dims) == value
        assert low is None or low <= value
        assert high is None or value <= high
        assert not e.nonnegative() or value >= 0
        assert value == 0 if e.divisor() == 0 else value % e.divisor() == 0


def test_what_is_proved_of_expressions_holds_for_all_programs() -> None:
    proved = 0

    @settings(max_examples=300)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal proved
        tokens = Sym("T", data.draw(st.sampled_from([1, 4])), data.draw(st.sampled_from([0, 4])), 12)
        count = Sym("n", 1, data.draw(st.integers(-2, 1)), 3)
        extents = [expression(data.draw, [tokens, count], 1)[0] for _ in range(2)]

        @kernel(grid=lambda d, c: tuple(extents))
        def empty(d, c):
            pass

        analysis = IndexAnalysis(empty.trace({"T": tokens, "n": count}))
        programs = [Sym("@pid0"), Sym("@pid1")]
        e, value_of = expression(data.draw, [tokens, count, *programs], 2)
        if not analysis.proves_nonnegative(e):
            return
        proved += 1
        for t in range(tokens.min, 13, tokens.divisible_by):
            for n in range(count.min, 4):
                try:
                    grid = [range(x.evaluate({"T": t, "n": n})) for x in extents]
                except ZeroDivisionError:
                    continue
                for p, q in itertools.product(*grid):
                    try:
                        value = value_of({"T": t, "n": n, "@pid0": p, "@pid1": q})
                    except ZeroDivisionError:
                        continue
                    assert value >= 0, (e, t, n, p, q)

    check()
    assert proved > 40


def test_proofs_about_expressions_are_tight() -> None:
    count, tokens = Sym("n", 1, -2, 3), Sym("T", 1, 1)

    @kernel(grid=lambda d, c: (4, d.T))
    def empty(d, c):
        pass

    proves = IndexAnalysis(empty.trace({"T": tokens, "n": count})).proves_nonnegative
    p, q, n = (Expr.of(s) for s in (Sym("@pid0"), Sym("@pid1"), count))
    assert proves(p * n + 6), "p is at most 3 and n at least -2"
    assert not proves(p * n + 5)
    assert not proves(q * n + 6)
    assert proves(floordiv(q, 4) * 4 - q + 3)
    assert not proves(floordiv(q, 4) * 4 - q + 2)
    assert proves(q - cdiv(q, 4) * 4 + 3)
    assert not proves(q - cdiv(q, 4) * 4 + 2)
    assert proves(Expr.of(tokens) - q - 1)
    assert not proves(Expr.of(tokens) - q - 2)


def test_an_expression_without_a_bound_has_none() -> None:
    unknown = floordiv(Expr.of(Sym("a")), Expr.of(Sym("d", 1, -3, 3)))
    assert unknown.bounds() == (None, None)
    assert (larger(0, unknown) * Expr.of(Sym("b", 1, 0, 6))).bounds() == (0, None)
    assert (larger(0, unknown) * Expr.of(Sym("c", 1, -1, 6))).bounds() == (None, None)


# -- what must be provable, or a backend would mask for nothing ---------------------------------------------------------


def copies(
    start: Any,
    size: int,
    *,
    end: Any = None,
    grid: Any = lambda d: (d.T // 32,),
    divisible_by: int = 64,
    minimum: int = 0,
) -> bool:
    """Whether a copy at start(d, program ids...) of `size` rows of x [T] is proved to be in bounds."""

    @kernel(grid=lambda d, c: grid(d))
    def copy(d, c, table=In("64", i32), x=In("T", f32), o=Out("T", f32)):
        rows = span(start(d, program_id, table), size, end=None if end is None else end(d))
        o[rows] = x[rows]

    traced = copy.trace({"T": Sym("T", divisible_by=divisible_by, min=minimum), "H": 8, "n": Sym("n", min=1)})
    answers = set()
    for k in (traced, simplify(traced)):
        answers |= {span_in_bounds(op, 0, k) for op in walk(k.body) if op.opcode == "store"}
    assert len(answers) == 1
    return answers.pop()


def test_a_grid_that_divides_needs_no_mask() -> None:
    assert copies(lambda d, pid, t: pid(0) * 32, 32)
    assert copies(lambda d, pid, t: pid(0) * 32, 32, end=lambda d: d.T)


def test_a_grid_that_rounds_up_needs_a_mask() -> None:
    up = {"grid": lambda d: (cdiv_of(d.T, 32),)}
    assert not copies(lambda d, pid, t: pid(0) * 32, 32, divisible_by=1, **up)
    assert not copies(lambda d, pid, t: pid(0) * 32, 32, divisible_by=16, **up)
    assert copies(lambda d, pid, t: pid(0) * 32, 32, divisible_by=32, **up)


def test_a_grid_that_rounds_down_needs_no_mask() -> None:
    assert copies(lambda d, pid, t: pid(0) * 32, 32, divisible_by=1)


def test_rows_that_overlap_the_next_program_need_a_mask() -> None:
    assert not copies(lambda d, pid, t: pid(0) * 32, 33)
    assert not copies(lambda d, pid, t: pid(0) * 32 + 1, 32)
    assert not copies(lambda d, pid, t: pid(0) * 32 - 1, 32)
    assert not copies(lambda d, pid, t: pid(0) * 32, 32, end=lambda d: d.T - 1)


def test_rows_counted_from_the_end() -> None:
    assert copies(lambda d, pid, t: d.T - (pid(0) + 1) * 32, 32)
    assert not copies(lambda d, pid, t: d.T - pid(0) * 32, 32)


def test_two_axes_that_make_one() -> None:
    two = {"grid": lambda d: (d.T // 64, 2)}
    assert copies(lambda d, pid, t: pid(0) * 64 + pid(1) * 32, 32, **two)
    assert not copies(lambda d, pid, t: pid(0) * 64 + pid(1) * 48, 32, **two)
    assert copies(lambda d, pid, t: (pid(0) * 2 + pid(1)) * 32, 32, **two)


def test_quotients_and_remainders_of_program_ids() -> None:
    flat = {"grid": lambda d: (d.T // 8,)}
    assert copies(lambda d, pid, t: pid(0) // 4 * 32, 32, **flat)
    assert copies(lambda d, pid, t: pid(0) // 4 * 32 + pid(0) % 4 * 8, 8, divisible_by=32, **flat)
    assert copies(lambda d, pid, t: pid(0) % 2 * 32, 32, minimum=64)
    assert not copies(lambda d, pid, t: pid(0) % 2 * 32, 32, minimum=63, divisible_by=1)


def test_a_minimum_keeps_rows_inside() -> None:
    assert copies(lambda d, pid, t: minimum(pid(0) * 48, d.T - 32), 32, minimum=64)


def test_a_number_read_from_memory_proves_nothing_unless_assumed() -> None:
    assert not copies(lambda d, pid, t: t[pid(0)], 32)
    assert not copies(lambda d, pid, t: t[pid(0)], 32, minimum=128)
    assert copies(lambda d, pid, t: assume(t[pid(0)], min=0, max=96), 32, minimum=128)
    assert not copies(lambda d, pid, t: assume(t[pid(0)], max=96), 32, minimum=128)


def test_loops() -> None:
    def looped(
        stop: Any, start: Any = 0, step: int = 1, scale: int = 32, size: int = 32, reverse: bool = False
    ) -> bool:
        @kernel(grid=lambda d, c: (d.T // 64,))
        def copy(d, c, x=In("T", f32), o=Out("T", f32)):
            @loop(stop(d, program_id(0)), start=start, step=step, reverse=reverse)
            def body(i):
                rows = span(i * scale, size)
                o[rows] = x[rows]

        k = simplify(copy.trace({"T": Sym("T", divisible_by=64)}))
        return span_in_bounds(loads(k)[0], 0, k)

    assert looped(lambda d, p: d.T // 32)
    assert looped(lambda d, p: d.T // 32, reverse=True)
    assert looped(lambda d, p: d.T, step=32, scale=1)
    assert looped(lambda d, p: d.T - 31, scale=1)
    assert looped(lambda d, p: p * 2 + 2), "causal: up to the program's own rows"
    assert looped(lambda d, p: d.T // 32, start=1)
    assert not looped(lambda d, p: d.T // 32, start=-1)
    assert not looped(lambda d, p: d.T // 32 + 1)
    assert not looped(lambda d, p: cdiv_of(d.T, 128), scale=128, size=128)
    assert not looped(lambda d, p: d.T, step=48, scale=1, size=48)


def test_the_chunk_scan_needs_no_mask_where_chunks_divide() -> None:
    for divisible_by, unmasked in ((64, True), (32, True), (16, False), (1, False)):
        k = simplify(traced_scan(32, divisible_by))
        rows = [span_in_bounds(op, 0, k) for op in loads(k) if op.attrs["tensor"] == "v"]
        assert rows == [unmasked]
        assert all(span_in_bounds(op, 1, k) for op in walk(k.body) if op.attrs.get("tensor") == "final_state")


# -- affine forms -----------------------------------------------------------------------------------------------------


def test_affine_forms_read_as_polynomials() -> None:
    @kernel(grid=lambda d, c: (d.T // 64, d.H))
    def forms(d, c, table=In("64", i64), o=Out("T", f32)):
        @loop(d.T // 64, start=program_id(0), step=2)
        def body(i):
            first = i * 64 + (program_id(1) << 4)
            big = first.to(i64) * 3
            read = table[program_id(1)].to(i32)
            for value in (first, big, read, first // 16, first % 16, assume(read, divisible_by=8)):
                o[value] = 0.0

    k = forms.trace({"T": Sym("T", divisible_by=64), "H": 8})
    values = [op.operands[0] for op in walk(k.body) if op.opcode == "store"]
    texts = [str(affine(v, k)) for v in values]
    assert texts[0] == "@i0 * 128 + @pid0 * 64 + @pid1 * 16"
    assert texts[1] == "@i0 * 384 + @pid0 * 192 + @pid1 * 48"
    assert texts[2].startswith("@v")
    assert texts[3] == "@i0 * 8 + @pid0 * 4 + @pid1"
    assert texts[4] == "0"
    assert [proved_divisor(v, k) for v in values] == [16, 48, 1, 1, 0, 8]


def test_a_narrowing_cast_is_kept_only_where_the_value_fits() -> None:
    @kernel(grid=lambda d, c: (d.H, d.T))
    def narrow(d, c, o=Out("T*T*64", f32)):
        o[(program_id(0).to(i64) * 4).to(i32)] = 0.0
        o[(program_id(1).to(i64) * 4).to(i32)] = 0.0

    k = narrow.trace({"T": Sym("T"), "H": 8})
    texts = [str(affine(op.operands[0], k)) for op in walk(k.body) if op.opcode == "store"]
    assert texts[0] == "@pid0 * 4"
    assert texts[1].startswith("@v")


@pytest.mark.parametrize("dividend", [-8, -1])
def test_division_of_what_may_be_negative_is_left_open(dividend: int) -> None:
    @kernel(grid=lambda d, c: (4,))
    def divide(d, c, o=Out("T", f32)):
        o[(program_id(0) + dividend) // 4] = 0.0

    k = divide.trace({"T": Sym("T")})
    assert str(affine(next(op for op in walk(k.body) if op.opcode == "store").operands[0], k)).startswith("@v")
