"""What the user holds while a kernel is traced: a `Tile`, an immutable value with numpy-like operators."""

from __future__ import annotations

from typing import Any

from k3dsl.errors import TraceError
from k3dsl.frontend.builder import Builder, constant_of, user_location
from k3dsl.ir import opset
from k3dsl.ir.graph import Value
from k3dsl.ir.scalars import wrapped
from k3dsl.ir.symbols import Expr
from k3dsl.ir.types import DType, TileType, f32, i1, i32, promote

Operand = Any  # Tile | int | float | bool | Expr


class Tile:
    """A traced value of static shape: a scalar (shape ()) or a tile. Arithmetic broadcasts as in numpy."""

    __slots__ = ("value",)
    __array_priority__ = 1000

    def __init__(self, value: Value) -> None:
        self.value = value

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> DType:
        return self.value.dtype

    @property
    def type(self) -> TileType:
        return self.value.type

    def __repr__(self) -> str:
        return f"<tile {self.value.type}>"

    def __bool__(self) -> bool:
        raise TraceError(
            "a traced value has no truth value while the kernel is traced",
            where=user_location(),
            fix="use where(cond, a, b) to choose, @when(cond) for side effects, & | ~ for and, or, not, maximum() for max(), "
            "or a knob or static dim in a Python if",
        )

    def __int__(self) -> int:
        raise TraceError(
            "a traced value is not a Python number",
            where=user_location(),
            fix="loop with @loop(n), index with span() or the value itself",
        )

    __index__ = __int__

    def __len__(self) -> int:
        raise TraceError("a tile has no len()", where=user_location(), fix="use .shape")

    def __iter__(self) -> Any:
        raise TraceError("a tile cannot be iterated", where=user_location(), fix="use reductions, reshape or @loop")

    def __getitem__(self, key: Any) -> Tile:
        """x[:, None], x[None], x[i, :] with a static int i."""
        keys = key if isinstance(key, tuple) else (key,)
        out, axis = self, 0
        for k in keys:
            if k is None:
                out = out.reshape(*out.shape[:axis], 1, *out.shape[axis:])
                axis += 1
            elif isinstance(k, slice) and k == slice(None):
                axis += 1
            elif isinstance(k, int):
                out = out.select(axis, k)
            else:
                raise TraceError(
                    f"a tile index takes ':', None and static integers, got {k!r}",
                    where=user_location(),
                    fix="index the tensor instead (a gather), or use where() with arange()",
                )
            if axis > len(out.shape):
                raise TraceError(f"too many indices for {self.type}", where=user_location())
        return out

    @property
    def T(self) -> Tile:
        """Swaps the last two axes."""
        n = len(self.shape)
        if n < 2:
            raise TraceError(f".T needs two axes, got {self.type}", where=user_location())
        return self.permute(*range(n - 2), n - 1, n - 2)

    def _axis(self, axis: int) -> int:
        """A non-negative axis number."""
        n = len(self.shape)
        if not -n <= axis < n:
            raise TraceError(f"axis {axis} is out of range for {self.type}", where=user_location())
        return axis % n

    def permute(self, *axes: int) -> Tile:
        return Tile(Builder.current().emit("permute", [self.value], {"axes": tuple(axes)}).result)

    def reshape(self, *shape: Any) -> Tile:
        """The same elements in row-major order under another shape; one extent may be -1."""
        want = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else tuple(shape)
        if -1 in want:
            known = 1
            for extent in want:
                known *= extent if extent != -1 else 1
            want = tuple(self.type.size // known if extent == -1 else extent for extent in want)
        return Tile(Builder.current().reshape(self.value, want))

    def broadcast(self, *shape: int) -> Tile:
        return Tile(Builder.current().broadcast(self.value, tuple(shape)))

    def to(self, dtype: DType) -> Tile:
        """Converts the dtype: to floats rounding to nearest even, from floats to integers cutting off and saturating, between
        integers keeping the lowest bits. The rounding is part of the meaning and stays."""
        return Tile(Builder.current().cast(self.value, dtype))

    def select(self, axis: int, position: int) -> Tile:
        """The slice at a static position of an axis; the axis goes away."""
        axis = self._axis(axis)
        position += self.shape[axis] if position < 0 else 0
        return Tile(Builder.current().emit("select", [self.value], {"axis": axis, "position": position}).result)

    def _reduce(self, kind: str, axis: int, keepdim: bool) -> Tile:
        builder = Builder.current()
        attrs = {"kind": kind, "axis": self._axis(axis), "keepdim": keepdim}
        counts = self.dtype.is_bool and kind not in ("any", "all")
        value = builder.cast(self.value, i32) if counts else self.value
        return Tile(builder.emit("reduce", [value], attrs).result)

    def sum(self, axis: int, keepdim: bool = False) -> Tile:
        return self._reduce("sum", axis, keepdim)

    def max(self, axis: int, keepdim: bool = False) -> Tile:
        return self._reduce("max", axis, keepdim)

    def min(self, axis: int, keepdim: bool = False) -> Tile:
        return self._reduce("min", axis, keepdim)

    def prod(self, axis: int, keepdim: bool = False) -> Tile:
        return self._reduce("prod", axis, keepdim)

    def any(self, axis: int, keepdim: bool = False) -> Tile:
        return self._reduce("any", axis, keepdim)

    def all(self, axis: int, keepdim: bool = False) -> Tile:
        return self._reduce("all", axis, keepdim)

    def __add__(self, o: Operand) -> Tile:
        return binary("add", self, o)

    def __radd__(self, o: Operand) -> Tile:
        return binary("add", o, self)

    def __sub__(self, o: Operand) -> Tile:
        return binary("sub", self, o)

    def __rsub__(self, o: Operand) -> Tile:
        return binary("sub", o, self)

    def __mul__(self, o: Operand) -> Tile:
        return binary("mul", self, o)

    def __rmul__(self, o: Operand) -> Tile:
        return binary("mul", o, self)

    def __truediv__(self, o: Operand) -> Tile:
        return binary("div", self, o)

    def __rtruediv__(self, o: Operand) -> Tile:
        return binary("div", o, self)

    def __matmul__(self, o: Operand) -> Tile:
        raise TraceError("tiles have no @", where=user_location(), fix="dot(a, b)")

    __rmatmul__ = __matmul__

    def __floordiv__(self, o: Operand) -> Tile:
        return binary("floordiv", self, o)

    def __rfloordiv__(self, o: Operand) -> Tile:
        return binary("floordiv", o, self)

    def __mod__(self, o: Operand) -> Tile:
        return binary("mod", self, o)

    def __rmod__(self, o: Operand) -> Tile:
        return binary("mod", o, self)

    def __and__(self, o: Operand) -> Tile:
        return binary("and", self, o)

    def __rand__(self, o: Operand) -> Tile:
        return binary("and", o, self)

    def __or__(self, o: Operand) -> Tile:
        return binary("or", self, o)

    def __ror__(self, o: Operand) -> Tile:
        return binary("or", o, self)

    def __xor__(self, o: Operand) -> Tile:
        return binary("xor", self, o)

    def __lshift__(self, o: Operand) -> Tile:
        return binary("shl", self, o)

    def __rshift__(self, o: Operand) -> Tile:
        return binary("shr", self, o)

    def __rlshift__(self, o: Operand) -> Tile:
        return binary("shl", o, self)

    def __rrshift__(self, o: Operand) -> Tile:
        return binary("shr", o, self)

    def __rxor__(self, o: Operand) -> Tile:
        return binary("xor", o, self)

    def __pow__(self, exponent: object) -> Tile:
        """A small static integer power, as products."""
        if not isinstance(exponent, int) or not 1 <= exponent <= 8:
            raise TraceError(
                f"a tile can be raised to a static integer power from 1 to 8, got {exponent!r}",
                where=user_location(),
                fix="use exp2(y * log2(x)), sqrt or rsqrt",
            )
        out = self
        for _ in range(exponent - 1):
            out = out * self
        return out

    def __lt__(self, o: Operand) -> Tile:
        return binary("lt", self, o)

    def __le__(self, o: Operand) -> Tile:
        return binary("le", self, o)

    def __gt__(self, o: Operand) -> Tile:
        return binary("gt", self, o)

    def __ge__(self, o: Operand) -> Tile:
        return binary("ge", self, o)

    def __eq__(self, o: Operand) -> Tile:  # type: ignore[override]
        return binary("eq", self, o)

    def __ne__(self, o: Operand) -> Tile:  # type: ignore[override]
        return binary("ne", self, o)

    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Tile:
        return unary("neg", self)

    def __abs__(self) -> Tile:
        return unary("abs", self)

    def __invert__(self) -> Tile:
        return unary("not", self)


def lift(x: Operand, like: DType | None = None) -> Tile:
    """A Tile from a number, a dim expression or a Tile."""
    if isinstance(x, Tile):
        return x
    return Tile(Builder.current().scalar(x, like))


_FOLD = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
}


def binary(opcode: str, a: Operand, b: Operand) -> Tile:
    """An elementwise operation with promotion and broadcasting."""
    builder = Builder.current()
    if not isinstance(a, Tile):
        x, y = lift(a, b.dtype if isinstance(b, Tile) else None), lift(b)
    else:
        x, y = a, lift(b, a.dtype)
    u, v = x.value, y.value
    dtype = promote(u.dtype, v.dtype)
    if dtype is None:
        raise TraceError(
            f"{u.dtype} and {v.dtype} have no common dtype",
            where=user_location(),
            fix=f"cast one operand, e.g. .to({f32})",
        )
    if dtype.is_bool and opcode not in opset.BITWISE and opcode not in opset.COMPARE:
        dtype = i32
    if opcode == "div" and not dtype.is_float:
        dtype = f32
    u, v = builder.cast(u, dtype), builder.cast(v, dtype)
    if opcode in _FOLD and u.shape == v.shape == () and dtype.is_int:
        ca, cb = constant_of(u), constant_of(v)
        if ca is not None and cb is not None and not (opcode in ("floordiv", "mod") and cb == 0):
            return Tile(builder.constant(wrapped(int(_FOLD[opcode](ca, cb)), dtype), dtype))
        if cb is not None and cb == (0 if opcode in ("add", "sub") else 1 if opcode in ("mul", "floordiv") else None):
            return Tile(u)
        if ca is not None and ca == (0 if opcode == "add" else 1 if opcode == "mul" else None):
            return Tile(v)
    shape = builder.joint_shape(u.shape, v.shape)
    return Tile(builder.emit(opcode, [builder.broadcast(u, shape), builder.broadcast(v, shape)]).result)


def unary(opcode: str, x: Operand, approx: bool = False) -> Tile:
    """An elementwise operation of one operand; integers become fp32 where a float is needed."""
    t = lift(x)
    if opcode in opset.UNARY_FLOAT and not t.dtype.is_float:
        t = t.to(f32)
    return Tile(Builder.current().emit(opcode, [t.value], {"approx": True} if approx else {}).result)


def as_dim(x: Operand) -> Value:
    """A loop bound or index as an i32 scalar value."""
    t = lift(x, i32)
    if t.shape != () or not t.dtype.is_int:
        raise TraceError(f"expected an integer scalar, got {t.type}", where=user_location())
    return t.value


__all__ = ["Expr", "Operand", "Tile", "as_dim", "binary", "i1", "lift", "unary"]
