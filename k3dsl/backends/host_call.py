"""How a kernel's grid and machine parameters follow from its arguments, where they are not the arguments themselves.

A compiler may drop, reorder and add parameters: shapes, and descriptors of the tensor memory accelerator (TMA), which
the host makes from a tensor's address and shape. A `HostCall` is that recipe as plain data, so that a bundle launches
such a kernel with the driver alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3dsl.backends.base import Arg, Artifact
from k3dsl.backends.driver import DriverKernel, cuda_library
from k3dsl.errors import LaunchError

TENSOR_MAP_BYTES = 128  # of CUtensorMap
_TENSOR_MAP_ALIGNMENT = 64
_MAX_RANK = 5
_KEPT_MAPS = 256  # descriptors a kernel keeps: calls with the same tensors make none

# A value is a number, or a list: what it is, then its operands.
Value = Any
_INFIX = {"+": "+", "-": "-", "*": "*", "//": "//", "%": "%", "<": "<", "<=": "<=", "==": "==", "!=": "!="}
_FUNCTIONS = ("min", "max")


@dataclass(frozen=True)
class TensorMap:
    """One TMA descriptor: what cuTensorMapEncodeTiled is called with, axes innermost first.

    base: index of the tensor among the arguments. dims in elements; strides in bytes, the innermost one included; box
    and element_strides in elements. dtype, interleave, swizzle, l2_promotion and oob_fill: numbers of CUDA's enums.
    """

    base: int
    dtype: int
    dims: tuple[Value, ...]
    strides: tuple[Value, ...]
    box: tuple[Value, ...]
    element_strides: tuple[Value, ...]
    interleave: int
    swizzle: int
    l2_promotion: int
    oob_fill: int

    def to_json(self) -> dict[str, Any]:
        return {
            "base": self.base,
            "dtype": self.dtype,
            "dims": list(self.dims),
            "strides": list(self.strides),
            "box": list(self.box),
            "element_strides": list(self.element_strides),
            "interleave": self.interleave,
            "swizzle": self.swizzle,
            "l2_promotion": self.l2_promotion,
            "oob_fill": self.oob_fill,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TensorMap:
        lists = ("dims", "strides", "box", "element_strides")
        return TensorMap(**{**data, **{name: tuple(data[name]) for name in lists}})


@dataclass(frozen=True)
class Parameter:
    """One machine parameter, in order.

    kind: 'pointer' (the address of argument `value`), 'scalar' (a value of `dtype`) or 'tensor_map' (the descriptor
    number `value` of the call).
    """

    name: str
    kind: str
    value: Value
    dtype: str = "i64"


@dataclass(frozen=True)
class HostCall:
    """grid: programs along x, y and z. Values are numbers or lists:

    ['arg', i] is argument i; ['shape', i, axis] and ['stride', i, axis] (in elements) belong to the tensor that is
    argument i; ['+', a, b] and so on, ['min', a, b], ['max', a, b], ['select', condition, a, b].
    """

    grid: tuple[Value, Value, Value]
    parameters: tuple[Parameter, ...]
    tensor_maps: tuple[TensorMap, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "grid": list(self.grid),
            "parameters": [[p.name, p.kind, p.value, p.dtype] for p in self.parameters],
            "tensor_maps": [t.to_json() for t in self.tensor_maps],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> HostCall:
        x, y, z = data["grid"]
        return HostCall(
            (x, y, z),
            tuple(Parameter(*p) for p in data["parameters"]),
            tuple(TensorMap.from_json(t) for t in data["tensor_maps"]),
        )

    def machine_args(self) -> tuple[Arg, ...]:
        """The machine parameters as arguments of a DriverKernel."""
        kinds = {"pointer": "pointer", "scalar": "scalar", "tensor_map": "tensor_map"}
        return tuple(
            Arg(p.name, kinds[p.kind], "u8" if p.kind == "tensor_map" else p.dtype)  # type: ignore[arg-type]
            for p in self.parameters
        )


def compile_values(values: Sequence[Value]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A fast function from a launch's arguments to the values. Raises ValueError for a value that is none."""
    text = f"lambda a: ({''.join(f'{_python(value)},' for value in values)})"
    return eval(text, {"min": min, "max": max})  # the text holds numbers, and what _python writes


def _python(value: Value) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        raise ValueError(f"{value!r} is no value of a host call")
    if isinstance(value, (int, float)):
        return repr(value)
    what, *operands = value
    if what in ("arg", "shape", "stride"):
        if len(operands) != (1 if what == "arg" else 2) or not all(type(n) is int and n >= 0 for n in operands):
            raise ValueError(f"{value!r} is no value of a host call")
        held = f"a[{operands[0]}]"
        return held if what == "arg" else f"{held}.{'shape' if what == 'shape' else 'stride()'}[{operands[1]}]"
    parts = [_python(operand) for operand in operands]
    if what in _INFIX and len(parts) == 2:
        return f"({parts[0]} {_INFIX[what]} {parts[1]})"
    if what in _FUNCTIONS and len(parts) == 2:
        return f"{what}({parts[0]}, {parts[1]})"
    if what == "select" and len(parts) == 3:
        return f"({parts[1]} if {parts[0]} else {parts[2]})"
    raise ValueError(f"{value!r} is no value of a host call")


def _reads_layout(values: Sequence[Value]) -> bool:
    return any(isinstance(v, list) and (v[0] in ("shape", "stride") or _reads_layout(v[1:])) for v in values)


class HostCallKernel:
    """Launches machine code by its host call, through NVIDIA's driver. See backends.common.Launcher.

    The grid that a caller gives only says whether there is anything to launch: the host call has its own.
    """

    def __init__(self, kernel: DriverKernel, call: HostCall, args: Sequence[Arg]) -> None:
        self.kernel = kernel
        self.call = call
        self._arg_count = len(args)
        self._grid = compile_values(call.grid)
        self._maps = [_TensorMapMaker(kernel.entry, map) for map in call.tensor_maps]
        # a tensor map's place is held by 0 until it is made
        self._values = compile_values(
            [
                ["arg", p.value] if p.kind == "pointer" else 0 if p.kind == "tensor_map" else p.value
                for p in call.parameters
            ]
        )
        self._map_places = [(i, self._maps[p.value]) for i, p in enumerate(call.parameters) if p.kind == "tensor_map"]
        everything = [*call.grid, *(p.value for p in call.parameters)]
        for map in call.tensor_maps:
            everything += [*map.dims, *map.strides]
        self.needs_tensors = _reads_layout(everything)

    @classmethod
    def from_artifact(cls, artifact: Artifact, device: int = 0) -> HostCallKernel:
        """The kernel of an artifact whose `launch` has a host_call. Raises LaunchError where it has none."""
        return cls.from_launch(
            artifact.binary,
            artifact.format,
            artifact.entry,
            artifact.launch,
            artifact.source.args,
            device,
            artifact.target,
        )

    @classmethod
    def from_launch(
        cls,
        binary: bytes,
        format: str,
        entry: str,
        launch: Mapping[str, Any],
        args: Sequence[Arg],
        device: int,
        built_for: str,
    ) -> HostCallKernel:
        if launch.get("host_call") is None:
            raise LaunchError(
                f"{entry}: the driver alone cannot launch this kernel: {launch.get('needs', 'no host call is known')}"
            )
        call = HostCall.from_json(launch["host_call"])
        kernel = DriverKernel(
            binary,
            format,
            entry,
            launch["threads"],
            launch["shared_bytes"],
            launch["params"],
            call.machine_args(),
            device=device,
            built_for=built_for,
        )
        return cls(kernel, call, args)

    def __call__(self, grid: tuple[int, int, int], args: Sequence[Any], stream: int | None = None) -> None:
        """Enqueues the kernel and returns; safe in a CUDA graph. With no program along some axis, launches nothing.

        args: one value for each argument of the source. An address does for a tensor where nothing reads its shape.
        Raises LaunchError.
        """
        if 0 in grid:
            return
        if len(args) != self._arg_count:
            raise LaunchError(f"{self.kernel.entry} takes {self._arg_count} arguments, not {len(args)}")
        try:
            own = self._grid(args)
            values = list(self._values(args))
            for place, maker in self._map_places:
                values[place] = maker(args)
        except AttributeError as error:
            raise LaunchError(
                f"{self.kernel.entry}: reads the shape of a tensor, and got an address: {error}", fix="pass the tensor"
            ) from None
        self.kernel(own, values, stream)

    def fixed(self, args: Sequence[Any]) -> FixedCall | None:
        """The launch with these numbers, whatever its tensors; None where the shape of a tensor is read."""
        if self.needs_tensors:
            return None
        pointers = [(i, p.value) for i, p in enumerate(self.call.parameters) if p.kind == "pointer"]
        maps = [(i, maker.base, maker.fixed(args)) for i, maker in self._map_places]
        return FixedCall(self.kernel, self._grid(args), list(self._values(args)), pointers, maps)


class FixedCall:
    """A launch of which all but the addresses is known. See backends.common.Launcher; its own grid and numbers are used."""

    def __init__(
        self,
        kernel: DriverKernel,
        grid: tuple[int, int, int],
        values: list[Any],
        pointers: list[tuple[int, int]],
        maps: list[tuple[int, int, Callable[[int], bytes]]],
    ) -> None:
        self._kernel, self._grid, self._values = kernel, grid, values
        self._pointers, self._maps = pointers, maps

    def fixed(self, args: Sequence[Any]) -> FixedCall:
        """Itself."""
        return self

    def __call__(self, grid: tuple[int, int, int], args: Sequence[Any], stream: int | None = None) -> None:
        if 0 in grid:
            return
        values = self._values.copy()
        for place, argument in self._pointers:
            values[place] = args[argument]
        for place, argument, descriptor in self._maps:
            values[place] = descriptor(args[argument])
        self._kernel(self._grid, values, stream)


class _TensorMapMaker:
    """Makes one TMA descriptor, and keeps those it made: an equal tensor gives an equal descriptor."""

    def __init__(self, entry: str, map: TensorMap) -> None:
        rank = len(map.dims)
        if not 1 <= rank <= _MAX_RANK or not rank == len(map.strides) == len(map.box) == len(map.element_strides):
            raise LaunchError(f"{entry}: a tensor map of rank {rank} does not fit its description")
        self._entry = entry
        self._map = map
        self._rank = rank
        self._extents = compile_values([*map.dims, *map.strides, *map.box, *map.element_strides])
        self._made: dict[tuple[int, ...], bytes] = {}

    def __call__(self, args: Sequence[Any]) -> bytes:
        base = args[self._map.base]
        address = base if isinstance(base, int) else base.data_ptr()
        extents = self._extents(args)
        key = (address, *extents)
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= _KEPT_MAPS:
                self._made.clear()
            found = self._made[key] = self._encode(address, extents)
        return found

    @property
    def base(self) -> int:
        """Which argument the descriptor is of."""
        return self._map.base

    def fixed(self, args: Sequence[Any]) -> Callable[[int], bytes]:
        """The descriptor by its tensor's address, with the extents that follow from these arguments."""
        extents = self._extents(args)
        made: dict[int, bytes] = {}

        def descriptor(address: int) -> bytes:
            found = made.get(address)
            if found is None:
                if len(made) >= _KEPT_MAPS:
                    made.clear()
                found = made[address] = self._encode(address, extents)
            return found

        return descriptor

    def _encode(self, address: int, extents: tuple[int, ...]) -> bytes:
        rank, map = self._rank, self._map
        dims, strides, box, steps = (extents[i * rank : (i + 1) * rank] for i in range(4))
        library = cuda_library()
        buffer = ctypes.create_string_buffer(TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT)
        skipped = -ctypes.addressof(buffer) % _TENSOR_MAP_ALIGNMENT
        code = library.cuTensorMapEncodeTiled(
            ctypes.c_void_p(ctypes.addressof(buffer) + skipped),
            ctypes.c_int(map.dtype),
            ctypes.c_uint32(rank),
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*dims),
            (ctypes.c_uint64 * max(1, rank - 1))(*strides[1:]),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*steps),
            ctypes.c_int(map.interleave),
            ctypes.c_int(map.swizzle),
            ctypes.c_int(map.l2_promotion),
            ctypes.c_int(map.oob_fill),
        )
        if code:
            raise LaunchError(
                f"{self._entry}: cuTensorMapEncodeTiled failed with error {code} for a tensor at {address:#x} of extents "
                f"{list(dims)}, strides of {list(strides)} bytes, in boxes of {list(box)}",
                fix="TMA needs an address and strides that are multiples of 16 bytes",
            )
        return buffer.raw[skipped : skipped + TENSOR_MAP_BYTES]
