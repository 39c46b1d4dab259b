"""Ops that go wrong on purpose, each in a way that its knob `how` names; for tests of the tuner."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch

from k3dsl.errors import BuildError
from k3dsl.ops.softmax.space import SOFTMAX
from k3dsl.runtime import executable
from k3dsl.runtime.op import Case, Knob, Op, Option, forced_for

HOW = (
    "right", "wrong", "racing", "leaking", "hang", "fault", "exit", "partial", "raise", "slow", "spawn", "refused",
    "past the end", "before the start", "beside the input", "into the input", "unbuildable",
)  # fmt: skip
_calls = itertools.count()
_fitted = executable.fitted


def counted(launch: Any, target: Any) -> Any:
    """Builds a launch, and leaves a line about it in a file."""
    with open(os.environ["K3DSL_TEST_LOG"], "a") as file:
        file.write(f"{launch.schedule.num_warps}\n")
    return _fitted(launch, target)


def plan(dims: Any, knobs: Any, options: Any, backend: str, schedules: Any = None, strides: Any = None) -> Any:
    """The kernel is softmax's whatever the knob says; but compiling may go wrong too."""
    compiling = options["compiling"] if backend != "torch" else "right"
    if compiling == "hang":
        time.sleep(3600)
    if compiling == "fault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if compiling == "raise":
        raise KeyError("a bug of the plan")
    if compiling == "counted":
        executable.fitted = counted
    if compiling == "late fault":
        executable.fitted = lambda *_: os.kill(os.getpid(), signal.SIGSEGV)
    own = {n: k.default for n, k in ((k.name, k) for k in SOFTMAX.knobs)}
    return SOFTMAX.plan(dims, own, {"dtype": options["dtype"], "out_dtype": None}, backend, schedules)


def inputs(dims: Any, options: Any, device: Any, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(dims["R"], dims["N"], generator=generator).to(device)}


def call(x: torch.Tensor) -> dict[str, Any]:
    """2 x, or what the knob makes of it."""
    force = forced_for(plan)
    how = force.knobs.get("how", "right") if force is not None else "right"
    out = executable._allocate("o", tuple(x.shape), x.dtype, x.device)  # as an executable makes it
    out.copy_(2 * x)
    if how in ("past the end", "before the start"):
        offset = out.storage_offset() + (out.numel() + 3 if how == "past the end" else -2)
        torch.as_strided(out, (2,), (1,), offset).fill_(7.0)
    elif how == "beside the input":
        torch.as_strided(x, (1,), (1,), x.storage_offset() + x.numel()).fill_(7.0)
    elif how == "into the input":
        x[-1, -1] += 1
    elif how == "unbuildable" and x.shape[0] % 2:  # the ragged dims, not its own
        raise BuildError("no layout was found")
    elif how == "wrong":
        out.mul_(1.001)
    elif how == "racing":
        out[0, 0] *= 1 + 1e-7 * (next(_calls) % 7)
    elif how == "leaking":  # a trace of memory that nobody wrote, too small to be an error, and no NaN
        scratch = executable._allocate("scratch", tuple(x.shape), x.dtype, x.device)
        out += scratch.nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1) * 1e-6
    elif how == "hang":
        time.sleep(3600)
    elif how == "fault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "exit":
        os._exit(3)
    elif how == "partial":
        out = torch.empty_like(x)
        out[:-1] = 2 * x[:-1]
    elif how == "raise":
        raise RuntimeError("no such kernel image")
    elif how == "slow":
        time.sleep(0.05)
    elif how == "spawn":  # a toolchain or a profiler of its own, which hangs with it
        code = "import time; time.sleep(3600)"
        subprocess.Popen([sys.executable, "-c", code, os.environ["K3DSL_TEST_MARK"]])
        time.sleep(3600)
    return {"o": out}


def cases(size: str) -> list[Case]:
    """Three families; the last makes huge numbers."""

    def case(name: str, rows: int, scale: float) -> Case:
        def make(device: Any, seed: int) -> dict[str, Any]:
            return {"x": scale * inputs({"R": rows, "N": 8}, {}, device, seed)["x"]}

        return Case(name, name, make, {"o": 1e-5})

    return [case("mild", 4, 1.0), case("ragged", 3, 1.0), case("extreme", 4, 1e30)]


BAD = Op(
    name="bad",
    doc="2 x, unless told otherwise.",
    dims=(*SOFTMAX.dims,),
    knobs=(Knob("how", HOW, "right", "what goes wrong"),),
    options=(
        Option(
            "compiling",
            ("right", "hang", "fault", "raise", "late fault", "counted"),
            "right",
            "in compiling",
        ),
        SOFTMAX.options[0],
    ),
    plan=plan,
    launches=("softmax",),
    inputs=inputs,
    cases=cases,
    call=call,
    reference=lambda x: {"o": 2 * x.double()},
    limits=lambda options: {"o": 1e-5},
    constraints=lambda dims, knobs, options: ["nobody wants it"] if knobs["how"] == "refused" else [],
)
