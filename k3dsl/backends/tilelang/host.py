"""Reads the lowered host function: how the kernel is launched, as plain data. The one place that looks into TVM's IR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3dsl.backends.host_call import HostCall, Parameter, TensorMap, Value

# Fields of TVM's tensor struct, and of a packed argument.
_DATA, _SHAPE, _STRIDES, _PACKED_VALUE = 1, 2, 3, 15
_HARMLESS = {"__tvm_set_device"}
_TENSOR_MAP = "__tvm_tensormap_create_tiled"
_THREADS = ("threadIdx.x", "threadIdx.y", "threadIdx.z")
_GRID = ("blockIdx.x", "blockIdx.y", "blockIdx.z")
_DYNAMIC_SHARED = "tirx.use_dyn_shared_memory"
_DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "i1",
}
_BINARY = {
    "Add": "+",
    "Sub": "-",
    "Mul": "*",
    "FloorDiv": "//",
    "FloorMod": "%",
    "Min": "min",
    "Max": "max",
    "LT": "<",
    "LE": "<=",
    "EQ": "==",
    "NE": "!=",
}


class Unreadable(Exception):
    """What the host does for this kernel is more than a HostCall can say."""


@dataclass(frozen=True)
class HostFunction:
    """entry: the kernel's symbol. threads and shared_bytes (dynamic) per program.

    call: how to launch it, or None, and then `needs` says why.
    """

    entry: str
    threads: int
    shared_bytes: int
    call: HostCall | None
    needs: str | None


def read(host_module: Any, device_module: Any) -> HostFunction:
    """Reads TileLang's two lowered modules. Raises Unreadable when there is not one kernel of fixed block size."""
    kernels = [f for _, f in device_module.functions.items() if "tirx.kernel_launch_params" in f.attrs]
    if len(kernels) != 1:
        raise Unreadable(f"the function has {len(kernels)} kernels, and one is what a launch can be")
    kernel = kernels[0]
    entry = str(kernel.attrs["global_symbol"])
    extents = {str(tag): extent for tag, extent in kernel.attrs["thread_extent"].items()}
    threads = 1
    for tag in _THREADS:
        extent = extents.get(tag, 1)
        if not hasattr(extent, "value") and not isinstance(extent, int):
            raise Unreadable(f"the number of threads is {extent}, known only at run time")
        threads *= int(extent)
    shared = kernel.attrs.get("dyn_shared_memory_buf", 0)
    try:
        call, needs = _Reader(host_module, kernel, entry).host_call(), None
    except Unreadable as error:
        call, needs = None, f"TileLang's own host code ({error})"
    return HostFunction(entry, threads, int(shared), call, needs)


class _Reader:
    """Finds where each value of the launch comes from, back to the arguments."""

    def __init__(self, host_module: Any, kernel: Any, entry: str) -> None:
        from tvm import tirx

        self.kernel = kernel
        self.entry = entry
        self.bound: dict[Any, Any] = {}
        self.launch: Any = None
        self.maps: dict[Any, Any] = {}  # descriptor variable -> the call that makes it
        self.unknown: list[str] = []
        self.args: Any = None
        functions = list(host_module.functions.values())
        if len(functions) != 1:
            raise Unreadable(f"{len(functions)} host functions")
        self.args = functions[0].params[1]
        tirx.stmt_functor.post_order_visit(functions[0].body, self._visit)

    def _visit(self, node: Any) -> None:
        kind = type(node).__name__
        if kind == "Bind":
            self.bound[node.var] = node.value
        elif kind == "Call" and node.op.name.startswith("tirx.tvm_call_"):
            name = getattr(node.args[0], "value", None)
            if name == self.entry:
                if self.launch is not None:
                    self.unknown.append("two launches")
                self.launch = node
            elif name == _TENSOR_MAP:
                self.maps[node.args[1]] = node
            elif name not in _HARMLESS:
                self.unknown.append(str(name))
        elif kind in ("For", "While", "IfThenElse"):
            self.unknown.append("control flow")

    def host_call(self) -> HostCall:
        if self.unknown:
            raise Unreadable(f"it calls {', '.join(dict.fromkeys(self.unknown))}")
        if self.launch is None:
            raise Unreadable("it does not launch the kernel")
        tags = [str(tag) for tag in self.kernel.attrs["tirx.kernel_launch_params"]]
        if strange := [tag for tag in tags if tag not in (*_THREADS, *_GRID, _DYNAMIC_SHARED)]:
            raise Unreadable(f"it launches with {', '.join(strange)}")
        given = list(self.launch.args)[1:]
        parameters, extents = given[: len(self.kernel.params)], given[len(self.kernel.params) :]
        if len(extents) != len(tags):
            raise Unreadable(f"it launches with {len(given)} values for {len(self.kernel.params)} parameters")
        by_tag = dict(zip(tags, extents, strict=True))
        x, y, z = (self.value(by_tag[tag]) if tag in by_tag else 1 for tag in _GRID)
        maps: list[TensorMap] = []
        found: list[Parameter] = []
        for declared, value in zip(self.kernel.params, parameters, strict=True):
            name = str(declared.name)
            if value in self.maps:
                found.append(Parameter(name, "tensor_map", len(maps)))
                maps.append(self.tensor_map(self.maps[value]))
            elif str(value.dtype) == "handle":
                found.append(Parameter(name, "pointer", self.pointer(value)))
            elif (dtype := str(declared.dtype)) in _DTYPES:
                found.append(Parameter(name, "scalar", self.value(value), _DTYPES[dtype]))
            else:
                raise Unreadable(f"the parameter {name} is {dtype}")
        return HostCall((x, y, z), tuple(found), tuple(maps))

    def tensor_map(self, call: Any) -> TensorMap:
        """(name, descriptor, dtype, rank, base, dims, strides, box, element strides, 4 enums)"""
        dtype, rank = self.number(call.args[2]), self.number(call.args[3])
        rest = list(call.args)[5:]
        if len(rest) != 4 * rank + 4:
            raise Unreadable(f"a tensor map of rank {rank} is made from {len(rest)} values")
        dims, strides, box, steps = (tuple(map(self.value, rest[i * rank : (i + 1) * rank])) for i in range(4))
        enums = [self.number(value) for value in rest[4 * rank :]]
        return TensorMap(self.pointer(call.args[4]), dtype, dims, strides, box, steps, *enums)

    def number(self, node: Any) -> int:
        value = self.value(node)
        if not isinstance(value, int):
            raise Unreadable(f"{node} is known only at run time")
        return value

    def pointer(self, node: Any) -> int:
        """Index of the argument whose tensor starts at this address."""
        source: Any = self.bound.get(node)
        if _is_struct_get(source) and int(source.args[2]) == _DATA and int(source.args[1]) == 0:
            return self.tensor(source.args[0])
        raise Unreadable(f"where {node} points is computed")

    def tensor(self, node: Any) -> int:
        """Index of the argument that this handle of a tensor is."""
        node = self.bound.get(node, node)
        if type(node).__name__ == "Select":  # a tensor comes as an object or as its struct
            node = node.false_value
        return self.packed(node)

    def packed(self, node: Any) -> int:
        if _is_struct_get(node) and node.args[0].same_as(self.args) and int(node.args[2]) == _PACKED_VALUE:
            return int(node.args[1])
        raise Unreadable(f"{node} is no argument")

    def value(self, node: Any) -> Value:
        kind = type(node).__name__
        if isinstance(node, (int, float)):
            return node
        if kind in ("IntImm", "FloatImm"):
            return node.value
        if kind == "Var":
            if node not in self.bound:
                raise Unreadable(f"{node} is computed")
            return self.value(self.bound[node])
        if kind == "Cast":
            return self.value(node.value)
        if kind in _BINARY:
            return [_BINARY[kind], self.value(node.a), self.value(node.b)]
        if kind == "BufferLoad":
            return self.extent(node)
        if kind == "Select":
            return self.select(node)
        if kind == "Call" and node.op.name == "tirx.if_then_else" and _is_null_check(node.args[0]):
            return self.value(node.args[2])  # a tensor of torch always has strides
        if kind == "Call" and node.op.name in ("tirx.shift_right", "tirx.shift_left"):
            amount = self.number(node.args[1])
            return ["//" if node.op.name.endswith("right") else "*", self.value(node.args[0]), 1 << amount]
        if _is_struct_get(node):
            return ["arg", self.packed(node)]
        raise Unreadable(f"{node} is computed")

    def select(self, node: Any) -> Value:
        """A number comes packed as an integer or a float: either way it is that argument."""
        yes, no = self.value(node.true_value), self.value(node.false_value)
        return yes if yes == no else ["select", self.value(node.condition), yes, no]

    def extent(self, node: Any) -> Value:
        """One entry of a tensor's shape or strides."""
        source: Any = self.bound.get(node.buffer.data)
        field = int(source.args[2]) if _is_struct_get(source) else None
        if field not in (_SHAPE, _STRIDES) or len(node.indices) != 1:
            raise Unreadable(f"{node} is computed")
        what = "shape" if field == _SHAPE else "stride"
        return [what, self.tensor(source.args[0]), self.number(node.indices[0])]


def _is_struct_get(node: Any) -> bool:
    return type(node).__name__ == "Call" and node.op.name == "tirx.tvm_struct_get"


def _is_null_check(node: Any) -> bool:
    return type(node).__name__ == "Call" and node.op.name == "tirx.isnullptr"
