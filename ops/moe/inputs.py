"""Inputs on which the MoE ops are judged: families of numbers, of logits and of routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from k3dsl.backends.torch.dtypes import to_torch
from k3dsl.ops.moe import reference

MARGIN = 1e-4
"""Least distance between the last score chosen and the next: far above what fp32 roundings move a score by."""


def _generator(device: Any, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def normal(
    shape: tuple[int, ...], device: Any, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> torch.Tensor:
    """Normal numbers of a standard deviation, drawn on the device: weights of real size would take a CPU minutes."""
    out = torch.empty(shape, dtype=dtype, device=device)
    return out.normal_(0.0, scale, generator=_generator(device, seed)) if out.numel() else out


def choices(T: int, E: int, K: int, device: Any, seed: int, routing: str = "uniform") -> torch.Tensor:
    """ids [T, K] int32, distinct in a token as far as there are experts.

    routing: 'uniform'; 'popular' (expert e is wanted like 1 / (e + 1)); 'first-half' (the others get nothing); 'one' (every
    first choice is expert 0, the rest is dropped); 'dropped' (uniform, every tenth choice -1 or past the last expert).
    """
    taste = torch.rand((T, E), generator=_generator(device, seed), device=device)
    if routing == "popular":
        taste = taste.log() * torch.arange(1, E + 1, device=device)  # exponential races
    if routing == "first-half":
        taste[:, max(K, E // 2) :] -= 2.0
    ids = torch.empty((0, K), dtype=torch.int32, device=device)
    if T:
        ids = taste.topk(min(K, E), dim=1).indices.to(torch.int32).repeat(1, -(-K // E))[:, :K]
    if routing == "one":
        ids.fill_(-1)[:, 0] = 0
    if routing == "dropped":
        number = torch.arange(T * K, device=device).view(T, K)
        ids = torch.where(number % 10 == 3, -1, torch.where(number % 10 == 7, E + 5, ids)).to(torch.int32)
    return ids


def experts(
    T: int,
    E: int,
    K: int,
    D: int,
    I: int,
    device: Any,
    seed: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    packed: bool = False,
    numbers: str = "mild",
    routing: str = "uniform",
    activation: str = "situ",
    ranks: int = 1,
) -> dict[str, Any]:
    """Keyword arguments of `moe_experts`. ranks: of the choices one in so many is kept, the others are of other ranks.

    numbers: 'mild'; 'checkpoint' (weights of standard deviation 0.006, a few channels of x far larger than the rest);
    'saturated' (gates and linear parts far beyond the betas, and one token of NaN).
    """
    x = normal((T, D), device, seed)
    scale = 0.006 if numbers == "checkpoint" else 1.0
    if numbers == "checkpoint":
        x[:, ::17] *= 30.0
    if numbers == "saturated":
        x *= 60.0
        x[T // 2] = torch.nan
    shapes = {"w_gate": (E, I, D), "w_up": (E, I, D), "w_down": (E, D, I)}
    drawn: dict[str, Any] = {}
    for n, (name, shape) in enumerate(shapes.items()):
        part = name.removeprefix("w_")
        if packed:
            bits = _generator(device, seed + 10 + n)
            out, width = shape[1:]
            drawn[name] = torch.randint(0, 256, (E, out, width // 2), generator=bits, device=device, dtype=torch.uint8)
            groups = (E, out, width // 32)
            drawn[f"{part}_scale"] = torch.randint(119, 124, groups, generator=bits, device=device, dtype=torch.uint8)
        else:
            own = scale if numbers == "checkpoint" else shape[2] ** -0.5
            drawn[name] = normal(shape, device, seed + 10 + n, dtype, own)
            drawn[f"{part}_scale"] = None
    ids = choices(T, E, K, device, seed + 2, routing)
    if ranks > 1:
        kept = torch.rand((T, K), generator=_generator(device, seed + 3), device=device) < 1 / ranks
        ids = torch.where(kept, ids, -1)
    weights = torch.rand((T, K), generator=_generator(device, seed + 1), device=device)
    weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return {
        "x": x.to(dtype),
        **drawn,
        "weights": weights,
        "ids": ids,
        "activation": activation,
        "beta": 4.0,
        "linear_beta": 25.0,
        "precision": "ieee",
        "ranks": ranks,
    }


def _options(options: Mapping[str, Any], top_k: int) -> dict[str, Any]:
    return {"top_k": top_k, **{n: options[n] for n in ("renormalize", "scale", "scoring")}}


def _clear(logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, scoring: str) -> torch.Tensor:
    """Which rows [T] leave no doubt about their top_k: the last of them is a margin above the next, or equals it exactly."""
    score = reference.scores(logits.double(), scoring)
    biased = score if bias is None else score + bias.double()
    if top_k >= biased.shape[1]:
        return torch.ones(biased.shape[0], dtype=torch.bool, device=biased.device)
    best = torch.where(biased.isnan(), -torch.inf, biased).topk(top_k + 1, dim=1).values
    last, following = best[:, top_k - 1], best[:, top_k]
    return (last == following) | (last - following > MARGIN * (1 if scoring == "sigmoid" else last))


def _only_clear(x: torch.Tensor, clear: torch.Tensor) -> torch.Tensor:
    """x with the rows in doubt replaced by the clear ones, from the first on."""
    good = torch.where(clear)[0]
    if not good.numel():
        return x
    number = torch.arange(x.shape[0], device=x.device)
    return torch.where(clear[:, None], x, x[good[number % good.numel()]])


def topk(
    T: int, E: int, K: int, options: Mapping[str, Any], device: Any, seed: int, family: str = "mild"
) -> dict[str, Any]:
    """Keyword arguments of `moe_topk`.

    family: 'mild'; 'extreme...' (scores of exactly 0 and 1, infinite logits, rows and single logits of NaN); 'ties' (few
    different logits, no bias: the lowest ids win).
    """
    logits = normal((T, E), device, seed)
    bias = normal((E,), device, seed + 1, scale=0.05) if options["bias"] else None
    if family == "ties":
        return {"logits": logits.round(), "bias": None, **_options(options, K)}
    if family.startswith("extreme"):
        special = [torch.inf, -torch.inf, torch.nan, 1e30, -1e30]
        for row in range(1, T, 3):
            at = torch.randperm(E, generator=torch.Generator().manual_seed(seed + row))[: len(special)]
            logits[row, at.to(device)] = torch.tensor(special, device=device)[: at.numel()]
        for row, value in zip(range(0, T, max(1, T // 5)), special, strict=False):
            logits[row] = value
        bias = None if bias is None else bias.mul(64).round() / 64  # added to 0 and 1 without rounding: ties stay ties
    logits = _only_clear(logits, _clear(logits, bias, K, options["scoring"]))
    return {"logits": logits, "bias": bias, **_options(options, K)}


def router(
    T: int, D: int, E: int, K: int, options: Mapping[str, Any], device: Any, seed: int, family: str = "mild"
) -> dict[str, Any]:
    """Keyword arguments of `moe_router`. family: 'mild'; 'checkpoint-like...' (a few channels of x far larger than the
    rest); 'extreme...' (logits that saturate, rows of NaN)."""
    x = normal((T, D), device, seed)
    weight = normal((E, D), device, seed + 1, scale=D**-0.5).to(to_torch(options["weight_dtype"]))
    bias = normal((E,), device, seed + 2, scale=0.02) if options["bias"] else None
    if family.startswith("checkpoint"):
        x[:, ::29] *= 20.0
        x *= 0.3
    if family.startswith("extreme"):
        x *= 4.0
    x = x.to(to_torch(options["dtype"]))
    logits = x.double() @ weight.double().T
    x = _only_clear(x, _clear(logits, bias, K, options["scoring"]))
    if family.startswith("extreme"):
        x[:: max(2, T // 3)] = torch.nan
    return {"x": x, "weight": weight, "bias": bias, **_options(options, K)}


def sorted_pairs(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(order, slots, offsets) as `moe_sort` gives them, by torch's stable sort; no wait for the device."""
    flat = ids.flatten()
    known = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    in_order, order = torch.sort(known, stable=True)
    numbers = torch.arange(num_experts + 1, device=ids.device, dtype=known.dtype)
    offsets = torch.searchsorted(in_order, numbers).to(torch.int32)
    slots = torch.empty_like(order)
    slots[order] = torch.arange(order.numel(), device=ids.device)
    slots = torch.where(known < num_experts, slots, -1)
    return order.to(torch.int32), slots.to(torch.int32), offsets
