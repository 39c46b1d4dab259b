"""Makes a built Triton kernel callable on a GPU of this machine, through Triton's own launcher where that is at hand."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

from k3dsl.backends.base import Artifact
from k3dsl.backends.common import Launcher, artifact_key
from k3dsl.backends.triton.build import compiled_kernel, triton_cache
from k3dsl.errors import LaunchError, ResourceError

_MAX_PROGRAMS = 2**31 - 1
_INTEGER_BITS = {"i8": 8, "i16": 16, "i32": 32}


# One launcher an artifact and device, kept for good: from version 3.8 on Triton unloads the machine code of a kernel that
# is no longer referenced, though it may still be running or be part of a CUDA graph.
_launchers: dict[tuple[str, int], TritonLauncher] = {}


def load(artifact: Artifact, device_index: int) -> Launcher:
    """A launcher of the artifact on device `device_index` as torch counts them.

    A kernel that this process built goes through Triton's launcher, so a launch costs what Triton's own does, or less.
    One that came from elsewhere (another process, a bundle) goes through the GPU's driver, without Triton.

    Raises LaunchError when the device refuses the machine code, ResourceError when it lacks the shared memory.
    """
    key = (artifact_key(artifact), device_index)
    if (known := _launchers.get(key)) is not None:
        return known
    compiled = compiled_kernel(artifact)
    if compiled is None:
        # the driver path stands higher in the house than this one; nothing else here needs it
        from k3dsl.backends.driver import DriverKernel

        return DriverKernel.from_artifact(artifact, device_index)
    launcher = _launchers[key] = TritonLauncher(artifact, compiled, device_index)
    return launcher


class TritonLauncher:
    """Launches through the launch stub that Triton made for the kernel's signature. See Launcher."""

    def __init__(self, artifact: Artifact, compiled: Any, device_index: int) -> None:
        import torch
        from triton import knobs
        from triton.runtime.errors import OutOfResources

        self._name = artifact.source.name
        self._arg_count = len(artifact.source.args)
        self._limits = [
            (index, arg.name, 1 << (_INTEGER_BITS[arg.dtype] - 1))
            for index, arg in enumerate(artifact.source.args)
            if arg.kind != "pointer" and arg.dtype in _INTEGER_BITS
        ]
        self._device = device_index
        self._hooks = knobs.runtime
        # Triton's kernel holds the function handle of one device: the original stays unloaded, a pattern for others
        self._kernel = copy.copy(compiled)
        self._scratch_bytes = artifact.launch["global_scratch_bytes"]
        try:
            with torch.cuda.device(device_index), triton_cache():
                self._run = self._kernel.run  # loads the machine code
        except OutOfResources as error:
            raise ResourceError(f"{self._name} on device {device_index}: {error}") from error
        except Exception as error:
            raise LaunchError(
                f"{self._name} cannot be loaded on device {device_index}: {error}",
                fix=f"it was built for {artifact.target}; build it for this machine's GPU",
            ) from error
        self._function = self._kernel.function
        self._packed = self._kernel.packed_metadata
        # not Triton's own: a driver object made before torch was imported knows only the default stream
        self._current_device = torch.cuda.current_device
        self._current_stream = torch._C._cuda_getCurrentRawStream

    def fixed(self, args: Sequence[Any]) -> TritonLauncher:
        """Itself: it takes addresses as they are."""
        return self

    def __call__(self, grid: tuple[int, int, int], args: Sequence[Any], stream: int | None = None) -> None:
        """See Launcher."""
        x, y, z = grid
        programs = x * y * z
        if programs == 0:
            return
        # Triton multiplies in 32 bits and launches nothing, silently, when the product comes out negative
        if not 0 < programs <= _MAX_PROGRAMS:
            raise LaunchError(f"{self._name}: a grid of {x} x {y} x {z} is not between 1 and {_MAX_PROGRAMS} programs")
        if len(args) != self._arg_count:
            raise LaunchError(f"{self._name} takes {self._arg_count} arguments, not {len(args)}")
        if self._current_device() != self._device:
            import torch

            with torch.cuda.device(self._device):
                return self(grid, args, stream)
        if stream is None:
            stream = self._current_stream(self._device)
        enter, leave = self._hooks.launch_enter_hook, self._hooks.launch_exit_hook
        metadata = None
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler is listening
            metadata = self._kernel.launch_metadata(grid, stream, *args)
        else:
            enter = leave = None
        try:
            for index, name, limit in self._limits:  # Triton 3.9 drops the upper bits, silently
                if not -limit <= args[index] < limit:
                    raise OverflowError(f"the argument {name} is {args[index]}, which does not fit its dtype")
            if self._scratch_bytes:
                with _scratch_allocator(self._device):
                    self._run(x, y, z, stream, self._function, self._packed, metadata, enter, leave, *args)
            else:
                self._run(x, y, z, stream, self._function, self._packed, metadata, enter, leave, *args)
        except Exception as error:
            raise LaunchError(f"{self._name} with a grid of {x} x {y} x {z}: {error}") from error


@contextlib.contextmanager
def _scratch_allocator(device: int) -> Iterator[None]:
    """Lets Triton's launcher take the kernel's scratch from torch, whatever allocator the user gave to Triton."""
    from triton.runtime import _allocation

    from k3dsl.backends.driver import scratch_buffer

    token = _allocation._allocator.set(lambda size, _, stream: scratch_buffer(size, device, stream or 0))
    try:
        yield
    finally:
        _allocation._allocator.reset(token)
