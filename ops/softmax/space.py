"""The softmax op for the registry: dims, options, knobs with their constraints, and a rule for shapes that nobody tuned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from k3dsl.backends.torch.dtypes import to_torch
from k3dsl.ir.symbols import Sym
from k3dsl.ir.types import bf16, f16, f32
from k3dsl.ops import common
from k3dsl.ops.softmax import kernels, reference
from k3dsl.runtime.op import Dim, Knob, Op, Option
from k3dsl.runtime.plan import Plan

BLOCKS = tuple(1 << n for n in range(4, 15))
WHOLE = 8192
"""Elements of a row up to which the rule holds it whole."""


def plan(
    dims: common.Settings,
    knobs: common.Settings,
    options: common.Settings,
    backend: str,
    schedules: common.Schedules = None,
    strides: common.Strides = None,
) -> Plan:
    """One launch. dims: R rows of N elements."""
    d = dict(dims)
    if knobs["passes"] == 1 and isinstance(d["N"], Sym):
        d["N"] = replace(d["N"], max=knobs["block"])  # what the code counts on
    dtypes = {"x": options["dtype"], "o": options["out_dtype"] or options["dtype"]}
    default: dict[str, Any] = {"num_warps": knobs["num_warps"]}
    if knobs["passes"] == 2:
        default["stages"] = {"reduce": knobs["stages"], "write": knobs["stages"]}
    return common.one_launch(
        "softmax", kernels.softmax, d, knobs, options, dtypes, backend, schedules, strides, default
    )


def constraints(dims: Mapping[str, Any], knobs: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Why a point of the space is refused."""
    reasons = []
    if knobs["passes"] == 1 and isinstance(dims["N"], int) and dims["N"] > knobs["block"]:
        reasons.append(f"one pass needs a block of at least N = {dims['N']}, got {knobs['block']}")
    if knobs["rows"] * knobs["block"] > 1 << 16:
        reasons.append(f"{knobs['rows']} rows of {knobs['block']} elements do not fit a program's registers")
    return reasons


def rule(options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """Rows that fit are held whole, several a program when they are short."""
    if dims["N"] > WHOLE:
        return {"passes": 2, "block": 4096, "rows": 1, "num_warps": 8}
    block = next(n for n in BLOCKS if dims["N"] <= n)
    rows = max(1, min(32, 1024 // block))
    return {"passes": 1, "block": block, "rows": rows, "num_warps": 8 if block >= 4096 else 4}


def inputs(dims: Mapping[str, int], options: Mapping[str, Any], device: Any, seed: int) -> dict[str, Any]:
    """Normal numbers, wide enough for a clear maximum."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(dims["R"], dims["N"], generator=generator) * 4
    out = options["out_dtype"]
    return {"x": x.to(device, to_torch(options["dtype"])), "dtype": None if out is None else to_torch(out)}


def call(**arguments: Any) -> dict[str, Any]:
    """The op's torch function with its output by name."""
    from k3dsl.ops.softmax.api import softmax

    return {"o": softmax(**arguments)}


def limits(options: Mapping[str, Any]) -> dict[str, float]:
    """Largest relative RMS error: the rounding of the output."""
    return {"o": {bf16: 4e-3, f16: 5e-4, f32: 2e-6}[options["out_dtype"] or options["dtype"]]}


SOFTMAX = Op(
    name="softmax",
    doc="Softmax over rows of any width.",
    dims=(Dim("R", 8192, "rows"), Dim("N", 4096, "elements of a row")),
    knobs=(
        Knob("passes", (1, 2), 1, "1 holds whole rows, 2 reads them twice"),
        Knob("block", BLOCKS, 4096, "elements of a row held at a time"),
        Knob("rows", (1, 2, 4, 8, 16, 32), 1, "rows a program"),
        Knob("num_warps", (1, 2, 4, 8, 16), 8, "warps a program"),
        Knob("stages", (1, 2, 3, 4), 2, "blocks in flight, with two passes"),
    ),
    options=(
        Option("dtype", (bf16, f16, f32), bf16, "of x"),
        Option("out_dtype", (None, bf16, f16, f32), None, "of o; None: as x"),
    ),
    plan=plan,
    launches=("softmax",),
    inputs=inputs,
    call=call,
    reference=lambda **x: {"o": reference.softmax(x["x"])},
    peers=lambda: {"torch": lambda **x: {"o": torch.softmax(x["x"], -1, dtype=x["dtype"])}},
    limits=limits,
    constraints=constraints,
    heuristic=rule,
    cpu_dims={"R": 512, "N": 1000},
)
