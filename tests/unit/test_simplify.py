"""`simplify` changes how a kernel is written and not what it computes, and the rules it follows one by one."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from ir_examples import traced_every_op, traced_scan
from ir_generate import any_kernels, integer_kernels
from ir_numpy import interpret

from k3dsl.errors import VerifyError
from k3dsl.ir.graph import Kernel, walk
from k3dsl.ir.parser import parse_kernel
from k3dsl.ir.printer import print_kernel
from k3dsl.ir.verifier import verify
from k3dsl.language import In, Out, f32, kernel, loop, maximum, minimum, program_id, scalar, span, when, zeros
from k3dsl.passes.simplify import simplify


def outputs(kernel: Kernel, dims: dict[str, int]) -> np.ndarray:
    x = np.arange(64).reshape(2, 4, 8) * 7 % 23 - 11
    o = np.full((3, 4, 8), -(10**6))
    interpret(kernel, dims, {"x": x, "o": o})
    return o


@settings(max_examples=100)
@given(integer_kernels())
def test_results_stay_the_same(kernel: Kernel) -> None:
    simpler = simplify(kernel)
    verify(simpler)
    for dims in ({"T": 8, "n": 0}, {"T": 12, "n": 2}):
        np.testing.assert_array_equal(outputs(simpler, dims), outputs(kernel, dims))


@settings(max_examples=50)
@given(any_kernels() | integer_kernels())
def test_a_second_time_changes_nothing_and_the_input_never_changes(kernel: Kernel) -> None:
    before = print_kernel(kernel, locations=True)
    once = simplify(kernel)
    assert print_kernel(kernel, locations=True) == before
    assert print_kernel(simplify(once), locations=True) == print_kernel(once, locations=True)
    assert len(list(walk(once.body))) <= len(list(walk(kernel.body)))


# -- rule by rule -----------------------------------------------------------------------------------------------------

HEAD = """kernel k
  dim T: divisible_by=32 min=32
  dim n
  in x: f32[T, 8]
  in ids: i32[T]
  inout o: f32[T, 8]
  inout m: i32[T]
  scalar s: i32 as %s
  grid (T // 32)

  %p: i32 = program_id axis=0
  %v: f32[8] = load x[%p, :]
  %k: i32[8] = iota size=8
"""


def simplified(lines: str, use: str) -> list[str]:
    """The lines that are left of a body that stores `use`, without what every test has and without the stores."""
    text = HEAD + "".join(f"  {line}\n" for line in lines.splitlines()) + f"  {use}\n"
    out = print_kernel(simplify(parse_kernel(text))).split("\n\n", 1)[1].splitlines()
    return [line.strip() for line in out if not line.startswith(("  %p:", "  %v:", "  %k:"))]


def test_arithmetic_on_dims_becomes_one_dim() -> None:
    lines = "%t: i32 = dim T\n%c2: i32 = const 2\n%c8: i32 = const 8\n%a: i32 = floordiv %t, %c2\n%b: i32 = sub %a, %c8"
    assert simplified(lines, "store m[%b] = %s") == ["%b: i32 = dim T // 2 - 8", "store m[%b] = %s"]


def test_arithmetic_that_needs_more_bits_stays() -> None:
    lines = "%t: i32 = dim T\n%u: i32 = dim n\n%a: i32 = mul %t, %u"
    assert simplified(lines, "store m[%a] = %s")[2:] == ["%a: i32 = mul %t, %u", "store m[%a] = %s"]


def test_division_of_what_may_be_negative_stays() -> None:
    lines = "%t: i32 = dim n\n%c: i32 = const 8\n%a: i32 = sub %t, %c\n%b: i32 = floordiv %a, %c"
    assert simplified(lines, "store m[%b] = %s")[-2:] == ["%b: i32 = floordiv %a, %c", "store m[%b] = %s"]


def test_constants_fold_unless_they_overflow() -> None:
    lines = "%a: i32 = const 3\n%b: i32 = const 4\n%c: i32 = mul %a, %b"
    assert simplified(lines, "store m[%c] = %s") == ["%c: i32 = const 12", "store m[%c] = %s"]
    big = "%a: i32 = const 2147483647\n%b: i32 = const 2\n%c: i32 = add %a, %b"
    assert "%c: i32 = add %a, %b" in simplified(big, "store m[%c] = %s")


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        ("%z: i32 = const 0\n%a: i32 = add %s, %z", "%s"),
        ("%z: i32 = const 0\n%a: i32 = sub %s, %z", "%s"),
        ("%z: i32 = const 1\n%a: i32 = mul %z, %s", "%s"),
        ("%z: i32 = const 1\n%a: i32 = floordiv %s, %z", "%s"),
        ("%a: i32 = min %s, %s", "%s"),
        ("%t: i1 = const true\n%z: i32 = const 5\n%a: i32 = where %t, %s, %z", "%s"),
        ("%t: i32 = dim T\n%z: i32 = const 0\n%c: i1 = gt %t, %z\n%a: i32 = where %c, %s, %z", "%s"),
        ("%w: i64 = cast %s\n%a: i32 = cast %w", "%s"),
        ("%t: i32 = dim T\n%z: i32 = const 1000\n%c: i32 = mod %t, %z\n%a: i32 = min %s, %s", "%s"),
    ],
)
def test_scalars_that_equal_another(lines: str, value: str) -> None:
    assert simplified(lines, "store m[%p] = %a") == [f"store m[%p] = {value}"]


@pytest.mark.parametrize(
    "lines",
    [
        "%1: f32[2,4] = reshape %v\n%a: f32[8] = reshape %1",
        "%1: f32[2,4] = reshape %v\n%2: f32[4,2] = permute %1 axes=(1, 0)\n%3: f32[2,4] = permute %2 axes=(1, 0)\n"
        "%a: f32[8] = reshape %3",
        "%1: f32[8] = permute %v axes=(0)\n%a: f32[8] = broadcast %1",
        "%a: f32[8] = cast %v",
        "%1: f64[8] = cast %v\n%a: f32[8] = cast %1",
        "%b: i1[8] = lt %k, %k\n%a: f32[8] = where %b, %v, %v",
    ],
)
def test_views_and_casts_that_change_nothing(lines: str) -> None:
    assert simplified(lines, "store o[%p, :] = %a") == ["store o[%p, :] = %v"]


def test_permutations_compose_in_order() -> None:
    lines = "%1: f32[1,2,4] = reshape %v\n%2: f32[2,4,1] = permute %1 axes=(1, 2, 0)\n"
    lines += "%3: f32[2,1,4] = permute %2 axes=(0, 2, 1)\n"
    lines += "%4: f32[4,2,1] = permute %3 axes=(2, 0, 1)\n%a: f32[8] = reshape %4"
    assert simplified(lines, "store o[%p, :] = %a")[1] == "%1: f32[4,2,1] = permute %0 axes=(2, 1, 0)"


def test_integer_tiles_lose_neutral_constants_and_floats_keep_them() -> None:
    lines = "%1: i32 = const 0\n%2: i32[8] = broadcast %1\n%3: i32[8] = add %k, %2\n%4: f32[8] = cast %3"
    assert simplified(lines, "store o[%p, :] = %4") == ["%0: f32[8] = cast %k", "store o[%p, :] = %0"]
    floats = "%1: f32 = const 0.0\n%2: f32[8] = broadcast %1\n%3: f32[8] = add %v, %2"  # -0.0 + 0.0 is 0.0
    assert len(simplified(floats, "store o[%p, :] = %3")) == 4


def test_a_rounding_cast_stays() -> None:
    assert len(simplified("%1: bf16[8] = cast %v\n%2: f32[8] = cast %1", "store o[%p, :] = %2")) == 3
    exact = (
        "%1: f32 = const 1.5\n%2: bf16 = cast %1\n%3: f32 = cast %2\n%4: f64 = cast %3\n"
        "%5: f32 = cast %4\n%6: f32[8] = broadcast %5"
    )
    assert [line.split(" = ", 1)[1] for line in simplified(exact, "store o[%p, :] = %6")[:4]] == [
        "const 1.5",
        "cast %0",
        "cast %1",
        "broadcast %2",
    ]


def test_a_filled_tile_is_broadcast_once() -> None:
    lines = (
        "%1: f32 = const 2.0\n%2: f32[4] = broadcast %1\n%3: f32[1,4] = reshape %2\n"
        "%4: f32[2,4] = broadcast %3\n%5: f32[8] = reshape %4"
    )
    assert simplified(lines, "store o[%p, :] = %5") == [
        "%0: f32 = const 2.0",
        "%1: f32[8] = broadcast %0",
        "store o[%p, :] = %1",
    ]


def test_equal_ops_merge_also_into_regions_and_loads_never_do() -> None:
    lines = """%one: i32 = add %p, %s
%two: i32 = add %p, %s
loop %i in %p .. %two:
  %three: i32 = add %p, %s
  %w: f32[8] = load x[%three, :]
  store o[%i, :] = %w
  yield
%u: f32[8] = load x[%one, :]
%z: f32[8] = load x[%one, :]
%sum: f32[8] = add %u, %z"""
    assert simplified(lines, "store o[%two, :] = %sum") == [
        "%one: i32 = add %p, %s",
        "loop %i in %p .. %one:",
        "%w: f32[8] = load x[%one, :]",
        "store o[%i, :] = %w",
        "yield",
        "%u: f32[8] = load x[%one, :]",
        "%z: f32[8] = load x[%one, :]",
        "%sum: f32[8] = add %u, %z",
        "store o[%one, :] = %sum",
    ]


def test_what_is_equal_in_one_branch_does_not_leak_into_the_next() -> None:
    lines = """%c: i1 = lt %p, %s
when %c:
  %a: i32 = mul %p, %s
  store m[%a] = %s
when %c:
  %b: i32 = mul %p, %s
  store m[%b] = %s"""
    assert len([line for line in simplified(lines, "store m[%p] = %s") if " mul " in line]) == 2


def test_a_combine_keeps_its_own_constants() -> None:
    lines = """%h: f32 = const 0.5
%a: f32[8] = broadcast %h
%r: f32 = reduce %v axis=0 combine(%l: f32, %q: f32):
  %g: f32 = const 0.5
  %t: f32 = mul %l, %g
  %w: f32 = add %t, %q
  yield %w
%b: f32[8] = broadcast %r
%c: f32[8] = add %a, %b"""
    assert sum("const 0.5" in line for line in simplified(lines, "store o[%p, :] = %c")) == 2


def test_unused_ops_and_loads_go_and_effects_stay() -> None:
    lines = """%a: f32[8] = load x[%s, :]
%b: f32[8] = exp %a
%c: f32[8] = loop %i in %p .. %s carry(%d = %b):
  %e: f32[8] = neg %d
  yield %e
%t: i1 = lt %p, %s
loop %q in %p .. %s:
  when %t:
    %g: f32[8] = load x[%q, :]
  yield
loop %j in %p .. %s:
  store m[%j] = %j
  yield"""
    assert simplified(lines, "store o[%p, :] = %v") == [
        "loop %j in %p .. %s:",
        "store m[%j] = %j",
        "yield",
        "store o[%p, :] = %v",
    ]


def test_known_conditions_decide() -> None:
    lines = """%t: i32 = dim T
%z: i32 = const 32
%c: i1 = ge %t, %z
when %c:
  store m[%p] = %s
%d: i1 = lt %t, %z
when %d:
  store m[%s] = %s
%e: f32[8] = loop %i in %z .. %z carry(%f = %v):
  %g: f32[8] = neg %f
  yield %g"""
    assert simplified(lines, "store o[%p, :] = %e") == ["store m[%p] = %s", "store o[%p, :] = %v"]


def test_names_and_places_are_kept() -> None:
    kernel = simplify(traced_scan())
    text = print_kernel(kernel, locations=True)
    assert re.search(r"%rb: bf16\[64,32\] = cast %r  # .*ir_examples.py:\d+\n", text)
    assert all(op.loc is not None for op in walk(kernel.body))


def test_a_merged_op_takes_the_name_of_the_one_that_had_one() -> None:
    text = HEAD + "  %0: i32 = add %p, %s\n  %first: i32 = add %p, %s\n  store m[%0] = %first\n"
    assert "store m[%first] = %first" in print_kernel(simplify(parse_kernel(text)))


def test_the_examples_stay_right() -> None:
    for traced in (traced_scan(), traced_every_op()):
        verify(simplify(traced))


def value_ids(kernel: Kernel) -> set[int]:
    values: list[Any] = [v for op in walk(kernel.body) for v in op.results]
    return {id(v) for v in values}


def test_the_result_shares_no_value_with_the_input() -> None:
    kernel = traced_every_op()
    assert not value_ids(kernel) & value_ids(simplify(kernel))


@kernel(grid=lambda d, c: (d.T,))
def whole_blocks(d, c, x=In("T 16"), o=Out("T 16")):
    """Reads 64 rows at once where there are so many before the program's own, which for fewer rows than 64 is never."""
    own = program_id(0)
    until = minimum(maximum(own + 1, 0), d.T) // 64

    @loop(until, init=zeros((16,), f32))
    def total(j, acc):
        return acc + x[span(j * 64, 64), :].sum(0)

    @when(scalar(64) <= d.T)
    def _():
        o[own, :] = total + x[span(0, 64), :].sum(0)

    @when(scalar(64) > d.T)
    def _():
        o[own, :] = total


@pytest.mark.parametrize(("rows", "left"), [(3, set()), (63, set()), (64, {"loop", "when"}), (200, {"loop", "when"})])
def test_what_never_runs_may_overrun_and_is_dropped(rows: int, left: set[str]) -> None:
    traced = whole_blocks.trace({"T": rows}, {}, {"x": f32, "o": f32})
    verify(traced)
    simpler = simplify(traced)
    verify(simpler)
    assert {op.opcode for op in walk(simpler.body)} & {"loop", "when"} <= left
    assert (rows < 64) == ("loop" not in {op.opcode for op in walk(simpler.body)})


def test_what_may_run_must_not_overrun() -> None:
    """64 rows of a tensor of 63 in a loop that runs once."""

    @kernel(grid=lambda d, c: (1,))
    def once(d, c, x=In("63 16"), o=Out("16")):
        @loop(minimum(program_id(0) + 1, 1), init=zeros((16,), f32))
        def total(j, acc):
            return acc + x[span(j * 64, 64), :].sum(0)

        o[:] = total

    with pytest.raises(VerifyError, match="overruns the extent 63"):
        verify(once.trace({}, {}, {"x": f32, "o": f32}))
