"""The segment_sum op for the registry: dims, options, knobs, and a rule for shapes that nobody tuned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from k3dsl.backends.torch.dtypes import to_torch
from k3dsl.ir.types import bf16, f16, f32, i32, i64
from k3dsl.ops import common
from k3dsl.ops.segment_sum import kernels, reference
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
    """One launch. dims: T rows, N segments, D columns."""
    io = options["dtype"]
    dtypes = {"values": io, "cu_seqlens": options["cu_dtype"], "out": options["out_dtype"] or io}
    default = {"num_warps": knobs["num_warps"], "stages": {"rows": knobs["stages"]}}
    # many small programs hide the memory's latency better than a warp group that copies for one large one
    own = {"threads": max(128, 32 * knobs["num_warps"]), "stages": {"rows": 1}}
    return common.one_launch(
        "segment_sum", kernels.segment_sum, dims, knobs, options, dtypes, backend, schedules, strides, default, own
    )


def rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """Columns no wider than there are."""
    return {"block_d": next((n for n in (16, 32, 64) if dims["D"] <= n), 128)}


def inputs(dims: Mapping[str, int], options: Mapping[str, Any], device: Any, seed: int) -> dict[str, Any]:
    """Normal numbers in segments of random lengths, some of them empty."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(dims["T"], dims["D"], generator=generator).to(device, to_torch(options["dtype"]))
    cuts = torch.randint(0, dims["T"] + 1, (dims["N"] - 1,), generator=generator).sort().values
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([dims["T"]])])
    out = options["out_dtype"]
    return {
        "values": values,
        "cu_seqlens": offsets.to(device, to_torch(options["cu_dtype"])),
        "out_dtype": None if out is None else to_torch(out),
    }


def call(**arguments: Any) -> dict[str, Any]:
    """The op's torch function with its output by name."""
    from k3dsl.ops.segment_sum.api import segment_sum

    return {"out": segment_sum(**arguments)}


def _torch(**x: Any) -> dict[str, Any]:
    return {"out": torch.segment_reduce(x["values"], "sum", offsets=x["cu_seqlens"].long(), axis=0)}


def limits(options: Mapping[str, Any]) -> dict[str, float]:
    """Largest relative RMS error: the rounding of the output."""
    return {"out": {bf16: 3e-3, f16: 4e-4, f32: 2e-6}[options["out_dtype"] or options["dtype"]]}


SEGMENT_SUM = Op(
    name="segment_sum",
    doc="Sums of ragged segments of rows.",
    dims=(Dim("T", 65536, "rows"), Dim("N", 256, "segments"), Dim("D", 1024, "columns")),
    knobs=(
        Knob("block_t", (1, 2, 4, 8, 16, 32, 64), 32, "rows in one step"),
        Knob("block_d", (16, 32, 64, 128, 256, 512), 128, "columns a program"),
        Knob("num_warps", (1, 2, 4, 8), 4, "warps a program"),
        Knob("stages", (1, 2, 3, 4), 2, "steps in flight"),
    ),
    options=(
        Option("dtype", (bf16, f16, f32), bf16, "of the values"),
        Option("out_dtype", (None, bf16, f16, f32), None, "of the sums; None: as the values"),
        Option("cu_dtype", (i32, i64), i32, "of cu_seqlens"),
    ),
    plan=plan,
    launches=("segment_sum",),
    inputs=inputs,
    call=call,
    reference=lambda **x: {"out": reference.segment_sum(x["values"], x["cu_seqlens"])},
    peers=lambda: {"torch": _torch},
    limits=limits,
    heuristic=rule,
    prepare_dims=common.narrow,
    cpu_dims={"T": 4096, "N": 32, "D": 256},
)
