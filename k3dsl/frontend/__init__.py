"""The language: what a kernel author imports. Public surface of this folder."""

from k3dsl.frontend.functions import (
    arange,
    argmax,
    argmin,
    assume,
    cdiv,
    ceil,
    cos,
    cummax,
    cummin,
    cumprod,
    cumsum,
    dequantize_mxfp4,
    dot,
    erf,
    exp,
    exp2,
    floor,
    full,
    log,
    log1p,
    log2,
    loop,
    maximum,
    minimum,
    ones,
    program_id,
    reciprocal,
    reduce,
    rsqrt,
    scalar,
    scan,
    sigmoid,
    sin,
    softplus,
    sqrt,
    tanh,
    unit_lower_inverse,
    when,
    where,
    zeros,
)
from k3dsl.frontend.kernel import Kernel, kernel
from k3dsl.frontend.tensor import In, InOut, Out, Scalar, TensorSpec, span
from k3dsl.frontend.tile import Tile
from k3dsl.ir.symbols import Sym
from k3dsl.ir.types import bf16, f8e4m3, f8e5m2, f16, f32, f64, i1, i8, i16, i32, i64, u8

__all__ = [
    "In", "InOut", "Kernel", "Out", "Scalar", "Sym", "TensorSpec", "Tile", "arange", "argmax", "argmin", "assume",
    "bf16", "cdiv", "ceil", "cos", "cummax", "cummin", "cumprod", "cumsum", "dequantize_mxfp4", "dot", "erf", "exp",
    "exp2", "f8e4m3", "f8e5m2", "f16", "f32", "f64", "floor", "full", "i1", "i8", "i16", "i32", "i64", "kernel", "log",
    "log1p", "log2", "loop", "maximum", "minimum", "ones", "program_id", "reciprocal", "reduce", "rsqrt", "scalar",
    "scan", "sigmoid", "sin", "softplus", "span", "sqrt", "tanh", "u8", "unit_lower_inverse", "when", "where", "zeros",
]  # fmt: skip
