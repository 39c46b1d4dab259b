"""The trace in progress: where new ops go, where in the user's file they come from, and simple folding on the way."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from k3dsl.errors import TraceError
from k3dsl.ir import opset
from k3dsl.ir.graph import Index, Op, Region, TensorParam, Value
from k3dsl.ir.scalars import wrapped
from k3dsl.ir.symbols import Expr
from k3dsl.ir.types import DTYPES, TORCH_NAMES, DType, f32, i1, i32, i64

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INTERNAL = tuple(os.path.join(_PACKAGE, folder) + os.sep for folder in ("frontend", "ir", "passes"))
_current: list[Builder] = []


def user_location() -> str | None:
    """file:line of the nearest frame outside the language itself."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not internal(path):
            return f"{short_path(path)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


@lru_cache(maxsize=1024)
def internal(path: str) -> bool:
    """True for a source file of the language itself, whose frames and variables mean nothing to a user."""
    return os.path.abspath(path).startswith(_INTERNAL)


def short_path(path: str) -> str:
    """The path from the working folder where it lies below, else its last three parts: the same on every machine."""
    return _short(path, os.getcwd())


@lru_cache(maxsize=1024)
def _short(path: str, folder: str) -> str:
    full = os.path.realpath(path)
    relative = os.path.relpath(full, os.path.realpath(folder))
    if not relative.startswith(".."):
        return relative
    return os.path.join(*full.split(os.sep)[-3:])


_BY_NAME = DTYPES | {f"torch.{name}": dtype for dtype, name in TORCH_NAMES.items()}


def as_dtype(value: object) -> DType:
    """A dtype of the language from itself, its name or torch's. Raises TraceError for anything else."""
    if isinstance(value, DType):
        return value
    if str(value) in _BY_NAME:
        return _BY_NAME[str(value)]
    raise TraceError(f"{value!r} is no dtype", where=user_location(), fix=f"one of {', '.join(DTYPES)}")


class Builder:
    """Collects ops into nested regions. One builder serves one trace."""

    def __init__(self, tensors: dict[str, TensorParam]) -> None:
        self.tensors = tensors
        self.body = Region()
        self.grid: tuple[Expr, ...] = ()
        self.stack: list[Region] = [self.body]
        self.alive: set[int] = {id(self.body)}
        self.home: dict[int, Region] = {}

    @staticmethod
    def current() -> Builder:
        if not _current:
            raise TraceError(
                "a language operation ran outside a kernel",
                where=user_location(),
                fix="call it inside a function decorated with @kernel",
            )
        return _current[-1]

    @contextmanager
    def active(self) -> Iterator[None]:
        _current.append(self)
        try:
            yield
        finally:
            _current.pop()

    @contextmanager
    def region(self, region: Region) -> Iterator[Region]:
        """Ops emitted inside go to `region`; values made there cannot be used after it ends."""
        self.stack.append(region)
        self.alive.add(id(region))
        for arg in region.args:
            self.home[id(arg)] = region
        try:
            yield region
        finally:
            self.stack.pop()
            self.alive.discard(id(region))

    def emit(
        self,
        opcode: str,
        operands: list[Value],
        attrs: dict[str, Any] | None = None,
        *,
        regions: list[Region] | None = None,
        index: tuple[Index, ...] = (),
    ) -> Op:
        op = Op(opcode, operands, [], attrs, regions, index, user_location())
        for v in operands:
            home = self.home.get(id(v))
            if home is not None and id(home) not in self.alive:
                raise TraceError(
                    f"{opcode} uses a value made inside a loop or when body that has ended",
                    where=op.loc,
                    fix="return it from the loop body and carry it with init=",
                )
        types = opset.infer(op, self.tensors)
        op.results = [Value(t, op) for t in types]
        self.stack[-1].ops.append(op)
        for v in op.results:
            self.home[id(v)] = self.stack[-1]
        return op

    def constant(self, value: float, dtype: DType) -> Value:
        dtype = as_dtype(dtype)
        if dtype.is_float:
            value = float(value)
        elif dtype.is_bool:
            value = bool(value)
        elif value != value or value in (math.inf, -math.inf) or value != int(value):
            raise TraceError(
                f"{value} is no {dtype}", where=user_location(), fix="give a whole number, or .to(f32) the tile"
            )
        else:
            value = int(value)
        return self.emit("const", [], {"value": value, "dtype": dtype}).result

    def dim(self, expr: Expr) -> Value:
        c = expr.constant
        if c is not None:
            return self.constant(c, i32 if -(2**31) <= c < 2**31 else i64)
        return self.emit("dim", [], {"expr": expr}).result

    def scalar(self, value: object, like: DType | None = None) -> Value:
        """A Python number or dim expression as a scalar value; `like` is the dtype of the tile it meets."""
        if isinstance(value, Expr):
            v = self.dim(value)
            return self.cast(v, like) if like is not None and like.is_float else v
        if isinstance(value, bool):
            return self.constant(value, i1)
        if isinstance(value, int):
            if like is not None and not like.is_bool:
                return self.constant(value, like)
            return self.constant(value, i32 if -(2**31) <= value < 2**31 else i64)
        if isinstance(value, float):
            return self.constant(value, like if like is not None and like.is_float else f32)
        raise TraceError(
            f"expected a traced value or a number, got {type(value).__name__}",
            where=user_location(),
            fix="use tiles, Python numbers and dims in kernel arithmetic",
        )

    def cast(self, v: Value, dtype: DType) -> Value:
        dtype = as_dtype(dtype)
        if v.dtype == dtype:
            return v
        c = constant_of(v)
        if c is not None and v.shape == () and v.dtype.is_int and (dtype.is_float or dtype.is_int):
            return self.constant(wrapped(int(c), dtype) if dtype.is_int else c, dtype)
        return self.emit("cast", [v], {"dtype": dtype}).result

    def broadcast(self, v: Value, shape: tuple[int, ...]) -> Value:
        """Numpy broadcasting: missing leading axes are added, axes of extent 1 repeat."""
        if v.shape == shape:
            return v
        if v.shape != () and len(v.shape) < len(shape):
            v = self.reshape(v, (1,) * (len(shape) - len(v.shape)) + v.shape)
        if v.shape == shape:
            return v
        return self.emit("broadcast", [v], {"shape": shape}).result

    def reshape(self, v: Value, shape: tuple[int, ...]) -> Value:
        if v.shape == shape:
            return v
        return self.emit("reshape", [v], {"shape": shape}).result

    def joint_shape(self, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
        n = max(len(a), len(b))
        pa, pb = (1,) * (n - len(a)) + a, (1,) * (n - len(b)) + b
        for x, y in zip(pa, pb, strict=True):
            if x != y and x != 1 and y != 1:
                raise TraceError(
                    f"shapes {list(a)} and {list(b)} do not broadcast",
                    where=user_location(),
                    fix="axes must be equal or 1; insert axes with x[:, None] or transpose with .T",
                )
        return tuple(y if x == 1 else x for x, y in zip(pa, pb, strict=True))


def constant_of(v: Value) -> float | int | bool | None:
    """The value of a scalar or filled constant, else None."""
    if v.op is not None and v.op.opcode == "const":
        return v.op.attrs["value"]
    return None
