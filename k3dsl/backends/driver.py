"""Launches compiled machine code (cubin, hsaco) through the GPU's own driver library, with no compiler installed."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from k3dsl.backends.base import MAX_GRID_YZ, Arg, Artifact
from k3dsl.errors import LaunchError

# How one value of each dtype is packed into a slot of 8 bytes, and its size. bf16 is packed from its bits.
_PACKING = {
    "f64": ("d", 8),
    "f32": ("f4x", 4),
    "f16": ("e6x", 2),
    "bf16": ("H6x", 2),
    "i64": ("q", 8),
    "i32": ("i4x", 4),
    "i16": ("h6x", 2),
    "i8": ("b7x", 1),
    "u8": ("B7x", 1),
    "i1": ("?7x", 1),
}
_ADDRESS = ("Q", 8)
_TENSOR_MAP = ("128s", 128)
_SLOT = 8
_MAX_GRID = (2**31 - 1, MAX_GRID_YZ, MAX_GRID_YZ)


class DriverKernel:
    """One kernel's machine code on one device, launched through libcuda or libamdhip64.

    binary: the file's bytes, of `format` 'cubin' or 'hsaco', in which `entry` is the kernel's symbol. threads and
    shared_bytes (dynamic) are per program. params: size in bytes of each machine parameter; args: what the first of
    them are. At most two addresses may follow: global scratch (global_scratch_bytes per program, allocated by torch at
    each launch) and profile scratch (always null). device: as torch counts. built_for: the target's name, for messages.

    The machine code is loaded at the first launch on the device, and shared by all kernels with equal bytes.

    Raises LaunchError when params do not fit args, and where a kernel needs what this path does not do (clusters).
    """

    def __init__(
        self,
        binary: bytes,
        format: str,
        entry: str,
        threads: int,
        shared_bytes: int,
        params: Sequence[int],
        args: Sequence[Arg],
        *,
        global_scratch_bytes: int = 0,
        num_ctas: int = 1,
        device: int = 0,
        built_for: str = "",
    ) -> None:
        if format not in _DRIVERS:
            raise LaunchError(
                f"{entry}: cannot launch machine code of format {format!r}; {', '.join(_DRIVERS)} can be",
                fix="build it where nvcc is" if format == "cu" else None,
            )
        if num_ctas != 1:
            raise LaunchError(
                f"{entry}: launching clusters of {num_ctas} programs needs Triton", fix="build it with num_ctas=1"
            )
        packing = [_packing(entry, arg) for arg in args]
        _check_params(entry, args, [size for _, size in packing], params, global_scratch_bytes)
        self.entry = entry
        self.device = device
        self._binary = binary
        self._format = format
        self._built_for = built_for
        self._threads = threads
        self._shared_bytes = shared_bytes
        self._scratch_bytes = global_scratch_bytes
        self._args = tuple(args)
        self._convert = [_converter(entry, arg) for arg in args]
        self._pieces = [piece for piece, _ in packing]
        sizes = [struct.calcsize("<" + piece) for piece in self._pieces]
        # The slots past the arguments hold the address of global scratch and null.
        hidden = len(params) - len(args)
        self._struct = struct.Struct("<" + "".join(self._pieces) + "Q" * hidden)
        self._hidden = [0] * hidden
        # The driver copies parameters while it enqueues: one buffer serves every launch, one thread at a time.
        self._buffer = ctypes.create_string_buffer(max(_SLOT, self._struct.size))
        start = ctypes.addressof(self._buffer)
        offsets = list(accumulate([*sizes, *[_SLOT] * hidden], initial=0))[: len(params)]
        self._pointers = (ctypes.c_void_p * max(1, len(params)))(*(start + offset for offset in offsets))
        self._lock = threading.Lock()
        self._loaded: tuple[_Driver, int] | None = None

    @classmethod
    def from_artifact(cls, artifact: Artifact, device: int = 0) -> DriverKernel:
        """The kernel of an artifact, wherever that was built."""
        launch = artifact.launch
        return cls(
            artifact.binary,
            artifact.format,
            artifact.entry,
            launch["threads"],
            launch["shared_bytes"],
            launch["params"],
            artifact.source.args,
            global_scratch_bytes=launch.get("global_scratch_bytes", 0),
            num_ctas=launch.get("num_ctas", 1),
            device=device,
            built_for=artifact.target,
        )

    def fixed(self, args: Sequence[Any]) -> DriverKernel:
        """Itself: it takes addresses as they are. See backends.common.Launcher."""
        return self

    def __call__(self, grid: tuple[int, int, int], args: Sequence[Any], stream: int | None = None) -> None:
        """Enqueues the kernel and returns; safe in a CUDA graph. With no program along some axis, launches nothing.

        args: a tensor on the GPU or an address for each pointer, a number for each other Arg. stream: a raw stream
        handle; None is torch's current stream, or the default stream in a process without torch.

        Raises LaunchError with the driver's own name for what went wrong.
        """
        x, y, z = grid
        if x == 0 or y == 0 or z == 0:
            return
        if not (0 < x <= _MAX_GRID[0] and 0 < y <= _MAX_GRID[1] and 0 < z <= _MAX_GRID[2]):
            raise LaunchError(f"{self.entry}: a grid of {x} x {y} x {z} is out of bounds, which are {_MAX_GRID}")
        if len(args) != len(self._args):
            raise LaunchError(f"{self.entry} takes {len(self._args)} arguments, not {len(args)}")
        values = [convert(value) for convert, value in zip(self._convert, args, strict=True)]
        if stream is None:
            stream = _current_stream(self.device)
        driver, function = self._loaded or self._load()
        hidden = self._hidden
        if self._scratch_bytes:
            # held until the launch is enqueued; after that the stream's order keeps it from being reused too soon
            scratch = scratch_buffer(self._scratch_bytes * x * y * z, self.device, stream)
            hidden = [scratch.data_ptr(), *hidden[1:]]
        with self._lock:
            try:
                self._struct.pack_into(self._buffer, 0, *values, *hidden)
            except struct.error as error:
                raise LaunchError(f"{self.entry}: {self._culprit(values) or error}") from error
            driver.launch(self, function, (x, y, z), self._threads, self._shared_bytes, stream, self._pointers)

    def _load(self) -> tuple[_Driver, int]:
        driver = _driver(self._format)
        self._loaded = driver, driver.function(self, self._binary, self._shared_bytes, self._built_for)
        return self._loaded

    def _culprit(self, values: Sequence[Any]) -> str | None:
        """Which argument the packing refused, and why."""
        for arg, piece, value in zip(self._args, self._pieces, values, strict=True):
            try:
                struct.pack("<" + piece, value)
            except struct.error as error:
                return f"the argument {arg.name} ({arg.dtype}) cannot be {value!r}: {error}"
        return None


def scratch_buffer(size: int, device: int, stream: int) -> Any:
    """A torch tensor of `size` bytes on `device`, whose memory is reused in the order of `stream` (a raw handle)."""
    import torch

    if stream == torch._C._cuda_getCurrentRawStream(device):
        return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))
    with torch_stream(stream, device):
        return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))


def torch_stream(stream: int, device: int) -> Any:
    """A context in which the stream with this raw handle is torch's current one."""
    import torch

    if stream == 0:
        return torch.cuda.stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device))


def _packing(entry: str, arg: Arg) -> tuple[str, int]:
    if arg.kind == "pointer":
        return _ADDRESS
    if arg.kind == "tensor_map":
        return _TENSOR_MAP
    if arg.dtype not in _PACKING:
        raise LaunchError(f"{entry}: the argument {arg.name} has dtype {arg.dtype}, which a launch cannot pass")
    return _PACKING[arg.dtype]


def _check_params(
    entry: str, args: Sequence[Arg], sizes: Sequence[int], params: Sequence[int], scratch_bytes: int
) -> None:
    """The machine code's own account of its parameters must be the arguments, then at most two addresses."""
    hidden = list(params[len(sizes) :])
    if list(params[: len(sizes)]) != list(sizes) or hidden not in ([], [8], [8, 8]):
        described = ", ".join(f"{arg.name}: {size}" for arg, size in zip(args, sizes, strict=True))
        raise LaunchError(
            f"{entry}: the machine code takes parameters of {list(params)} bytes, and the arguments are ({described})",
            fix="the binary and its description do not belong together: build the kernel again",
        )
    if scratch_bytes and not hidden:
        raise LaunchError(f"{entry}: needs scratch memory, but the machine code takes no address of it")


def _converter(entry: str, arg: Arg) -> Callable[[Any], Any]:
    """What turns an argument into the number that is packed."""

    def address(value: Any) -> int:
        if value is None:
            return 0
        if isinstance(value, int):
            return value
        if not getattr(value, "is_cuda", True):
            raise LaunchError(f"{entry}: the argument {arg.name} is a tensor on the CPU", fix="move it to the GPU")
        return value.data_ptr()

    if arg.kind == "pointer":
        return address
    if arg.dtype == "bf16" and arg.kind != "tensor_map":
        return _bf16_bits
    return _unchanged


def _unchanged(value: Any) -> Any:
    return value


def _bf16_bits(value: float) -> int:
    """The upper half of the float32 nearest to value, rounded to nearest, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if value != value:
        return 0x7FC0
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def _current_stream(device: int) -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return torch._C._cuda_getCurrentRawStream(device)


class _Driver:
    """What CUDA and HIP have in common: modules are loaded once a device, and every call returns an error code."""

    library: ctypes.CDLL

    def __init__(self) -> None:
        self._modules: dict[tuple[int, str], int] = {}
        self._lock = threading.Lock()

    def function(self, kernel: DriverKernel, binary: bytes, shared_bytes: int, built_for: str) -> int:
        """The handle of the kernel's entry on its device, from the module that has these bytes."""
        key = (kernel.device, hashlib.sha256(binary).hexdigest())
        with self._lock:
            previous = self._enter(kernel)
            try:
                if key not in self._modules:
                    self._modules[key] = self._load_module(kernel, binary, built_for)
                return self._get_function(kernel, self._modules[key], shared_bytes)
            finally:
                self._leave(previous)

    def launch(
        self,
        kernel: DriverKernel,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        pointers: Any,
    ) -> None:
        """Enqueues one launch with the parameters that `pointers` point at."""
        previous = self._enter(kernel)
        try:
            code = self._launch(function, *grid, threads, 1, 1, shared_bytes, stream, pointers, None)
        finally:
            self._leave(previous)
        if code:
            what = f"launch with a grid of {grid}, {threads} threads and {shared_bytes} bytes of shared memory"
            raise self._failure(kernel, what, code)

    _launch: Callable[..., int]

    def _load_module(self, kernel: DriverKernel, binary: bytes, built_for: str) -> int:
        raise NotImplementedError

    def _get_function(self, kernel: DriverKernel, module: int, shared_bytes: int) -> int:
        raise NotImplementedError

    def _enter(self, kernel: DriverKernel) -> Any:
        """Makes the kernel's device current; returns what _leave needs, None when it was current already."""
        raise NotImplementedError

    def _leave(self, previous: Any) -> None:
        raise NotImplementedError

    def _describe(self, code: int) -> str:
        raise NotImplementedError

    def _failure(self, kernel: DriverKernel, what: str, code: int, fix: str | None = None) -> LaunchError:
        return LaunchError(f"{kernel.entry} on device {kernel.device}: {what} failed: {self._describe(code)}", fix=fix)

    def _check(self, kernel: DriverKernel, what: str, code: int, fix: str | None = None) -> None:
        if code:
            raise self._failure(kernel, what, code, fix)


def _wrong_gpu(built_for: str) -> str:
    return f"the machine code was built for {built_for or 'another GPU'}; build the kernel for this one"


class _Cuda(_Driver):
    """libcuda. Kernels run in the device's primary context, the one that torch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.library = _open(("libcuda.so.1", "libcuda.so"), "NVIDIA's driver")
        pointer, integer, unsigned = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
        self._launch = self.library.cuLaunchKernel
        self._launch.argtypes = [pointer, *[unsigned] * 7, pointer, pointer, pointer]
        self.library.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
        self.library.cuFuncSetAttribute.argtypes = [pointer, integer, integer]
        self.library.cuFuncGetAttribute.argtypes = [pointer, integer, pointer]
        self.library.cuCtxPushCurrent_v2.argtypes = [pointer]
        self._contexts: dict[int, int] = {}
        if code := self.library.cuInit(0):
            raise LaunchError(f"NVIDIA's driver does not start: {self._describe(code)}")

    def _enter(self, kernel: DriverKernel) -> int | None:
        wanted = self._contexts.get(kernel.device) or self._retain(kernel)
        current = ctypes.c_void_p()
        self._check(kernel, "cuCtxGetCurrent", self.library.cuCtxGetCurrent(ctypes.byref(current)))
        if current.value == wanted:
            return None
        self._check(kernel, "cuCtxPushCurrent", self.library.cuCtxPushCurrent_v2(wanted))
        return wanted

    def _leave(self, previous: int | None) -> None:
        if previous is not None:
            self.library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _retain(self, kernel: DriverKernel) -> int:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check(kernel, "cuDeviceGet", self.library.cuDeviceGet(ctypes.byref(device), kernel.device))
        code = self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        self._check(kernel, "cuDevicePrimaryCtxRetain", code)
        self._contexts[kernel.device] = context.value or 0
        return self._contexts[kernel.device]

    def _load_module(self, kernel: DriverKernel, binary: bytes, built_for: str) -> int:
        module = ctypes.c_void_p()
        code = self.library.cuModuleLoadData(ctypes.byref(module), binary)
        self._check(kernel, "cuModuleLoadData", code, _wrong_gpu(built_for))
        return module.value or 0

    def _get_function(self, kernel: DriverKernel, module: int, shared_bytes: int) -> int:
        function = ctypes.c_void_p()
        code = self.library.cuModuleGetFunction(ctypes.byref(function), module, kernel.entry.encode())
        self._check(kernel, "cuModuleGetFunction", code)
        # more than 48 KiB must be opted in to, and what the kernel declares itself counts towards that
        if shared_bytes:
            dynamic_shared = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            code = self.library.cuFuncSetAttribute(function, dynamic_shared, shared_bytes)
            what = f"opting in to {shared_bytes} bytes of shared memory per program"
            self._check(kernel, what, code, "use smaller tiles or fewer stages")
        return function.value or 0

    def _describe(self, code: int) -> str:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self.library.cuGetErrorName(code, ctypes.byref(name))
        self.library.cuGetErrorString(code, ctypes.byref(text))
        return f"{(name.value or b'unknown').decode()} ({code}): {(text.value or b'no description').decode()}"


class _Hip(_Driver):
    """libamdhip64."""

    def __init__(self) -> None:
        super().__init__()
        self.library = _open(_hip_candidates(), "AMD's HIP runtime")
        pointer, unsigned = ctypes.c_void_p, ctypes.c_uint
        self._launch = self.library.hipModuleLaunchKernel
        self._launch.argtypes = [pointer, *[unsigned] * 7, pointer, pointer, pointer]
        self.library.hipModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
        self.library.hipGetErrorName.restype = ctypes.c_char_p
        self.library.hipGetErrorString.restype = ctypes.c_char_p
        if code := self.library.hipInit(0):
            raise LaunchError(f"AMD's HIP runtime does not start: {self._describe(code)}")

    def _enter(self, kernel: DriverKernel) -> int | None:
        current = ctypes.c_int()
        self._check(kernel, "hipGetDevice", self.library.hipGetDevice(ctypes.byref(current)))
        if current.value == kernel.device:
            return None
        self._check(kernel, "hipSetDevice", self.library.hipSetDevice(kernel.device))
        return current.value

    def _leave(self, previous: int | None) -> None:
        if previous is not None:
            self.library.hipSetDevice(previous)

    def _load_module(self, kernel: DriverKernel, binary: bytes, built_for: str) -> int:
        module = ctypes.c_void_p()
        code = self.library.hipModuleLoadData(ctypes.byref(module), binary)
        self._check(kernel, "hipModuleLoadData", code, _wrong_gpu(built_for))
        return module.value or 0

    def _get_function(self, kernel: DriverKernel, module: int, shared_bytes: int) -> int:
        function = ctypes.c_void_p()
        code = self.library.hipModuleGetFunction(ctypes.byref(function), module, kernel.entry.encode())
        self._check(kernel, "hipModuleGetFunction", code)
        return function.value or 0

    def _describe(self, code: int) -> str:
        name, text = self.library.hipGetErrorName(code), self.library.hipGetErrorString(code)
        return f"{(name or b'unknown').decode()} ({code}): {(text or b'no description').decode()}"


def _hip_candidates() -> tuple[str, ...]:
    """torch's own copy first: two copies of the runtime in one process do not see each other's memory."""
    torch = sys.modules.get("torch")
    own = Path(torch.__file__ or "").parent / "lib" / "libamdhip64.so" if torch is not None else None
    return (*((str(own),) if own is not None and own.exists() else ()), "libamdhip64.so", "libamdhip64.so.7")


def _open(candidates: Sequence[str], owner: str) -> ctypes.CDLL:
    for name in candidates:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise LaunchError(
        f"{owner} is not on this machine: none of {', '.join(candidates)} can be opened",
        fix="run on a machine with such a GPU; compiling and the torch backend need none",
    )


_DRIVERS: dict[str, Callable[[], _Driver]] = {"cubin": _Cuda, "hsaco": _Hip}


@functools.cache
def _driver(format: str) -> _Driver:
    return _DRIVERS[format]()


def cuda_library() -> ctypes.CDLL:
    """libcuda, started. Raises LaunchError on a machine without NVIDIA's driver."""
    return _driver("cubin").library
