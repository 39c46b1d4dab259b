"""Tensors as a kernel sees them: declarations of its parameters, indices, and structured reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3dsl.errors import TraceError
from k3dsl.frontend.builder import Builder, as_dtype, user_location
from k3dsl.frontend.tile import Operand, Tile, as_dim, lift
from k3dsl.ir.graph import Index, Op, TensorParam, Value
from k3dsl.ir.opset import access_shape
from k3dsl.ir.symbols import Sym
from k3dsl.ir.types import DType


@dataclass(frozen=True)
class Declaration:
    """A tensor or scalar parameter of a kernel, given as the default value of the function's argument.

    shape: axis extents separated by spaces, each a dim, a knob, a number, or an expression such as 'H*K'.
    dtype: fixed, or None when the caller chooses. optional: may be None, so that the kernel leaves it out.
    """

    role: str
    shape: str
    dtype: DType | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.shape, str):
            raise TraceError(
                f"a tensor is declared with shape {self.shape!r}",
                where=user_location(),
                fix='its axes as text, separated by spaces: In("T H*K")',
            )
        if self.dtype is not None:
            object.__setattr__(self, "dtype", as_dtype(self.dtype))


def In(shape: str, dtype: DType | None = None, *, optional: bool = False) -> Any:
    """A tensor the kernel only reads."""
    return Declaration("in", shape, dtype, optional)


def Out(shape: str, dtype: DType | None = None, *, optional: bool = False) -> Any:
    """A tensor the kernel writes and never reads."""
    return Declaration("out", shape, dtype, optional)


def InOut(shape: str, dtype: DType | None = None, *, optional: bool = False) -> Any:
    """A tensor the kernel reads and updates in place."""
    return Declaration("inout", shape, dtype, optional)


def Scalar(dtype: DType) -> Any:
    """A number passed at run time."""
    return Declaration("scalar", "", dtype)


@dataclass(frozen=True)
class TensorSpec:
    """How the caller's tensor is laid out: dtype, and strides (elements, int or Sym) when it is not contiguous."""

    dtype: DType
    strides: tuple[int | Sym, ...] | None = None


class Span:
    """A range of rows of one axis. See span()."""

    __slots__ = ("end", "shape", "start")

    def __init__(self, start: Operand, shape: tuple[int, ...], end: Operand | None) -> None:
        self.start, self.shape, self.end = start, shape, end

    @property
    def size(self) -> int:
        n = 1
        for extent in self.shape:
            n *= extent
        return n

    def reshape(self, *shape: int) -> Span:
        """The same rows laid out as a tile of several axes: span(s, 32).reshape(2, 16) reads [2, 16, ...]."""
        out = Span(self.start, tuple(shape), self.end)
        if out.size != self.size:
            raise TraceError(f"cannot lay {self.size} rows out as {list(shape)}", where=user_location())
        return out


def span(start: Operand, size: int, end: Operand | None = None) -> Span:
    """`size` rows from `start`. Rows at or past `end` read as 0 (or the load's `other`) and are not written."""
    if isinstance(size, Tile) or not isinstance(size, int) or size < 1:
        raise TraceError(
            f"span size must be a positive static int, got {size!r}",
            where=user_location(),
            fix="give the tile extent as a knob or static dim, and the true end with end=",
        )
    return Span(start, (size,), end)


class TensorRef:
    """A tensor parameter inside a kernel. x[...] reads a tile, x[...] = tile writes one."""

    def __init__(self, param: TensorParam) -> None:
        self.param = param

    @property
    def dtype(self) -> DType:
        return self.param.dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        """Extents: plain ints where static, expressions where they are runtime dims."""
        return tuple(e.constant if e.constant is not None else e for e in self.param.shape)

    def _arithmetic(self, *_: Any) -> Any:
        raise TraceError(
            f"{self.param.name} is a tensor, no tile",
            where=user_location(),
            fix=f"read a tile of it: {self.param.name}[...]",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _arithmetic
    __floordiv__ = __mod__ = __pow__ = __matmul__ = __neg__ = __abs__ = _arithmetic
    __lt__ = __le__ = __gt__ = __ge__ = to = sum = max = min = _arithmetic

    def _index(self, key: Any) -> tuple[list[Value], tuple[Index, ...]]:
        keys = key if isinstance(key, tuple) else (key,)
        keys = (*keys, *[slice(None)] * (self.param.rank - len(keys)))
        if len(keys) != self.param.rank:
            raise TraceError(
                f"{self.param.name} has {self.param.rank} axes, got {len(keys)} indices",
                where=user_location(),
                fix="give at most one index an axis: a scalar, span(), ':' or an integer tile; missing ones are ':'",
            )
        operands: list[Value] = []
        index: list[Index] = []
        for axis, k in enumerate(keys):
            if isinstance(k, Span):
                operands.append(as_dim(k.start))
                start, end = len(operands) - 1, None
                if k.end is not None:
                    operands.append(as_dim(k.end))
                    end = len(operands) - 1
                index.append(Index("span", k.shape, start, end))
            elif isinstance(k, slice):
                if k != slice(None):
                    raise TraceError(
                        "a tensor slice must be ':'", where=user_location(), fix="use span(start, size, end=...)"
                    )
                extent = self.param.shape[axis].constant
                if extent is None:
                    raise TraceError(
                        f"':' needs a static axis, axis {axis} of {self.param.name} is {self.param.shape[axis]}",
                        where=user_location(),
                        fix="use span(start, size, end=...) over a runtime axis",
                    )
                index.append(Index("full", (extent,)))
            else:
                t = lift(k)
                operands.append(t.value if t.shape else as_dim(t))
                index.append(Index("tile" if t.shape else "scalar", t.shape, len(operands) - 1))
        return operands, tuple(index)

    def load(
        self,
        *key: Any,
        mask: Tile | None = None,
        other: float = 0.0,
        contiguity: int | None = None,
        order: tuple[int, ...] | None = None,
    ) -> Tile:
        """Reads a tile.

        mask: bool tile of the result's shape; where false, `other` is read. contiguity: a hint that a thread should hold
        this many neighbours of the last axis. order: a hint to read the axes in this order of nesting (outermost first).
        """
        operands, index = self._index(key)
        attrs: dict[str, Any] = {"tensor": self.param.name}
        if other:
            attrs["other"] = float(other)
            dtype = self.param.dtype
            if dtype.is_int and not attrs["other"].is_integer():
                raise TraceError(
                    f"other={other} is no {dtype}",
                    where=user_location(),
                    fix="give a whole number",
                )
        if contiguity:
            attrs["contiguity"] = int(contiguity)
        if order:
            attrs["order"] = tuple(order)
        if mask is not None:
            shape = access_shape(Op("load", operands, [], index=index, loc=user_location()), self.param)
            attrs["mask_slot"] = len(operands)
            operands.append(Builder.current().broadcast(mask.value, shape))
        return Tile(Builder.current().emit("load", operands, attrs, index=index).result)

    def store(self, *key: Any, value: Operand, mask: Tile | None = None, contiguity: int | None = None) -> None:
        """Writes a tile; where the mask is false nothing is written."""
        self._write("store", key, value, mask, contiguity)

    def atomic_add(self, *key: Any, value: Operand, mask: Tile | None = None) -> None:
        """Adds a tile to the tensor atomically. The order of additions is not fixed, so float sums may differ run to run."""
        self._write("atomic_add", key, value, mask, None)

    def _write(self, opcode: str, key: Any, value: Operand, mask: Tile | None, contiguity: int | None) -> None:
        builder = Builder.current()
        operands, index = self._index(key)
        shape = access_shape(Op(opcode, operands, [], index=index, loc=user_location()), self.param)
        if isinstance(value, float) and self.dtype.is_int:
            tile = Tile(builder.constant(value, self.dtype))
        else:
            tile = lift(value, self.dtype)
        if tile.dtype != self.dtype and not isinstance(value, Tile):
            tile = tile.to(self.dtype)
        attrs: dict[str, Any] = {"tensor": self.param.name}
        if contiguity:
            attrs["contiguity"] = int(contiguity)
        if mask is not None:
            attrs["mask_slot"] = len(operands)
            operands.append(builder.broadcast(mask.value, shape))
        attrs["value_slot"] = len(operands)
        stored = builder.broadcast(tile.value, shape) if tile.shape == () else tile.value
        operands.append(stored)
        builder.emit(opcode, operands, attrs, index=index)

    def __getitem__(self, key: Any) -> Tile:
        return self.load(*(key if isinstance(key, tuple) else (key,)))

    def __setitem__(self, key: Any, value: Operand) -> None:
        self.store(*(key if isinstance(key, tuple) else (key,)), value=value)
