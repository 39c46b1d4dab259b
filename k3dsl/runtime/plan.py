"""A plan: the launches that make up one call of an op, and the buffers between them. Pure data until it is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from k3dsl.errors import ArgumentError
from k3dsl.ir.graph import Kernel
from k3dsl.ir.symbols import Expr, Sym
from k3dsl.ir.types import DType


@dataclass(frozen=True)
class Buffer:
    """A tensor of a plan. role: 'in', 'out', 'inout' (the caller's) or 'scratch' (made for the call).

    strides: for a caller's tensor that is not contiguous, its strides in elements.
    """

    name: str
    dtype: DType
    shape: tuple[Expr, ...]
    role: str = "in"
    strides: tuple[Expr, ...] | None = None


@dataclass(frozen=True)
class Launch:
    """One kernel launch. args: buffer name by kernel parameter, where they differ. schedule: as its backend defines it.

    smaller: schedules to take in turn where a default one needs more shared memory than the target has. least_shared: bytes
    that a program is known to need on any NVIDIA GPU, so that none compiles for minutes what it cannot hold.
    """

    label: str
    kernel: Kernel
    backend: str
    schedule: Any
    args: Mapping[str, str] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    smaller: tuple[Any, ...] = ()
    least_shared: int = 0

    def buffer_of(self, parameter: str) -> str:
        return self.args.get(parameter, parameter)


@dataclass(frozen=True)
class Step:
    """One run of a launch. launch: its number in the plan. dims: of its kernel's dims those that change from step to step, as
    expressions of the call's.

    lane: steps of one lane run one after the other, lanes beside each other. Lane 0 is the caller's stream; of the work that
    waits, that of lanes under 0 is taken up first. after: numbers of earlier steps that must have ended, in any lane.
    """

    launch: int
    dims: Mapping[str, Expr] = field(default_factory=dict)
    lane: int = 0
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """All launches of one op call, in order. dims: static values and runtime symbols. steps: how the launches are run; when
    there are none, each once."""

    op: str
    dims: Mapping[str, int | Sym | Expr]
    buffers: Mapping[str, Buffer]
    launches: tuple[Launch, ...]
    knobs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()

    def symbols(self) -> dict[str, Sym]:
        """The runtime dims that a call must give or that its tensors' shapes tell."""
        found = {s.name: s for launch in self.launches for s in launch.kernel.dims}
        for step in self.steps:
            found = {n: s for n, s in found.items() if n not in step.dims}
        for step in self.steps:
            for e in step.dims.values():
                found.update(e.symbols())
        for b in self.buffers.values():
            for e in (*b.shape, *(b.strides or ())):
                found.update(e.symbols())
        return found

    def order(self) -> tuple[Step, ...]:
        """The steps of a call."""
        return self.steps or tuple(Step(n) for n in range(len(self.launches)))

    def outputs(self) -> list[Buffer]:
        return [b for b in self.buffers.values() if b.role in ("out", "inout")]

    def check(self) -> None:
        """Raises ArgumentError when a launch uses a buffer that is missing or of another dtype or shape, and when steps leave
        out a launch, give only some of its runs a dim, or wait for a step that has not begun."""
        order = self.order()
        for number, launch in enumerate(self.launches):
            runs = [step for step in order if step.launch == number]
            if not runs:
                raise ArgumentError(f"{self.op}: no step runs launch {launch.label}")
            if any(set(step.dims) != set(runs[0].dims) for step in runs):
                raise ArgumentError(f"{self.op}: the steps of launch {launch.label} give it different dims")
        for number, step in enumerate(order):
            if any(not 0 <= n < number for n in step.after):
                raise ArgumentError(f"{self.op}: step {number} waits for {list(step.after)}, which come no earlier")
        for launch in self.launches:
            for tensor in launch.kernel.tensors:
                name = launch.buffer_of(tensor.name)
                buffer = self.buffers.get(name)
                if buffer is None:
                    raise ArgumentError(f"{self.op}: launch {launch.label} needs buffer {name!r}, which the plan lacks")
                if buffer.dtype != tensor.dtype or len(buffer.shape) != len(tensor.shape):
                    raise ArgumentError(
                        f"{self.op}: launch {launch.label} takes {tensor.name} as {tensor.dtype} of rank {tensor.rank}, "
                        f"buffer {name} is {buffer.dtype} of rank {len(buffer.shape)}"
                    )


def buffers_of(kernels: list[Kernel], scratch: tuple[str, ...] = ()) -> dict[str, Buffer]:
    """Buffers for kernels whose parameters are named alike: a tensor written by one and read by another is scratch when
    `scratch` names it; else its role is the widest of its uses."""
    out: dict[str, Buffer] = {}
    for k in kernels:
        for t in k.tensors:
            role = "scratch" if t.name in scratch else t.role
            known = out.get(t.name)
            if known is not None and known.role != role:
                role = "inout" if "inout" in (role, known.role) else "out"
            out[t.name] = Buffer(t.name, t.dtype, t.shape, role, t.strides)
    return out
