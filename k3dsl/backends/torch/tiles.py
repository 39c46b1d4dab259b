"""Operations that change a tile's shape or mix its elements: views, named reductions and scans, products, inverses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3dsl.backends.torch.dtypes import Numerics, round_tf32, to_torch
from k3dsl.backends.torch.elementwise import Evaluate
from k3dsl.ir.graph import Op
from k3dsl.ir.types import DType, bf16, f16


def _broadcast(op: Op, xs: list[Tensor], numerics: Numerics) -> Tensor:
    x, shape = xs[0], op.result.shape
    if x.dim() == 1:
        x = x.reshape(-1, *(1,) * len(shape))
    return x.expand(x.shape[0], *shape)


def _reshape(op: Op, xs: list[Tensor], numerics: Numerics) -> Tensor:
    return xs[0].reshape(xs[0].shape[0], *op.result.shape)


def _permute(op: Op, xs: list[Tensor], numerics: Numerics) -> Tensor:
    return xs[0].permute(0, *(a + 1 for a in op.attrs["axes"]))


def _select(op: Op, xs: list[Tensor], numerics: Numerics) -> Tensor:
    return xs[0].select(op.attrs["axis"] + 1, op.attrs["position"]).reshape(xs[0].shape[0], *op.result.shape)


def _accumulator(x: Tensor) -> torch.dtype:
    """16-bit floats are summed in fp32 and rounded once; everything else in its own dtype."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


_REDUCE: dict[str, Callable[[Tensor, int, bool], Tensor]] = {
    "sum": lambda x, axis, keep: torch.sum(x, axis, keepdim=keep, dtype=_accumulator(x)),
    "prod": lambda x, axis, keep: torch.prod(x, axis, keepdim=keep, dtype=_accumulator(x)),
    "max": lambda x, axis, keep: torch.amax(x, axis, keepdim=keep),  # both propagate NaN
    "min": lambda x, axis, keep: torch.amin(x, axis, keepdim=keep),
    "any": lambda x, axis, keep: torch.any(x, axis, keepdim=keep),
    "all": lambda x, axis, keep: torch.all(x, axis, keepdim=keep),
}
_SCAN: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, axis: torch.cumsum(x, axis, dtype=_accumulator(x)),
    "prod": lambda x, axis: torch.cumprod(x, axis, dtype=_accumulator(x)),
    "max": lambda x, axis: torch.cummax(x, axis).values,
    "min": lambda x, axis: torch.cummin(x, axis).values,
}


def named_reduce(op: Op, xs: list[Tensor], numerics: Numerics) -> Tensor:
    """A reduction of one tile by a kind of opset.REDUCE."""
    f = _REDUCE[op.attrs["kind"]]
    return numerics.settle(f(xs[0], op.attrs["axis"] + 1, bool(op.attrs.get("keepdim"))), op.result.dtype)


def named_scan(op: Op, xs: list[Tensor], numerics: Numerics) -> Tensor:
    """An inclusive scan of one tile by a kind of opset.SCAN."""
    f, axis = _SCAN[op.attrs["kind"]], op.attrs["axis"] + 1
    if op.attrs.get("reverse"):
        return numerics.settle(f(xs[0].flip(axis), axis).flip(axis), op.result.dtype)
    return numerics.settle(f(xs[0], axis), op.result.dtype)


def _argreduce(best: Callable[[Tensor, int, bool], Tensor]) -> Evaluate:
    """The lowest position of the best value; a NaN counts as best, as in numpy and torch."""

    def evaluate(op: Op, xs: list[Tensor], numerics: Numerics) -> Tensor:
        x, axis = xs[0], op.attrs["axis"] + 1
        hit = x == best(x, axis, True)
        if x.dtype.is_floating_point:
            hit = hit | torch.isnan(x)
        n = x.shape[axis]
        positions = torch.arange(n, dtype=torch.int32, device=x.device).view(-1, *(1,) * (x.dim() - axis - 1))
        return torch.where(hit, positions, n).amin(axis, keepdim=bool(op.attrs.get("keepdim")))

    return evaluate


_NARROW: dict[str, DType] = {"bf16": bf16, "fp16": f16}


def _factor(x: Tensor, precision: str, numerics: Numerics) -> Tensor:
    """A dot's operand in the dtype that is multiplied, which makes every product exact or correctly rounded."""
    if numerics.exact or x.dtype == torch.float64:
        return x
    if precision in _NARROW:
        x = x.to(to_torch(_NARROW[precision]))
    x = x.float()
    return round_tf32(x) if precision == "tf32" else x


def _dot(op: Op, xs: list[Tensor], numerics: Numerics) -> Tensor:
    precision = op.attrs["precision"]
    a, b = (_factor(x, precision, numerics) for x in xs[:2])
    if len(xs) == 3 and a.dim() == 3 and a.shape[0] == b.shape[0] == xs[2].shape[0] > 1:
        return torch.baddbmm(xs[2], a, b)
    lead = max(a.shape[0], b.shape[0])
    # torch folds a batch into rows when the other operand has no batch axis
    if a.shape[0] == 1:
        a = a[0]
    if b.shape[0] == 1:
        b = b[0]
    out = torch.matmul(a, b)
    if lead == 1:
        out = out[None]
    return out + xs[2] if len(xs) == 3 else out


def _unit_lower_inverse(op: Op, xs: list[Tensor], numerics: Numerics) -> Tensor:
    x = xs[0] if xs[0].dtype == torch.float64 else xs[0].float()
    # tril copies, so that a NaN or infinity on or above the diagonal is not looked at
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    inverse = torch.linalg.solve_triangular(x.tril(-1), identity.expand_as(x), upper=False, unitriangular=True)
    return numerics.settle(inverse, op.result.dtype)


TILES: dict[str, Evaluate] = {
    "broadcast": _broadcast,
    "reshape": _reshape,
    "permute": _permute,
    "select": _select,
    "argmax": _argreduce(_REDUCE["max"]),
    "argmin": _argreduce(_REDUCE["min"]),
    "dot": _dot,
    "unit_lower_inverse": _unit_lower_inverse,
}
