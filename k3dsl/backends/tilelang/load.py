"""Makes a built TileLang kernel callable on a GPU of this machine: through TileLang's host code, or the driver alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from k3dsl.backends.base import Artifact
from k3dsl.backends.common import Launcher, artifact_key, write_module
from k3dsl.backends.driver import torch_stream
from k3dsl.backends.host_call import FixedCall, HostCallKernel
from k3dsl.backends.tilelang.build import PASS_CONFIGS, Lowered, lock, lower, lowered_kernel, require_tilelang
from k3dsl.errors import LaunchError

_COMPILE_CALLBACK = "tilelang_callback_cuda_compile"

# One launcher an artifact and device, kept for good: machine code that may be part of a CUDA graph must stay loaded.
_launchers: dict[tuple[str, int], Launcher] = {}


def load(artifact: Artifact, device_index: int) -> Launcher:
    """A launcher of the artifact on device `device_index` as torch counts them.

    It goes through the GPU's driver, without TileLang, whether this process built it or it came from the cache on disk, so that
    the same calls are refused (TileLang's own host code refuses strides of 0). Where the driver alone cannot launch it, it
    goes through the host code that TileLang generated, called through tvm-ffi; one that came from elsewhere is lowered again
    for that.

    Raises LaunchError when the artifact is CUDA source only.
    """
    key = (artifact_key(artifact), device_index)
    known = _launchers.get(key)
    if known is None:
        known = _launchers[key] = _launcher(artifact, device_index)
    return known


def _launcher(artifact: Artifact, device_index: int) -> Launcher:
    if artifact.format != "cubin":
        raise LaunchError(
            f"{artifact.source.name}: there is only CUDA source, no machine code", fix=artifact.launch["needs"]
        )
    if artifact.launch.get("host_call") is not None:
        return HostCallKernel.from_artifact(artifact, device_index)
    lowered = lowered_kernel(artifact)
    if lowered is None:
        require_tilelang(artifact.source.name)
        with lock:
            configs = {**PASS_CONFIGS, **artifact.source.options.get("pass_configs", {})}
            lowered = lower(artifact.source, artifact.target, write_module(artifact.source), configs)
    return TileLangLauncher(artifact, lowered, device_index)


def host_function(artifact: Artifact, lowered: Lowered) -> Any:
    """TileLang's host function of the kernel, with the artifact's machine code in it. No GPU is asked."""
    import importlib

    import tvm_ffi
    from tilelang import tvm

    engine = importlib.import_module("tilelang.engine.lower")
    original = tvm_ffi.get_global_func(_COMPILE_CALLBACK)
    context, target = lowered.context, lowered.context.target
    with lock:
        # TileLang would call nvcc here; the machine code is there already
        tvm_ffi.register_global_func(_COMPILE_CALLBACK, lambda *_: bytearray(artifact.binary), override=True)
        try:
            with target, tvm.transform.PassContext(opt_level=3):
                device = engine.device_codegen(lowered.device_module, context)
                host = engine.host_codegen(lowered.host_module, context)
                host.import_module(device)
        finally:
            tvm_ffi.register_global_func(_COMPILE_CALLBACK, original, override=True)
        return tvm.runtime.Executable(host).jit()["main"]


class TileLangLauncher:
    """Launches through the host function that TileLang generated, called through tvm-ffi. See common.Launcher.

    tvm-ffi takes torch's current stream along with the first tensor, whatever stream was set for it by its own means.
    The host function computes the grid.
    """

    def __init__(self, artifact: Artifact, lowered: Lowered, device_index: int) -> None:
        self._name = artifact.source.name
        self._args = artifact.source.args
        self._device = device_index
        try:
            self._run = host_function(artifact, lowered)
        except Exception as error:
            raise LaunchError(f"{self._name}: TileLang's host code does not build: {error}") from error

    def __call__(self, grid: tuple[int, int, int], args: Sequence[Any], stream: int | None = None) -> None:
        """See common.Launcher. Takes no addresses in place of tensors."""
        x, y, z = grid
        if x == 0 or y == 0 or z == 0:
            return
        if len(args) != len(self._args):
            raise LaunchError(f"{self._name} takes {len(self._args)} arguments, not {len(args)}")
        try:
            if stream is None:
                self._run(*args)
            else:
                with torch_stream(stream, self._device):
                    self._run(*args)
        except Exception as error:
            raise LaunchError(f"{self._name}: {error}") from error

    def fixed(self, args: Sequence[Any]) -> FixedCall | None:
        """None: it takes tensors."""
        return None
