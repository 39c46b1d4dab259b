"""How the MoE ops are judged and timed: inputs for given dims and options, cases, references, peers, traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from k3dsl.backends.torch.dtypes import to_torch
from k3dsl.ir.types import bf16, f16, f32
from k3dsl.ops import common
from k3dsl.ops.moe import inputs, reference
from k3dsl.runtime.op import Case
from k3dsl.runtime.plan import Plan
from k3dsl.runtime.timing import plan_traffic

Settings = Mapping[str, Any]
ROUNDING = {bf16: 5e-3, f16: 8e-4, f32: 1e-5}
"""Largest relative RMS error of the experts' sum: the roundings of h, of each expert's output, and of the sum."""
SHAPES, FEW = "shapes, layouts, dtypes", ("ragged", "extreme", "skewed")


# ---- situ --------------------------------------------------------------------------------------------------------------


def situ_inputs(dims: Settings, options: Settings, device: Any, seed: int) -> dict[str, Any]:
    """Normal numbers, wide enough that some saturate."""
    names = ("gate", "up", "grad") if options["backward"] else ("gate", "up")
    drawn = {
        n: inputs.normal((dims["R"], dims["I"]), device, seed + k, to_torch(options["dtype"]), 4.0)
        for k, n in enumerate(names)
    }
    return {**drawn, **{n: options[n] for n in ("activation", "beta", "linear_beta")}}


def situ_call(**x: Any) -> dict[str, Any]:
    """The torch function, or with `grad` its backward pass, outputs by name."""
    from k3dsl.ops.moe import activation

    betas = float(x["beta"]), float(x["linear_beta"])
    if "grad" in x:
        names = ("grad_gate", "grad_up")
        found = activation.backward(x["gate"], x["up"], x["grad"], x["activation"], *betas)
        return dict(zip(names, found, strict=True))
    if x["activation"] == "silu":
        return {"y": activation.swiglu(x["gate"], x["up"])}
    return {"y": activation.situ(x["gate"], x["up"], beta=betas[0], linear_beta=betas[1])}


def situ_reference(**x: Any) -> dict[str, Any]:
    """In float64; gradients by autograd."""
    grad = x.pop("grad", None)
    gate, up = (x[n].double().requires_grad_(grad is not None) for n in ("gate", "up"))
    with torch.enable_grad(), torch.inference_mode(False):
        gate, up = (t.clone() if grad is None else t.clone().detach().requires_grad_() for t in (gate, up))
        y = reference.glu(gate, up, x["activation"], x["beta"], x["linear_beta"])
        if grad is None:
            return {"y": y}
        found = torch.autograd.grad(y, (gate, up), grad.double().clone())
    return dict(zip(("grad_gate", "grad_up"), found, strict=True))


def situ_peers() -> dict[str, Callable[..., dict[str, Any]]]:
    """Plain torch, compiled where torch.compile works."""

    def eager(**x: Any) -> dict[str, Any]:
        if "grad" in x:
            return {}
        gate, up = x["gate"].float(), x["up"].float()
        return {"y": reference.glu(gate, up, x["activation"], x["beta"], x["linear_beta"]).to(x["gate"].dtype)}

    return {"torch": eager}


def situ_limits(options: Settings) -> dict[str, float]:
    """One rounding of the result."""
    limit = {bf16: 3e-3, f16: 4e-4, f32: 2e-6}[options["dtype"]]
    return dict.fromkeys(("grad_gate", "grad_up") if options["backward"] else ("y",), limit)


# ---- choosing experts --------------------------------------------------------------------------------------------------
# Judged as a dense [T, E] matrix of weights: the order among the chosen is free, and a wrong choice is a wrong number.


def _dense(weights: torch.Tensor, ids: torch.Tensor, num_experts: int) -> dict[str, torch.Tensor]:
    out = torch.zeros((ids.shape[0], num_experts), dtype=weights.dtype, device=weights.device)
    return {"routing": out.scatter_(1, ids.long(), weights)}


def topk_inputs(dims: Settings, options: Settings, device: Any, seed: int) -> dict[str, Any]:
    """Normal logits without near-ties, which two roundings would decide differently."""
    return inputs.topk(dims["T"], dims["E"], dims["K"], options, device, seed)


def topk_call(**x: Any) -> dict[str, Any]:
    """`moe_topk` as a dense matrix of weights."""
    from k3dsl.ops.moe.router import moe_topk

    return _dense(*moe_topk(**x), x["logits"].shape[-1])


def topk_reference(**x: Any) -> dict[str, Any]:
    """In float64."""
    return _dense(*reference.topk(**x), x["logits"].shape[-1])


def topk_limits(options: Settings) -> dict[str, float]:
    """Scores and their sum in fp32; logits to a few units of their last place."""
    return {"routing": 1e-5}


def topk_cases(size: str) -> list[Case]:
    """Families of logits, and shapes. Raises ArgumentError for another size than small and whole."""
    common.check_suite(size)
    shapes = [(70, 40, 6), (33, 896, 16)] if size == "small" else [(257, 896, 16), (70, 1025, 17), (5, 256, 8)]

    def make(family: str, T: int, E: int, K: int, options: Settings) -> Callable[[Any, int], dict[str, Any]]:
        return lambda device, seed: inputs.topk(T, E, K, options, device, seed, family)

    plain: Settings = {"bias": True, "scoring": "sigmoid", "renormalize": True, "scale": 1.0}
    found = []
    for T, E, K in shapes:
        for family in ("mild", "extreme: saturated, infinite and NaN logits", "ties"):
            found.append(
                Case(f"{family.split(':')[0]}/T{T}-E{E}-K{K}", family, make(family, T, E, K, plain), topk_limits({}))
            )
    changes: dict[str, Settings] = {
        "softmax": {"scoring": "softmax"},
        "no-bias": {"bias": False},
        "scaled": {"renormalize": False, "scale": 2.446},
    }
    for name, change in changes.items():
        found.append(Case(f"mild/{name}", SHAPES, make("mild", 31, 64, 8, {**plain, **change}), topk_limits({})))
    return found


def topk_peers() -> dict[str, Callable[..., dict[str, Any]]]:
    """Sigmoid, torch.topk, gather."""

    def torch_topk(**x: Any) -> dict[str, Any]:
        return _dense(*_torch_choice(**x), x["logits"].shape[-1])

    return {"torch": torch_topk}


def _torch_choice(
    logits: torch.Tensor, bias: Any, top_k: int, renormalize: bool, scale: float, scoring: str
) -> tuple[torch.Tensor, torch.Tensor]:
    score = reference.scores(logits, scoring)
    ids = torch.topk(score if bias is None else score + bias, top_k, dim=-1, sorted=False).indices
    weights = score.gather(1, ids)
    return (weights / (weights.sum(1, keepdim=True) + 1e-20) if renormalize else weights) * scale, ids


def router_inputs(dims: Settings, options: Settings, device: Any, seed: int) -> dict[str, Any]:
    """Normal tokens and weights without near-ties."""
    return inputs.router(dims["T"], dims["D"], dims["E"], dims["K"], options, device, seed)


def router_cases(size: str) -> list[Case]:
    """Families of tokens, dtypes, shapes. Raises ArgumentError for another size than small and whole."""
    common.check_suite(size)
    plain = {
        "bias": True, "scoring": "sigmoid", "renormalize": True, "scale": 1.0, "dtype": bf16, "weight_dtype": f32
    }  # fmt: skip

    def case(name: str, family: str, T: int, D: int, E: int, K: int, **change: Any) -> Case:
        options = {**plain, **change}

        def make(device: Any, seed: int) -> dict[str, Any]:
            return inputs.router(T, D, E, K, options, device, seed, family)

        return Case(name, family, make, topk_limits({}))

    found = [
        case("mild", "mild", 40, 100, 70, 6),
        case("outliers", "checkpoint-like: outlier channels", 33, 256, 896, 16),
        case("large", "extreme: saturated and NaN rows", 17, 64, 40, 4),
        case("one-token", "ragged", 1, 130, 33, 3),
        *[case(f"mild/{t}", SHAPES, 20, 64, 48, 4, dtype=t) for t in (f16, f32)],
        case("mild/bf16-weight", SHAPES, 20, 64, 48, 4, weight_dtype=bf16),
    ]
    if size == "whole":
        found += [
            case("mild/whole", "mild", 300, 7168, 896, 16),
            case("outliers/kimi-linear", "checkpoint-like: outlier channels", 129, 2304, 256, 8, scale=2.446),
        ]
    return found


def router_call(**x: Any) -> dict[str, Any]:
    """`moe_router` as a dense matrix of weights."""
    from k3dsl.ops.moe.router import moe_router

    return _dense(*moe_router(**x), x["weight"].shape[0])


def router_reference(**x: Any) -> dict[str, Any]:
    """In float64."""
    return _dense(*reference.router(**x), x["weight"].shape[0])


def router_peers() -> dict[str, Callable[..., dict[str, Any]]]:
    """torch's fp32 product, then sigmoid, topk, gather."""

    def torch_router(*, x: torch.Tensor, weight: torch.Tensor, **rest: Any) -> dict[str, Any]:
        return _dense(*_torch_choice(x.float() @ weight.float().T, **rest), weight.shape[0])

    return {"torch": torch_router}


# ---- sorting -----------------------------------------------------------------------------------------------------------


def sort_inputs(dims: Settings, options: Settings, device: Any, seed: int) -> dict[str, Any]:
    """Distinct random experts a token; every tenth choice is dropped."""
    ids = inputs.choices(dims["T"], dims["E"], dims["K"], device, seed, "dropped").to(to_torch(options["ids_dtype"]))
    return {"ids": ids, "num_experts": dims["E"], "block_m": options["block_m"]}


def sort_call(**x: Any) -> dict[str, Any]:
    """`moe_sort`, outputs by name."""
    from k3dsl.ops.moe.experts import moe_sort

    return moe_sort(**x)._asdict()


def sort_reference(**x: Any) -> dict[str, Any]:
    """Counted one by one."""
    return dict(reference.sort(**x))


def sort_limits(options: Settings) -> dict[str, float]:
    """None: these are integers."""
    return dict.fromkeys(("order", "slots", "expert_offsets", "block_expert", "block_row"), 0.0)


def sort_peers() -> dict[str, Callable[..., dict[str, Any]]]:
    """torch's stable sort, without the table of blocks."""

    def torch_sort(ids: torch.Tensor, num_experts: int, block_m: int) -> dict[str, Any]:
        order, _, offsets = inputs.sorted_pairs(ids, num_experts)
        return {"order": order, "expert_offsets": offsets}

    return {"torch": torch_sort}


# ---- experts -----------------------------------------------------------------------------------------------------------


def experts_inputs(dims: Settings, options: Settings, device: Any, seed: int) -> dict[str, Any]:
    """Normal tokens and weights, distinct random experts a token."""
    drawn = inputs.experts(
        dims["T"], dims["E"], dims["K"], dims["D"], dims["I"], device, seed,
        dtype=to_torch(options["dtype"]), packed=options["weights"] == "mxfp4", ranks=int(options["ranks"]),
    )  # fmt: skip
    drawn["ids"] = drawn["ids"].to(to_torch(options["ids_dtype"]))
    return {**drawn, **{n: options[n] for n in ("activation", "beta", "linear_beta", "precision")}}


def experts_cases(size: str) -> list[Case]:
    """Families of numbers and of routing, dtypes, shapes. Raises ArgumentError for another size than small and whole."""
    common.check_suite(size)

    def case(name: str, family: str, shape: tuple[int, int, int, int, int], **how: Any) -> Case:
        dtype = how.get("dtype", torch.bfloat16)

        def make(device: Any, seed: int) -> dict[str, Any]:
            T, E, K, D, I = shape
            return inputs.experts(T, E, K, D, I, device, seed, **how)

        limit = {torch.bfloat16: 5e-3, torch.float16: 8e-4, torch.float32: 1e-5}[dtype]
        return Case(name, family, make, {"out": limit})

    base = (50, 10, 4, 96, 64)
    found = [
        case("mild", "mild", base),
        case("mild/mxfp4", "mild", base, packed=True),
        case("checkpoint", "checkpoint-like: small weights, outlier channels", base, numbers="checkpoint"),
        case("saturated", "extreme: saturated activations, a NaN token", base, numbers="saturated"),
        case("one-expert", "skewed routing", base, routing="one"),
        case("popular", "skewed routing", (120, 12, 3, 64, 96), routing="popular"),
        case("dropped", "skewed routing", base, routing="dropped"),
        case("one-rank-of-eight", "skewed routing", (90, 10, 4, 96, 64), ranks=8),
        case("last-empty", "skewed routing", base, routing="first-half"),
        case("one-token", "ragged", (1, 10, 4, 96, 64)),
        case("many-experts", "ragged", (7, 896, 16, 64, 32), packed=True),
        case("mild/fp16", SHAPES, base, dtype=torch.float16),
        case("mild/fp32", SHAPES, (20, 6, 2, 64, 48), dtype=torch.float32),
        case("mild/silu", SHAPES, base, activation="silu"),
    ]
    if size == "whole":
        found += [
            case("mild/T129", "ragged", (129, 20, 8, 128, 160)),
            case("popular/mxfp4", "skewed routing", (300, 32, 8, 256, 128), routing="popular", packed=True),
            case("mild/K3-slice", "mild", (256, 16, 16, 3584, 3072)),
            case("mild/K3-slice-mxfp4", "mild", (256, 16, 16, 3584, 3072), packed=True),
            case("mild/kimi-linear", "mild", (300, 32, 8, 2304, 1024), activation="silu"),
        ]
    return found


def experts_call(**x: Any) -> dict[str, Any]:
    """`moe_experts`, output by name."""
    from k3dsl.ops.moe.experts import moe_experts

    return {"out": moe_experts(**x)}


def experts_reference(**x: Any) -> dict[str, Any]:
    """Expert by expert in float64."""
    for name in ("precision", "ranks"):
        x.pop(name, None)
    return {"out": reference.experts(**x)}


def experts_limits(options: Settings) -> dict[str, float]:
    """Largest relative RMS error."""
    loose = options["dtype"] == f32 and options["precision"] == "tf32"
    return {"out": 3e-3 if loose else ROUNDING[options["dtype"]]}


def experts_peers() -> dict[str, Callable[..., dict[str, Any]]]:
    """torch._grouped_mm with plain torch around it, where torch has it; MXFP4 weights are dequantised in each call."""
    grouped = getattr(torch, "_grouped_mm", None)
    if grouped is None:
        return {}

    def call(**x: Any) -> dict[str, Any]:
        token, (T, K), E = x["x"], x["ids"].shape, x["w_gate"].shape[0]
        gate, up, down = (
            w if x[s] is None else reference.dequantize(w, x[s]).to(token.dtype)
            for w, s in (
                (x["w_gate"], "gate_scale"),
                (x["w_up"], "up_scale"),
                (x["w_down"], "down_scale"),
            )
        )
        order, slots, offsets = inputs.sorted_pairs(x["ids"], E)
        rows, ends = token[order.long() // K], offsets[1:]
        g, u = (grouped(rows, w.transpose(-2, -1), offs=ends) for w in (gate, up))
        h = reference.glu(g.float(), u.float(), x["activation"], x["beta"], x["linear_beta"]).to(token.dtype)
        y = grouped(h, down.transpose(-2, -1), offs=ends)
        picked = torch.where((slots >= 0)[:, None], y[slots.clamp(min=0).long()].float(), 0.0).view(T, K, -1)
        return {"out": (picked * x["weights"][..., None]).sum(1).to(token.dtype)}

    return {"torch._grouped_mm": call}


def router_flops(plan: Plan, dims: Mapping[str, int]) -> dict[str, int]:
    """Of one product; sums as exact as fp32's take several."""
    d = common.known_dims(plan, dims)
    return {"logits": 2 * d["T"] * d["D"] * d["E"]}


def experts_flops(plan: Plan, dims: Mapping[str, int]) -> dict[str, int]:
    """Of gate and up, and of down, for every choice that is an expert here."""
    d = common.known_dims(plan, dims)
    product = 2 * (d["T"] * d["K"] // int(plan.options["ranks"])) * d["D"] * d["I"]
    return {"gate_up": 2 * product, "down": product}


def experts_traffic(plan: Plan, dims: Mapping[str, int]) -> dict[str, int]:
    """Of the weights only those of experts that some token chose are read: as many as uniform routing hits on average."""
    moved = plan_traffic(plan, dims)
    d = common.known_dims(plan, dims)
    E, K, T = (d[n] for n in ("E", "K", "T"))
    all_experts = E * int(plan.options["ranks"])
    idle = (1 - K / all_experts) ** T if all_experts > K else 0.0
    for launch in plan.launches:
        for t in launch.kernel.tensors:
            if t.name.startswith("w_") or t.name.endswith("_scale"):
                size = t.dtype.bytes
                for extent in t.shape:
                    size *= extent.evaluate(dims)
                moved[launch.label] -= round(size * idle)
    return moved
