"""Routed experts, SiTU and the whole block on the CPU backend: pitfalls on record, every knob, gradients, wrong arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from k3dsl import ops
from k3dsl.autotune.space import Space
from k3dsl.errors import ArgumentError, LegalityError
from k3dsl.ir.printer import print_kernel
from k3dsl.ops.moe import inputs, judge, reference
from k3dsl.ops.moe.experts import bound_of
from k3dsl.ops.moe.space import EXPERTS, SITU
from k3dsl.runtime.metrics import assert_close_rms
from k3dsl.runtime.op import forced
from k3dsl.runtime.timing import plan_traffic
from k3dsl.targets import get_target

NAN, INF = math.nan, math.inf
BF16, F32 = torch.bfloat16, torch.float32


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = F32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def drawn(*shape: int, seed: int = 0, **how: Any) -> dict[str, Any]:
    """Keyword arguments of moe_experts for T, E, K, D, I."""
    T, E, K, D, I = shape
    return inputs.experts(T, E, K, D, I, "cpu", seed, **how)


def agrees(x: dict[str, Any], limit: float = 5e-3) -> torch.Tensor:
    got = ops.moe_experts(**x)
    assert_close_rms("out", got, judge.experts_reference(**x)["out"], limit)
    return got


# ---- SiTU --------------------------------------------------------------------------------------------------------------


def test_situ_of_numbers_worked_out_by_hand() -> None:
    g, u = torch.tensor([2.0, -2.0, 0.0, 100.0, -100.0]), torch.tensor([3.0, 3.0, 3.0, 1000.0, -1000.0])
    wanted = [
        4 * math.tanh(0.5) / (1 + math.exp(-2)) * 25 * math.tanh(0.12),
        -4 * math.tanh(0.5) / (1 + math.exp(2)) * 25 * math.tanh(0.12),
        0.0,
        100.0,  # both factors at their bounds, 4 and 25
        0.0,
    ]
    torch.testing.assert_close(ops.situ(g, u), torch.tensor(wanted), rtol=1e-6, atol=1e-6)
    assert ops.situ(u, g)[1] == pytest.approx(-4 * math.tanh(0.75) / (1 + math.exp(-3)) * 25 * math.tanh(0.08))
    torch.testing.assert_close(ops.swiglu(g, u)[:2], (g * torch.sigmoid(g) * u)[:2])


def test_situ_saturates_at_infinity_and_keeps_nan_to_itself() -> None:
    g, u = torch.tensor([INF, -INF, 1.0, NAN, 1.0]), torch.tensor([INF, INF, -INF, 1.0, NAN])
    got = ops.situ(g, u)
    assert got[0] == 100
    assert got[1] == 0
    assert got[2] == pytest.approx(-25 * 4 * math.tanh(0.25) / (1 + math.exp(-1)))
    assert got[3:].isnan().all()


def test_situ_of_one_fused_tensor_is_that_of_its_halves(poisoned_memory: None) -> None:
    fused = numbers(3, 7, 70, dtype=BF16)
    for function in (ops.situ, ops.swiglu):
        whole, halves = function(fused), function(fused[..., :35].contiguous(), fused[..., 35:].contiguous())
        assert whole.shape == (3, 7, 35)
        assert torch.equal(whole, halves)
    assert ops.situ(fused[:0]).shape == (0, 7, 35)
    assert ops.situ(fused[..., :0]).shape == (3, 7, 0)
    assert ops.situ(numbers(8)).shape == (4,)
    transposed = numbers(6, 5).T
    torch.testing.assert_close(ops.situ(transposed, transposed), ops.situ(transposed.clone(), transposed.clone()))


@pytest.mark.parametrize("knobs", [{"rows": 8, "block": 64}, {"rows": 1, "block": 4096}])
def test_situ_under_other_knobs(knobs: dict[str, Any], poisoned_memory: None) -> None:
    g, u = numbers(37, 200, scale=4.0), numbers(37, 200, seed=1, scale=40.0)
    with forced(SITU, knobs, {}):
        assert_close_rms("y", ops.situ(g, u), reference.glu(g.double(), u.double()), 1e-6)


@pytest.mark.parametrize(("activation", "betas"), [("situ", (4.0, 25.0)), ("situ", (2.0, 7.0)), ("silu", (1.0, 1.0))])
def test_gradients_of_the_activation(activation: str, betas: tuple[float, float]) -> None:
    g, u, w = numbers(20, 50, scale=4.0), numbers(20, 50, seed=1, scale=20.0), numbers(20, 50, seed=2)
    a, b = (t.clone().requires_grad_() for t in (g, u))
    y = ops.swiglu(a, b) if activation == "silu" else ops.situ(a, b, beta=betas[0], linear_beta=betas[1])
    got = torch.autograd.grad((y * w).sum(), (a, b))
    c, d = (t.double().requires_grad_() for t in (g, u))
    wanted = torch.autograd.grad((reference.glu(c, d, activation, *betas) * w.double()).sum(), (c, d))
    for name, x, e in zip(("gate", "up"), got, wanted, strict=True):
        assert_close_rms(name, x, e, 2e-6)


# ---- experts: pitfalls -------------------------------------------------------------------------------------------------


def test_one_token_and_one_expert_by_hand() -> None:
    """D = I = 2: gate 2 x0, up 3 x1 in the first row; gate up the other way round would give another number."""
    x = torch.tensor([[1.0, 2.0]])
    gate, up = torch.tensor([[[2.0, 0.0], [0.0, 0.0]]]), torch.tensor([[[0.0, 3.0], [0.0, 0.0]]])
    down = torch.tensor([[[1.0, 0.0], [10.0, 0.0]]])
    out = ops.moe_experts(x, gate, up, down, torch.tensor([[0.5]]), torch.tensor([[0]]))
    h = 4 * math.tanh(0.5) / (1 + math.exp(-2)) * 25 * math.tanh(6 / 25)
    torch.testing.assert_close(out, 0.5 * h * torch.tensor([[1.0, 10.0]]))
    silu = ops.moe_experts(x, gate, up, down, torch.tensor([[0.5]]), torch.tensor([[0]]), activation="silu")
    torch.testing.assert_close(silu, 0.5 * 6 * 2 / (1 + math.exp(-2)) * torch.tensor([[1.0, 10.0]]))


def test_ids_of_no_expert_count_as_nothing(poisoned_memory: None) -> None:
    x = drawn(23, 6, 3, 64, 32, seed=1)
    x["ids"][2] = -1
    x["ids"][5, 1] = 6 + 5
    x["ids"][7, 0] = 2**31 - 1
    x["weights"][2, 0] = NAN  # of a choice that was dropped
    got = agrees({**x, "weights": x["weights"].nan_to_num(0.0)})
    assert torch.equal(ops.moe_experts(**x), got)
    assert (got[2] == 0).all()
    wide = {**x, "ids": x["ids"].long(), "weights": x["weights"].nan_to_num(0.0)}
    wide["ids"][7, 0] = 2**33 + 1  # expert 1, if it were cut to 32 bits
    assert torch.equal(ops.moe_experts(**wide), got)


def test_a_nan_token_stays_alone_where_rows_past_the_end_read_it(poisoned_memory: None) -> None:
    """Rows past an expert's last read token 0, and then its NaN; they must not reach another row."""
    x = drawn(40, 5, 2, 64, 32, routing="popular")
    x["x"][0] = NAN
    got = ops.moe_experts(**x)
    assert got[0].isnan().all()
    assert got[1:].isfinite().all()
    agrees(x)


def test_a_call_leaves_nothing_for_the_next(poisoned_memory: None) -> None:
    one, spread = drawn(50, 10, 4, 96, 64, routing="one"), drawn(50, 10, 4, 96, 64, seed=5)
    first = agrees(one)
    agrees(spread)
    assert torch.equal(agrees(one), first)


def test_an_expert_chosen_twice_counts_twice() -> None:
    x = drawn(4, 3, 2, 32, 32, dtype=F32)
    x["ids"][:] = 1
    single = {**x, "ids": x["ids"][:, :1].contiguous(), "weights": x["weights"].sum(1, keepdim=True)}
    torch.testing.assert_close(ops.moe_experts(**x), ops.moe_experts(**single), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T", [0, 1, 2, 63, 64, 65])
def test_every_number_of_tokens(T: int, poisoned_memory: None) -> None:
    got = agrees(drawn(T, 8, 2, 64, 32, packed=T % 2 == 0))
    assert got.shape == (T, 64)


def test_no_experts_give_nothing() -> None:
    x = drawn(3, 2, 2, 32, 32, dtype=F32)
    none = {**x, **{n: x[n][:0].clone().requires_grad_() for n in ("w_gate", "w_up", "w_down")}}
    out = ops.moe_experts(**none)
    assert torch.equal(out, torch.zeros(3, 32))
    (g,) = torch.autograd.grad(out.sum(), none["w_up"])
    assert g.shape == (0, 32, 32)


def test_choices_of_other_ranks_make_blocks_lower() -> None:
    """8192 tokens, 16 of 896 experts, 112 here: 146 rows an expert, not 1170."""
    dims = {"T": 8192, "E": 112, "K": 16}
    assert EXPERTS.point(dims, {}).knobs["block_m"] == 128
    assert EXPERTS.point(dims, {"ranks": 8}).knobs["block_m"] == 64
    assert EXPERTS.point({**dims, "T": 64}, {"ranks": 8}).knobs["swap_ab"]


KNOBS: list[dict[str, Any]] = [
    {"block_m": 16},
    {"block_m": 32, "swap_ab": True},
    {"block_m": 128, "block_n": 32, "num_warps": 4},
    {"block_m": 16, "swap_ab": True, "group": 4},
    {"block_m": 16, "group": 8, "block_n": 32},
    {"block_m": 16, "gather": "before"},
    {"block_m": 192, "gather": "before", "wide_down": True, "swap_ab": True},
    {"block_k": 32, "block_d": 128},
    {"block_k": 128, "block_n": 256, "chunk": 64},
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("knobs", KNOBS, ids=[",".join(f"{n}={v}" for n, v in k.items()) for k in KNOBS])
def test_every_knob_gives_the_same_answer(knobs: dict[str, Any], packed: bool, poisoned_memory: None) -> None:
    """D = 160, I = 96: blocks of 64 and 128 columns have a tail, of weights and of scales."""
    x = drawn(60, 9, 3, 160, 96, packed=packed, routing="popular", seed=2)
    with forced(EXPERTS, knobs, {}):
        agrees(x)


LANE_ORDER = {"lane_order": True, "gather": "before", "block_n": 128, "block_k": 128}


@pytest.mark.parametrize(
    "knobs",
    [{}, {"block_k": 256}, {"swap_ab": True, "block_m": 16}, {"block_n": 256, "group": 2}, {"wide_down": True}],
    ids=str,
)
def test_columns_in_lane_order_give_the_same_answer(knobs: dict[str, Any], poisoned_memory: None) -> None:
    """D = 384, I = 256: blocks of 256 columns have a tail, whose columns are in order among themselves."""
    x = drawn(60, 9, 3, 384, 256, packed=True, routing="popular", seed=2)
    with forced(EXPERTS, {**LANE_ORDER, **knobs}, {}):
        agrees(x)


@pytest.mark.parametrize(
    "setting", [{"gather": "inside"}, {"block_k": 64}, {"block_n": 64}, {"lane_order": False}], ids=str
)
def test_one_knob_of_packed_experts_can_be_fixed(setting: dict[str, Any], poisoned_memory: None) -> None:
    """What lane order needs is no reason to refuse the others: without it columns stay in the order of the weights."""
    for T in (16, 1024, 8192):
        assert EXPERTS.point({"T": T}, {"weights": "mxfp4", **setting}).reasons() == []
    x = drawn(60, 9, 3, 384, 256, packed=True, routing="popular", seed=2)
    with forced(EXPERTS, {**LANE_ORDER, **setting}, {}):
        agrees(x)


@pytest.mark.parametrize(
    ("dims", "settings"), [({"I": 96}, {}), ({}, {"gather": "inside"}), ({}, {"weights": "plain"})], ids=str
)
def test_columns_are_put_in_lane_order_only_where_that_goes(dims: dict[str, int], settings: dict[str, Any]) -> None:
    def first(settings: dict[str, Any]) -> str:
        point = EXPERTS.point(dims, {"weights": "mxfp4", **LANE_ORDER, **settings})
        return print_kernel(next(x.kernel for x in point.plan("torch").launches if x.label == "gate_up"))

    assert first(settings) == first({**settings, "lane_order": False})
    assert "permute" in first({"gather": "before"}) or dims


def test_lane_order_is_not_searched_for_plain_weights() -> None:
    for weights, choices in (("plain", (False,)), ("mxfp4", (False, True))):
        space = Space(EXPERTS, {"T": 1024}, {"weights": weights}, get_target("sm_90a"), ("triton",))
        assert next(p for p in space.knobs() if p.name == "lane_order").choices == choices
        assert any(seed["lane_order"] for seed in space.seeds()) == (weights == "mxfp4")


def test_scales_past_the_end_are_not_read(poisoned_memory: None) -> None:
    """Views whose rows are followed by 0xff, which as a scale is NaN, and as codes is -6 twice."""
    x = drawn(9, 4, 2, 96, 32, packed=True)
    got = ops.moe_experts(**x)
    for name in ("w_gate", "w_up", "w_down", "gate_scale", "up_scale", "down_scale"):
        t = x[name]
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 48), 255, dtype=torch.uint8)
        wide[..., : t.shape[-1]] = t
        x[name] = wide[..., : t.shape[-1]]
    with forced(EXPERTS, {"block_k": 128}, {}):
        assert_close_rms("out", ops.moe_experts(**x), got, 3e-3)


def test_views_need_no_copy_and_give_the_same(poisoned_memory: None) -> None:
    x = drawn(12, 5, 2, 64, 48, dtype=F32, seed=3)
    got = agrees(x, 1e-5)
    fused = torch.cat([x["w_gate"], x["w_up"]], 1)
    assert torch.equal(ops.moe_experts(**{**x, "w_gate": fused, "w_up": None}), got)
    rows = torch.full((12, 100), NAN)
    rows[:, 4:68] = x["x"]
    torch.testing.assert_close(ops.moe_experts(**{**x, "x": rows[:, 4:68]}), got)
    batched = {**x, **{n: x[n].view(3, 4, -1) for n in ("x", "weights", "ids")}}
    assert torch.equal(ops.moe_experts(**batched), got.view(3, 4, 64))
    packed = drawn(12, 5, 2, 64, 32, packed=True)
    fused_scale = torch.cat([packed["gate_scale"], packed["up_scale"]], 1)
    fused = torch.cat([packed["w_gate"], packed["w_up"]], 1)
    one = {**packed, "w_gate": fused, "w_up": None, "gate_scale": fused_scale, "up_scale": None}
    assert torch.equal(ops.moe_experts(**one), ops.moe_experts(**packed))


def test_896_experts_of_which_16_are_taken(poisoned_memory: None) -> None:
    x = drawn(5, 896, 16, 32, 32, packed=True, seed=4)
    x["ids"][0] = torch.arange(880, 896)  # the last ones
    agrees(x)


def test_packed_weights_equal_their_dequantised_form() -> None:
    x = drawn(30, 6, 2, 64, 32, packed=True, seed=6)
    plain = {
        **x,
        **{f"{n}_scale": None for n in ("gate", "up", "down")},
        **{f"w_{n}": reference.dequantize(x[f"w_{n}"], x[f"{n}_scale"]).to(BF16) for n in ("gate", "up", "down")},
    }
    assert torch.equal(ops.moe_experts(**x), ops.moe_experts(**plain))


def test_the_bound_of_the_block_table_is_reached_and_never_passed() -> None:
    """Every expert one pair more than whole blocks: the worst routing there is."""
    for E, block_m in ((7, 16), (3, 64)):
        ids = torch.arange(E).repeat(block_m + 1)[:, None].to(torch.int32)
        table = ops.moe_sort(ids, E, block_m).block_expert
        used = int((table >= 0).sum())
        assert used == 2 * E <= bound_of(ids.numel(), E, block_m) == table.numel()
    assert bound_of(5, 896, 64) == 5


# ---- experts: gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["situ", "silu"])
@pytest.mark.parametrize("routing", ["dropped", "popular"])
def test_gradients_are_those_of_plain_torch(activation: str, routing: str) -> None:
    x = drawn(70, 4, 2, 24, 16, dtype=F32, routing=routing, activation=activation, seed=7)
    names = ("x", "w_gate", "w_up", "w_down", "weights")
    ours = {n: x[n].clone().requires_grad_() for n in names}
    w = numbers(70, 24, seed=8)
    got = torch.autograd.grad((ops.moe_experts(**{**x, **ours}) * w).sum(), list(ours.values()))
    theirs = {n: x[n].double().requires_grad_() for n in names}
    out = judge.experts_reference(**{**x, **theirs})["out"]
    wanted = torch.autograd.grad((out * w.double()).sum(), list(theirs.values()))
    for name, g, e in zip(names, got, wanted, strict=True):
        assert g.dtype == F32
        assert_close_rms(f"gradient of {name}", g, e, 1e-5)


def test_packed_weights_pass_gradients_on_and_have_none() -> None:
    x = drawn(20, 4, 2, 32, 32, packed=True, seed=9)
    token, share = x["x"].clone().requires_grad_(), x["weights"].clone().requires_grad_()
    out = ops.moe_experts(**{**x, "x": token, "weights": share})
    got = torch.autograd.grad(out.float().sum(), (token, share))
    a, b = x["x"].double().requires_grad_(), x["weights"].double().requires_grad_()
    wanted = torch.autograd.grad(judge.experts_reference(**{**x, "x": a, "weights": b})["out"].sum(), (a, b))
    assert_close_rms("gradient of x", got[0], wanted[0], 3e-3)
    assert_close_rms("gradient of weights", got[1], wanted[1], 3e-3)


def test_gradients_of_no_tokens_are_zero() -> None:
    x = drawn(0, 4, 2, 32, 32, dtype=F32)
    x["w_gate"].requires_grad_()
    (g,) = torch.autograd.grad(ops.moe_experts(**x).sum(), x["w_gate"])
    assert (g == 0).all()
    assert g.shape == (4, 32, 32)


# ---- the whole block ---------------------------------------------------------------------------------------------------


def block(hidden: int, D: int, I: int, S: int, E: int, seed: int = 0, dtype: torch.dtype = F32) -> dict[str, Any]:
    """Arguments of latent_moe."""
    shapes = {
        "router_weight": (E, hidden), "w_gate": (E, I, D), "w_up": (E, I, D), "w_down": (E, D, I),
        "latent_down": (D, hidden), "latent_up": (hidden, D), "shared_gate": (S, hidden), "shared_up": (S, hidden),
        "shared_down": (hidden, S),
    }  # fmt: skip
    made = {n: numbers(*s, seed=seed + k, scale=s[-1] ** -0.5, dtype=dtype) for k, (n, s) in enumerate(shapes.items())}
    made["router_weight"] = made["router_weight"].float()
    norm = (1 + numbers(D, seed=seed + 20, scale=0.1)).to(dtype)
    return {**made, "router_bias": numbers(E, seed=seed + 21, scale=0.05), "latent_norm": norm}


def plain_block(x: torch.Tensor, top_k: int, activation: str = "situ", **w: Any) -> torch.Tensor:
    """Spec 2.5, step by step in fp64."""
    w = {n: t.double() for n, t in w.items()}
    x = x.double()
    s = torch.sigmoid(x @ w["router_weight"].T)
    ids = (s + w["router_bias"]).topk(top_k, dim=-1).indices
    weights = s.gather(-1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    z = x @ w["latent_down"].T if "latent_down" in w else x
    y = torch.zeros_like(z)
    for t in range(len(x)):
        for e, share in zip(ids[t].tolist(), weights[t], strict=True):
            gate, up = w["w_gate"][e] @ z[t], w["w_up"][e] @ z[t]
            y[t] += share * (w["w_down"][e] @ reference.glu(gate, up, activation))
    if "latent_norm" in w:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * w["latent_norm"]
    if "latent_up" in w:
        y = y @ w["latent_up"].T
    if "shared_gate" in w:
        h = reference.glu(x @ w["shared_gate"].T, x @ w["shared_up"].T, activation)
        y = y + h @ w["shared_down"].T
    return y


@pytest.mark.parametrize(("name", "shape"), [("shared_down", (1, 8)), ("latent_up", (1, 16)), ("latent_norm", (5,))])
def test_parts_of_the_block_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...]) -> None:
    """A width of 1 would be repeated in silence."""
    w = {**block(32, 16, 24, 8, 5), name: torch.ones(shape)}
    with pytest.raises(ArgumentError, match=f"^{name}: "):
        ops.latent_moe(numbers(4, 32), top_k=2, **w)


def test_the_block_is_that_of_the_report() -> None:
    x, w = numbers(2, 9, 48, seed=3), block(48, 32, 16, 24, 10)
    got = ops.latent_moe(x, top_k=3, **w)
    assert_close_rms("out", got.view(18, 48), plain_block(x.view(18, 48), 3, **w), 1e-5)
    half = block(48, 32, 16, 24, 10, dtype=BF16)
    out = ops.latent_moe(x.to(BF16), top_k=3, **half)
    assert_close_rms("out", out.view(18, 48), plain_block(x.to(BF16).view(18, 48), 3, **half), 1e-2)


def test_without_latent_parts_it_is_kimi_linears_block() -> None:
    x, w = numbers(11, 32, seed=3), block(32, 32, 16, 24, 10)
    for name in ("latent_down", "latent_up", "latent_norm"):
        del w[name]
    got = ops.latent_moe(x, top_k=3, activation="silu", **w)
    assert_close_rms("out", got, plain_block(x, 3, "silu", **w), 1e-5)


def test_ranks_that_hold_a_part_of_the_experts_norm_after_the_sum() -> None:
    x, w = numbers(13, 48, seed=3), block(48, 32, 16, 24, 12)
    wanted = plain_block(x, 4, **w)
    partial: list[torch.Tensor] = []

    def collect(y: torch.Tensor) -> torch.Tensor:
        partial.append(y)
        return y

    def held(first: int) -> dict[str, torch.Tensor]:
        return {**w, **{n: w[n][first : first + 4] for n in ("w_gate", "w_up", "w_down")}}

    for first in (0, 4, 8):
        ops.latent_moe(x, top_k=4, first_expert=first, reduce=collect, **held(first))
    summed = ops.latent_moe(x, top_k=4, first_expert=8, reduce=lambda y: partial[0] + partial[1] + y, **held(8))
    assert_close_rms("out", summed, wanted, 1e-5)
    alone = ops.latent_moe(x, top_k=4, first_expert=8, **held(8))
    with pytest.raises(AssertionError):
        assert_close_rms("norm of a partial sum", alone, wanted, 0.1)


def test_gradients_reach_every_weight_of_the_block() -> None:
    x, w = numbers(6, 32, seed=3), block(32, 16, 16, 24, 6)
    bias = w.pop("router_bias")
    ours = {n: t.clone().requires_grad_() for n, t in {"x": x, **w}.items()}
    loss = numbers(6, 32, seed=5)
    got = torch.autograd.grad((ops.latent_moe(router_bias=bias, top_k=2, **ours) * loss).sum(), list(ours.values()))
    for (name, t), g in zip(ours.items(), got, strict=True):
        # a difference quotient in fp64 along one random direction
        step = numbers(*t.shape, seed=40).double() * 1e-6

        def shifted(sign: float, name: str = name, step: torch.Tensor = step) -> torch.Tensor:
            values = {n: v.detach().double() + (sign * step if n == name else 0.0) for n, v in ours.items()}
            return (plain_block(top_k=2, router_bias=bias, **values) * loss.double()).sum()

        slope = float(shifted(1.0) - shifted(-1.0)) / 2
        assert float((g.double() * step).sum()) == pytest.approx(slope, rel=2e-3, abs=1e-9), name


# ---- wrong arguments ---------------------------------------------------------------------------------------------------

X, WG, WD = torch.zeros(4, 64), torch.zeros(3, 32, 64), torch.zeros(3, 64, 32)
P, S = torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.int32)
XB, WP, WS = X.bfloat16(), torch.zeros(3, 32, 32, dtype=torch.uint8), torch.zeros(3, 32, 2, dtype=torch.uint8)
DP, DS = torch.zeros(3, 64, 16, dtype=torch.uint8), torch.zeros(3, 64, 1, dtype=torch.uint8)
W8 = torch.zeros(8, 64)
SCALES: dict[str, Any] = {"gate_scale": WS, "up_scale": WS, "down_scale": DS}
WRONG = [
    (lambda: ops.situ(X[:, :5]), "gate", "5 columns, no gate and up", "[..., 2 I]"),
    (lambda: ops.situ(X, X[:2]), "up", "shape [2, 64]", "one shape"),
    (lambda: ops.situ(X, X.half()), "up", "float16, gate is float32", "gate.dtype"),
    (lambda: ops.situ(X, X, beta=0), "beta", "0", "positive"),
    (lambda: ops.situ(torch.zeros(())), "gate", "scalar", "vector"),
    (lambda: ops.moe_experts(torch.zeros(4, 128), WG, WG, WD, P, S), "x", "D = 64 of w_gate", "3584"),
    (lambda: ops.moe_experts(X, WG, WG[:2], WD, P, S), "w_up", "needs [3, 32, 64]", "w_down [E, D, I]"),
    (lambda: ops.moe_experts(X, WG, WG, WG, P, S), "w_down", "needs [3, 64, 32]", "w_down [E, D, I]"),
    (lambda: ops.moe_experts(X, WG.half(), WG, WD, P, S), "w_gate", "float16, needs float32 or uint8", "float32"),
    (lambda: ops.moe_experts(X, WG[0], WG, WD, P, S), "w_gate", "needs 3 dims", "one tensor"),
    (lambda: ops.moe_experts(X, WG[:, :31], None, WD, P, S), "w_gate", "31 rows an expert", "or w_up"),
    (lambda: ops.moe_experts(X, WG, WG, WD.mT.contiguous().mT, P, S), "w_down", "last dim", "contiguous()"),
    (lambda: ops.moe_experts(X, WG, WG, WD, P.half(), S), "weights", "float16, needs float32", "float32"),
    (lambda: ops.moe_experts(X, WG, WG, WD, P, S.short()), "ids", "int16", "int32"),
    (lambda: ops.moe_experts(X, WG, WG, WD, P[:3], S), "weights", "needs [4, 2]", "each token"),
    (lambda: ops.moe_experts(X, WG, WG, WD, P, S[:3]), "ids", "needs [4, 'K']", "each token"),
    (lambda: ops.moe_experts(X, WG, WG, WD, P, S[:, :1]), "weights", "shape [4, 2]", "each token"),
    (lambda: ops.moe_experts(X, WG, WG, WD, P, S, activation="gelu"), "activation", "'gelu'", "situ, silu"),
    (lambda: ops.moe_experts(X, WG, WG, WD, P, S, precision="tf23"), "precision", "'tf23'", "tf32"),
    (lambda: ops.moe_experts(X, WG, WG, WD, P, S, ranks=0), "ranks", "0", "at least 1"),
    (lambda: ops.moe_experts(X, WG, WG, WD, P, S, **SCALES), "gate_scale", "given, but w_gate", "uint8"),
    (lambda: ops.moe_experts(XB, WP, WP, DP, P, S), "gate_scale", "missing", "weight_scale"),
    (lambda: ops.moe_experts(X, WP, WP, DP, P, S, **SCALES), "x", "multiplied as bf16", "bfloat16"),
    (lambda: ops.moe_experts(XB, WP, WP, DP, P, S, **{**SCALES, "up_scale": WS[:, :, :1]}), "up_scale", "[3, 32, 2]", "32"),
    (lambda: ops.moe_experts(XB, WP, None, DP, P, S, **SCALES), "up_scale", "without w_up", "fused"),
    (lambda: ops.latent_moe(X, W8, None, WG, WG, WD, top_k=2, latent_down=X), "latent_up", "missing", "together"),
    (lambda: ops.latent_moe(X, W8, None, WG, WG, WD, top_k=2, latent_norm=X[0]), "latent_norm", "without", "all three"),
    (lambda: ops.latent_moe(X, W8, None, WG, WG, WD, top_k=2, first_expert=6), "first_expert", "holds 3", "0 to 5"),
    (lambda: ops.latent_moe(X, W8[:2], None, WG, WG, WD, top_k=2), "first_expert", "router's 2", "fewer experts"),
    (lambda: ops.latent_moe(X, None, None, WG, WG, WD, top_k=2), "router_weight", "is a NoneType", "torch.Tensor"),
    (lambda: ops.moe_experts(XB, WP, WG.to(BF16), DP, P, S, **SCALES), "w_up", "w_gate is uint8", "packs nothing"),
    (
        lambda: ops.moe_experts(XB, WP, WP, DP, P, S, **{**SCALES, "gate_scale": WS.float()}), "gate_scale", "needs uint8",
        "a cast makes others",
    ),
    (lambda: ops.latent_moe(X, W8, None, WG, WG, WD, top_k=2, activation="gelu"), "activation", "'gelu'", "situ"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "argument", "reason", "remedy"), WRONG)
def test_a_wrong_argument_is_named_with_the_reason_and_the_remedy(call, argument, reason, remedy) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.message.startswith(f"{argument}: ")
    assert reason in caught.value.message
    assert remedy in (caught.value.fix or "")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"block_m": 128, "block_n": 256, "num_warps": 8}, "256 accumulators a thread"),
        ({"weights": "mxfp4", "dtype": "f16"}, "multiplied with bf16"),
        ({"weights": "mxfp4"}, "groups of 32 columns"),
    ],
)
def test_points_that_cannot_run_are_refused(settings: dict[str, Any], says: str) -> None:
    dims = {"D": 80} if settings == {"weights": "mxfp4"} else {}
    with pytest.raises(LegalityError, match=says):
        EXPERTS.point(dims, settings).plan("torch")


# ---- torch -------------------------------------------------------------------------------------------------------------

OVERLOADS = {
    "situ": (X, X, "situ", 4.0, 25.0),
    "situ_backward": (X, X, X, "silu", 4.0, 25.0),
    "moe_experts": (X, WG, WG, WD, P, S, None, None, None, "situ", 4.0, 25.0, "ieee", 1),
}


@pytest.mark.parametrize("name", OVERLOADS)
def test_the_fake_implementation_gives_the_real_ones_shapes_and_dtypes(name: str) -> None:
    overload = getattr(torch.ops.k3dsl, name).default
    torch.library.opcheck(overload, OVERLOADS[name], test_utils=("test_schema", "test_faketensor"))


def test_the_block_runs_inside_torch_compile() -> None:
    x, w = numbers(5, 32, seed=3), block(32, 16, 16, 24, 6)
    compiled = torch.compile(lambda t: ops.latent_moe(t, top_k=2, **w) + 1.0, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), ops.latent_moe(x, top_k=2, **w) + 1.0)


def test_traffic_counts_the_weights_of_experts_that_are_hit() -> None:
    point = EXPERTS.point({"T": 1, "E": 100, "K": 10, "D": 64, "I": 32}, {})
    plan = point.plan("torch")
    moved, all_read = judge.experts_traffic(plan, {"T": 1}), plan_traffic(plan, {"T": 1})
    assert moved["count"] == all_read["count"]
    expert = 64 * 32 * 2
    assert all_read["gate_up"] - moved["gate_up"] == 90 * 2 * expert  # one token hits 10 of 100
    assert all_read["down"] - moved["down"] == 90 * expert
    all_hit = EXPERTS.point({"T": 4096, "E": 8, "K": 8, "D": 64, "I": 32}, {}).plan("torch")
    assert judge.experts_traffic(all_hit, {"T": 4096}) == plan_traffic(all_hit, {"T": 4096})
