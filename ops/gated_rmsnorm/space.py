"""The gated_rmsnorm op for the registry: dims, options, knobs with their constraints, and a rule for shapes nobody tuned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from k3dsl.backends.torch.dtypes import to_torch
from k3dsl.backends.triton.text import pow2
from k3dsl.ir.types import bf16, f16, f32
from k3dsl.ops import common
from k3dsl.ops.gated_rmsnorm import kernels, reference
from k3dsl.runtime.op import Case, Dim, Knob, Op, Option
from k3dsl.runtime.plan import Plan

MAX_WIDTH = 16384


def plan(
    dims: common.Settings,
    knobs: common.Settings,
    options: common.Settings,
    backend: str,
    schedules: common.Schedules = None,
    strides: common.Strides = None,
) -> Plan:
    """One launch. dims: N tokens, H heads and D elements of a head, both static."""
    io = options["dtype"]
    dtypes = {"x": io, "gate": options["gate_dtype"] or io, "weight": options["weight_dtype"] or io, "y": io}
    fixed = {**options, "silu": options["activation"] == "silu", "approx": io != f32}
    default = {"num_warps": knobs["num_warps"]}
    return common.one_launch(
        "gated_rmsnorm", kernels.gated_rmsnorm, dims, knobs, fixed, dtypes, backend, schedules, strides, default
    )


def constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why a point of the space is refused."""
    if not 1 <= dims["D"] <= MAX_WIDTH:
        return [f"D = {dims['D']}, needs 1 to {MAX_WIDTH}"]
    held = knobs["tokens"] * knobs["heads"] * pow2(dims["D"])
    if held > 2048 * knobs["num_warps"]:
        return [f"{held} elements do not fit the registers of {knobs['num_warps']} warps; take more, or fewer heads"]
    return []


def rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """About 2048 elements a program: heads first, as many as divide the token's, then tokens."""
    width = pow2(dims["D"])
    heads = tokens = 1
    while 2 * heads * width <= 2048 and dims["H"] % (2 * heads) == 0 and heads < 32:
        heads *= 2
    while 2 * tokens * heads * width <= 2048 and tokens < min(16, dims["N"]):
        tokens *= 2
    return {"heads": heads, "tokens": tokens, "num_warps": max(1, min(16, tokens * heads * width // 512))}


def inputs(
    dims: Mapping[str, Any],
    options: Mapping[str, Any],
    device: Any,
    seed: int,
    scale: float = 1.0,
    gate_mean: float = 0.0,
    strided: bool = False,
) -> dict[str, Any]:
    """Normal numbers, weights around 1. strided: both are slices of wider tensors."""
    generator = torch.Generator().manual_seed(seed)
    io = to_torch(options["dtype"])
    N, H, D = dims["N"], dims["H"], dims["D"]

    def draw(mean: float, std: float, dtype: torch.dtype) -> torch.Tensor:
        wide = torch.randn(N, H * D * (2 if strided else 1), generator=generator) * std + mean
        return wide.to(device, dtype)[:, -H * D :].unflatten(1, (H, D))

    weight = 1 + 0.1 * torch.randn(D, generator=generator)
    return {
        "x": draw(0.0, scale, io),
        "gate": draw(gate_mean, 2.0, io if options["gate_dtype"] is None else to_torch(options["gate_dtype"])),
        "weight": weight.to(device, io if options["weight_dtype"] is None else to_torch(options["weight_dtype"])),
        "eps": options["eps"],
        "activation": options["activation"],
    }


def cases(size: str) -> list[Case]:
    """Tokens, heads, widths, dtypes, scales, closed and open gates, slices. Raises ArgumentError for another size."""
    common.check_suite(size)
    found: list[Case] = []

    def add(
        name: str, family: str, dims: Mapping[str, int], options: Mapping[str, Any] | None = None, **how: Any
    ) -> None:
        sizes = GATED_RMSNORM.resolve_dims({"N": 17, "H": 6, "D": 128, **dims})
        chosen = GATED_RMSNORM.resolve_options(options or {})
        make = lambda device, seed: inputs(sizes, chosen, device, seed, **how)  # noqa: E731
        found.append(Case(name, family, make, limits(chosen)))

    for tokens in (1, 2, 33, *(() if size == "small" else (1000, 8192))):
        for heads in (1, 12, 96):
            add(f"N{tokens}-H{heads}", "tokens, heads", {"N": tokens, "H": heads})
    for width in (1, 7, 96, 192, 1024, MAX_WIDTH):
        add(f"D{width}", "widths", {"D": width, "H": 3})
    for dtype in (bf16, f16, f32):
        for activation in ("sigmoid", "silu"):
            add(f"{dtype}-{activation}", "dtypes", {}, {"dtype": dtype, "activation": activation})
    add("bf16-all", "dtypes", {}, {"weight_dtype": None})
    add("fp32-gate", "dtypes", {}, {"gate_dtype": f32})
    for scale in (0.0, 1e-6, 1e4):
        add(f"scale-{scale:g}", "scales", {}, {"dtype": f32}, scale=scale)
    for mean in (-60.0, 60.0):
        add(f"gate-{mean:g}", "scales", {}, {"activation": "silu"}, gate_mean=mean)
    add("strided", "layouts", {"N": 33}, strided=True)
    return found


def call(**arguments: Any) -> dict[str, Any]:
    """The op's torch function with its output by name."""
    from k3dsl.ops.gated_rmsnorm.api import gated_rmsnorm

    return {"y": gated_rmsnorm(**arguments)}


def peers() -> dict[str, Callable[..., dict[str, Any]]]:
    """Plain torch; fla's kernel where it can be imported."""

    def plain(*, x: Any, gate: Any, weight: Any, eps: float, activation: str) -> dict[str, Any]:
        normed = torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), eps)
        opened = torch.nn.functional.silu(gate.float()) if activation == "silu" else torch.sigmoid(gate.float())
        return {"y": (normed * opened).to(x.dtype)}

    found: dict[str, Callable[..., dict[str, Any]]] = {"torch": plain}
    try:
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
    except ImportError:
        return found

    def fla(*, x: Any, gate: Any, weight: Any, eps: float, activation: str) -> dict[str, Any]:
        return {"y": rms_norm_gated(x, gate, weight, None, activation, eps=eps)}

    return found | {"fla rms_norm_gated": fla}


def limits(options: Mapping[str, Any]) -> dict[str, float]:
    """Largest relative RMS error: the rounding of the output."""
    return {"y": {bf16: 3e-3, f16: 4e-4, f32: 2e-6}[options["dtype"]]}


GATED_RMSNORM = Op(
    name="gated_rmsnorm",
    doc="RMSNorm over each head times a sigmoid or SiLU gate, rounded once.",
    dims=(
        Dim("N", 8192, "tokens"),
        Dim("H", 96, "heads", static=True),
        Dim("D", 128, "elements of a head", static=True),
    ),
    knobs=(
        Knob("tokens", (1, 2, 4, 8, 16), 1, "tokens a program"),
        Knob("heads", (1, 2, 4, 8, 16, 32), 16, "heads a program"),
        Knob("num_warps", (1, 2, 4, 8, 16), 4, "warps a program"),
    ),
    options=(
        Option("dtype", (bf16, f16, f32), bf16, "of x and y"),
        Option("gate_dtype", (None, bf16, f16, f32), None, "of the gate; None: as x"),
        Option("weight_dtype", (None, bf16, f16, f32), f32, "of the weight; None: as x"),
        Option("eps", (), 1e-5, "added to the mean of squares", constant=True),
        Option("activation", ("sigmoid", "silu"), "sigmoid", "of the gate"),
    ),
    plan=plan,
    launches=("gated_rmsnorm",),
    inputs=inputs,
    cases=cases,
    call=call,
    reference=lambda **x: {"y": reference.gated_rmsnorm(**x)},
    peers=peers,
    limits=limits,
    constraints=constraints,
    canonical=lambda o: {**o, **{n: o[n] or o["dtype"] for n in ("gate_dtype", "weight_dtype")}},
    heuristic=rule,
    cpu_dims={"N": 64, "H": 8},
)
