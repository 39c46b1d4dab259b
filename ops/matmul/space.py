"""The matmul op for the registry: dims, options, knobs with their constraints, and a rule for shapes that nobody tuned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from k3dsl.backends.torch.dtypes import to_torch
from k3dsl.ir.types import bf16, f16, f32
from k3dsl.ops import common
from k3dsl.ops.matmul import kernels, reference
from k3dsl.runtime.op import Dim, Knob, Op, Option
from k3dsl.runtime.plan import Plan


def plan(
    dims: common.Settings,
    knobs: common.Settings,
    options: common.Settings,
    backend: str,
    schedules: common.Schedules = None,
    strides: common.Strides = None,
) -> Plan:
    """One launch. dims: M, N, K."""
    io = options["dtype"]
    variant = {**options, "precision": options["precision"] if io == f32 else None}
    dtypes = {"a": io, "b": io, "o": options["out_dtype"] or io}
    default = {"num_warps": knobs["num_warps"], "stages": {"k": knobs["stages"]}}
    return common.one_launch(
        "matmul", kernels.matmul, dims, knobs, variant, dtypes, backend, schedules, strides, default
    )


def constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why a point of the space is refused."""
    accumulators = knobs["block_m"] * knobs["block_n"] // (knobs["num_warps"] * 32)
    return [f"{accumulators} accumulators a thread do not fit the registers"] if accumulators > 256 else []


def rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """Blocks no larger than the problem asks for. Few rows (a decode step): narrow blocks, deeper in K. Rows that are no
    multiple of 16 bytes are read one element at a time, which takes small steps or too many registers."""
    wide = 64 if options["dtype"] == f32 else 128
    odd = dims["K"] % 8 or dims["N"] % 8
    if dims["M"] <= 64:
        rows = next(n for n in (16, 32, 64) if dims["M"] <= n)
        deep = 32 if odd else 64 if wide == 64 else 128
        return {"block_m": rows, "block_n": 64, "block_k": deep, "group": 1, "num_warps": 4}
    knobs: dict[str, Any] = {"block_m": wide, "block_n": wide if dims["N"] > 64 else 64}
    if options["dtype"] == f32:
        knobs |= {"block_k": 32, "num_warps": 4}
    elif odd:
        knobs["block_k"] = 32
    row_blocks = -(-dims["M"] // knobs["block_m"])
    knobs["group"] = next(n for n in (8, 4, 2, 1) if n <= row_blocks)
    return knobs


def inputs(dims: Mapping[str, int], options: Mapping[str, Any], device: Any, seed: int) -> dict[str, Any]:
    """Normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    io = to_torch(options["dtype"])
    a = torch.randn(dims["M"], dims["K"], generator=generator).to(device, io)
    b = torch.randn(dims["K"], dims["N"], generator=generator).to(device, io)
    out = options["out_dtype"]
    return {"a": a, "b": b, "precision": options["precision"], "out_dtype": None if out is None else to_torch(out)}


def call(**arguments: Any) -> dict[str, Any]:
    """The op's torch function with its output by name."""
    from k3dsl.ops.matmul.api import matmul

    return {"o": matmul(**arguments)}


def flops(plan: Plan, dims: Mapping[str, int]) -> dict[str, int]:
    """Of the one product."""
    d = common.known_dims(plan, dims)
    return {"matmul": 2 * d["M"] * d["N"] * d["K"]}


def limits(options: Mapping[str, Any]) -> dict[str, float]:
    """Largest relative RMS error: the rounding of the output, and of the factors in tf32."""
    if options["dtype"] == f32:
        return {"o": 1e-3 if options["precision"] == "tf32" else 1e-5}
    return {"o": {bf16: 3e-3, f16: 4e-4, f32: 1e-5}[options["out_dtype"] or options["dtype"]]}


MATMUL = Op(
    name="matmul",
    doc="Matrix product with fp32 accumulation, any M, N and K.",
    dims=(
        Dim("M", 4096, "rows of a"),
        Dim("N", 4096, "columns of b"),
        Dim("K", 4096, "columns of a, rows of b"),
    ),
    knobs=(
        Knob("block_m", (16, 32, 64, 128, 256), 128, "rows a program computes"),
        Knob("block_n", (16, 32, 64, 128, 256), 128, "columns a program computes"),
        Knob("block_k", (16, 32, 64, 128), 64, "columns of a in one step"),
        Knob("group", (1, 2, 4, 8, 16), 8, "row blocks that run together, for the L2 cache"),
        Knob("num_warps", (2, 4, 8, 16), 8, "warps a program"),
        Knob("stages", (1, 2, 3, 4, 5), 3, "steps of K in flight"),
    ),
    options=(
        Option("dtype", (bf16, f16, f32), bf16, "of a and b"),
        Option("out_dtype", (None, bf16, f16, f32), None, "of o; None: as a and b"),
        Option("precision", ("ieee", "tf32x3", "tf32"), "ieee", "how fp32 products are formed"),
    ),
    plan=plan,
    launches=("matmul",),
    inputs=inputs,
    call=call,
    reference=lambda **x: {"o": reference.matmul(x["a"], x["b"])},
    peers=lambda: {"torch": lambda **x: {"o": x["a"] @ x["b"]}},
    limits=limits,
    flops=flops,
    constraints=constraints,
    heuristic=rule,
    prepare_dims=common.narrow,
    cpu_dims={"M": 256, "N": 256, "K": 256},
    seeds=(
        {"block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "stages": 3},
        {"block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 4, "stages": 4},
        {"block_m": 64, "block_n": 256, "block_k": 64, "num_warps": 4, "stages": 4},
    ),
)
