"""TileLang text of the elementwise ops, each on operands that are single terms."""

from __future__ import annotations

from k3dsl.backends.tilelang.text import atom, opened, tl_dtype
from k3dsl.ir.scalars import clamped
from k3dsl.ir.types import DType, f32

CALLS = {
    "exp": "tl.exp({})",
    "exp2": "tl.exp2({})",
    "log": "tl.log({})",
    "log2": "tl.log2({})",
    "log1p": "tl.log1p({})",
    "sqrt": "tl.sqrt({})",
    "rsqrt": "tl.rsqrt({})",
    "tanh": "tl.tanh({})",
    "sigmoid": "1.0 / (1.0 + tl.exp2({} * tl.float32(-1.4426950408889634)))",
    "softplus": "tl.max({0}, tl.float32(0.0)) + tl.log1p(tl.exp(-tl.abs({0})))",
    "reciprocal": "tl.float32(1.0) / {}",
    "sin": "tl.sin({})",
    "cos": "tl.cos({})",
    "erf": "tl.erf({})",
    "floor": "tl.floor({})",
    "ceil": "tl.ceil({})",
    "tf32": 'tl.call_pure_extern("float32", "k3dsl::tf32", {})',
}

MAY_OVERFLOW = frozenset({"add", "sub", "mul", "neg", "abs", "not", "shl"})
"""Integer ops whose result may have more bits than its dtype; it wraps."""
_APPROXIMATE = {"reciprocal": "tl.fast_rcp({})"}


def widened(opcode: str, dtype: DType) -> bool:
    """Arithmetic and functions of floats narrower than fp32 are computed in fp32 and rounded once."""
    return dtype.is_float and dtype.bits < f32.bits and opcode not in ("neg", "abs", "where", "cast")


def cast_text(text: str, source: DType, target: DType) -> str:
    """The text of a value of `source` as `target`."""
    if source == target:
        return text
    if (ends := clamped(source, target)) is not None:
        low, high = ends
        return f"tl.cast(tl.max(tl.min(tl.cast({opened(text)}, tl.int32), {high}), {low}), {tl_dtype(target)})"
    if target.is_bool:
        return f"{atom(text)} != {'0' if not source.is_float else 'tl.float32(0.0)'}"
    if 8 in (source.bits, target.bits) and f32 not in (source, target) and (source.is_float or target.is_float):
        text = f"tl.cast({opened(text)}, tl.float32)"  # the one dtype that 8-bit floats convert to and from
    return f"tl.cast({opened(text)}, {tl_dtype(target)})"


def function_text(opcode: str, arg: str, dtype: DType, approx: bool) -> str:
    """A unary function of an atom, computed in `dtype`."""
    template = _APPROXIMATE.get(opcode) if approx and dtype == f32 else None
    template = template or CALLS[opcode]
    if dtype.bits == 64:
        template = template.replace("float32", "float64")
    if template.endswith("({})"):
        arg = opened(arg)
    return template.format(arg)


def minmax(opcode: str, a: str, b: str) -> str:
    """NaN in either operand gives NaN: see prelude."""
    return f"tl.{opcode}({opened(a)}, {opened(b)})"


def negated(text: str) -> str:
    """The opposite of a condition. TVM would turn a negated comparison round, which is another thing for NaN."""
    return f"tl.cast({opened(text)}, tl.int32) == 0"
