"""Mistakes in a kernel: each error names the author's file and line, the reason and what to change."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch
from ir_examples import Body, trace_body

import k3dsl
from k3dsl.errors import ArgumentError, K3Error, KernelCodeError, TraceError, UnknownNameError, VerifyError
from k3dsl.ir.printer import print_kernel
from k3dsl.ir.symbols import Sym
from k3dsl.ir.types import DType
from k3dsl.ir.verifier import verify
from k3dsl.language import (
    In,
    Out,
    TensorSpec,
    arange,
    bf16,
    dot,
    f32,
    full,
    i1,
    i8,
    i32,
    kernel,
    loop,
    program_id,
    reduce,
    scalar,
    span,
    when,
    where,
    zeros,
)


def use_if(d, c, x, o, e):
    if x[0, 0] > 0.0:  # mistake
        o[0] = x[0]


def use_and(d, c, x, o, e):
    o[0] = where(x[0] > 0.0 and x[0] < 1.0, 1.0, 0.0)  # mistake


def use_range(d, c, x, o, e):
    for i in range(e.ids[0]):  # mistake
        o[i] = 0.0


def loop_over_a_dim(d, c, x, o, e):
    for i in range(d.T):  # mistake
        o[i] = 0.0


def ask_a_dim(d, c, x, o, e):
    if d.T > 100:  # mistake
        o[0] = 0.0


def halve_a_dim(d, c, x, o, e):
    o[span(0, 8, end=d.T / 2)] = 0.0  # mistake


def divide_by_a_dim(d, c, x, o, e):
    o[span(0, 2 / d.T)] = 0.0  # mistake


def divide_a_dim_by_a_float(d, c, x, o, e):
    o[0] = d.T / 2.0  # mistake


def ask_the_library(d, c, x, o, e):
    json.loads("(")  # mistake


def misspell_a_function(d, c, x, o, e):
    o[0] = expp(x[0])  # noqa: F821  # mistake


def divide_by_zero(d, c, x, o, e):
    o[0] = 1.0 / (e.half.shape[0] - 16)  # mistake


def loop_over_a_builtin(d, c, x, o, e):
    loop(4, init=e.scale)(max)  # mistake


def multiply_with_at(d, c, x, o, e):
    o[0] = (x[0][None, :] @ x[0][:, None])[0, 0]  # mistake


def misspell_an_argument(d, c, x, o, e):
    o[0] = x.load(0, maks=True)  # mistake


def forget_the_axis(d, c, x, o, e):
    o[0] = x[0].sum()  # mistake


def too_few_carries(d, c, x, o, e):
    @loop(4, init=e.scale)  # mistake
    def total(i):
        return 0.0


def index_in_when(d, c, x, o, e):
    @when(program_id(0) > 0)  # mistake
    def _(i):
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


def init_of_text(d, c, x, o, e):
    @loop(4, init=("a", "b"))  # mistake
    def body(i, a, b):
        return a, b


MISTAKES: list[tuple[Body, type[K3Error], str, str]] = [
    (use_if, TraceError, "a traced value has no truth value", "use where(cond, a, b) to choose, @when(cond)"),
    (use_and, TraceError, "a traced value has no truth value", "use where(cond, a, b) to choose"),
    (use_range, TraceError, "a traced value is not a Python number", "loop with @loop(n)"),
    (loop_over_a_dim, TraceError, "T is only known at run time", "@loop(d.T) loops at run time"),
    (ask_a_dim, TraceError, "T compared with 100 is only known at run time", "compare traced values"),
    (halve_a_dim, TraceError, "T / 2 is no integer", "T // 2"),
    (divide_by_a_dim, TraceError, "2 / T is no integer", "2 // T"),
    (divide_a_dim_by_a_float, TraceError, "T / 2.0 is no integer", "makes it a traced number"),
    (ask_the_library, KernelCodeError, "JSONDecodeError: Expecting value", ""),
    (misspell_a_function, KernelCodeError, "NameError: name 'expp' is not defined", ""),
    (divide_by_zero, KernelCodeError, "ZeroDivisionError: float division by zero", ""),
    (loop_over_a_builtin, TraceError, "a traced value has no truth value", ""),
    (multiply_with_at, TraceError, "tiles have no @", "dot(a, b)"),
    (misspell_an_argument, TraceError, "got an unexpected keyword argument 'maks'", ""),
    (forget_the_axis, TraceError, "missing 1 required positional argument: 'axis'", ""),
    (too_few_carries, TraceError, "the body of a loop takes (i, carry 1)", "one parameter for each"),
    (index_in_when, TraceError, "the body of a when takes ()", "no parameters"),
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
    (init_of_text, TraceError, "expected a traced value or a number, got str", "use tiles, Python numbers"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m[0].__name__)
def test_a_mistake_names_the_line_the_reason_and_the_change(mistake: tuple[Body, type[K3Error], str, str]) -> None:
    body, kind, reason, fix = mistake
    source, first = inspect.getsourcelines(body)
    line = first + next(k for k, text in enumerate(source) if "# mistake" in text)
    with pytest.raises(kind) as caught:
        trace_body(body)
    message = str(caught.value)
    assert f"test_frontend_errors.py:{line}: " in message.splitlines()[0]
    assert reason in message
    assert fix in (caught.value.fix or "")


def test_unknown_dims_and_knobs_name_their_neighbours() -> None:
    dims = {"T": Sym("T", 16), "tokens": 3, "heads": 4, "K": 16}
    with pytest.raises(UnknownNameError, match="asks for the dim 'token', which was not given; is tokens meant"):
        trace_body(lambda d, c, x, o, e: d.token, dims=dims)
    with pytest.raises(UnknownNameError, match="asks for the knob 'block_w', which was not given; is block_v meant"):
        trace_body(lambda d, c, x, o, e: c.block_w, block_v=4)
    with pytest.raises(UnknownNameError, match="the dim 'Q', which was not given; given: K, T, heads, tokens"):
        trace_body(lambda d, c, x, o, e: d.Q, dims=dims)


def test_a_runtime_dim_is_no_python_number() -> None:
    with pytest.raises(TraceError, match="T is only known at run time"):
        trace_body(lambda d, c, x, o, e: [o for _ in range(d.T)])
    with pytest.raises(TraceError, match="runtime dim expression T was used where Python needs a plain number"):
        trace_body(lambda d, c, x, o, e: 1 if d.T else 2)


def test_the_language_works_inside_kernels_only() -> None:
    with pytest.raises(TraceError, match=r"test_frontend_errors.py:\d+: a language operation ran outside a kernel"):
        arange(4)


def test_a_kernel_returns_nothing_and_has_one_to_three_axes() -> None:
    with pytest.raises(TraceError, match="kernel k returns a value"):
        trace_body(lambda d, c, x, o, e: x[0])

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

    with pytest.raises(TraceError, match=r"kernel empty takes \(\)"):

        @kernel(grid=lambda d, c: (1,))
        def empty():
            pass

    with pytest.raises(TraceError, match=r"kernel bare takes \(x, o\)(.|\n)*the dims and the knobs"):

        @kernel(grid=lambda d, c: (1,))
        def bare(x=In("4"), o=Out("4")):
            pass


def test_a_dim_over_a_tile_is_a_tile() -> None:
    trace_body(lambda d, c, x, o, e: o.__setitem__(0, d.T / x[0] + x[0] / d.T))


def test_pythons_own_errors_are_told_apart_and_keep_their_cause() -> None:
    with pytest.raises(KernelCodeError) as caught:
        trace_body(lambda d, c, x, o, e: [][3])
    assert isinstance(caught.value.__cause__, IndexError)


def test_a_grid_is_a_function_of_dims_and_knobs() -> None:
    def nothing(d, c, o=Out("4", f32)):
        o[:] = 0.0

    with pytest.raises(TraceError, match=r"errors.py:\d+: @kernel without a grid"):
        kernel(nothing)
    with pytest.raises(TraceError, match="takes its function as a decorator does"):
        kernel(nothing, grid=lambda d, c: (1,))
    with pytest.raises(TraceError, match=r"grid is \(1,\), no function"):
        kernel(grid=(1,))(nothing)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match=r"errors.py:\d+: kernel nothing: TypeError: .* takes 1 positional argument"):
        kernel(grid=lambda d: (1,))(nothing).trace({})  # type: ignore[arg-type,misc]
    with pytest.raises(TraceError, match=r"errors.py:\d+: T / 2 is no integer"):
        kernel(grid=lambda d, c: (d.T / 2,))(nothing).trace({"T": Sym("T")})


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
        trace_body(use_if)
    with pytest.raises(TraceError, match="outside a kernel"):
        arange(4)
    verify(copy_kernel_of(f32).trace({"T": 4}))


# ---- numbers that are not what they seem ---------------------------------------------------------------------------------


def compiled(body: Any, dims: dict[str, Any] | None = None, grid: Any = lambda d, c: (1,), **where: Any) -> Any:
    return k3dsl.compile(kernel(grid=grid)(body), dims=dims or {}, **({"target": "cpu"} | where))


def test_whether_a_runtime_dim_is_a_number_is_no_question_for_python() -> None:
    """False would be an answer, and the wrong one for some calls."""
    N = Sym("N", divisible_by=4)

    def chosen(d, c, o=Out("N", f32)):
        o[span(0, 8, end=d.N)] = where(d.N == 8, 1.0, 0.0)

    def listed(d, c, o=Out("N", f32)):
        o[span(0, 8, end=d.N)] = 1.0 if d.N in (4, 8) else 0.0

    def unequal(d, c, o=Out("N", f32)):
        o[span(0, 8, end=d.N)] = 1.0 if o.shape[0] != 8 else 0.0

    def gridded(d, c, o=Out("N", f32)):
        o[span(program_id(0) * 8, 8, end=d.N)] = 1.0

    for body in (chosen, listed, unequal):
        with pytest.raises(TraceError, match=r"errors.py:\d+: N compared with \d is only known at run time"):
            compiled(body, {"N": N})
    with pytest.raises(TraceError, match="N compared with 8 is only known"):
        compiled(gridded, {"N": N}, lambda d, c: (2 if d.N == 8 else 1,))

    def decided(d, c, o=Out("N", f32)):
        assert d.N == d.N
        assert d.N != -1
        assert d.N % 4 == 0
        o[span(0, 8, end=d.N)] = where(scalar(d.N) == 8, 1.0, 0.0)

    o = torch.empty(8)
    compiled(decided, {"N": N})(o=o)
    assert o.tolist() == [1.0] * 8


def test_a_float_is_no_integer() -> None:
    def stored(d, c, o=Out("8", i32)):
        o[:] = 1.5

    def filled(d, c, o=Out("8", i32)):
        o[:] = full((8,), float("nan"), i32)

    def otherwise(d, c, x=In("8", i32), o=Out("8", i32)):
        o[:] = x.load(slice(None), mask=arange(8) < 4, other=float("-inf"))

    for body, number in ((stored, "1.5"), (filled, "nan"), (otherwise, "-inf")):
        with pytest.raises(TraceError, match=rf"errors.py:\d+: (other=)?{number} is no i32"):
            compiled(body)

    def whole(d, c, o=Out("8", i32)):
        o[:] = 2.0

    o = torch.empty(8, dtype=torch.int32)
    compiled(whole)(o=o)
    assert o.tolist() == [2] * 8


def test_constants_wrap_as_other_integers_do() -> None:
    def body(d, c, a=Out("1", i32), b=Out("1", i8), e=Out("1", i8)):
        a[:] = scalar(2**31 - 1) + 1
        b[:] = full((), 300, i32).to(i8)
        e[:] = full((), 100, i8) * 2

    a, b, e = torch.empty(1, dtype=torch.int32), *torch.empty(2, 1, dtype=torch.int8)
    compiled(body)(a=a, b=b, e=e)
    assert (a.item(), b.item(), e.item()) == (-(2**31), 44, -56)


def test_a_loop_body_that_binds_an_outer_tile_is_refused() -> None:
    def body(d, c, x=In("8", f32), o=Out("8", f32)):
        t = x[:]

        @loop(3)
        def _(i):
            nonlocal t
            t = t + 1.0

        o[:] = x[:]

    with pytest.raises(TraceError, match="binds 't' of the code around it"):
        compiled(body)


def test_dtypes_go_by_their_names_and_by_torchs_too() -> None:
    def body(d, c, x=In("8", torch.float32), o=Out("8", "i32")):
        o[:] = (x[:] + zeros((8,), torch.float32)).to("i32")

    o = torch.empty(8, dtype=torch.int32)
    compiled(body)(x=torch.arange(8.0), o=o)
    assert o.tolist() == list(range(8))
    with pytest.raises(TraceError, match="'float31' is no dtype"):
        compiled(lambda d, c, x=In("8", f32), o=Out("8", f32): o.__setitem__(slice(None), x[:].to("float31")))
    with pytest.raises(TraceError, match=r"declared with shape \(8,\)"):
        In((8,), f32)  # type: ignore[arg-type]


def test_what_a_triton_user_tries_first_says_how_it_is_done_here() -> None:
    @kernel(grid=lambda d, c: (1,))
    def copy(d, c, x=In("8", f32), o=Out("8", f32)):
        o[:] = x[:]

    x = torch.zeros(8)
    for attempt in (lambda: copy(x, x), lambda: copy[(1,)](x, x)):
        with pytest.raises(TraceError, match=r"k3dsl.compile\(copy, dims=..., target=...\)"):
            attempt()
    with pytest.raises(ArgumentError, match=r"takes its arguments by name\n  fix: \(x=..., o=...\)"):
        k3dsl.compile(copy, dims={}, target="cpu")(x, x)
    for wrong in ({"dims": ["N"]}, {"dims": {}, "knobs": ["N"]}, {"dims": {}, "tensors": [f32]}):
        with pytest.raises(ArgumentError, match="is a list"):
            k3dsl.compile(copy, target="cpu", **wrong)
    for wrong in (
        {"target": 90},
        {"target": "cpu", "schedule": {"nwarps": 4}},
        {"target": "cpu", "schedule": "num_warps=4"},
    ):
        with pytest.raises(ArgumentError):
            k3dsl.compile(copy, dims={}, **wrong)
    for fact in (Sym("a b"), Sym("N", 2.5), Sym("N", min=-5), Sym("N", min=5, max=3)):
        with pytest.raises(ArgumentError, match="a name, a divisor of at least 1"):
            k3dsl.compile(copy, dims={"N": fact}, target="cpu")
