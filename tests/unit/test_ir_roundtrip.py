"""Printed IR reads back to the same kernel, and a kernel's hash is of what it computes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from ir_examples import traced_every_op, traced_scan
from ir_generate import any_kernels, index_kernels

from k3dsl.errors import ParseError
from k3dsl.ir.copying import copy_kernel
from k3dsl.ir.graph import Kernel, walk
from k3dsl.ir.identity import kernel_hash
from k3dsl.ir.opset import OPSET
from k3dsl.ir.parser import parse_kernel
from k3dsl.ir.printer import print_kernel
from k3dsl.ir.symbols import Expr, Sym
from k3dsl.ir.verifier import verify
from k3dsl.language import In, Out, f32, kernel, program_id, span
from k3dsl.passes.simplify import simplify

TESTS = Path(__file__).parents[1]


def reads_back(kernel: Kernel) -> None:
    for locations in (False, True):
        text = print_kernel(kernel, locations=locations)
        again = parse_kernel(text)
        assert print_kernel(again, locations=locations) == text
        assert kernel_hash(again) == kernel_hash(kernel)
        verify(again)
    if locations:
        assert [op.loc for op in walk(again.body)] == [op.loc for op in walk(kernel.body)]


def test_the_example_has_every_op() -> None:
    assert {op.opcode for op in walk(traced_every_op().body)} == set(OPSET)


@pytest.mark.parametrize("trace", [traced_scan, traced_every_op])
def test_handwritten_kernels_read_back(trace: Callable[[], Kernel]) -> None:
    reads_back(trace())
    reads_back(simplify(trace()))


@settings(max_examples=60)
@given(any_kernels())
def test_generated_kernels_read_back(kernel: Kernel) -> None:
    reads_back(kernel)


@settings(max_examples=30)
@given(index_kernels())
def test_generated_index_arithmetic_reads_back(kernel: Kernel) -> None:
    reads_back(kernel)


def test_the_text_reads_like_the_language(golden: Callable[[str, str], None]) -> None:
    golden("chunk_scan", print_kernel(traced_scan()))
    golden("chunk_scan_simplified", print_kernel(simplify(traced_scan())))
    golden("every_op", print_kernel(traced_every_op()))


def test_a_copy_is_equal_and_shares_no_op() -> None:
    kernel = traced_every_op()
    copy = copy_kernel(kernel)
    assert print_kernel(copy, locations=True) == print_kernel(kernel, locations=True)
    assert not {id(op) for op in walk(copy.body)} & {id(op) for op in walk(kernel.body)}


# -- identity ---------------------------------------------------------------------------------------------------------


def scaled(
    factor: float = 2.0, rows: int = 16, divisible_by: int = 16, grid_axes: int = 1, spelled: str = "a"
) -> Kernel:
    @kernel(grid=lambda d, c: (d.T // rows, 1)[:grid_axes])
    def scale(d, c, x=In("T", f32), o=Out("T", f32)):
        if spelled == "a":
            at = span(program_id(0) * rows, rows)
            o[at] = x[at] * factor
        else:
            block = program_id(0)
            first = block * rows
            other_name = span(first, rows)

            # elsewhere in the file, under other names
            loaded = x[other_name]
            result = loaded * factor
            again = block * rows
            del again
            o[span(first, rows)] = result

    return scale.trace({"T": Sym("T", divisible_by=divisible_by)})


def test_two_traces_agree() -> None:
    assert kernel_hash(scaled()) == kernel_hash(scaled())


def test_names_and_lines_do_not_count() -> None:
    assert kernel_hash(simplify(scaled())) == kernel_hash(simplify(scaled(spelled="b")))


@pytest.mark.parametrize(
    "change", [{"factor": 3.0}, {"factor": -2.0}, {"divisible_by": 32}, {"grid_axes": 2}, {"rows": 8}]
)
def test_what_it_computes_counts(change: dict[str, int]) -> None:
    assert kernel_hash(scaled(**change)) != kernel_hash(scaled())  # type: ignore[arg-type]


def test_the_order_of_dims_does_not_count() -> None:
    def two(names: tuple[str, str]) -> Kernel:
        @kernel(grid=lambda d, c: (d.A, d.B))
        def fill(d, c, o=Out("A B", f32)):
            o[program_id(0), program_id(1)] = 1.0

        return fill.trace({n: Sym(n) for n in names})

    assert kernel_hash(two(("A", "B"))) == kernel_hash(two(("B", "A")))


@pytest.mark.parametrize(
    ("find", "replace"),
    [
        ("const 5.0", "const -0.0"),
        ("precision=tf32", "precision=ieee"),
        ("approx=true ", ""),
        ("bound=64.0", "bound=65.0"),
        ("end=%", "end=%"),
        ("step=2", "step=4"),
        ('"two words"', '"other words"'),
        ("strides=(row_stride, 1)", "strides=(row_stride, 2)"),
        ("dim row_stride: divisible_by=8 max=4096", "dim row_stride: divisible_by=8 max=8192"),
        ("inout acc", "out acc"),
    ],
)
def test_every_part_of_the_text_counts(find: str, replace: str) -> None:
    text = print_kernel(traced_every_op())
    changed = text.replace(find + " ", replace + " ") if find.endswith("=%") else text.replace(find, replace)
    assert find in text or find.strip() in text
    assert (kernel_hash(parse_kernel(changed)) == kernel_hash(parse_kernel(text))) == (changed == text)


def test_the_hash_is_the_same_in_another_process() -> None:
    program = "import ir_examples, k3dsl.ir.identity as i; print(i.kernel_hash(ir_examples.traced_every_op()))"
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    found = {kernel_hash(traced_every_op())}
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths}
        found.add(
            subprocess.run(
                [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
            ).stdout.strip()
        )
    assert len(found) == 1


# -- what does not parse ----------------------------------------------------------------------------------------------

HEAD = "kernel k\n  dim T\n  in x: f32[T, 8]\n  out o: f32[T, 8]\n  scalar s: f32 as %s\n  grid (T)\n\n"


@pytest.mark.parametrize(
    ("body", "line", "expected"),
    [
        ("  %a: f32 = frobnicate %s\n", 8, "expected an opcode, found frobnicate"),
        ("  %a: f33 = neg %s\n", 8, "expected a dtype"),
        ("  %a: f32 = neg %b\n", 8, "%b is not defined above"),
        ("  %a: f32 = neg %s\n  %a: f32 = neg %s\n", 9, "%a is defined twice"),
        ("  %a: f32 = exp %s fast=true\n", 8, "expected an attribute of exp (approx, bound), found fast"),
        ("  %a: f32 = exp %s approx=maybe\n", 8, "expected a value of kind bool, found maybe"),
        ("  %a: i32 = program_id\n", 8, "expected axis=... of program_id, found the end of the line"),
        ("  %a: i32 = const 1.5\n", 8, "expected a constant of type i32, found 1.5"),
        ("  %a: i32 = dim T // N\n", 8, "unknown name 'N'"),
        ("  %a: i32 = dim T //\n", 8, "cannot read 'T //' as an integer expression"),
        ("  %a: f32[8] = load x[%s, :\n", 8, "expected ','"),
        ("  %a = neg %s\n", 8, "expected '%name: type = op'"),
        ("  %a: f32 = neg %s %s\n", 8, "expected the end of the line, found %s"),
        ("  %a: f32 = neg %s ?\n", 8, "expected a value, name, number or mark"),
        ("  %a: i1 = const true\n  when %a:\n  store o[%a, :] = %s\n", 9, "expected an indented block below"),
        ("    %a: f32 = neg %s\n", 8, "expected an op at the kernel's indentation"),
    ],
)
def test_a_mistake_names_its_line_and_what_was_expected(body: str, line: int, expected: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse_kernel(HEAD + body)
    assert str(caught.value).startswith(f"line {line}: ")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "line 1: expected 'kernel NAME', found the end of the text"),
        ("module k\n", "line 1: expected 'kernel NAME'"),
        ("kernel k\n  dim T: odd=1\n", "line 2: expected divisible_by=N, min=N or max=N, found odd=1"),
        ("kernel k\n  in x f32\n", "line 2: expected 'NAME: DTYPE[EXTENTS]'"),
        ("kernel k\n  in x: f32[T]\n", "line 2: unknown name 'T'"),
        ("kernel k\n  grid 3\n", "line 2: expected (...)"),
        ("kernel k\n  tensor x\n", "line 2: expected dim, in, out, inout, scalar or grid, found tensor"),
        ("kernel k\n", "line 1: expected 'grid (...)', found the end of the text"),
    ],
)
def test_a_wrong_header_names_its_line(text: str, expected: str) -> None:
    with pytest.raises(ParseError, match="line") as caught:
        parse_kernel(text)
    assert expected in str(caught.value)


def test_expressions_keep_the_facts_of_their_dims() -> None:
    tokens = Sym("T", divisible_by=64, min=64)
    kernel = parse_kernel(print_kernel(traced_scan()))
    assert kernel.dims == [Sym("T", divisible_by=64)]
    assert kernel.tensor("w").shape[0] == Expr.of(tokens) // 32
