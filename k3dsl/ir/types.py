"""The types of the IR: dtypes, and tiles of them (a scalar is a tile of shape ())."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DType:
    """An element type. `name` is what printed IR, packs and metadata use."""

    name: str
    kind: Literal["float", "int", "uint", "bool"]
    bits: int

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_int(self) -> bool:
        return self.kind in ("int", "uint")

    @property
    def is_bool(self) -> bool:
        return self.kind == "bool"

    @property
    def bytes(self) -> int:
        return max(1, self.bits // 8)

    def __repr__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)  # a string remembers its hash; dtypes are keys at every step of an evaluation


f64 = DType("f64", "float", 64)
f32 = DType("f32", "float", 32)
f16 = DType("f16", "float", 16)
bf16 = DType("bf16", "float", 16)
f8e4m3 = DType("f8e4m3", "float", 8)
f8e5m2 = DType("f8e5m2", "float", 8)
i64 = DType("i64", "int", 64)
i32 = DType("i32", "int", 32)
i16 = DType("i16", "int", 16)
i8 = DType("i8", "int", 8)
u8 = DType("u8", "uint", 8)
i1 = DType("i1", "bool", 1)

TORCH_NAMES: dict[DType, str] = {
    f64: "float64", f32: "float32", f16: "float16", bf16: "bfloat16", f8e4m3: "float8_e4m3fn", f8e5m2: "float8_e5m2",
    i64: "int64", i32: "int32", i16: "int16", i8: "int8", u8: "uint8", i1: "bool",
}  # fmt: skip
"""Every dtype, and what torch calls it."""
DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in TORCH_NAMES}


@dataclass(frozen=True)
class TileType:
    """A tile of static shape, held by one program. Shape () is a scalar."""

    dtype: DType
    shape: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        n = 1
        for extent in self.shape:
            n *= extent
        return n

    def with_dtype(self, dtype: DType) -> TileType:
        return TileType(dtype, self.shape)

    def with_shape(self, shape: tuple[int, ...]) -> TileType:
        return TileType(self.dtype, tuple(shape))

    def __str__(self) -> str:
        return self.dtype.name + (f"[{','.join(map(str, self.shape))}]" if self.shape else "")


def promote(a: DType, b: DType) -> DType | None:
    """The dtype that arithmetic on `a` and `b` gives, or None when the pair needs an explicit cast.

    Equal kinds give the wider one; an integer with a float gives the float. bf16 with f16 has no common type.
    """
    if a == b:
        return a
    if a.is_bool:
        return b
    if b.is_bool:
        return a
    if a.is_float != b.is_float:
        return a if a.is_float else b
    if a.bits == b.bits:
        return None
    return a if a.bits > b.bits else b
