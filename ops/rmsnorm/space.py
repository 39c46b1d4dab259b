"""The rmsnorm op for the registry: dims, options, knobs with their constraints, and a rule for shapes that nobody tuned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from k3dsl.backends.torch.dtypes import to_torch
from k3dsl.backends.triton.text import pow2
from k3dsl.ir.types import bf16, f16, f32
from k3dsl.ops import common
from k3dsl.ops.rmsnorm import kernels, reference
from k3dsl.runtime.op import Dim, Knob, Op, Option
from k3dsl.runtime.plan import Plan

MAX_WIDTH = 65536


def plan(
    dims: common.Settings,
    knobs: common.Settings,
    options: common.Settings,
    backend: str,
    schedules: common.Schedules = None,
    strides: common.Strides = None,
) -> Plan:
    """One launch. dims: R rows of D elements, D static."""
    dtypes = {"x": options["dtype"], "weight": options["weight_dtype"] or options["dtype"], "y": options["dtype"]}
    default = {"num_warps": knobs["num_warps"]}
    return common.one_launch(
        "rmsnorm", kernels.rmsnorm, dims, knobs, options, dtypes, backend, schedules, strides, default
    )


def constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why a point of the space is refused."""
    held = knobs["rows"] * pow2(dims["D"])
    if held > MAX_WIDTH:
        return [f"{knobs['rows']} rows of {dims['D']} elements do not fit a program's registers"]
    return []


def rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """Several rows a program when they are short; about 16 elements a thread."""
    width = pow2(dims["D"])
    rows = max(1, min(16, 1024 // width))
    return {"rows": rows, "num_warps": max(1, min(16, rows * width // 512))}


def cpu_rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """No rows that are not there."""
    return {"rows": common.covering((1, 2, 4, 8, 16), dims["R"])} if dims["R"] <= 16 else {}


def inputs(dims: Mapping[str, int], options: Mapping[str, Any], device: Any, seed: int) -> dict[str, Any]:
    """Normal numbers, weights around 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(dims["R"], dims["D"], generator=generator)
    weight = 1 + 0.1 * torch.randn(dims["D"], generator=generator)
    io = to_torch(options["dtype"])
    weight_dtype = io if options["weight_dtype"] is None else to_torch(options["weight_dtype"])
    return {"x": x.to(device, io), "weight": weight.to(device, weight_dtype), "eps": options["eps"]}


def call(**arguments: Any) -> dict[str, Any]:
    """The op's torch function with its output by name."""
    from k3dsl.ops.rmsnorm.api import rmsnorm

    return {"y": rmsnorm(**arguments)}


def limits(options: Mapping[str, Any]) -> dict[str, float]:
    """Largest relative RMS error: two roundings."""
    return {"y": {bf16: 4e-3, f16: 5e-4, f32: 1e-6}[options["dtype"]]}


def _torch(**x: Any) -> dict[str, Any]:
    return {"y": torch.nn.functional.rms_norm(x["x"], x["weight"].shape, x["weight"], x["eps"])}


RMSNORM = Op(
    name="rmsnorm",
    doc="RMSNorm in Llama's form, any width.",
    dims=(Dim("R", 8192, "rows"), Dim("D", 7168, "elements of a row", static=True)),
    knobs=(
        Knob("rows", (1, 2, 4, 8, 16), 1, "rows a program"),
        Knob("num_warps", (1, 2, 4, 8, 16, 32), 8, "warps a program"),
    ),
    options=(
        Option("dtype", (bf16, f16, f32), bf16, "of x and y"),
        Option("weight_dtype", (None, bf16, f16, f32), None, "of the weight; None: as x"),
        Option("eps", (), 1e-6, "added to the mean of squares", constant=True),
    ),
    plan=plan,
    launches=("rmsnorm",),
    inputs=inputs,
    call=call,
    reference=lambda **x: {"y": reference.rmsnorm(**x)},
    peers=lambda: {"torch": _torch},
    limits=limits,
    constraints=constraints,
    heuristic=rule,
    cpu_heuristic=cpu_rule,
    cpu_dims={"R": 128, "D": 7168},
)
