"""Elementwise operations on batched tiles."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3dsl.backends.torch.dtypes import Numerics
from k3dsl.ir.graph import Op
from k3dsl.ir.types import DType


def _softplus(x: Tensor) -> Tensor:
    # log(1 + e**x) = max(x, 0) + log(1 + e**-|x|): no overflow, no cancellation
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


_TRANSCENDENTAL: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": _softplus,
    "reciprocal": torch.reciprocal,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
}


def _not(x: Tensor) -> Tensor:
    return torch.bitwise_not(x)  # of a bool: logical


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")


DIVISIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"floordiv": _divide, "mod": torch.fmod}
"""Of integers by what is not 0."""


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    """Integer a // b for a, b >= 0. A zero divisor gives -1, as on NVIDIA GPUs; negative operands are undefined."""
    zero = b == 0
    if not bool(zero.any()):
        return _divide(a, b)
    return torch.where(zero, -1, _divide(a, torch.where(zero, 1, b)))


def _remainder(a: Tensor, b: Tensor) -> Tensor:
    """Integer a % b for a, b >= 0. A zero divisor gives -1; negative operands are undefined."""
    zero = b == 0
    if not bool(zero.any()):
        return torch.fmod(a, b)
    return torch.where(zero, -1, torch.fmod(a, torch.where(zero, 1, b)))


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "not": _not,
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floordiv": _quotient,
    "mod": _remainder,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
}
_COMPARE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
}

Compute = Callable[..., Tensor]
"""A pure op on its operands."""
Maker = Callable[[Op, Numerics], "Compute | None"]
"""What computes an op: everything that does not depend on operands is worked out once. None: not on its operands alone."""


def settled(f: Compute, dtype: DType, numerics: Numerics, known: torch.dtype | None = None) -> Compute:
    """f with its result rounded to `dtype` and held as such. known: the dtype that f gives, None to look every time."""
    if dtype.is_float and dtype.bits == 8:
        return lambda *xs: numerics.settle(f(*xs), dtype)
    held = numerics.held(dtype)
    if known == held:
        return f

    def one(a: Tensor) -> Tensor:
        x = f(a)
        return x if x.dtype is held else x.to(held)

    def two(a: Tensor, b: Tensor) -> Tensor:
        x = f(a, b)
        return x if x.dtype is held else x.to(held)

    return two if f in _TWO else one


def _transcendental(f: Compute) -> Maker:
    def make(op: Op, numerics: Numerics) -> Compute:
        # 16-bit floats are computed in fp32 and rounded once, at the end
        narrow = numerics.held(op.operands[0].dtype) in (torch.float16, torch.bfloat16)
        known = torch.float32 if narrow else numerics.held(op.operands[0].dtype)
        return settled((lambda x: f(x.float())) if narrow else f, op.result.dtype, numerics, known)

    return make


def _unary(f: Compute) -> Maker:
    return lambda op, numerics: f  # exact in every dtype


def _binary(f: Compute) -> Maker:
    def make(op: Op, numerics: Numerics) -> Compute:
        left, right = (numerics.held(v.dtype) for v in op.operands)
        return settled(f, op.result.dtype, numerics, left if left == right and left != torch.bool else None)

    return make


def _where(op: Op, numerics: Numerics) -> Compute:
    return torch.where


# a method of its own takes half the time that x.to(dtype) does to begin
_TO: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: Tensor.float,
    torch.bfloat16: Tensor.bfloat16,
    torch.float16: Tensor.half,
    torch.float64: Tensor.double,
    torch.int32: Tensor.int,
    torch.int64: Tensor.long,
}


def _cast(op: Op, numerics: Numerics) -> Compute:
    source, dtype = op.operands[0].dtype, op.result.dtype
    held = numerics.held(dtype)
    if not dtype.is_bool and not (source.is_float and dtype.is_int) and not (dtype.is_float and dtype.bits == 8):
        return _TO.get(held) or (lambda x: x.to(held))
    return lambda x: numerics.convert(x, source, dtype)


_TWO = frozenset(_BINARY.values())
ELEMENTWISE: dict[str, Maker] = {
    **{name: _transcendental(f) for name, f in _TRANSCENDENTAL.items()},
    **{name: _unary(f) for name, f in _UNARY.items()},
    **{name: _binary(f) for name, f in _BINARY.items()},
    **{name: _unary(f) for name, f in _COMPARE.items()},
    "where": _where,
    "cast": _cast,
}
