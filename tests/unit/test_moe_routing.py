"""Choosing experts and sorting by them on the CPU backend: ties, NaN, bias, precision, order, tables, wrong arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from k3dsl import ops
from k3dsl.errors import ArgumentError
from k3dsl.ops.moe import inputs, reference
from k3dsl.ops.moe.space import ROUTER, SORT, TOPK
from k3dsl.ops.registry import get_op, op_names
from k3dsl.runtime.judge import cases_of
from k3dsl.runtime.metrics import assert_close_rms
from k3dsl.runtime.op import Case, forced

NAN, INF = math.nan, math.inf
OPS = ("moe.situ", "moe.topk", "moe.router", "moe.sort", "moe.experts")


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


# ---- the registry ------------------------------------------------------------------------------------------------------

CASES = [(name, case) for name in OPS for case in cases_of(get_op(name))]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{n}-{c.name}" for n, c in CASES])
def test_an_op_agrees_with_float64_and_repeats_bitwise(name: str, case: Case, poisoned_memory: None) -> None:
    op = get_op(name)
    assert op.call is not None
    assert op.reference is not None
    drawn = case.make("cpu", 0)
    got, expected = op.call(**drawn), op.reference(**drawn)
    assert set(got) == set(expected) == set(case.limits)
    for key, limit in case.limits.items():
        assert got[key].is_contiguous()
        assert_close_rms(key, got[key], expected[key], limit)
    again = op.call(**drawn)
    assert all(torch.equal(got[key].nan_to_num(7.0), again[key].nan_to_num(7.0)) for key in got)


@pytest.mark.parametrize("name", OPS)
def test_the_rules_and_seeds_are_points_of_the_space_and_peers_agree(name: str) -> None:
    op = get_op(name)
    assert name in op_names()
    dtypes = ("bf16", "f16", "f32") if "dtype" in [o.name for o in op.options] else (None,)
    for dtype in dtypes:
        for size in (1, 16, 100, 5000, 70000):
            dims = {d.name: size for d in op.dims if not d.static}
            assert op.point(dims, {} if dtype is None else {"dtype": dtype}).reasons() == []
    for seed in op.seeds:
        packed = {"weights": "mxfp4"} if seed.get("lane_order") else {}
        assert op.point({}, {**seed, **packed}).reasons() == []
    assert op.inputs is not None
    assert op.reference is not None
    assert op.peers is not None
    drawn = op.inputs(op.resolve_dims(op.cpu_dims), op.resolve_options({}), "cpu", 0)
    expected = op.reference(**drawn)
    for peer in op.peers().values():
        for key, actual in peer(**drawn).items():
            assert_close_rms(f"peer's {key}", actual, expected[key], 1e-2)


# ---- selection ---------------------------------------------------------------------------------------------------------


def test_ties_go_to_the_lowest_ids() -> None:
    logits = torch.tensor([[0.0] * 40, [1.0, 2.0] * 20])
    _, ids = ops.moe_topk(logits, None, 4)
    assert ids.tolist() == [[0, 1, 2, 3], [1, 3, 5, 7]]
    weights, ids = ops.moe_router(torch.ones(2, 8), torch.zeros(40, 8), torch.zeros(40), 16)
    assert ids.tolist() == [list(range(16))] * 2  # an untrained router: every token goes to the same experts
    torch.testing.assert_close(weights, torch.full((2, 16), 1 / 16))


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_nan_is_never_chosen_before_a_number_and_ids_stay_in_range(scoring: str) -> None:
    E, K = 20, 4
    logits = numbers(4, E)
    logits[0] = NAN
    logits[1, 2:] = NAN  # fewer numbers than choices
    logits[2, ::2] = NAN
    weights, ids = ops.moe_topk(logits, numbers(E, seed=1, scale=0.1), K, scoring=scoring)
    assert all(len(set(row)) == K and min(row) >= 0 and max(row) < E for row in ids.tolist())
    assert ids[0].tolist() == [0, 1, 2, 3]
    assert weights[0].isnan().all()
    if scoring == "sigmoid":  # a softmax of a row with NaN is NaN everywhere
        assert sorted(ids[1, :2].tolist()) == [0, 1]
        assert weights[1].isnan().all()  # half of what was chosen has no score, and the token shows it
        assert all(i % 2 for i in ids[2].tolist())
        assert weights[2].isfinite().all()
    assert weights[3].isfinite().all()


def test_infinite_logits_and_biases() -> None:
    logits = torch.tensor([[-INF, INF, 0.0, -INF, 3.0, INF]])
    weights, ids = ops.moe_topk(logits, None, 3)
    assert ids.tolist() == [[1, 5, 4]]
    s = 1 / (1 + math.exp(-3))
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1.0, s]]) / (2 + s))
    closed = torch.tensor([0.0, -INF, 0.0, 0.0, 0.0, -INF])  # experts that are switched off
    _, ids = ops.moe_topk(logits, closed, 4)
    assert ids.tolist() == [[4, 2, 0, 3]]
    _, ids = ops.moe_topk(logits, closed, 6)
    assert ids.tolist() == [[4, 2, 0, 3, 1, 5]]
    nothing, _ = ops.moe_topk(torch.full((1, 4), -INF), None, 2)
    assert nothing.tolist() == [[0.0, 0.0]]  # 0 / (0 + 1e-20)


def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 10.0])
    weights, ids = ops.moe_topk(logits, bias, 2, renormalize=False, scale=2.446)
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, 2.446 * torch.sigmoid(torch.tensor([[-1.0, 2.0]])))
    weights, _ = ops.moe_topk(logits, bias, 2)
    low, high = 1 / (1 + math.exp(1)), 1 / (1 + math.exp(-2))
    torch.testing.assert_close(weights, torch.tensor([[low, high]]) / (low + high))


def test_logits_keep_what_bf16_would_lose() -> None:
    """Scores that differ in the 12th bit: rounding weights, products or logits to bf16 makes them one, and the lowest id
    would win; the highest must."""
    E, D = 64, 256
    x = torch.ones(3, D, dtype=torch.bfloat16)
    weight = torch.full((E, D), 1 / 256) * (1 + torch.arange(E)[:, None] * 2.0**-12)
    assert weight.to(torch.bfloat16).unique().numel() <= 5
    for splits in (1, 4):
        with forced(ROUTER, {"splits": splits}, {}):
            _, ids = ops.moe_router(x, weight, None, 4)
        assert ids.tolist() == [[63, 62, 61, 60]] * 3


@pytest.mark.parametrize("knobs", [{"splits": 16}, {"block_k": 128, "splits": 8}, {"block_t": 128, "rows": 8}])
def test_every_way_to_divide_the_router_is_right(knobs: dict[str, Any], poisoned_memory: None) -> None:
    case = next(c for c in cases_of(ROUTER) if c.name == "outliers")
    drawn = case.make("cpu", 3)
    with forced(ROUTER, knobs, {}):
        assert ROUTER.call is not None
        got = ROUTER.call(**drawn)
    assert ROUTER.reference is not None
    assert_close_rms("routing", got["routing"], ROUTER.reference(**drawn)["routing"], 1e-5)


def test_shapes_layouts_and_empty_tensors() -> None:
    x, weight, bias = numbers(2, 3, 32), numbers(12, 32, seed=1), numbers(12, seed=2)
    weights, ids = ops.moe_router(x, weight, bias, 5)
    assert (weights.shape, ids.shape) == ((2, 3, 5), (2, 3, 5))
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    wide = torch.full((6, 40), NAN)
    wide[:, :32] = x.view(6, 32)
    strided, same = ops.moe_router(wide[:, :32], weight, bias, 5)  # rows 40 apart
    torch.testing.assert_close(strided, weights.view(6, 5))
    assert torch.equal(same, ids.view(6, 5))
    for T in (0, 1):
        weights, ids = ops.moe_router(x.view(6, 32)[:T], weight, bias, 12)
        assert weights.shape == ids.shape == (T, 12)
    assert ops.moe_topk(numbers(0, 9), None, 2)[0].shape == (0, 2)


def test_gradients_of_the_weights_are_those_of_plain_torch() -> None:
    x, weight, bias = numbers(5, 16), numbers(9, 16, seed=1), numbers(9, seed=2)
    for scoring in ("sigmoid", "softmax"):
        a, b = (t.clone().requires_grad_() for t in (x, weight))
        w, ids = ops.moe_router(a, b, bias, 3, scale=2.0, scoring=scoring)
        assert not ids.requires_grad
        got = torch.autograd.grad((w * numbers(5, 3, seed=4)).sum(), (a, b))
        c, d = (t.double().requires_grad_() for t in (x, weight))
        picked = reference.scores(c @ d.T, scoring).gather(1, ids.long())
        expected = picked / (picked.sum(1, keepdim=True) + 1e-20) * 2.0
        wanted = torch.autograd.grad((expected * numbers(5, 3, seed=4).double()).sum(), (c, d))
        logits = (x @ weight.T).requires_grad_()
        of_logits = torch.autograd.grad(
            (ops.moe_topk(logits, bias, 3, scale=2.0, scoring=scoring)[0] * numbers(5, 3, seed=4)).sum(), logits
        )[0]
        for g, e in zip((*got, of_logits @ weight), (*wanted, wanted[0]), strict=True):
            assert_close_rms("gradient", g, e, 1e-5)


# ---- sorting -----------------------------------------------------------------------------------------------------------


def sorts(ids: torch.Tensor, E: int, block_m: int, **knobs: Any) -> None:
    with forced(SORT, knobs, {}):
        got = ops.moe_sort(ids, E, block_m)
    for name, wanted in reference.sort(ids, E, block_m).items():
        assert torch.equal(getattr(got, name), wanted), name


@pytest.mark.parametrize("chunk", [16, 64, 128, 1024])
@pytest.mark.parametrize("block_m", [16, 128])
def test_pairs_are_in_the_order_of_experts_and_then_of_tokens(chunk: int, block_m: int, poisoned_memory: None) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (211, 3), generator=generator, dtype=torch.int32)
    sorts(ids, 9, block_m, chunk=chunk)


EDGES = {
    "one-token": (torch.tensor([[4, 0, 2]]), 5),
    "one-pair": (torch.tensor([[0]]), 1),
    "all-to-one": (torch.zeros(150, 2), 7),
    "all-to-the-last": (torch.full((150, 2), 6), 7),
    "nothing": (torch.full((20, 2), -1), 7),
    "garbage": (torch.tensor([[2**31 - 1, 3], [-(2**31), 0], [7, 6], [-1, -2]]), 7),
    "lane-boundary": (torch.arange(64).view(16, 4) % 33, 32),
    "1025-experts": (torch.arange(64).view(16, 4) * 31 % 1025, 1025),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges_of_sorting(name: str, poisoned_memory: None) -> None:
    ids, E = EDGES[name]
    sorts(ids.to(torch.int32), E, 16)


def test_sorting_takes_int64_and_strides_and_nothing() -> None:
    ids = torch.tensor([[2**40 + 1, 1, 9], [0, -(2**40), 9]])
    sorts(ids[:, :2], 3, 16)
    empty = ops.moe_sort(torch.empty(0, 4, dtype=torch.int32), 5)
    assert empty.expert_offsets.tolist() == [0] * 6
    assert empty.order.shape == empty.block_expert.shape == (0,)


# ---- wrong arguments ---------------------------------------------------------------------------------------------------

X, W, B, L = torch.zeros(4, 8), torch.zeros(6, 8), torch.zeros(6), torch.zeros(4, 6)
IDS = torch.zeros(4, 2, dtype=torch.int32)
WRONG = [
    (lambda: ops.moe_topk(L.half(), None, 2), "logits", "float16, needs float32", "float32"),
    (lambda: ops.moe_topk(torch.zeros(()), None, 2), "logits", "scalar", "one number an expert"),
    (lambda: ops.moe_topk(L, None, 7), "top_k", "7, there are E = 6 experts", "from 1 to 6"),
    (lambda: ops.moe_topk(L, None, True), "top_k", "True", "integer"),
    (lambda: ops.moe_topk(L, B[:5], 2), "bias", "needs [E] = [6]", "one number an expert"),
    (lambda: ops.moe_topk(L, B.bfloat16(), 2), "bias", "changes what is selected", "e_score_correction_bias"),
    (lambda: ops.moe_topk(L, B.to("meta"), 2), "bias", "is on meta, logits is on cpu", "'cpu'"),
    (lambda: ops.moe_topk(L, B, 2, scale=math.nan), "scale", "nan", "finite"),
    (lambda: ops.moe_topk(L, B, 2, scoring="tanh"), "scoring", "'tanh'", "sigmoid, softmax"),
    (lambda: ops.moe_router(X[:, :7], W, B, 2), "x", "D = 8 of weight", "whole tokens"),
    (lambda: ops.moe_router(X, W[0], B, 2), "weight", "needs 2 dims [E, D]", "one row an expert"),
    (lambda: ops.moe_router(X, W[:, :0], B, 2), "x", "D = 0", "whole tokens"),
    (lambda: ops.moe_router(X, W.T.contiguous().T, B, 2), "weight", "last dim must be contiguous", "contiguous()"),
    (lambda: ops.moe_router(X.long(), W, B, 2), "x", "int64", "bfloat16"),
    (lambda: ops.moe_sort(IDS.float(), 4), "ids", "float32, needs int32 or int64", "int32"),
    (lambda: ops.moe_sort(IDS[0], 4), "ids", "needs 2 dims [T, K]", "K experts of each token"),
    (lambda: ops.moe_sort(IDS, 0), "num_experts", "0", "at least 1"),
    (lambda: ops.moe_sort(IDS, 4, 48), "block_m", "48", "16, 32, 64, 128, 192, 256"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "argument", "reason", "remedy"), WRONG)
def test_a_wrong_argument_is_named_with_the_reason_and_the_remedy(call, argument, reason, remedy) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.message.startswith(f"{argument}: ")
    assert reason in caught.value.message
    assert remedy in (caught.value.fix or "")


# ---- torch -------------------------------------------------------------------------------------------------------------

OVERLOADS = {
    "moe_topk": (L, B, 2, True, 1.0, "sigmoid"),
    "moe_router": (X, W, B, 2, True, 1.0, "sigmoid"),
    "moe_sort": (IDS, 5, 16),
}


@pytest.mark.parametrize("name", OVERLOADS)
def test_the_fake_implementation_gives_the_real_ones_shapes_and_dtypes(name: str) -> None:
    overload = getattr(torch.ops.k3dsl, name).default
    torch.library.opcheck(overload, OVERLOADS[name], test_utils=("test_schema", "test_faketensor"))


def test_the_selection_takes_any_top_k_and_never_repeats_an_expert() -> None:
    for E, K in ((1, 1), (3, 3), (17, 6), (33, 33)):
        logits = numbers(5, E, seed=E)
        weights, ids = ops.moe_topk(logits, None, K)
        wanted = torch.topk(logits, K).indices
        assert torch.equal(ids.long(), wanted)
        torch.testing.assert_close(weights.sum(1), torch.ones(5))
    assert TOPK.point({"E": 4, "K": 5}, {}).reasons() == ["top_k K = 5 of E = 4 experts"]


def test_more_choices_than_experts_are_drawn_again() -> None:
    ids = inputs.choices(5, 7, 16, "cpu", 0)
    assert ids.shape == (5, 16)
    assert all(row[:7].unique().numel() == 7 for row in ids)
