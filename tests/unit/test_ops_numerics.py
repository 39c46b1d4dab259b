"""What every kernel of the registry keeps to."""

from __future__ import annotations

import warnings

import pytest

import k3dsl
from k3dsl.errors import NumericsWarning
from k3dsl.ir.parser import parse_kernel
from k3dsl.ir.printer import print_kernel
from k3dsl.ir.verifier import verify
from k3dsl.language import In, Out, arange, exp, f32, kernel
from k3dsl.ops.registry import get_op, op_names
from k3dsl.passes.exponents import check_exponents

VARIANTS = {
    "kda.forward": ({}, {"gate": "softplus"}, {"gate": "none"}, {"dtype": "f32"}, {"varlen": True}),
    "kda.decode": ({}, {"gate": "softplus"}, {"gate": "none"}, {"in_place": False}),
    "mla.prefill": ({}, {"varlen": True, "lse": True}, {"causal": False, "packed": False}),
    "mla.decode": ({}, {"block_n": 128}, {"tail": "masked", "num_splits": 1, "lse": True}),
    "attnres.site": ({}, {"logits": True}, {"unroll": True}),
    "attnres.phase1": ({}, {"dtype": "f32"}),
    "gated_delta_rule": ({}, {"varlen": True}, {"dtype": "f32"}),
    "linear_attention": ({}, {"normalize": True}, {"dtype": "f16"}),
    "attention.decode": ({}, {"splits": 8}),
    "moe.topk": ({}, {"scoring": "softmax"}),
    "moe.router": ({}, {"dtype": "f32", "splits": 4, "bias": False}),
    "moe.experts": (
        {},
        {"weights": "mxfp4", "swap_ab": True},
        {"activation": "silu", "group": 4},
        {"gather": "before"},
    ),
    "moe.situ": ({}, {"backward": True}),
}
POINTS = [(name, settings) for name in op_names() for settings in VARIANTS.get(name, ({},))]


@pytest.mark.parametrize(("name", "settings"), POINTS, ids=[f"{n}-{s}" for n, s in POINTS])
def test_no_exponential_can_overflow_and_the_ir_survives_a_round_trip(name: str, settings: dict) -> None:
    op = get_op(name)
    knobs, options, _ = op.split_settings(settings)
    for launch in op.point({}, {**knobs, **options}, symbolic=True).plan("torch").launches:
        verify(launch.kernel)
        assert check_exponents(launch.kernel) == []
        text = print_kernel(launch.kernel)
        assert print_kernel(parse_kernel(text)) == text


DIMS_WITHOUT_AN_EDGE = {"B": 1, "T": 64, "S": 128, "H": 2, "HK": 2, "D": 64, "V": 64}


@pytest.mark.parametrize("backend", ["triton", "tilelang"])
def test_defaults_name_only_loops_that_the_dims_leave_in(backend: str) -> None:
    """Whole blocks of keys without a causal edge: the kernel has one loop, and the default schedule speaks of two."""
    op = get_op("attention")
    plan = op.point(DIMS_WITHOUT_AN_EDGE, {"causal": False, "block_k": 64}, symbolic=False).plan(backend)
    assert set(plan.launches[0].schedule.stages) == {"keys"}


@kernel(grid=lambda d, c: (1,))
def risky(d, c, x=In("8", f32), o=Out("8", f32)):
    o[arange(8)] = exp(x[arange(8)])


@kernel(grid=lambda d, c: (1,))
def bounded(d, c, x=In("8", f32), o=Out("8", f32)):
    o[arange(8)] = exp(x[arange(8)], bound=80.0)


def test_compile_warns_of_an_unbounded_exponential_and_takes_a_stated_bound() -> None:
    with pytest.warns(NumericsWarning, match="exp"):
        k3dsl.compile(risky, dims={}, target="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        k3dsl.compile(bounded, dims={}, target="cpu")


PACKED = [name for name in op_names() if any(o.name == "varlen" for o in get_op(name).options)]


@pytest.mark.parametrize("tokens", [1, 3, 4, 17])
@pytest.mark.parametrize("backend", ["triton", "tilelang"])
@pytest.mark.parametrize(
    ("name", "varlen"), [*((name, False) for name in op_names()), *((name, True) for name in PACKED)]
)
def test_every_op_is_planned_for_few_rows_that_are_compiled_in(
    name: str, backend: str, tokens: int, varlen: bool
) -> None:
    """Blocks are higher than the tensors: what whole blocks read is never run, and no reason to refuse the kernel."""
    op = get_op(name)
    few = {d.name: 64 if d.name == "P" else tokens for d in op.dims if d.name in (*"TRMSP",) and d.default}
    point = op.point(op.resolve_dims({**op.cpu_dims, **few}), {"varlen": True} if varlen else {})
    if reasons := point.reasons():
        pytest.skip("; ".join(reasons))
    assert point.plan(backend).launches
