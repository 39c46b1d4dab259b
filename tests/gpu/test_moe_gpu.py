"""The MoE ops on the GPU through Triton and TileLang: cases, every seed, graphs, no waiting, weights beyond 2^31 elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cuda_calls import no_waiting

from k3dsl import ops
from k3dsl.errors import LegalityError
from k3dsl.ops.moe import inputs, judge, reference
from k3dsl.ops.moe.space import EXPERTS, ROUTER, SORT
from k3dsl.ops.registry import get_op
from k3dsl.runtime.dispatch import using_backend
from k3dsl.runtime.judge import cases_of
from k3dsl.runtime.metrics import assert_close_rms
from k3dsl.runtime.op import Case, forced

pytestmark = pytest.mark.gpu

OPS = ("moe.situ", "moe.topk", "moe.router", "moe.sort", "moe.experts")
CASES = [(name, case) for name in OPS for case in cases_of(get_op(name))]
WHOLE = [(n, case) for n in ("moe.topk", "moe.router", "moe.experts") for case in cases_of(get_op(n), "whole")]
SEEDS = [(name, dict(seed)) for name in ("moe.router", "moe.experts") for seed in get_op(name).seeds]


def judged(name: str, case: Case, repeats: int) -> None:
    op = get_op(name)
    assert op.call is not None
    assert op.reference is not None
    drawn = case.make("cuda", 0)
    got, expected = op.call(**drawn), op.reference(**drawn)
    for key, limit in case.limits.items():
        assert_close_rms(key, got[key], expected[key], limit)
    for _ in range(repeats):
        again = op.call(**drawn)
        assert all(torch.equal(got[key].nan_to_num(7.0), again[key].nan_to_num(7.0)) for key in got)


@pytest.mark.parametrize("backend", ["triton", "tilelang"])
@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{n}-{c.name}" for n, c in CASES])
def test_an_op_agrees_with_float64_and_repeats_bitwise(
    name: str, case: Case, backend: str, poisoned_memory: None
) -> None:
    if backend == "tilelang":
        pytest.importorskip("tilelang")
    with using_backend(backend):
        judged(name, case, 10)


@pytest.mark.parametrize(("name", "case"), WHOLE, ids=[f"{n}-{c.name}" for n, c in WHOLE])
def test_the_whole_set_of_cases(name: str, case: Case, poisoned_memory: None) -> None:
    judged(name, case, 3)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("knobs", [*({"block_m": m, "swap_ab": s} for m in (16, 32, 64) for s in (False, True)),
                                   {"block_m": 128}, {"group": 4, "block_m": 16}, {"stages": 1}, {"stages": 4},
                                   {"gather": "before"}, {"gather": "before", "wide_down": True, "block_m": 192}])  # fmt: skip
def test_every_way_to_run_the_experts_is_right(knobs: dict[str, Any], packed: bool, poisoned_memory: None) -> None:
    x = inputs.experts(200, 24, 4, 416, 288, "cuda", 0, packed=packed, routing="popular")
    small = {"block_n": 64, "block_k": 64, "num_warps": 4, **knobs}
    with forced(EXPERTS, small, {}):
        got = ops.moe_experts(**x)
    assert_close_rms("out", got, judge.experts_reference(**x)["out"], 5e-3)


@pytest.mark.parametrize("knobs", [{"block_m": 16, "swap_ab": True}, {"block_m": 32, "swap_ab": True, "block_k": 256},
                                   {"block_m": 64, "num_warps": 8}, {"block_m": 64, "block_n": 256, "num_warps": 8},
                                   {"block_m": 128, "block_k": 256, "swap_ab": True, "num_warps": 8, "stages": 2}])  # fmt: skip
def test_packed_weights_in_lane_order_are_right(knobs: dict[str, Any], poisoned_memory: None) -> None:
    x = inputs.experts(200, 24, 4, 384, 256, "cuda", 0, packed=True, routing="popular")
    wide = {"block_n": 128, "block_k": 128, "num_warps": 4, "gather": "before", "lane_order": True, **knobs}
    with forced(EXPERTS, wide, {}):
        got = [ops.moe_experts(**x) for _ in range(3)]
    assert_close_rms("out", got[0], judge.experts_reference(**x)["out"], 5e-3)
    assert all(torch.equal(got[0], again) for again in got)


@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_every_seed_is_right(name: str, seed: dict[str, Any], poisoned_memory: None) -> None:
    op = get_op(name)
    knobs, _, schedules = op.split_settings(seed)
    if any(field.endswith(".backend") for field in seed):
        pytest.importorskip("tilelang")
    case = next(c for c in cases_of(op) if c.name in ("outliers", "popular"))
    if name == "moe.experts":  # in the seeds' blocks, and packed for those of packed weights
        size = {"T": 200, "E": 24, "K": 4, "D": 384, "I": 256}
        options = op.resolve_options({"weights": "mxfp4" if seed.get("lane_order") else "plain"})
        assert op.inputs is not None
        case = replace(case, make=partial(op.inputs, size, options))
    with forced(op, knobs, schedules):
        judged(name, case, 10)


@pytest.mark.parametrize("T", [1, 63, 64, 65, 4096])
@pytest.mark.parametrize("chunk", [64, 512])
def test_sorting_at_real_size(T: int, chunk: int, poisoned_memory: None) -> None:
    ids = inputs.choices(T, 896, 16, "cuda", 0, "dropped")
    with forced(SORT, {"chunk": chunk}, {}):
        got = ops.moe_sort(ids, 896, 64)._asdict()
    for name, wanted in reference.sort(ids, 896, 64).items():
        assert torch.equal(got[name], wanted), name


# ---- graphs, streams, large weights ------------------------------------------------------------------------------------


def calls() -> dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]:
    def drawn(packed: bool) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
        x = inputs.experts(40, 16, 4, 128, 96, "cuda", 0, packed=packed)
        fixed = {n: t for n, t in x.items() if n not in ("x", "weights")}
        return lambda t, w: ops.moe_experts(t, weights=w, **fixed), (x["x"], x["weights"])

    x, weight = torch.randn(33, 256, device="cuda").bfloat16(), torch.randn(64, 256, device="cuda")
    gate = torch.randn(40, 96, device="cuda").bfloat16()
    return {
        "experts": drawn(False),
        "experts-mxfp4": drawn(True),
        "router": (lambda a: ops.moe_router(a, weight, None, 6)[0], (x,)),
        "sort": (lambda s: ops.moe_sort(s.topk(4).indices, 64).order, (torch.randn(50, 64, device="cuda"),)),
        "situ": (ops.situ, (gate, gate.clone())),
    }


NAMES = ("experts", "experts-mxfp4", "router", "sort", "situ")


@pytest.mark.parametrize("name", NAMES)
def test_an_op_can_be_captured_in_a_cuda_graph_and_replayed_on_new_data(name: str) -> None:
    function, tensors = calls()[name]
    function(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(*tensors)
    for _ in range(3):
        for x in tensors:
            x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, function(*tensors))


@pytest.mark.parametrize("name", NAMES)
def test_an_op_and_its_backward_pass_never_wait_for_the_gpu(name: str) -> None:
    function, tensors = calls()[name]
    differentiable = name != "sort"
    inputs_ = [x.clone().requires_grad_(differentiable) for x in tensors]

    def run() -> None:
        out = function(*inputs_)
        if differentiable:
            torch.autograd.grad(out, inputs_, torch.ones_like(out))

    run()
    with no_waiting():
        run()


def test_weights_and_rows_beyond_2_31_elements(poisoned_memory: None) -> None:
    """The last experts of 2.4e9 elements a weight, and T K D beyond 2^31."""
    E, D, I = 220, 3584, 3072
    assert E * D * I > 2**31
    x = inputs.experts(8, E, 2, D, I, "cuda", 0)
    x["ids"][:] = torch.tensor([E - 1, E - 2])
    assert_close_rms("out", ops.moe_experts(**x), judge.experts_reference(**x)["out"], 5e-3)
    del x
    T, K = 37_500, 16
    assert T * K * D > 2**31
    x = inputs.experts(T, 16, K, D, 32, "cuda", 1)
    got = ops.moe_experts(**x)[-64:]
    last = {**x, **{n: x[n][-64:] for n in ("x", "weights", "ids")}}
    assert_close_rms("out", got, judge.experts_reference(**last)["out"], 5e-3)


def test_the_router_chooses_as_float64_does_at_k3_size() -> None:
    """Where it does not, the scores differ by less than fp32 can tell."""
    x = torch.randn(4096, 7168, device="cuda").bfloat16()
    weight, bias = torch.randn(896, 7168, device="cuda") * 7168**-0.5, torch.randn(896, device="cuda") * 0.02
    biased = torch.sigmoid(x.double() @ weight.double().T) + bias.double()
    wanted = biased.topk(16, dim=1).values.sort(1).values
    for splits in (1, 8):
        with forced(ROUTER, {"splits": splits}, {}):
            _, ids = ops.moe_router(x, weight, bias, 16)
        got = biased.gather(1, ids.long()).sort(1).values
        assert (wanted - got).abs().max() < 2e-6


def test_both_backends_take_the_default_knobs_of_every_size() -> None:
    pytest.importorskip("tilelang")
    for T in (1, 64, 2048):
        x = inputs.experts(T, 32, 8, 512, 256, "cuda", 0)
        out = []
        for backend in ("triton", "tilelang"):
            with using_backend(backend):
                try:
                    out.append(ops.moe_experts(**x))
                except LegalityError as error:  # refused is right, wrong is not
                    pytest.fail(f"{backend} refuses T = {T}: {error}")
        assert_close_rms("tilelang", out[1], out[0], 4e-3)
