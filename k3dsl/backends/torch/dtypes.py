"""Element types: k3dsl's and torch's names for them, and how values are held, converted and rounded."""

from __future__ import annotations

import torch

from k3dsl.errors import ArgumentError
from k3dsl.ir import types
from k3dsl.ir.types import DType

_TORCH: dict[DType, torch.dtype] = {dtype: getattr(torch, name) for dtype, name in types.TORCH_NAMES.items()}
_K3DSL = {v: k for k, v in _TORCH.items()}
_F8_MAX = {types.f8e4m3: 448.0, types.f8e5m2: 57344.0}


def to_torch(dtype: DType) -> torch.dtype:
    """The torch dtype of a k3dsl dtype."""
    return _TORCH[dtype]


def from_torch(dtype: torch.dtype) -> DType:
    """The k3dsl dtype of a torch dtype. Raises ArgumentError for one that k3dsl lacks (complex, quantised, ...)."""
    if dtype not in _K3DSL:
        known = ", ".join(str(t) for t in _K3DSL)
        raise ArgumentError(f"k3dsl has no dtype for {dtype}", fix=f"use one of {known}")
    return _K3DSL[dtype]


class Numerics:
    """How one evaluation holds values: each float in its own dtype, or all floats in `compute_dtype`.

    8-bit floats are held in fp32, rounded to their own grid after every operation, since torch computes nothing in them.
    """

    def __init__(self, compute_dtype: torch.dtype | None) -> None:
        if compute_dtype not in (None, torch.float32, torch.float64):
            raise ArgumentError(
                f"compute_dtype is {compute_dtype}", fix="use None (each value in its own dtype), float32 or float64"
            )
        self.compute_dtype = compute_dtype
        self._held = {dtype: self._holder(dtype) for dtype in _TORCH}

    @property
    def exact(self) -> bool:
        """True when floats are not rounded to their own dtypes."""
        return self.compute_dtype is not None

    def _holder(self, dtype: DType) -> torch.dtype:
        if dtype.is_float:
            if self.compute_dtype is not None:
                return self.compute_dtype
            if dtype.bits == 8:
                return torch.float32
        return _TORCH[dtype]

    def held(self, dtype: DType) -> torch.dtype:
        """The torch dtype in which values of `dtype` are held."""
        return self._held[dtype]

    def settle(self, x: torch.Tensor, dtype: DType) -> torch.Tensor:
        """A result of an operation, rounded to `dtype` and held as such."""
        if dtype.is_float and dtype.bits == 8 and not self.exact:
            return round_f8(x, dtype).to(torch.float32)
        held = self._held[dtype]
        return x if x.dtype == held else x.to(held)

    def convert(self, x: torch.Tensor, source: DType, dtype: DType) -> torch.Tensor:
        """The IR's cast."""
        if source.is_float and dtype.is_int:
            return truncate(x, dtype)
        if dtype.is_bool:
            return x != 0
        return self.settle(x, dtype)

    def stored(self, x: torch.Tensor, dtype: DType) -> torch.Tensor:
        """A held value as the bits that a tensor of `dtype` keeps (8-bit floats as bytes)."""
        if dtype.is_float and dtype.bits == 8:
            return round_f8(x, dtype).view(torch.uint8)
        return x.to(_TORCH[dtype])

    def loaded(self, x: torch.Tensor, dtype: DType) -> torch.Tensor:
        """The inverse of `stored`."""
        if dtype.is_float and dtype.bits == 8:
            x = x.view(_TORCH[dtype])
        held = self._held[dtype]
        return x if x.dtype is held else x.to(held)


def round_f8(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Rounds to an 8-bit float; what is too large becomes the largest number, as in the GPUs' conversion."""
    limit = _F8_MAX[dtype]
    return x.to(torch.float32).clamp(-limit, limit).to(_TORCH[dtype])


def truncate(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Float to integer as GPUs convert: toward zero, NaN gives 0, what is too large gives the nearest integer there is."""
    info = torch.iinfo(_TORCH[dtype])
    wide = x.to(torch.float64)
    # 2**63 is a double while 2**63 - 1 is not: the top of i64 is patched in after the conversion.
    top = float(info.max) if dtype.bits < 64 else float(2**63 - 1024)
    out = torch.nan_to_num(wide, nan=0.0).clamp(float(info.min), top).to(_TORCH[dtype])
    return torch.where(wide >= 2.0**63, info.max, out) if dtype.bits == 64 else out


def round_tf32(x: torch.Tensor) -> torch.Tensor:
    """fp32 with the mantissa rounded to tf32's 10 bits, to nearest, ties away from zero (cvt.rna)."""
    bits = x.contiguous().view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x)
