"""The graph: values, ops with nested regions, parameters, and the kernel that holds them. Pure data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from k3dsl.ir.symbols import Expr, Sym
from k3dsl.ir.types import DType, TileType


class Value:
    """One SSA value: the result of an op or an argument of a region."""

    __slots__ = ("name", "op", "type")

    def __init__(self, type: TileType, op: Op | None = None, name: str | None = None) -> None:
        self.type = type
        self.op = op
        self.name = name  # what the user called it, for readable output; never part of the identity

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape


@dataclass(frozen=True)
class Index:
    """How one axis of a tensor is indexed.

    kind 'scalar': operand slot `start`. 'full': the whole axis of static extent shape[0]. 'tile': operand slot `start`
    holds an integer tile (gather or scatter). 'span': rows start .. start + prod(shape) - 1, laid out as `shape`; rows at
    or past the scalar in slot `end` read as the fill value and are not written.
    """

    kind: str
    shape: tuple[int, ...] = ()
    start: int | None = None
    end: int | None = None


class Region:
    """A block of ops with arguments; `yields` are the values it hands back."""

    __slots__ = ("args", "ops", "yields")

    def __init__(self, args: list[Value] | None = None) -> None:
        self.args = args or []
        self.ops: list[Op] = []
        self.yields: list[Value] = []


class Op:
    """One operation. `attrs` are plain data; `index` is set on memory ops; `loc` is the user's file:line."""

    __slots__ = ("attrs", "index", "loc", "opcode", "operands", "regions", "results")

    def __init__(
        self,
        opcode: str,
        operands: list[Value],
        result_types: list[TileType],
        attrs: dict[str, Any] | None = None,
        regions: list[Region] | None = None,
        index: tuple[Index, ...] = (),
        loc: str | None = None,
    ) -> None:
        self.opcode = opcode
        self.operands = operands
        self.attrs = attrs or {}
        self.regions = regions or []
        self.index = index
        self.loc = loc
        self.results = [Value(t, self) for t in result_types]

    @property
    def result(self) -> Value:
        return self.results[0]


@dataclass(frozen=True)
class TensorParam:
    """A tensor the kernel reads or writes. `strides` is None when contiguous, else one expression an axis (elements).

    role: 'in' (only read), 'out' (every visible element is written by this launch), 'inout'.
    """

    name: str
    dtype: DType
    shape: tuple[Expr, ...]
    role: str = "in"
    strides: tuple[Expr, ...] | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    def stride_exprs(self) -> tuple[Expr, ...]:
        """Elements between neighbours along each axis."""
        if self.strides is not None:
            return self.strides
        strides: list[Expr] = []
        step = Expr.of(1)
        for extent in reversed(self.shape):
            strides.append(step)
            step = step * extent
        return tuple(reversed(strides))


@dataclass(frozen=True)
class ScalarParam:
    """A runtime number passed by value."""

    name: str
    dtype: DType


@dataclass
class Kernel:
    """A traced kernel: parameters, the grid over runtime dims, and a body of SSA ops.

    dims: the runtime symbols, with facts. grid: up to three extents. source: the user's file:line of the function.
    """

    name: str
    tensors: list[TensorParam]
    scalars: list[ScalarParam]
    dims: list[Sym]
    grid: tuple[Expr, ...]
    body: Region
    scalar_values: list[Value] = field(default_factory=list)
    source: str | None = None

    def tensor(self, name: str) -> TensorParam:
        for t in self.tensors:
            if t.name == name:
                return t
        raise KeyError(name)


def walk(region: Region) -> Iterator[Op]:
    """Every op of a region in program order, outer before inner."""
    for op in region.ops:
        yield op
        for inner in op.regions:
            yield from walk(inner)


SIDE_EFFECTS = frozenset({"store", "atomic_add", "when"})
MEMORY_OPS = frozenset({"load", "store", "atomic_add"})


def has_side_effects(op: Op) -> bool:
    """True when the op writes memory, itself or inside its regions."""
    if op.opcode in SIDE_EFFECTS:
        return True
    return any(has_side_effects(inner) for region in op.regions for inner in region.ops)


def is_pure(op: Op) -> bool:
    """True when equal operands always give the equal result, whatever happened in between (loads are not pure)."""
    return op.opcode not in ("load", *SIDE_EFFECTS) and all(is_pure(o) for region in op.regions for o in region.ops)
