"""Tracing: what the language's Python turns into, and the errors that a kernel's author sees."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from k3dsl import language as lang
from k3dsl.errors import ArgumentError, K3Error, TraceError, UnknownNameError, VerifyError
from k3dsl.ir.graph import Kernel, Op, walk
from k3dsl.ir.printer import print_kernel
from k3dsl.ir.symbols import Expr, Sym
from k3dsl.ir.types import DTYPES, DType, promote
from k3dsl.ir.verifier import verify
from k3dsl.language import (
    In,
    InOut,
    Out,
    Scalar,
    TensorSpec,
    Tile,
    arange,
    bf16,
    dot,
    exp2,
    f16,
    f32,
    i1,
    i32,
    i64,
    kernel,
    loop,
    program_id,
    reduce,
    span,
    when,
    where,
    zeros,
)

Body = Callable[..., Any]


def trace(body: Body, dims: dict[str, Any] | None = None, **knobs: Any) -> Kernel:
    """Traces body(d, c, x, o, e): x [T, 16] and o [T, 16] in f32, and `e` with tensors of other dtypes."""

    @kernel(grid=lambda d, c: (4,))
    def k(
        d, c,
        x=In("T 16", f32), half=In("16", f16), brain=In("16", bf16), ids=In("T", i32), wide=In("T", i64),
        both=InOut("T", f32), o=Out("T 16", f32), scale=Scalar(f32), extra=In("T", f32, optional=True),
    ):  # fmt: skip
        e = SimpleNamespace(half=half, brain=brain, ids=ids, wide=wide, both=both, scale=scale, extra=extra)
        return body(d, c, x, o, e)

    return k.trace(dims or {"T": Sym("T", divisible_by=16), "K": 16}, {"BV": 4, **knobs})


def lines(body: Body, **kwargs: Any) -> list[str]:
    """The printed ops of a body, without names and constants."""
    text = print_kernel(trace(body, **kwargs)).split("\n\n", 1)[1]
    return [line.strip().split(" = ", 1)[-1] for line in text.splitlines() if " = const " not in line]


def ops(body: Body, **kwargs: Any) -> list[Op]:
    return list(walk(trace(body, **kwargs).body))


def type_of(make: Callable[..., Tile]) -> str:
    seen: list[str] = []
    trace(lambda d, c, x, o, e: seen.append(str(make(x, e).type)))
    return seen[0]


# -- operators and types ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "opcode"),
    [
        (lambda a, b: a + b, "add"),
        (lambda a, b: a - b, "sub"),
        (lambda a, b: a * b, "mul"),
        (lambda a, b: a // b, "floordiv"),
        (lambda a, b: a % b, "mod"),
        (lambda a, b: a & b, "and"),
        (lambda a, b: a | b, "or"),
        (lambda a, b: a ^ b, "xor"),
        (lambda a, b: a << b, "shl"),
        (lambda a, b: a >> b, "shr"),
        (lambda a, b: a < b, "lt"),
        (lambda a, b: a <= b, "le"),
        (lambda a, b: a > b, "gt"),
        (lambda a, b: a >= b, "ge"),
        (lambda a, b: a == b, "eq"),
        (lambda a, b: a != b, "ne"),
        (lambda a, b: lang.minimum(a, b), "min"),
        (lambda a, b: lang.maximum(a, b), "max"),
    ],
)
def test_an_operator_is_one_op_on_both_sides_in_order(make: Callable[..., Tile], opcode: str) -> None:
    def body(d, c, x, o, e):
        a, b = arange(8), arange(8) + program_id(0)
        operands.extend([a.value, b.value])
        make(a, b)

    operands: list[Any] = []
    last = ops(body)[-1]
    assert (last.opcode, last.operands) == (opcode, operands)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x: 2 - x, "sub %0, %x"),
        (lambda x: 1 / x, "div %0, %x"),
        (lambda x: -x, "neg %x"),
        (lambda x: abs(x), "abs %x"),
    ],
)
def test_reflected_and_unary_operators(make: Callable[..., Tile], text: str) -> None:
    def body(d, c, t, o, e):
        x = e.scale.to(lang.f64)
        make(x)
        assert isinstance(x, Tile)

    found = lines(body)[-1]
    assert found.split()[0] == text.split()[0]
    assert found.endswith(text.split()[-1])


@pytest.mark.parametrize(
    ("a", "b", "result"),
    [
        ("f32", "f32", "f32"),
        ("f32", "bf16", "f32"),
        ("f16", "f32", "f32"),
        ("f64", "f32", "f64"),
        ("i32", "bf16", "bf16"),
        ("i32", "i64", "i64"),
        ("i1", "i8", "i8"),
        ("u8", "i32", "i32"),
        ("bf16", "f16", None),
        ("u8", "i8", None),
        ("f8e4m3", "f8e5m2", None),
    ],
)
def test_promotion(a: str, b: str, result: str | None) -> None:
    for x, y in ((a, b), (b, a)):
        found = promote(DTYPES[x], DTYPES[y])
        assert (found.name if found else None) == result


def test_numbers_take_the_tiles_dtype() -> None:
    assert type_of(lambda x, e: e.brain[:] * 2) == "bf16[16]"
    assert type_of(lambda x, e: e.brain[:] * 2.5) == "bf16[16]"
    assert type_of(lambda x, e: arange(4) + 1) == "i32[4]"
    assert type_of(lambda x, e: arange(4) + 0.5) == "f32[4]"
    assert type_of(lambda x, e: arange(4) / 2) == "f32[4]"
    assert type_of(lambda x, e: e.wide[0] + 1) == "i64"
    assert type_of(lambda x, e: (x[0] > 0) & True) == "i1[16]"
    assert type_of(lambda x, e: where(x[0] > 0, 1.0, e.half[:])) == "f16[16]"
    assert type_of(lambda x, e: exp2(arange(4))) == "f32[4]"


def test_broadcasting_follows_numpy() -> None:
    assert type_of(lambda x, e: x[span(0, 4)] + x[0]) == "f32[4,16]"
    assert type_of(lambda x, e: x[0][:, None] * e.half[:].to(f32)[None, :]) == "f32[16,16]"
    assert type_of(lambda x, e: x[0] + e.scale) == "f32[16]"
    assert type_of(lambda x, e: x[span(0, 4)][:, None, :] + x[span(0, 2)]) == "f32[4,2,16]"


def test_views_and_reductions() -> None:
    assert type_of(lambda x, e: x[span(0, 4)].T) == "f32[16,4]"
    assert type_of(lambda x, e: x[span(0, 4)].reshape(2, -1)) == "f32[2,32]"
    assert type_of(lambda x, e: x[span(0, 4)].permute(1, 0)[3]) == "f32[4]"
    assert type_of(lambda x, e: x[span(0, 4)][-1]) == "f32[16]"
    assert type_of(lambda x, e: x[span(0, 4)].sum(-1, keepdim=True)) == "f32[4,1]"
    assert type_of(lambda x, e: lang.argmax(x[span(0, 4)], 0)) == "i32[16]"
    assert type_of(lambda x, e: (x[span(0, 4)] > 0).any(1)) == "i1[4]"
    assert type_of(lambda x, e: reduce((x[0], arange(16)), 0, lambda a, i, b, j: (a + b, i * j))[1]) == "i32"


def test_products_name_their_precision() -> None:
    def precision(make: Callable[..., Tile]) -> tuple[str, str]:
        def body(d, c, x, o, e):
            make(x[span(0, 16)], e.half[:][:, None] + zeros((16, 16), f16))

        last = [op for op in ops(body) if op.opcode == "dot"][-1]
        return last.attrs["precision"], str(last.result.type)

    assert precision(lambda x, h: dot(x, x)) == ("ieee", "f32[16,16]")
    assert precision(lambda x, h: dot(h, h)) == ("fp16", "f32[16,16]")
    assert precision(lambda x, h: dot(x, x, precision="bf16")) == ("bf16", "f32[16,16]")
    assert precision(lambda x, h: dot(x, x, precision="tf32x3")) == ("tf32x3", "f32[16,16]")


# -- tensors ----------------------------------------------------------------------------------------------------------


def test_each_form_of_an_index() -> None:
    def body(d, c, x, o, e):
        p = program_id(0)
        x[p, :]
        x[p]
        x[span(p, 8), 3]
        x[span(p, 8, end=d.T).reshape(2, 4), span(0, 16)]
        x[arange(4), p]

    assert [line for line in lines(body) if "load" in line] == [
        "load x[%p, :]",
        "load x[%p, :]",
        "load x[span(%p, 8), %c3]",
        "load x[span(%p, (2, 4), end=%3), span(%c0, 16)]",
        "load x[%5, %p]",
    ]


def test_a_store_broadcasts_numbers_and_scalars_only() -> None:
    def body(d, c, x, o, e):
        o[0] = 0.0
        o[1] = e.scale
        o[span(2, 2)] = d.K

    assert [str(op.operands[-1].type) for op in ops(body) if op.opcode == "store"] == [
        "f32[16]",
        "f32[16]",
        "f32[2,16]",
    ]


def test_hints_masks_and_atomics_reach_the_ir() -> None:
    def body(d, c, x, o, e):
        t = x.load(span(0, 4), slice(None), mask=x[span(4, 4)] > 0.0, other=1.0, contiguity=8, order=(1, 0))
        o.store(span(0, 4), value=t, mask=t > 0.0, contiguity=2)
        e.both.atomic_add(span(0, 4), value=t.sum(1))

    found = {op.opcode: op.attrs for op in ops(body) if op.opcode in ("load", "store", "atomic_add")}
    assert found["load"] == {"tensor": "x", "other": 1.0, "contiguity": 8, "order": (1, 0), "mask_slot": 1}
    assert found["store"] == {"tensor": "o", "mask_slot": 1, "contiguity": 2, "value_slot": 2}
    assert found["atomic_add"] == {"tensor": "both", "value_slot": 1}


def test_strides_dims_and_optional_tensors() -> None:
    @kernel(grid=lambda d, c: (d.T // c.B, d.H))
    def k(d, c, x=In("T H*K+1"), extra=In("T", f32, optional=True), o=Out("B*2", f32)):
        assert extra is None
        assert x.shape == (Expr.of(Sym("T", 8)), 33)
        o[span(0, c.B)] = x[span(program_id(0) * c.B, c.B), 0].to(f32)

    stride = Sym("row", divisible_by=8)
    traced = k.trace({"T": Sym("T", 8), "H": 4, "K": 8}, {"B": 8}, {"x": TensorSpec(bf16, (stride, 1))})
    verify(traced)
    assert [t.name for t in traced.tensors] == ["x", "o"]
    assert traced.dims == [Sym("T", 8), stride]
    assert [str(g) for g in traced.grid] == ["T // 8", "4"]
    assert traced.tensors[1].shape == (Expr.of(16),)


# -- control flow -----------------------------------------------------------------------------------------------------


def test_python_control_flow_unrolls_and_selects() -> None:
    def body(d, c, x, o, e):
        for i in range(c.BV):
            if i % 2:
                o[i] = x[i]

    assert sum(op.opcode == "store" for op in ops(body)) == 2


def test_a_loop_gives_what_its_init_has() -> None:
    def body(d, c, x, o, e):
        @loop(3)
        def nothing(i):
            o[i] = 0.0

        @loop(d.T // 16, init=zeros((16,)), label="chunks")
        def one(i, a):
            return a + x[i]

        @loop(3, init=(zeros((16,)), program_id(0)), step=2, reverse=True)
        def two(i, a, n):
            return a, n + i

        assert nothing is None
        assert isinstance(one, Tile)
        assert [str(t.type) for t in two] == ["f32[16]", "i32"]
        o[0] = one + two[0]

    found = [op for op in ops(body) if op.opcode == "loop"]
    assert [op.attrs for op in found] == [
        {"step": 1, "reverse": False},
        {"step": 1, "reverse": False, "label": "chunks"},
        {"step": 2, "reverse": True},
    ]
    assert str(found[1].operands[1].op and found[1].operands[1].op.attrs["expr"]) == "T // 16"


def test_a_number_returned_from_a_loop_fills_the_carry() -> None:
    def body(d, c, x, o, e):
        @loop(3, init=zeros((16,)))
        def reset(i, a):
            return 0.0

        o[0] = reset

    verify(trace(body))


def test_when_runs_its_body_at_run_time_or_decides_while_tracing() -> None:
    def body(d, c, x, o, e):
        @when(program_id(0) > 1)
        def traced():
            o[0] = 0.0

        @when(c.BV == 4)
        def decided():
            o[1] = 0.0

        @when(False)
        def dropped():
            o[2] = 0.0

    top = trace(body).body.ops
    assert sum(op.opcode == "when" for op in top) == 1
    assert sum(op.opcode == "store" for op in top) == 1


def test_values_are_called_what_the_author_called_them() -> None:
    def body(d, c, x, o, e):
        row = x[0]
        pair = (row * 2.0, row + 1.0)
        total, most = reduce((row, row), 0, lambda left, up, right, other: (left + right, lang.maximum(up, other)))
        o[0] = pair[0] + pair[1] * total + most

    text = print_kernel(trace(body))
    for name in ("%row:", "%pair_0:", "%pair_1:", "%total:", "%most:", "%left:"):
        assert name in text


def test_a_dim_can_be_static_or_a_symbol() -> None:
    def body(d, c, x, o, e):
        assert d.K == 16
        assert str(d.T // 16 * 2) in ("2", "T // 8")
        assert math.prod(x.shape[1:]) == 16
        o[d.T - 1] = x[0]

    verify(trace(body))
    verify(trace(body, dims={"T": 16, "K": 16}))


# -- mistakes ---------------------------------------------------------------------------------------------------------


def use_if(d, c, x, o, e):
    if x[0, 0] > 0.0:  # mistake
        o[0] = x[0]


def use_and(d, c, x, o, e):
    o[0] = where(x[0] > 0.0 and x[0] < 1.0, 1.0, 0.0)  # mistake


def use_range(d, c, x, o, e):
    for i in range(e.ids[0]):  # mistake
        o[i] = 0.0


def mix_halves(d, c, x, o, e):
    o[0] = (e.half[:] + e.brain[:]).to(f32)  # mistake


def mix_in_dot(d, c, x, o, e):
    dot(e.half[:][None, :], e.brain[:][:, None])  # mistake


def leak(d, c, x, o, e):
    kept = []

    @loop(4)
    def body(i):
        kept.append(x[i])

    o[0] = kept[0]  # mistake


def leak_from_when(d, c, x, o, e):
    kept = []

    @when(program_id(0) > 0)
    def body():
        kept.append(x[0])

    o[0] = kept[0]  # mistake


def carry_shape(d, c, x, o, e):
    @loop(4, init=x[0])  # mistake
    def body(i, a):
        return a.reshape(4, 4)


def carry_dtype(d, c, x, o, e):
    @loop(4, init=x[0])  # mistake
    def body(i, a):
        return a.to(bf16)


def carry_count(d, c, x, o, e):
    @loop(4, init=x[0])  # mistake
    def body(i, a):
        return a, a


def carry_forgotten(d, c, x, o, e):
    @loop(4, init=x[0])  # mistake
    def body(i, a):
        a + 1.0


def loop_over_float(d, c, x, o, e):
    @loop(e.scale)  # mistake
    def body(i):
        pass


def step_backwards(d, c, x, o, e):
    @loop(4, step=-1)  # mistake
    def body(i):
        pass


def when_over_tile(d, c, x, o, e):
    @when(x[0] > 0.0)  # mistake
    def body():
        o[0] = 0.0


def when_returns(d, c, x, o, e):
    @when(program_id(0) > 0)  # mistake
    def body():
        return x[0]


def shapes_apart(d, c, x, o, e):
    x[0] + x[span(0, 4)].T  # mistake


def iterate(d, c, x, o, e):
    list(x[0])  # mistake


def span_of_traced_size(d, c, x, o, e):
    x[span(0, e.ids[0])]  # mistake


def python_slice(d, c, x, o, e):
    x[0:4]  # mistake


def whole_runtime_axis(d, c, x, o, e):
    x[:, 0]  # mistake


def too_many_indices(d, c, x, o, e):
    x[0, 0, 0]  # mistake


def float_index(d, c, x, o, e):
    x[e.scale]  # mistake


def store_other_dtype(d, c, x, o, e):
    o[0] = e.brain[:]  # mistake


def store_other_shape(d, c, x, o, e):
    o[0] = x[0].reshape(4, 4)  # mistake


def write_input(d, c, x, o, e):
    x[0] = o.dtype and 0.0  # mistake


def read_output(d, c, x, o, e):
    o[0]  # mistake


def index_a_tile(d, c, x, o, e):
    x[0][e.ids[0]]  # mistake


def pick_outside(d, c, x, o, e):
    x[0][16]  # mistake


def regroup(d, c, x, o, e):
    x[0].reshape(3, 5)  # mistake


def transpose_a_row(d, c, x, o, e):
    o[0] = x[0].T  # mistake


def divide_floats_whole(d, c, x, o, e):
    x[0] // 2  # mistake


def choose_by_number(d, c, x, o, e):
    where(x[0], 1.0, 0.0)  # mistake


def add_text(d, c, x, o, e):
    x[0] + "1"  # mistake


def bad_dot(d, c, x, o, e):
    dot(x[span(0, 4)], x[span(0, 4)])  # mistake


def bad_precision(d, c, x, o, e):
    dot(x[span(0, 4)], x[span(0, 4)].T, precision="fast")  # mistake


def combine_count(d, c, x, o, e):
    reduce((x[0],), 0, lambda a, b: (a, b))  # mistake


def init_of_numbers(d, c, x, o, e):
    @loop(4, init=(1.0, 2.0))  # mistake
    def body(i, a, b):
        return a, b


MISTAKES: list[tuple[Body, type[K3Error], str, str]] = [
    (use_if, TraceError, "a traced value has no truth value", "use where(cond, a, b) to choose, @when(cond)"),
    (use_and, TraceError, "a traced value has no truth value", "use where(cond, a, b) to choose"),
    (use_range, TraceError, "a traced value is not a Python number", "loop with @loop(n)"),
    (mix_halves, TraceError, "f16 and bf16 have no common dtype", "cast one operand, e.g. .to(f32)"),
    (mix_in_dot, VerifyError, "must share one float dtype, got f16 and bf16", "cast one with .to(...)"),
    (leak, TraceError, "uses a value made inside a loop or when body that has ended", "carry it with init="),
    (leak_from_when, TraceError, "uses a value made inside a loop or when body that has ended", "carry it with init="),
    (carry_shape, VerifyError, "the body returns (f32[4,4]) but carries (f32[16])", "return one value for each init"),
    (carry_dtype, VerifyError, "the body returns (bf16[16]) but carries (f32[16])", "return one value for each init"),
    (carry_count, TraceError, "the loop body returns 2 values but carries 1", "return one value for each init"),
    (carry_forgotten, TraceError, "the loop body returns 0 values but carries 1", "return one value for each init"),
    (loop_over_float, TraceError, "expected an integer scalar, got f32", ""),
    (step_backwards, VerifyError, "step must be at least 1, got -1", "use reverse=True"),
    (when_over_tile, VerifyError, "the condition must be a bool scalar, got i1[16]", "reduce it with any()/all()"),
    (when_returns, TraceError, "a when body returns nothing", "choose values with where(cond, a, b)"),
    (shapes_apart, TraceError, "shapes [16] and [16, 4] do not broadcast", "insert axes with x[:, None]"),
    (iterate, TraceError, "a tile cannot be iterated", "use reductions, reshape or @loop"),
    (span_of_traced_size, TraceError, "span size must be a positive static int", "the true end with end="),
    (python_slice, TraceError, "a tensor slice must be ':'", "use span(start, size, end=...)"),
    (whole_runtime_axis, TraceError, "':' needs a static axis, axis 0 of x is T", "use span(start, size, end=...)"),
    (too_many_indices, TraceError, "x has 2 axes, got 3 indices", "give at most one index an axis"),
    (float_index, TraceError, "expected an integer scalar, got f32", ""),
    (store_other_dtype, VerifyError, "takes f32[16], got bf16[16]", "reshape, broadcast or cast the value"),
    (store_other_shape, VerifyError, "takes f32[16], got f32[4,4]", "reshape, broadcast or cast the value"),
    (write_input, VerifyError, "x is declared In and cannot be written", "declare it Out or InOut"),
    (read_output, VerifyError, "o is declared Out and cannot be read", "declare it InOut"),
    (index_a_tile, TraceError, "a tile index takes ':', None and static integers", "index the tensor instead"),
    (pick_outside, VerifyError, "position 16 is out of range for axis 0 of f32[16]", ""),
    (regroup, VerifyError, "cannot reshape f32[16] (16 elements) to [3, 5] (15)", ""),
    (transpose_a_row, TraceError, ".T needs two axes, got f32[16]", ""),
    (divide_floats_whole, VerifyError, "takes integers, got f32", ""),
    (choose_by_number, VerifyError, "the condition must be bool, got f32", "compare first, e.g. x > 0"),
    (add_text, TraceError, "expected a traced value or a number, got str", "use tiles, Python numbers and dims"),
    (bad_dot, VerifyError, "inner extents differ: f32[4,16] times f32[4,16]", "transpose one operand with .T"),
    (bad_precision, VerifyError, "unknown precision 'fast'", "one of bf16, fp16, tf32, tf32x3, ieee"),
    (combine_count, TraceError, "combine must return 1 values, got 2", ""),
    (init_of_numbers, TraceError, "init must be tiles, got float", "use zeros() or full()"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m[0].__name__)
def test_a_mistake_names_the_line_the_reason_and_the_change(mistake: tuple[Body, type[K3Error], str, str]) -> None:
    body, kind, reason, fix = mistake
    source, first = inspect.getsourcelines(body)
    line = first + next(k for k, text in enumerate(source) if "# mistake" in text)
    with pytest.raises(kind) as caught:
        trace(body)
    message = str(caught.value)
    assert f"test_frontend.py:{line}: " in message.splitlines()[0]
    assert reason in message
    assert fix in (caught.value.fix or "")


def test_unknown_dims_and_knobs_name_their_neighbours() -> None:
    dims = {"T": Sym("T", 16), "tokens": 3, "heads": 4, "K": 16}
    with pytest.raises(UnknownNameError, match="unknown dim 'token'; did you mean tokens"):
        trace(lambda d, c, x, o, e: d.token, dims=dims)
    with pytest.raises(UnknownNameError, match="unknown knob 'block_w'; did you mean block_v"):
        trace(lambda d, c, x, o, e: c.block_w, block_v=4)
    with pytest.raises(UnknownNameError, match="unknown dim 'Q'; known: K, T, heads, tokens"):
        trace(lambda d, c, x, o, e: d.Q, dims=dims)


def test_a_runtime_dim_is_no_python_number() -> None:
    with pytest.raises(TraceError, match="T is only known at run time"):
        trace(lambda d, c, x, o, e: [o for _ in range(d.T)])
    with pytest.raises(TraceError, match="runtime dim expression T was used where Python needs a plain number"):
        trace(lambda d, c, x, o, e: 1 if d.T else 2)


def test_the_language_works_inside_kernels_only() -> None:
    with pytest.raises(TraceError, match=r"test_frontend.py:\d+: a language operation ran outside a kernel"):
        arange(4)


def test_a_kernel_returns_nothing_and_has_one_to_three_axes() -> None:
    with pytest.raises(TraceError, match="kernel k returns a value"):
        trace(lambda d, c, x, o, e: x[0])

    @kernel(grid=lambda d, c: (1, 1, 1, 1))
    def four(d, c, o=Out("4", f32)):
        o[:] = 0.0

    with pytest.raises(TraceError, match="kernel four: a grid has 1 to 3 axes, got 4"):
        four.trace({})


def test_every_parameter_is_declared() -> None:
    with pytest.raises(TraceError, match="parameter 'x' of kernel bare is not declared"):

        @kernel(grid=lambda d, c: (1,))
        def bare(d, c, x):
            pass

    with pytest.raises(TraceError, match="kernel empty must take"):

        @kernel(grid=lambda d, c: (1,))
        def empty():
            pass


def copy_kernel_of(dtype: DType | None) -> Any:
    @kernel(grid=lambda d, c: (1,))
    def copy(d, c, x=In("T", dtype), o=Out("T", f32)):
        o[0] = x[0].to(f32)

    return copy


def test_tensors_are_given_by_name_and_dtype() -> None:
    with pytest.raises(ArgumentError, match="kernel copy: no dtype given for tensor 'x'"):
        copy_kernel_of(None).trace({"T": 4})
    with pytest.raises(UnknownNameError, match="unknown parameter of kernel copy 'y'"):
        copy_kernel_of(None).trace({"T": 4}, {}, {"y": f32})
    with pytest.raises(ArgumentError, match="tensor 'x' is f32, got bf16"):
        copy_kernel_of(f32).trace({"T": 4}, {}, {"x": bf16})
    with pytest.raises(ArgumentError, match="tensor 'x' has 1 axes, got 2 strides"):
        copy_kernel_of(None).trace({"T": 4}, {}, {"x": TensorSpec(f32, (1, 1))})
    verify(copy_kernel_of(None).trace({"T": 4}, {}, {"x": i1}))


def test_tracing_twice_gives_fresh_kernels() -> None:
    k = copy_kernel_of(f32)
    first, second = k.trace({"T": 4}), k.trace({"T": 4})
    assert print_kernel(first) == print_kernel(second)
    assert first.body is not second.body


def test_a_failed_trace_leaves_nothing_behind() -> None:
    with pytest.raises(TraceError):
        trace(use_if)
    with pytest.raises(TraceError, match="outside a kernel"):
        arange(4)
    verify(copy_kernel_of(f32).trace({"T": 4}))
