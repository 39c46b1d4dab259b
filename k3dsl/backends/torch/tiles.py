"""Operations that change a tile's shape or mix its elements: views, named reductions and scans, products, inverses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3dsl.backends.torch.dtypes import Numerics, round_tf32, to_torch
from k3dsl.backends.torch.elementwise import Compute, Maker, settled
from k3dsl.ir.graph import Op
from k3dsl.ir.opset import MXFP4_GROUP
from k3dsl.ir.types import DType, bf16, f16

Evaluate = Callable[[Op, list[Tensor], Numerics], Tensor]


def _broadcast(op: Op, numerics: Numerics) -> Compute:
    shape = (-1, *op.result.shape)
    ones = (-1, *(1,) * len(op.result.shape))
    if op.operands[0].type.rank == 0:
        return lambda x: x.reshape(ones).expand(shape)
    return lambda x: x.expand(shape)


def _reshape(op: Op, numerics: Numerics) -> Compute:
    shape = (-1, *op.result.shape)
    return lambda x: x.reshape(shape)


def _permute(op: Op, numerics: Numerics) -> Compute:
    axes = (0, *(a + 1 for a in op.attrs["axes"]))
    return lambda x: x.permute(axes)


def _select(op: Op, numerics: Numerics) -> Compute:
    axis, position, shape = op.attrs["axis"] + 1, op.attrs["position"], op.result.shape
    return lambda x: x.select(axis, position).reshape(x.shape[0], *shape)


_REDUCE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "prod": torch.prod,
    "max": torch.amax,  # both propagate NaN
    "min": torch.amin,
    "any": torch.any,
    "all": torch.all,
}
_SCAN: dict[str, Callable[..., Tensor]] = {
    "sum": torch.cumsum,
    "prod": torch.cumprod,
    "max": lambda x, axis: torch.cummax(x, axis).values,
    "min": lambda x, axis: torch.cummin(x, axis).values,
}


def _accumulating(op: Op, numerics: Numerics) -> dict[str, torch.dtype]:
    """The dtype of a sum or product: 16-bit floats are summed in fp32 and rounded once; all else in its own dtype."""
    if op.attrs["kind"] not in ("sum", "prod"):
        return {}
    held = numerics.held(op.operands[0].dtype)
    return {"dtype": torch.float32 if held in (torch.float16, torch.bfloat16) else held}


def _reduce(op: Op, numerics: Numerics) -> Compute | None:
    """A reduction of one tile by a kind of opset.REDUCE; None for one with a combine region, which the machine runs."""
    if op.regions:
        return None
    f, axis, keepdim = _REDUCE[op.attrs["kind"]], op.attrs["axis"] + 1, bool(op.attrs.get("keepdim"))
    options = _accumulating(op, numerics)
    return settled(lambda x: f(x, axis, keepdim, **options), op.result.dtype, numerics)


def _scan(op: Op, numerics: Numerics) -> Compute | None:
    """An inclusive scan of one tile by a kind of opset.SCAN; None as for a reduction."""
    if op.regions:
        return None
    f, axis, options = _SCAN[op.attrs["kind"]], op.attrs["axis"] + 1, _accumulating(op, numerics)
    if op.attrs.get("reverse"):
        return settled(lambda x: f(x.flip(axis), axis, **options).flip(axis), op.result.dtype, numerics)
    return settled(lambda x: f(x, axis, **options), op.result.dtype, numerics)


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


def _factor(dtype: DType, precision: str, numerics: Numerics) -> Compute | None:
    """Brings a dot's operand to the dtype that is multiplied, which makes every product exact or correctly rounded; None
    where it has that."""
    held = numerics.held(dtype)
    if numerics.exact or held == torch.float64:
        return None
    narrow = to_torch(_NARROW[precision]) if precision in _NARROW else None
    if precision == "tf32":
        return lambda x: round_tf32(x.float())
    if narrow is not None and narrow != held:
        return lambda x: x.to(narrow).float()
    return None if held == torch.float32 else torch.Tensor.float


def _dot(op: Op, numerics: Numerics) -> Compute:
    precision = op.attrs["precision"]
    left, right = (_factor(v.dtype, precision, numerics) for v in op.operands[:2])

    def compute(a: Tensor, b: Tensor, acc: Tensor | None = None) -> Tensor:
        a = a if left is None else left(a)
        b = b if right is None else right(b)
        if acc is not None and a.dim() == 3 and a.shape[0] == b.shape[0] == acc.shape[0] > 1:
            return torch.baddbmm(acc, a, b)
        lead = max(a.shape[0], b.shape[0])
        # torch folds a batch into rows when the other operand has no batch axis
        if a.shape[0] == 1:
            a = a[0]
        if b.shape[0] == 1:
            b = b[0]
        if lead == 1 and a.dim() == b.dim() == 2:
            out = torch.mm(a, b)[None]
        else:
            out = torch.matmul(a, b)
            if lead == 1:
                out = out[None]
        return out if acc is None else out + acc

    return compute


def _unit_lower_inverse(op: Op, xs: list[Tensor], numerics: Numerics) -> Tensor:
    x = xs[0] if xs[0].dtype == torch.float64 else xs[0].float()
    # tril copies, so that a NaN or infinity on or above the diagonal is not looked at
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    inverse = torch.linalg.solve_triangular(x.tril(-1), identity.expand_as(x), upper=False, unitriangular=True)
    return numerics.settle(inverse, op.result.dtype)


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _dequantize_mxfp4(op: Op, xs: list[Tensor], numerics: Numerics) -> Tensor:
    packed, scale = xs
    lead = max(packed.shape[0], scale.shape[0])
    codes = torch.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], *op.result.shape)
    table = torch.tensor(_E2M1 + tuple(-x for x in _E2M1), dtype=torch.float64, device=packed.device)
    power = torch.exp2(scale.to(torch.float64) - 127)
    power = torch.where(scale == 255, torch.nan, power).repeat_interleave(MXFP4_GROUP, -1)
    return numerics.settle((table[codes.long()] * power).expand(lead, *op.result.shape), op.result.dtype)


def _each_time(f: Evaluate) -> Maker:
    """For ops that are rare or heavy: their attributes are looked at every time."""
    return lambda op, numerics: lambda *xs: f(op, list(xs), numerics)


TILES: dict[str, Maker] = {
    "broadcast": _broadcast,
    "reshape": _reshape,
    "permute": _permute,
    "select": _select,
    "reduce": _reduce,
    "scan": _scan,
    "argmax": _each_time(_argreduce(_REDUCE["max"])),
    "argmin": _each_time(_argreduce(_REDUCE["min"])),
    "dequantize_mxfp4": _each_time(_dequantize_mxfp4),
    "dot": _dot,
    "unit_lower_inverse": _each_time(_unit_lower_inverse),
}
