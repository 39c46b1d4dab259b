"""Tracing: what the language's Python turns into."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from ir_examples import Body, trace_body

from k3dsl import language as lang
from k3dsl.ir.graph import Op, walk
from k3dsl.ir.printer import print_kernel
from k3dsl.ir.symbols import Expr, Sym
from k3dsl.ir.types import DTYPES, promote
from k3dsl.ir.verifier import verify
from k3dsl.language import (
    In,
    Out,
    TensorSpec,
    Tile,
    arange,
    bf16,
    dot,
    exp2,
    f16,
    f32,
    kernel,
    loop,
    program_id,
    reduce,
    span,
    when,
    where,
    zeros,
)


def lines(body: Body, **kwargs: Any) -> list[str]:
    """The printed ops of a body, without names and constants."""
    text = print_kernel(trace_body(body, **kwargs)).split("\n\n", 1)[1]
    return [line.strip().split(" = ", 1)[-1] for line in text.splitlines() if " = const " not in line]


def ops(body: Body, **kwargs: Any) -> list[Op]:
    return list(walk(trace_body(body, **kwargs).body))


def type_of(make: Callable[..., Tile]) -> str:
    seen: list[str] = []
    trace_body(lambda d, c, x, o, e: seen.append(str(make(x, e).type)))
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

    verify(trace_body(body))


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

    top = trace_body(body).body.ops
    assert sum(op.opcode == "when" for op in top) == 1
    assert sum(op.opcode == "store" for op in top) == 1


def test_values_are_called_what_the_author_called_them() -> None:
    def body(d, c, x, o, e):
        row = x[0]
        pair = (row * 2.0, row + 1.0)
        total, most = reduce((row, row), 0, lambda left, up, right, other: (left + right, lang.maximum(up, other)))
        o[0] = pair[0] + pair[1] * total + most

    text = print_kernel(trace_body(body))
    for name in ("%row:", "%pair_0:", "%pair_1:", "%total:", "%most:", "%left:"):
        assert name in text


def test_a_dim_can_be_static_or_a_symbol() -> None:
    def body(d, c, x, o, e):
        assert d.K == 16
        assert str(d.T // 16 * 2) in ("2", "T // 8")
        assert math.prod(x.shape[1:]) == 16
        o[d.T - 1] = x[0]

    verify(trace_body(body))
    verify(trace_body(body, dims={"T": 16, "K": 16}))
