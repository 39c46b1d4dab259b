"""Inputs for candidates: those at a sweep's own dims drawn once and copied, and the calls that shapes alone make."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from k3dsl.runtime.dispatch import planning
from k3dsl.runtime.executable import Call
from k3dsl.runtime.op import Op, defaults_only, forced
from k3dsl.runtime.sketch import sketched
from k3dsl.targets import Target

KEEP_ABOVE_S = 0.5
"""Inputs that are drawn sooner are drawn again; many ops draw on the GPU itself, in no time."""


class Drawn:
    """What an op's `inputs` gave last, in host memory: a candidate that writes astray on a GPU cannot reach it there."""

    def __init__(self, keep_above_s: float = KEEP_ABOVE_S) -> None:
        self.keep_above_s = keep_above_s
        self._key: Any = None
        self._kept: Mapping[str, Any] = {}

    def get(
        self, op: Op, dims: Mapping[str, Any], options: Mapping[str, Any], device: torch.device, seed: int
    ) -> dict[str, Any]:
        """The op's inputs for the device; nothing of them is anybody else's."""
        assert op.inputs is not None
        key = (
            op.name,
            repr(sorted(dims.items())),
            repr(sorted(options.items(), key=lambda o: o[0])),
            str(device),
            seed,
        )
        if key == self._key:
            return _all_moved(self._kept, device)
        self._key, self._kept = None, {}  # before the next are made: they are large
        start = time.perf_counter()
        drawn = op.inputs(dims, options, device, seed)
        if time.perf_counter() - start > self.keep_above_s:
            self._key, self._kept = key, _all_moved(drawn, "cpu")
        return drawn


def _all_moved(tensors: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    copied: dict[int, torch.Tensor] = {}
    return {name: moved(x, device, copied) for name, x in tensors.items()}


def moved(x: Any, device: torch.device | str, copied: dict[int, torch.Tensor]) -> Any:
    """A copy on the device. Tensors that share memory share it there, in the same layout. copied: by address of a storage."""
    if isinstance(x, list | tuple):
        return type(x)(moved(each, device, copied) for each in x)
    if not isinstance(x, torch.Tensor):
        return x
    storage = x.untyped_storage()
    bytes_there = copied.get(storage.data_ptr())
    if bytes_there is None:
        here = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
        bytes_there = copied[storage.data_ptr()] = here.to(device, copy=True)
    there = torch.empty(0, dtype=x.dtype, device=device)
    return there.set_(bytes_there.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def planned_calls(
    op: Op,
    draw: Callable[[], Mapping[str, Any]],
    backend: str,
    settings: Mapping[str, Any],
    target: Target | None = None,
) -> list[Call]:
    """The executables that a call on such inputs would run on a GPU, see dispatch.planning. settings: knobs and schedule
    fields; the op's defaults for the rest, those of the target where it is known."""
    knobs, _, schedules = op.split_settings(settings)
    chosen = forced(op, knobs, schedules) if knobs or schedules else defaults_only(op)
    assert op.call is not None
    with torch.inference_mode(), planning(backend, target) as calls, chosen:
        inputs = sketched(draw)
        # whoever runs it gives it a copy of what it changes
        op.call(**{n: torch.empty_like(x) if n in op.mutates and x is not None else x for n, x in inputs.items()})
    return calls
