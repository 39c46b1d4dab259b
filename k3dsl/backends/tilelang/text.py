"""Small rules of TileLang expressions as text: parentheses, dim expressions, literals and dtype names."""

from __future__ import annotations

import math

import torch

from k3dsl.ir.symbols import Expr
from k3dsl.ir.types import DType, bf16

TL_DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u8": "uint8",
    "i1": "bool",
}


def pow2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def tl_dtype(dtype: DType) -> str:
    """The dtype as TileLang spells it."""
    return f"tl.{TL_DTYPES[dtype.name]}"


def closed(text: str) -> bool:
    """True when the text is one operand: a name, a number, a call, an element, or one pair of parentheses."""
    depth = 0
    for k, ch in enumerate(text):
        if depth == 0 and not (ch.isalnum() or ch in "_.(["):
            return False
        depth += (ch in "([") - (ch in ")]")
        if depth == 0 and ch in ")]" and k < len(text) - 1:
            return False
    return True


def atom(text: str) -> str:
    """The text so that any operator may follow or precede."""
    return text if closed(text) else f"({text})"


def opened(text: str) -> str:
    """The text without parentheses around all of it."""
    return text[1:-1] if text.startswith("(") and closed(text) else text


def total(*terms: str) -> str:
    """A sum of index terms, without zeros."""
    kept = [t for t in terms if t != "0"]
    return " + ".join(kept) if kept else "0"


def scaled(text: str, factor: int) -> str:
    """text * factor, without needless terms."""
    if text == "0" or factor == 0:
        return "0"
    return text if factor == 1 else f"{atom(text)} * {factor}"


def all_of(conditions: list[str]) -> str:
    """The conjunction of conditions."""
    text = conditions[0]
    for more in conditions[1:]:
        text = f"tl.And({text}, {more})"
    return text


def dim_text(expr: Expr, wide: bool = False) -> str:
    """A dim expression as kernel text; `wide` computes in 64 bits."""
    symbol = (lambda n: f"tl.cast({n}, tl.int64)") if wide else (lambda n: n)

    def call(op: str, a: str, b: str) -> str:
        if op in ("min", "max"):
            return f"tl.{op}({a}, {b})"
        if op == "cdiv":
            return f"tl.ceildiv({a}, {b})"
        return f"({atom(a)} {'//' if op == 'floordiv' else '%'} {atom(b)})"

    return expr.render(symbol, call)


def literal(value: float | int | bool, dtype: DType) -> str:
    """A typed constant."""
    name = tl_dtype(dtype)
    if dtype.is_bool:
        return f"tl.bool({bool(value)})"
    if not dtype.is_float:
        return str(int(value)) if dtype.name == "i32" else f"{name}({int(value)})"
    v = float(value)
    if dtype.bits == 16:  # of floats: TVM would fold the conversion away
        held = torch.bfloat16 if dtype == bf16 else torch.float16
        v = float(torch.tensor(v, dtype=torch.float64).to(held))
    if math.isinf(v):
        inf = f"tl.infinity({name})"
        return inf if v > 0 else f"(-{inf})"
    if math.isnan(v):
        return f'tl.cast(tl.float32("nan"), {name})'
    if v == 0 and math.copysign(1, v) < 0:
        return f"{name}(-0.0)"
    return f"{name}({v!r})"
