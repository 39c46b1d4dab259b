"""A slow and literal interpreter of integer kernels in numpy: one program and one op at a time, shared by tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from k3dsl.ir.graph import Kernel, Op, Region, Value

Visit = Callable[[Op, dict[int, Any]], None]
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "floordiv": np.floor_divide,
    "mod": np.mod,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": np.left_shift,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_UNARY: dict[str, Callable[[Any], Any]] = {"neg": np.negative, "abs": np.abs, "not": np.logical_not}


def interpret(
    kernel: Kernel, dims: Mapping[str, int], tensors: Mapping[str, np.ndarray], visit: Visit | None = None
) -> None:
    """Runs every program of the grid in order. visit(op, values) is called before each op with the values by id."""
    run = _Run(kernel, dims, tensors, visit)
    for program in itertools.product(*(range(extent.evaluate(dims)) for extent in kernel.grid)):
        run.program(program)


class _Run:
    def __init__(
        self, kernel: Kernel, dims: Mapping[str, int], tensors: Mapping[str, np.ndarray], visit: Visit | None
    ) -> None:
        self.kernel, self.dims, self.tensors, self.visit = kernel, dims, tensors, visit
        self.values: dict[int, Any] = {}
        self.ids: tuple[int, ...] = ()

    def program(self, ids: tuple[int, ...]) -> None:
        self.values, self.ids = {}, ids
        self.region(self.kernel.body)

    def region(self, region: Region) -> list[Any]:
        for op in region.ops:
            if self.visit is not None:
                self.visit(op, self.values)
            results = self.op(op)
            for value, result in zip(op.results, results, strict=True):
                assert np.shape(result) == value.shape, (op.opcode, np.shape(result), value.shape)
                self.values[id(value)] = result
        return [self[v] for v in region.yields]

    def __getitem__(self, value: Value) -> Any:
        return self.values[id(value)]

    def op(self, op: Op) -> list[Any]:
        xs = [self[v] for v in op.operands]
        name = op.opcode
        if name in _BINARY:
            return [_BINARY[name](*xs)]
        if name in _UNARY:
            return [_UNARY[name](*xs)]
        if name == "loop":
            return self.loop(op, xs)
        if name == "when":
            if xs[0]:
                self.region(op.regions[0])
            return []
        return getattr(self, name)(op, xs)  # type: ignore[no-any-return]

    def loop(self, op: Op, xs: list[Any]) -> list[Any]:
        region, carries = op.regions[0], xs[2:]
        steps = range(int(xs[0]), int(xs[1]), op.attrs["step"])
        for i in reversed(steps) if op.attrs.get("reverse") else steps:
            for arg, x in zip(region.args, [np.int64(i), *carries], strict=True):
                self.values[id(arg)] = x
            carries = self.region(region)
        return carries

    def const(self, op: Op, xs: list[Any]) -> list[Any]:
        kind = np.bool_ if op.attrs["dtype"].is_bool else np.int64
        return [np.full(op.result.shape, op.attrs["value"], kind)]

    def dim(self, op: Op, xs: list[Any]) -> list[Any]:
        return [np.int64(op.attrs["expr"].evaluate(self.dims))]

    def program_id(self, op: Op, xs: list[Any]) -> list[Any]:
        return [np.int64(self.ids[op.attrs["axis"]])]

    def iota(self, op: Op, xs: list[Any]) -> list[Any]:
        return [np.arange(op.attrs["size"])]

    def cast(self, op: Op, xs: list[Any]) -> list[Any]:
        return [np.asarray(xs[0]).astype(np.bool_ if op.result.dtype.is_bool else np.int64)]

    def broadcast(self, op: Op, xs: list[Any]) -> list[Any]:
        return [np.broadcast_to(xs[0], op.attrs["shape"])]

    def reshape(self, op: Op, xs: list[Any]) -> list[Any]:
        return [np.reshape(xs[0], op.attrs["shape"])]

    def permute(self, op: Op, xs: list[Any]) -> list[Any]:
        return [np.transpose(xs[0], op.attrs["axes"])]

    def where(self, op: Op, xs: list[Any]) -> list[Any]:
        return [np.where(*xs)]

    def select(self, op: Op, xs: list[Any]) -> list[Any]:
        return [np.take(xs[0], op.attrs["position"], op.attrs["axis"])]

    def assume(self, op: Op, xs: list[Any]) -> list[Any]:
        return xs

    def reduce(self, op: Op, xs: list[Any]) -> list[Any]:
        f = {"sum": np.sum, "max": np.max, "min": np.min}[op.attrs["kind"]]
        return [f(xs[0], axis=op.attrs["axis"], keepdims=bool(op.attrs.get("keepdim")))]

    def load(self, op: Op, xs: list[Any]) -> list[Any]:
        where, inside = self.places(op, xs)
        tensor = self.tensors[op.attrs["tensor"]]
        at = tuple(np.where(inside, w, 0) for w in where)
        return [np.where(inside, tensor[at], 0).reshape(op.result.shape)]

    def store(self, op: Op, xs: list[Any]) -> list[Any]:
        where, inside = self.places(op, xs)
        value = np.broadcast_to(np.reshape(xs[op.attrs["value_slot"]], inside.shape), inside.shape)
        self.tensors[op.attrs["tensor"]][tuple(w[inside] for w in where)] = value[inside]
        return []

    def places(self, op: Op, xs: list[Any]) -> tuple[list[np.ndarray], np.ndarray]:
        """The position on each axis of every element, and which elements exist. Tile indices are left out."""
        axes, limits = [], []
        for index in op.index:
            if index.kind == "full":
                axes.append(np.arange(index.shape[0]))
                limits.append(index.shape[0])
            elif index.kind == "span":
                axes.append(int(xs[index.start]) + np.arange(int(np.prod(index.shape))))
                limits.append(2**40 if index.end is None else int(xs[index.end]))
            else:
                axes.append(np.array([int(xs[index.start])]))
                limits.append(2**40)
        grids = np.meshgrid(*axes, indexing="ij")
        inside = np.ones(grids[0].shape, bool)
        for grid, limit in zip(grids, limits, strict=True):
            inside &= grid < limit
        if op.attrs.get("mask_slot") is not None:
            inside &= np.reshape(xs[op.attrs["mask_slot"]], inside.shape)
        return grids, inside
