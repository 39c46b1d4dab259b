"""Triton text of the elementwise ops, and the helper functions that a generated module may need."""

from __future__ import annotations

import math

from k3dsl.backends.printing import INFIX
from k3dsl.backends.triton.text import opened
from k3dsl.ir.types import DType, f32

TL_DTYPES = {
    "f64": "tl.float64",
    "f32": "tl.float32",
    "f16": "tl.float16",
    "bf16": "tl.bfloat16",
    "f8e4m3": "tl.float8e4nv",
    "f8e5m2": "tl.float8e5",
    "i64": "tl.int64",
    "i32": "tl.int32",
    "i16": "tl.int16",
    "i8": "tl.int8",
    "u8": "tl.uint8",
    "i1": "tl.int1",
}

_CALLS = {
    "exp": "tl.exp({})",
    "exp2": "tl.exp2({})",
    "log": "tl.log({})",
    "log2": "tl.log2({})",
    "log1p": "_log1p({})",
    "sqrt": "tl.sqrt_rn({})",
    "rsqrt": "tl.rsqrt({})",
    "tanh": "_tanh({})",
    "sigmoid": "1.0 / (1.0 + tl.exp2({} * -1.4426950408889634))",
    "softplus": "_softplus({})",
    "reciprocal": "1.0 / {}",
    "sin": "tl.sin({})",
    "cos": "tl.cos({})",
    "erf": "tl.erf({})",
    "floor": "tl.floor({})",
    "ceil": "tl.ceil({})",
}

_APPROXIMATE = {
    "reciprocal": "_reciprocal_approx({})",
    "tanh": "_tanh_approx({})",
    "sigmoid": "_reciprocal_approx(1.0 + tl.exp2({} * -1.4426950408889634))",
    "sqrt": "tl.sqrt({})",
}

HELPERS = {
    "_log1p": """
@triton.jit
def _log1p(x):
    # log(u) * x / (u - 1) undoes the rounding of u = 1 + x
    u = 1.0 + x
    plain = (u == 1.0) | (u == float("inf"))
    return tl.where(plain, x, tl.log(u) * (x / tl.where(plain, 1.0, u - 1.0)))
""",
    "_softplus": """
@triton.jit
def _softplus(x):
    y = tl.exp(-tl.abs(x))
    u = 1.0 + y
    return tl.maximum(x, 0.0) + tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0)))
""",
    "_tanh": """
@triton.jit
def _tanh(x):
    # e = exp(-2|x|); near 0 the odd series keeps full relative precision
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    s = x * x
    small = x * (1.0 + s * (-0.3333333333333333 + s * (0.13333333333333333 - s * 0.05396825396825397)))
    return tl.where(a < 0.125, small, tl.where(x < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e))
""",
    "_reciprocal_approx": """
@triton.jit
def _reciprocal_approx(x):
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
""",
    "_tanh_approx": """
@triton.jit
def _tanh_approx(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
""",
    "_exp2_neg": """
@triton.jit
def _exp2_neg(x):
    # 2**-x; as PTX, so that the sign is part of the instruction
    return tl.inline_asm_elementwise(
        "{ .reg .f32 t; neg.f32 t, $1; ex2.approx.ftz.f32 $0, t; }", "=f,f", [x],
        dtype=tl.float32, is_pure=True, pack=1)
""",
    "_e2m1": """
@triton.jit
def _e2m1(packed):
    # as the bits of an fp16 number a code is 2^14 times too small: one exponent and one mantissa bit of it are the code's
    low = ((packed & 7).to(tl.int16) << 9) | ((packed & 8).to(tl.int16) << 12)
    high = ((packed & 112).to(tl.int16) << 5) | ((packed & 128).to(tl.int16) << 8)
    return (low.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0,
            high.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0)
""",
    "_e2m1_bf16": """
@triton.jit
def _e2m1_bf16(packed):
    # four bytes at a time: prmt takes 4 codes as places in a table, once for the upper and once for the lower bytes of bf16.
    # The tables' halves $5 and $9 are constants that ptxas must not see as such, or it copies them anew for every use: to
    # each is added the last bit of n (n + 1), n the thread's number, which is 0
    upper, lower = tl.inline_asm_elementwise(
        "{ .reg .b32 n; mov.u32 n, %tid.x; mad.lo.u32 n, n, n, n; and.b32 n, n, 1;"
        " or.b32 $0, n, 0x3f3f3f00; or.b32 $1, n, 0xc0800000; }",
        "=r,=r,r", [0], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 m, n, p, q, r, s, t, u;"
        " and.b32 m, $4, 0x77777777; shr.b32 n, m, 16;"
        " prmt.b32 p, $5, 0x40404040, m; prmt.b32 q, $9, 0xc0804000, m;"
        " prmt.b32 r, $5, 0x40404040, n; prmt.b32 s, $9, 0xc0804000, n;"
        " prmt.b32 t, $4, 0, 0x1404; prmt.b32 u, $4, 0, 0x3424;"
        " prmt.b32 m, q, p, 0x6240; prmt.b32 n, q, p, 0x7351;"
        " lop3.b32 $2, t, 0x80008000, n, 0xea; shl.b32 t, t, 4; lop3.b32 $0, t, 0x80008000, m, 0xea;"
        " prmt.b32 m, s, r, 0x6240; prmt.b32 n, s, r, 0x7351;"
        " lop3.b32 $3, u, 0x80008000, n, 0xea; shl.b32 u, u, 4; lop3.b32 $1, u, 0x80008000, m, 0xea; }",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [packed, upper, lower], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
        pack=4)
""",
    "_opaque": """
@triton.jit
def _opaque(x):
    # of a tile that a reshape puts in another order Triton lays the tile before it out in shared memory, some as it cannot
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)
""",
    "_e8m0": """
@triton.jit
def _e8m0(scale):
    bits = tl.where(scale == 0, 0x400000, tl.where(scale == 255, 0x7FC00000, scale.to(tl.int32) << 23))
    return bits.to(tl.float32, bitcast=True)
""",
    "_max": """
@triton.jit
def _max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "_min": """
@triton.jit
def _min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "_argmax": """
@triton.jit
def _argmax(a, i, b, j):
    # NaN is above everything, the lower position wins a tie
    more = (a > b) | ((a != a) & (b == b))
    same = (a == b) | ((a != a) & (b != b))
    left = more | (same & (i < j))
    return tl.where(left, a, b), tl.where(left, i, j)
""",
    "_argmin": """
@triton.jit
def _argmin(a, i, b, j):
    # NaN is below everything, the lower position wins a tie
    less = (a < b) | ((a != a) & (b == b))
    same = (a == b) | ((a != a) & (b != b))
    left = less | (same & (i < j))
    return tl.where(left, a, b), tl.where(left, i, j)
""",
    "_mul": """
@triton.jit
def _mul(a, b):
    return a * b
""",
    "_or": """
@triton.jit
def _or(a, b):
    return a | b
""",
    "_and": """
@triton.jit
def _and(a, b):
    return a & b
""",
}


def literal(value: float | int | bool, dtype: DType) -> str:
    """A constant as Python text."""
    if dtype.is_bool:
        return "True" if value else "False"
    if not dtype.is_float:
        return str(int(value))
    v = float(value)
    if math.isinf(v):
        return 'float("inf")' if v > 0 else '-float("inf")'
    if math.isnan(v):
        return 'float("nan")'
    return repr(v)


def infix(opcode: str) -> str | None:
    """The operator of a binary op, if it is written as one."""
    return INFIX.get(opcode)


def call_text(opcode: str, arg: str, dtype: DType, approx: bool, asm: bool) -> tuple[str, bool]:
    """Text of a unary float function of an atom, and whether it is an atom itself (needs no parentheses).

    dtype: in which it is computed. asm: the target takes inline PTX; without it the exact form is used.
    """
    template = _CALLS[opcode]
    if approx and asm and dtype == f32 and opcode in _APPROXIMATE:
        template = _APPROXIMATE[opcode]
    if opcode == "sqrt" and dtype.bits == 64:
        template = "tl.sqrt({})"  # tl.sqrt_rn is of fp32 only
    if template.endswith("({})"):
        arg = opened(arg)
    return template.format(arg), not template.startswith("1.0 /")


def minmax(opcode: str, dtype: DType, a: str, b: str) -> str:
    """NaN in either operand gives NaN."""
    name = "tl.maximum" if opcode == "max" else "tl.minimum"
    nan = ", propagate_nan=tl.PropagateNan.ALL" if dtype.is_float else ""
    text = f"{name}({a}, {b}{nan})"
    return f"{text}.to(tl.bfloat16)" if dtype.name == "bf16" else text  # Triton 3.6 gives fp32


def needs_f32(opcode: str, dtype: DType) -> bool:
    """Functions (and division) of 16-bit floats, and everything of 8-bit floats, is computed in fp32 and rounded once."""
    if not dtype.is_float or dtype.bits >= f32.bits:
        return False
    return dtype.bits == 8 or opcode in _CALLS or opcode == "div"
