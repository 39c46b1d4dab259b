"""Elementwise operations on batched tiles."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3dsl.backends.torch.dtypes import Numerics
from k3dsl.ir.graph import Op


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


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    """Integer a // b for a, b >= 0. A zero divisor gives -1, as on NVIDIA GPUs; negative operands are undefined."""
    zero = b == 0
    if not bool(zero.any()):
        return torch.div(a, b, rounding_mode="trunc")
    return torch.where(zero, -1, torch.div(a, torch.where(zero, 1, b), rounding_mode="trunc"))


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

Evaluate = Callable[[Op, list[Tensor], Numerics], Tensor]


def _transcendental(f: Callable[[Tensor], Tensor]) -> Evaluate:
    def evaluate(op: Op, xs: list[Tensor], numerics: Numerics) -> Tensor:
        x = xs[0]
        if x.dtype in (torch.float16, torch.bfloat16):  # rounded once, at the end
            x = x.float()
        return numerics.settle(f(x), op.result.dtype)

    return evaluate


def _unary(f: Callable[[Tensor], Tensor]) -> Evaluate:
    return lambda op, xs, numerics: f(xs[0])  # exact in every dtype


def _binary(f: Callable[[Tensor, Tensor], Tensor]) -> Evaluate:
    return lambda op, xs, numerics: numerics.settle(f(xs[0], xs[1]), op.result.dtype)


def _compare(f: Callable[[Tensor, Tensor], Tensor]) -> Evaluate:
    return lambda op, xs, numerics: f(xs[0], xs[1])


def _where(op: Op, xs: list[Tensor], numerics: Numerics) -> Tensor:
    return torch.where(xs[0], xs[1], xs[2])


def _cast(op: Op, xs: list[Tensor], numerics: Numerics) -> Tensor:
    return numerics.convert(xs[0], op.operands[0].dtype, op.result.dtype)


ELEMENTWISE: dict[str, Evaluate] = {
    **{name: _transcendental(f) for name, f in _TRANSCENDENTAL.items()},
    **{name: _unary(f) for name, f in _UNARY.items()},
    **{name: _binary(f) for name, f in _BINARY.items()},
    **{name: _compare(f) for name, f in _COMPARE.items()},
    "where": _where,
    "cast": _cast,
}
