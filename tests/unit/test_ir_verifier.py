"""Each rule of the IR, broken by hand: the error names the op, the place, the reason and what to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from ir_examples import traced_every_op, traced_scan
from ir_generate import any_kernels

from k3dsl.errors import VerifyError
from k3dsl.ir.graph import Index, Kernel, Op, Region, Value, walk
from k3dsl.ir.parser import parse_kernel
from k3dsl.ir.symbols import Expr, Sym
from k3dsl.ir.types import TileType, f32, i32
from k3dsl.ir.verifier import verify
from k3dsl.passes.simplify import simplify

HEAD = """kernel k  # demo.py:1
  dim T: divisible_by=16
  in x: f32[T, 16]
  in m: i1[T, 16]
  out o: f32[T, 16]
  scalar s: f32 as %s
  grid (T // 16, 2)

"""
STORE = """  %p: i32 = program_id axis=0  # demo.py:2
  %a: f32[16] = load x[%p, :]  # demo.py:3
  store o[%p, :] = %a  # demo.py:4
"""
BODY = HEAD + STORE


def op_of(kernel: Kernel, opcode: str) -> Op:
    return next(op for op in walk(kernel.body) if op.opcode == opcode)


def refused(text: str) -> str:
    """The error of a kernel given as text, with its first lines in place."""
    with pytest.raises(VerifyError) as caught:
        verify(parse_kernel(text))
    return str(caught.value)


def test_right_kernels_pass() -> None:
    for kernel in (parse_kernel(BODY), traced_scan(), traced_every_op()):
        verify(kernel)
        verify(simplify(kernel))


@settings(max_examples=30)
@given(any_kernels())
def test_generated_kernels_pass_before_and_after_simplify(kernel: Kernel) -> None:
    verify(kernel)
    verify(simplify(kernel))


def test_an_access_with_a_mask_may_name_rows_that_are_not_there() -> None:
    """The mask says what is accessed: in a kernel with few rows compiled in, that of a whole block is false for some."""
    row = "  %b: i32 = const 16\n  %m: i1 = lt %b, %p\n  %c: f32 = load x[%p, %b]"
    assert "out of bounds" in refused(BODY + row + "\n")
    verify(parse_kernel(BODY + row + " mask=%m\n"))
    always = row.replace("lt %b, %p", "const true")
    assert "out of bounds" in refused(BODY + always + " mask=%m\n")


def test_the_whole_message() -> None:
    text = (
        HEAD
        + "  %a: f32[16] = broadcast %s  # demo.py:2\n  %b: f32[8] = neg %a  # demo.py:3\n"
        + STORE.replace("%a", "%c")
    )
    assert refused(text) == (
        "demo.py:3: neg: gives (f32[8]), but its operands and attributes make it (f32[16])\n  op: %b: f32[8] = neg %a"
    )


# -- wrong text: types, shapes, indices -------------------------------------------------------------------------------

LINES = {
    "operands of two dtypes": (
        "  %i: i32 = const 1\n  %b: f32 = add %s, %i\n",
        "operands differ in dtype: f32 and i32",
    ),
    "operands of two shapes": ("  %b: f32[4] = broadcast %s\n  %c: f32[4] = add %b, %s\n", "operands differ in shape"),
    "too few operands": ("  %b: f32 = add %s\n", "takes 2 operands, got 1"),
    "a float op on integers": ("  %i: i32 = const 1\n  %b: i32 = exp %i\n", "needs a float tile, got i32"),
    "a program axis past the third": ("  %b: i32 = program_id axis=3\n", "axis must be 0, 1 or 2"),
    "an axis the grid lacks": ("  %b: i32 = program_id axis=2\n", "axis 2 of a grid of 2 axes"),
    "a reshape to another size": ("  %b: f32[4] = reshape %s\n", "cannot reshape f32"),
    "a wrong permutation": ("  %b: f32[4] = broadcast %s\n  %c: f32[4] = permute %b axes=(1)\n", "are no permutation"),
    "an unknown reduction": (
        "  %b: f32[4] = broadcast %s\n  %c: f32 = reduce %b axis=0 kind=mean\n",
        "unknown kind 'mean'",
    ),
    "a reduction without a combine": (
        "  %b: f32[4] = broadcast %s\n  %c: f32 = reduce %b axis=0\n",
        "has 0 regions, needs 1",
    ),
    "a wrong result type": ("  %b: f32[4] = neg %s\n", "gives (f32[4]), but its operands and attributes make it (f32)"),
    "too many results": ("  %b: f32, %c: f32 = neg %s\n", "gives (f32, f32)"),
    "a constant that does not fit": ("  %b: i8 = const 300\n", "300 is no i8"),
    "a static index past the end": (
        "  %b: i32 = const 16\n  %c: f32 = load x[%p, %b]\n",
        "index 16 is out of bounds, the extent is 16",
    ),
    "a negative index": ("  %b: i32 = const -1\n  %c: f32 = load x[%b, %p]\n", "index -1 is negative"),
    "an index at the dim itself": (
        "  %b: i32 = dim T\n  %c: f32 = load x[%b, %p]\n",
        "index T is out of bounds, the extent is T",
    ),
    "a span past a static extent": (
        "  %b: f32[32] = load x[%p, span(%p, 32)]\n",
        "a span of 32 rows overruns the extent 16",
    ),
    "a span that starts too late": (
        "  %b: i32 = const 8\n  %c: f32[16] = load x[%p, span(%b, 16)]\n",
        "a span of 16 rows from 8 overruns the extent 16",
    ),
    "a span past a runtime extent": (
        "  %b: i32 = dim T\n  %c: i32 = const 8\n  %d: i32 = sub %b, %c\n  %e: f32[16,16] = load x[span(%d, 16), :]\n",
        "a span of 16 rows from T - 8 overruns the extent T",
    ),
    "an end past the extent": (
        "  %b: i64 = dim T + 1\n  %c: f32[16,16] = load x[span(%p, 16, end=%b), :]\n",
        "end=T + 1 is past the extent T",
    ),
    "too few indices": ("  %b: f32 = load x[%p]\n", "x has 2 axes, the index has 1"),
    "':' over a runtime axis": ("  %b: f32[16] = load x[:, %p]\n", "':' needs a static axis"),
    "a float index": ("  %b: f32[16] = load x[%s, :]\n", "indices must be integers, got f32"),
    "an unknown tensor": ("  %b: f32[16] = load y[%p, :]\n", "unknown tensor 'y'"),
    "a read of an Out": ("  %b: f32[16] = load o[%p, :]\n", "o is declared Out and cannot be read"),
    "a write to an In": ("  store x[%p, :] = %a\n", "x is declared In and cannot be written"),
    "a stored value of the wrong shape": ("  store o[%p, :] = %s\n", "o at this index takes f32[16], got f32"),
    "a mask of the wrong shape": (
        "  %b: i1[16] = load m[%p, :]\n  %c: f32[16,16] = load x[span(%p, 16), :] mask=%b\n",
        "the mask must be i1[16,16], got i1[16]",
    ),
    "an order of the wrong axes": ("  %b: f32[16] = load x[%p, :] order=(1, 0)\n", "order=(1, 0) is no permutation"),
    "a contiguity of nothing": ("  %b: f32[16] = load x[%p, :] contiguity=0\n", "contiguity=0 must be a power of two"),
    "a contiguity of three": ("  %b: f32[16] = load x[%p, :] contiguity=3\n", "contiguity=3 must be a power of two"),
    "a step backwards": ("  loop %i in %p .. %p step=-1:\n    yield\n", "step must be at least 1, got -1"),
    "a loop over floats": ("  loop %i in %s .. %p:\n    yield\n", "start and stop must be i32 scalars"),
    "a body that returns too little": (
        "  %b: f32 = loop %i in %p .. %p carry(%c = %s):\n    yield\n",
        "the body returns () but carries (f32)",
    ),
    "a body that returns another type": (
        "  %b: f32 = loop %i in %p .. %p carry(%c = %s):\n    yield %i\n",
        "the body returns (i32) but carries (f32)",
    ),
    "a when over a float": ("  when %s:\n    pass\n", "the condition must be a bool scalar, got f32"),
    "a when that yields": (
        "  %b: i1 = const true\n  when %b:\n    yield %s\n",
        "a when takes no arguments and gives no values",
    ),
    "a combine of another dtype": (
        "  %b: f32[4] = broadcast %s\n  %c: f32 = reduce %b axis=0 combine(%l: f32, %r: i32):\n    yield %l\n",
        "combine must take 2 scalars",
    ),
    "a combine that reaches outside": (
        "  %b: f32[4] = broadcast %s\n  %c: f32 = reduce %b axis=0 combine(%l: f32, %r: f32):\n"
        "    %t: f32 = mul %l, %s\n    yield %t\n",
        "a combine uses a value from around it",
    ),
    "a combine with memory": (
        "  %b: f32[4] = broadcast %s\n  %c: f32 = scan %b axis=0 combine(%l: f32, %r: f32):\n"
        "    %t: f32 = load x[%p, %p]\n    yield %t\n",
        "a combine cannot contain load",
    ),
    "a combine over tiles": (
        "  %b: f32[4] = broadcast %s\n  %c: f32[4] = scan %b axis=0 combine(%l: f32, %r: f32):\n"
        "    %t: f32[2] = broadcast %l\n    yield %t\n",
        "a combine takes and returns scalars",
    ),
    "a use before the definition": (
        "  %b: f32 = loop %i in %p .. %p carry(%c = %s):\n    yield %b\n",
        "which is not visible at its end",
    ),
    "a use after the region": (
        "  loop %i in %p .. %p:\n    %b: f32 = neg %s\n    yield\n  %c: f32 = neg %b\n",
        "uses %b outside the region it lives in",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_lines_that_break_a_rule(name: str) -> None:
    lines, reason = LINES[name]
    lines = "".join(f"{line}  # demo.py:9\n" for line in lines.splitlines())
    message = refused(BODY + lines)
    assert reason in message
    assert message.startswith("demo.py:")


# -- wrong headers ----------------------------------------------------------------------------------------------------

HEADERS: dict[str, tuple[Callable[[Kernel], None], str]] = {
    "no grid": (lambda k: setattr(k, "grid", ()), "a grid has 1 to 3 axes, got 0"),
    "four grid axes": (lambda k: setattr(k, "grid", (Expr.of(1),) * 4), "a grid has 1 to 3 axes, got 4"),
    "an empty grid": (lambda k: setattr(k, "grid", (Expr.of(0), Expr.of(2))), "grid axis 0 has extent 0"),
    "a grid over a foreign dim": (
        lambda k: setattr(k, "grid", (Expr.of(Sym("N")), Expr.of(2))),
        "grid axis 0 uses the dim N, which the kernel does not have (it has: T)",
    ),
    "a dim with other facts": (
        lambda k: setattr(k, "grid", (Expr.of(Sym("T")), Expr.of(2))),
        "grid axis 0 uses the dim T with other facts than the kernel's",
    ),
    "a dim twice": (lambda k: k.dims.append(k.dims[0]), "dim T is declared twice"),
    "a dim without values": (
        lambda k: k.dims.__setitem__(0, Sym("T", min=5, max=4)),
        "dim T can have no value: divisible_by=1, min=5, max=4",
    ),
    "a tensor twice": (lambda k: k.tensors.append(k.tensors[0]), "parameter x is declared twice"),
    "an unknown role": (
        lambda k: k.tensors.__setitem__(0, replace(k.tensors[0], role="scratch")),
        "tensor x has role 'scratch'",
    ),
    "a tensor over a foreign dim": (
        lambda k: k.tensors.__setitem__(0, replace(k.tensors[0], shape=(Expr.of(Sym("N")), Expr.of(16)))),
        "axis 0 of tensor x uses the dim N",
    ),
    "a stride too few": (
        lambda k: k.tensors.__setitem__(0, replace(k.tensors[0], strides=(Expr.of(16),))),
        "tensor x has 2 axes but 1 strides",
    ),
    "an Out that is never written": (
        lambda k: setattr(k.body, "ops", k.body.ops[:2]),
        "tensor o is declared Out but never written",
    ),
    "a scalar without a value": (lambda k: k.scalar_values.clear(), "the scalar values do not match"),
    "a body that yields": (lambda k: setattr(k.body, "yields", [k.scalar_values[0]]), "the body takes no arguments"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_break_a_rule(name: str) -> None:
    change, reason = HEADERS[name]
    kernel = parse_kernel(BODY)
    change(kernel)
    with pytest.raises(VerifyError) as caught:
        verify(kernel)
    assert str(caught.value).startswith("demo.py:1: kernel k: ")
    assert reason in str(caught.value)


# -- wrong graphs: what no text can say -------------------------------------------------------------------------------

GRAPHS: dict[str, tuple[Callable[[Kernel], None], str]] = {
    "an unknown op": (lambda k: setattr(op_of(k, "load"), "opcode", "fetch"), "unknown op 'fetch'"),
    "an unknown attribute": (lambda k: op_of(k, "load").attrs.update(cache="all"), "unknown attribute 'cache'"),
    "a missing attribute": (lambda k: op_of(k, "program_id").attrs.clear(), "attribute axis is missing"),
    "an attribute of the wrong kind": (
        lambda k: op_of(k, "program_id").attrs.update(axis="0"),
        "attribute axis must be of kind int, got '0'",
    ),
    "an operand before its definition": (
        lambda k: setattr(k.body, "ops", [k.body.ops[1], k.body.ops[0], k.body.ops[2]]),
        "uses %p before it is defined",
    ),
    "an operand of no op": (
        lambda k: op_of(k, "store").operands.__setitem__(1, Value(TileType(f32, (16,)))),
        "uses a value that no op of the kernel defines",
    ),
    "an op in two places": (lambda k: k.body.ops.append(k.body.ops[1]), "the same op stands in two places"),
    "the result of another op": (
        lambda k: setattr(k.body.ops[1], "results", [k.body.ops[0].results[0]]),
        "gives (i32), but its operands and attributes make it (f32[16])",
    ),
    "a result with another owner": (
        lambda k: setattr(k.body.ops[1].results[0], "op", k.body.ops[0]),
        "%a does not point to the op that defines it",
    ),
    "a slot out of range": (lambda k: op_of(k, "store").attrs.update(value_slot=5), "an operand slot is out of range"),
    "an operand without a role": (
        lambda k: op_of(k, "load").operands.append(k.scalar_values[0]),
        "an operand is neither an index, the mask nor the value",
    ),
    "an index on arithmetic": (
        lambda k: setattr(op_of(k, "program_id"), "index", (Index("full", (16,)),)),
        "only loads and stores have an index",
    ),
    "a region on a load": (lambda k: op_of(k, "load").regions.append(Region()), "has 1 regions, needs 0"),
    "an unknown kind of index": (
        lambda k: setattr(op_of(k, "load"), "index", (Index("row", (), 0), Index("full", (16,)))),
        "axis 0 of x: unknown kind of index 'row'",
    ),
    "a full axis of the wrong extent": (
        lambda k: setattr(op_of(k, "load"), "index", (Index("scalar", (), 0), Index("full", (8,)))),
        "':' needs a static axis",
    ),
    "a scalar index that has a shape": (
        lambda k: setattr(op_of(k, "load"), "index", (Index("scalar", (4,), 0), Index("full", (16,)))),
        "a scalar index of shape [4] holds i32",
    ),
    "a dim over a foreign symbol": (
        lambda k: k.body.ops.append(Op("dim", [], [TileType(i32)], {"expr": Expr.of(Sym("N"))})),
        "the expression uses the dim N",
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_that_break_a_rule(name: str) -> None:
    change, reason = GRAPHS[name]
    kernel = parse_kernel(BODY)
    change(kernel)
    with pytest.raises(VerifyError) as caught:
        verify(kernel)
    assert reason in str(caught.value)
    assert "\n  op: " in str(caught.value)


def test_an_error_says_what_to_change() -> None:
    text = BODY + "  loop %i in %p .. %p:\n    %b: f32 = neg %s\n    yield\n  %c: f32 = neg %b\n"
    assert refused(text).endswith("fix: return it from the loop body and carry it with init=")
    assert "fix: give span(..., end=...)" in refused(BODY + "  %b: f32[32] = load x[%p, span(%p, 32)]\n")
