"""A compiled plan: builds each launch for its backend once, then runs it on tensors with little overhead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from k3dsl import settings
from k3dsl.backends.base import MAX_GRID_YZ, Artifact, Source
from k3dsl.backends.common import Launcher
from k3dsl.backends.torch import dtypes as torch_dtypes
from k3dsl.errors import ArgumentError, LaunchError, ResourceError
from k3dsl.ir.graph import Kernel
from k3dsl.ir.identity import kernel_hash
from k3dsl.runtime import backends, lock
from k3dsl.runtime.backends import BACKENDS as BACKENDS
from k3dsl.runtime.extents import expression
from k3dsl.runtime.lanes import Lanes
from k3dsl.runtime.plan import Launch, Plan
from k3dsl.targets import Target, get_target

_artifacts: dict[tuple[str, str, str, str], Artifact] = {}

Allocate = Callable[[str, tuple[int, ...], torch.dtype, torch.device], torch.Tensor]
"""allocate(name, shape, dtype, device): memory for an output or scratch buffer of that name; what it holds is nobody's."""


def lower(launch: Launch, target: Target) -> Source:
    """The generated source of one launch."""
    return _dumped(backends.lower(launch.backend, launch.kernel, launch.schedule, target), target)


def _dumped(source: Source, target: Target) -> Source:
    """The source, also written to the folder of K3DSL_DUMP if there is one."""
    folder = settings.get("K3DSL_DUMP")
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            backend = "" if source.backend == "triton" else f"-{source.backend}"
            path = folder / f"{source.name}-{target.name}-{source.ir_hash[:16]}{backend}.py"
            path.write_text(source.text, encoding="utf-8")
        except OSError as error:
            raise ArgumentError(
                f"{folder} cannot be written: {error.strerror}", fix="set K3DSL_DUMP to another folder, or unset it"
            ) from None
    return source


def build(launch: Launch, target: Target) -> Artifact:
    """The machine code of one launch; built once a process for equal kernels, schedules and targets.

    Raises LockedError for one that was not built before k3dsl.lock(), ResourceError for one that the target cannot hold.
    """
    if reason := too_large(launch, target):
        raise ResourceError(f"{launch.label}: {reason}", fix="use smaller tiles")
    key = (launch.backend, kernel_hash(launch.kernel), repr(launch.schedule), target.name)
    if key not in _artifacts:
        lock.check(f"compiling kernel {launch.kernel.name} for {target.name}", launch.kernel.name)
        _artifacts[key] = backends.build(lower(launch, target), target)
    return _artifacts[key]


def too_large(launch: Launch, target: Target) -> str | None:
    """Why no schedule makes the launch fit the target's shared memory, where that is known before it is compiled."""
    if target.vendor != "nvidia" or launch.least_shared <= target.shared_per_block:
        return None
    return f"needs {launch.least_shared} bytes of shared memory per program, and {target.name} has {target.shared_per_block}"


def fitted(launch: Launch, target: Target) -> tuple[Launch, Artifact]:
    """The launch with the first of its schedules that the target's shared memory holds, and its machine code."""
    try:
        return launch, build(launch, target)
    except ResourceError:
        for schedule in launch.smaller:
            candidate = replace(launch, schedule=schedule)
            with suppress(ResourceError):
                return candidate, build(candidate, target)
        raise


RunWith = Callable[..., None]
"""run(tensors, dims, scalars, stream=None)"""


class BoundLaunch:
    """One launch made ready: how to get each argument, and what to call."""

    def __init__(self, launch: Launch, target: Target | None, device: torch.device) -> None:
        self.launch = launch
        self.kernel: Kernel = launch.kernel
        self.grid = expression(self.kernel.grid)
        self.names = [(t.name, launch.buffer_of(t.name)) for t in self.kernel.tensors]
        self.artifact: Artifact | None = None
        self.dim_names = [s.name for s in self.kernel.dims]
        if launch.backend == "torch":
            from k3dsl.backends.torch.evaluate import Evaluator

            self.evaluator = Evaluator(self.kernel, check=bool(settings.get("K3DSL_CHECK")))
            self.run_with: RunWith = self._run_torch
            return
        if target is None:
            raise ArgumentError("a generated backend needs a GPU target", fix="pass target='sm_90a' or the like")
        self.launch, self.artifact = fitted(launch, target)
        self.launcher = backends.load(self.artifact, device.index or 0)
        self.getters: list[tuple[int, str]] = []
        for arg in self.artifact.source.args:
            if arg.kind == "pointer":
                self.getters.append((0, launch.buffer_of(arg.source)))
            elif arg.kind == "scalar":
                self.getters.append((2, arg.source))
            else:
                self.getters.append((1, arg.name))
        self.run_with = self._run_gpu

    def run(self, tensors: Mapping[str, Any], dims: Mapping[str, int], stream: int | None = None) -> None:
        """Launches with the scalars that the plan gives, on torch's current stream or a raw one."""
        self.run_with(tensors, dims, self.launch.scalars, stream)

    def _run_torch(
        self,
        tensors: Mapping[str, torch.Tensor],
        dims: Mapping[str, int],
        scalars: Mapping[str, float],
        stream: int | None = None,
    ) -> None:
        self.evaluator(
            {parameter: tensors[buffer] for parameter, buffer in self.names},
            {name: dims[name] for name in self.dim_names},
            dict(scalars),
        )

    def _run_gpu(
        self,
        tensors: Mapping[str, torch.Tensor],
        dims: Mapping[str, int],
        scalars: Mapping[str, float],
        stream: int | None = None,
    ) -> None:
        args = [tensors[n] if kind == 0 else dims[n] if kind == 1 else scalars[n] for kind, n in self.getters]
        x, y, z = (*self.grid(dims), 1, 1)[:3]
        if y > MAX_GRID_YZ or z > MAX_GRID_YZ:
            raise LaunchError(
                f"kernel {self.kernel.name}: a grid of {x} x {y} x {z} programs; the second and third axis have at most "
                f"{MAX_GRID_YZ}",
                fix="split the call (a sequence: carry its state), or use larger tiles",
            )
        self.launcher((x, y, z), args, stream)

    def fixed(
        self, dims: Mapping[str, int]
    ) -> tuple[Launcher, tuple[int, int, int], list[Any], list[tuple[int, str]]] | None:
        """The launch for these dims, whatever the tensors: launcher, grid, arguments, and where among them the address of
        which buffer belongs. None for one that takes tensors, not addresses."""
        if self.artifact is None:
            return None
        args = [0 if kind == 0 else dims[n] if kind == 1 else self.launch.scalars[n] for kind, n in self.getters]
        launcher = self.launcher.fixed(args)
        if launcher is None:
            return None
        x, y, z = (*self.grid(dims), 1, 1)[:3]
        return launcher, (x, y, z), args, [(i, n) for i, (kind, n) in enumerate(self.getters) if kind == 0]


@dataclass(frozen=True)
class Call:
    """One call of an executable as it happened: every tensor by buffer name, scratch included, and the runtime dims."""

    executable: Executable
    tensors: Mapping[str, torch.Tensor]
    dims: Mapping[str, int]


_watchers: list[Callable[[Call], None]] = []


@contextmanager
def watching(seen: Callable[[Call], None]) -> Iterator[None]:
    """While active, every call of an executable in this process is handed to `seen` after it ran."""
    _watchers.append(seen)
    try:
        yield
    finally:
        _watchers[:] = [known for known in _watchers if known is not seen]


@contextmanager
def recording() -> Iterator[list[Call]]:
    """While active, every call of an executable in this process is appended to the list; for timing launch by launch."""
    calls: list[Call] = []
    with watching(calls.append):
        yield calls


_note: ContextVar[Callable[[Call], None] | None] = ContextVar("k3dsl_note", default=None)


@contextmanager
def noting(seen: Callable[[Call], None]) -> Iterator[None]:
    """As `watching`, for calls of this context (thread) only."""
    token = _note.set(seen)
    try:
        yield
    finally:
        _note.reset(token)


def _empty(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


_allocate: Allocate = _empty


@contextmanager
def allocating(allocate: Allocate) -> Iterator[None]:
    """While active, every output and scratch buffer that an executable makes in this process comes from `allocate`."""
    global _allocate
    before, _allocate = _allocate, allocate
    try:
        yield
    finally:
        _allocate = before


def observed() -> bool:
    """Whether somebody watches calls, or allocates for them."""
    return bool(_watchers) or _allocate is not _empty


class Executable:
    """A plan on one device. Call it with the caller's tensors by buffer name and the runtime dims.

    Scratch and outputs that are not given are allocated on the device; outputs come back by name. launched: False builds and
    runs nothing; a call is handed to those that watch, and its outputs hold anything.
    """

    def __init__(
        self, plan: Plan, target: Target | str | None, device: torch.device | str, *, launched: bool = True
    ) -> None:
        plan.check()
        self.plan = plan
        self.device = torch.device(device)
        self.target = get_target(target) if isinstance(target, str) else target
        self.launched = launched
        launches = plan.launches if launched else ()
        with lock.about(plan.op, plan.dims):
            self.launches = [BoundLaunch(launch, self.target, self.device) for launch in launches]
        self.made = [
            (b.name, expression(b.shape), torch_dtypes.to_torch(b.dtype))
            for b in plan.buffers.values()
            if b.role in ("scratch", "out")
        ]
        self.outputs = [b.name for b in plan.buffers.values() if b.role in ("out", "inout")]
        order = plan.order()
        self.lanes = Lanes(order)
        self._steps = [(step.launch, tuple(step.dims), expression(tuple(step.dims.values()))) for step in order]

    def steps(self, dims: Mapping[str, int]) -> list[tuple[BoundLaunch, Mapping[str, int]]]:
        """What a call runs, in order: launches, and the dims that each is given."""
        return [
            (self.launches[number], {**dims, **dict(zip(names, values(dims), strict=True))} if names else dims)
            for number, names, values in self._steps
        ]

    def run(self, tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int]) -> None:
        """Runs every step on tensors that are all there, scratch included."""
        steps = self.steps(dims)
        if self.lanes.several and self.device.type == "cuda":
            self.lanes.run(self.device, [partial(launch.run, tensors, own) for launch, own in steps])
            return
        for launch, own in steps:
            launch.run(tensors, own)

    def run_alone(self, launch: BoundLaunch, tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int]) -> None:
        """Runs the steps of one launch, one after the other, on the current stream."""
        for bound, own in self.steps(dims):
            if bound is launch:
                bound.run(tensors, own)

    def __call__(self, tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Runs every step on the current stream and lanes that join it. No check of shapes: the op's own function did that."""
        held = dict(tensors)
        for name, shape, dtype in self.made:
            if name not in held:
                held[name] = _allocate(name, shape(dims), dtype, self.device)
                if not self.launched and not dtype.is_floating_point:
                    held[name].zero_()  # an index that somebody follows
        if self.launched:
            self.run(held, dims)
        for seen in _watchers:
            seen(Call(self, held, dict(dims)))
        if (note := _note.get()) is not None:
            note(Call(self, held, dict(dims)))
        return {name: held[name] for name in self.outputs}
