"""The op set: each opcode with its meaning and the rule that gives its result types. The verifier runs the same rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from k3dsl.errors import VerifyError
from k3dsl.ir.graph import Op, TensorParam
from k3dsl.ir.types import DType, TileType, bf16, f32, i1, i32, i64, u8

UNARY_FLOAT = {
    "exp": "e**x",
    "exp2": "2**x",
    "log": "natural logarithm",
    "log2": "base-2 logarithm",
    "log1p": "log(1 + x), exact near 0",
    "sqrt": "square root",
    "rsqrt": "1/sqrt(x)",
    "tanh": "hyperbolic tangent",
    "sigmoid": "1/(1 + exp(-x))",
    "softplus": "log(1 + exp(x)), without overflow",
    "reciprocal": "1/x",
    "sin": "sine",
    "cos": "cosine",
    "erf": "error function",
    "floor": "rounds down",
    "ceil": "rounds up",
}
UNARY_ANY = {"neg": "-x", "abs": "|x|"}  # of numbers
BINARY = {
    "add": "a + b",
    "sub": "a - b",
    "mul": "a * b",
    "div": "a / b (floats)",
    "floordiv": "a // b (integers, both at least 0)",
    "mod": "a % b (integers, both at least 0)",
    "min": "the smaller; NaN if either is NaN",
    "max": "the larger; NaN if either is NaN",
}
BITWISE = {"and": "a & b", "or": "a | b", "xor": "a ^ b", "shl": "a << b", "shr": "a >> b"}
COMPARE = {"lt": "a < b", "le": "a <= b", "gt": "a > b", "ge": "a >= b", "eq": "a == b", "ne": "a != b"}
REDUCE = {
    "sum": "sum",
    "max": "maximum",
    "min": "minimum",
    "prod": "product",
    "any": "logical or",
    "all": "logical and",
}
SCAN = {"sum": "inclusive sum", "prod": "inclusive product", "max": "running maximum", "min": "running minimum"}
PRECISIONS = ("bf16", "fp16", "tf32", "tf32x3", "ieee")
MXFP4_GROUP = 32
"""Neighbours along the last axis that share a scale."""
INVERSE_METHODS = ("doubling", "substitution")
APPROXIMATE = frozenset({"reciprocal", "tanh", "sigmoid", "exp", "exp2", "log2", "rsqrt", "sqrt"})


@dataclass(frozen=True)
class OpInfo:
    """One opcode: what it means, and `infer(op, tensors)`, which gives the result types or raises VerifyError."""

    doc: str
    infer: Callable[[Op, dict[str, TensorParam]], list[TileType]]


def _fail(op: Op, message: str, fix: str | None = None) -> VerifyError:
    return VerifyError(f"{op.opcode}: {message}", where=op.loc, fix=fix)


def _same_shape(op: Op) -> tuple[int, ...]:
    shapes = {v.shape for v in op.operands}
    if len(shapes) != 1:
        raise _fail(op, f"operands differ in shape: {', '.join(str(v.type) for v in op.operands)}")
    return op.operands[0].shape


def _operands(op: Op, n: int) -> None:
    if len(op.operands) != n:
        raise _fail(op, f"takes {n} operands, got {len(op.operands)}")


def _unary(floats_only: bool) -> Callable[[Op, dict[str, TensorParam]], list[TileType]]:
    def infer(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
        _operands(op, 1)
        t = op.operands[0].type
        if floats_only and not t.dtype.is_float:
            raise _fail(op, f"needs a float tile, got {t}", fix="cast it first: x.to(f32)")
        if t.dtype.is_bool:
            raise _fail(op, f"takes numbers, got {t}", fix="use ~x for bools, or cast with .to(i32)")
        if op.attrs.get("approx") and op.opcode not in APPROXIMATE:
            raise _fail(op, "has no approximate form", fix=f"ops that have one: {', '.join(sorted(APPROXIMATE))}")
        return [t]

    return infer


def _not(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _operands(op, 1)
    t = op.operands[0].type
    if t.dtype.is_float:
        raise _fail(op, f"takes bools or integers, got {t}", fix="negate with -x, or compare first")
    return [t]


def _binary(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _operands(op, 2)
    shape = _same_shape(op)
    a, b = op.operands[0].dtype, op.operands[1].dtype
    if a != b:
        raise _fail(op, f"operands differ in dtype: {a} and {b}", fix="cast one of them with .to(...)")
    if op.opcode == "div" and not a.is_float:
        raise _fail(op, f"divides floats, got {a}", fix="use // for integers")
    if op.opcode in ("floordiv", "mod") and not a.is_int:
        raise _fail(op, f"takes integers, got {a}")
    return [TileType(a, shape)]


def _bitwise(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _operands(op, 2)
    shape = _same_shape(op)
    a, b = op.operands[0].dtype, op.operands[1].dtype
    if a != b or a.is_float:
        raise _fail(op, f"takes two equal integer or bool dtypes, got {a} and {b}")
    if a.is_bool and op.opcode in ("shl", "shr"):
        raise _fail(op, "takes integers, got bools")
    return [TileType(a, shape)]


def _compare(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _operands(op, 2)
    shape = _same_shape(op)
    if op.operands[0].dtype != op.operands[1].dtype:
        raise _fail(op, f"compares different dtypes: {op.operands[0].type} and {op.operands[1].type}")
    return [TileType(i1, shape)]


def _where(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _operands(op, 3)
    shape = _same_shape(op)
    c, a, b = (v.dtype for v in op.operands)
    if not c.is_bool:
        raise _fail(op, f"the condition must be bool, got {c}", fix="compare first, e.g. x > 0")
    if a != b:
        raise _fail(op, f"both branches must have one dtype, got {a} and {b}")
    return [TileType(a, shape)]


def _const(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _operands(op, 0)
    return [TileType(op.attrs["dtype"], tuple(op.attrs.get("shape", ())))]


def _program_id(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    if op.attrs["axis"] not in (0, 1, 2):
        raise _fail(op, f"axis must be 0, 1 or 2, got {op.attrs['axis']}")
    return [TileType(i32)]


def _dim(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _operands(op, 0)
    upper = op.attrs["expr"].upper()
    return [TileType(i32 if upper is not None and upper < 2**31 else i64)]


def _iota(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    if op.attrs["size"] < 1:
        raise _fail(op, f"needs a positive size, got {op.attrs['size']}")
    return [TileType(i32, (op.attrs["size"],))]


def _cast(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _operands(op, 1)
    return [op.operands[0].type.with_dtype(op.attrs["dtype"])]


def _broadcast(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _operands(op, 1)
    t, shape = op.operands[0].type, tuple(op.attrs["shape"])
    if t.shape != () and (
        len(t.shape) != len(shape) or any(a not in (1, b) for a, b in zip(t.shape, shape, strict=True))
    ):
        raise _fail(
            op, f"cannot broadcast {t} to {list(shape)}", fix="axes must be equal or 1; use reshape or x[:, None]"
        )
    return [t.with_shape(shape)]


def _reshape(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _operands(op, 1)
    t = op.operands[0].type
    new = t.with_shape(tuple(op.attrs["shape"]))
    if new.size != t.size:
        raise _fail(op, f"cannot reshape {t} ({t.size} elements) to {list(new.shape)} ({new.size})")
    return [new]


def _permute(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _operands(op, 1)
    t, axes = op.operands[0].type, tuple(op.attrs["axes"])
    if sorted(axes) != list(range(t.rank)):
        raise _fail(op, f"axes {axes} are no permutation of the {t.rank} axes of {t}")
    return [t.with_shape(tuple(t.shape[a] for a in axes))]


def _reduced(op: Op, t: TileType) -> TileType:
    axis = op.attrs["axis"]
    if not 0 <= axis < t.rank:
        raise _fail(op, f"axis {axis} is out of range for {t}")
    keep = (1,) if op.attrs.get("keepdim") else ()
    return t.with_shape(t.shape[:axis] + keep + t.shape[axis + 1 :])


def _combine_checked(op: Op) -> None:
    """A reduce or scan over several tiles (or with its own combine) carries a region: 2n scalars in, n scalars out."""
    n = len(op.operands)
    if op.attrs.get("kind") is not None:
        if n != 1:
            raise _fail(op, "a named reduction takes one tile", fix="give combine= for tuples")
        return
    region = op.regions[0]
    want = [v.dtype for v in op.operands]
    if [v.dtype for v in region.args] != want + want or [v.dtype for v in region.yields] != want:
        raise _fail(op, f"combine must take {2 * n} scalars and return {n} of dtypes {want}")


def _reduce(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _combine_checked(op)
    _same_shape(op)
    kind = op.attrs.get("kind")
    if kind in ("any", "all") and not op.operands[0].dtype.is_bool:
        raise _fail(op, f"{kind} reduces bools, got {op.operands[0].type}")
    if kind is not None and kind not in REDUCE:
        raise _fail(op, f"unknown kind {kind!r}", fix=f"one of {', '.join(REDUCE)}")
    return [_reduced(op, v.type) for v in op.operands]


def _argreduce(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _operands(op, 1)
    return [_reduced(op, op.operands[0].type).with_dtype(i32)]


def _scan(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _combine_checked(op)
    _same_shape(op)
    if op.attrs.get("kind") is not None and op.attrs["kind"] not in SCAN:
        raise _fail(op, f"unknown kind {op.attrs['kind']!r}", fix=f"one of {', '.join(SCAN)}")
    if not 0 <= op.attrs["axis"] < op.operands[0].type.rank:
        raise _fail(op, f"axis {op.attrs['axis']} is out of range for {op.operands[0].type}")
    return [v.type for v in op.operands]


def _select(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _operands(op, 1)
    t, i = op.operands[0].type, op.attrs["position"]
    out = _reduced(op, t)
    if not 0 <= i < t.shape[op.attrs["axis"]]:
        raise _fail(op, f"position {i} is out of range for axis {op.attrs['axis']} of {t}")
    return [out]


def _dot(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    if len(op.operands) not in (2, 3):
        raise _fail(op, "takes a, b and an optional accumulator")
    a, b = op.operands[0].type, op.operands[1].type
    if a.rank not in (2, 3) or a.rank != b.rank:
        raise _fail(op, f"takes two 2-D or two 3-D tiles, got {a} and {b}")
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise _fail(op, f"inner extents differ: {a} times {b}", fix="transpose one operand with .T")
    if a.dtype != b.dtype or not a.dtype.is_float:
        raise _fail(
            op, f"operands must share one float dtype, got {a.dtype} and {b.dtype}", fix="cast one with .to(...)"
        )
    precision = op.attrs["precision"]
    if precision not in PRECISIONS:
        raise _fail(op, f"unknown precision {precision!r}", fix=f"one of {', '.join(PRECISIONS)}")
    if a.dtype.bits == 16 and precision != {"bf16": "bf16", "f16": "fp16"}[a.dtype.name]:
        raise _fail(
            op, f"{a.dtype} operands cannot be multiplied in {precision}", fix="leave precision out, or cast to f32"
        )
    out = TileType(f32 if a.dtype.bits < 64 else a.dtype, (*a.shape[:-1], b.shape[-1]))
    if len(op.operands) == 3 and op.operands[2].type != out:
        raise _fail(op, f"the accumulator must be {out}, got {op.operands[2].type}")
    return [out]


def _inverse(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _operands(op, 1)
    t = op.operands[0].type
    if t.rank not in (2, 3) or t.shape[-1] != t.shape[-2] or not t.dtype.is_float:
        raise _fail(op, f"takes square float tiles, got {t}")
    if op.attrs["method"] not in INVERSE_METHODS:
        raise _fail(op, f"unknown method {op.attrs['method']!r}", fix=f"one of {', '.join(INVERSE_METHODS)}")
    n = t.shape[-1]
    if n & (n - 1):
        raise _fail(op, f"the extent must be a power of two, got {n}")
    return [t]


def _dequantize_mxfp4(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _operands(op, 2)
    packed, scale = (v.type for v in op.operands)
    if packed.dtype != u8 or scale.dtype != u8 or not packed.rank:
        raise _fail(op, f"takes two u8 tiles, packed codes and scales, got {packed} and {scale}")
    lead, half = packed.shape[:-1], packed.shape[-1]
    if 2 * half % MXFP4_GROUP:
        reason = f"{packed} holds {2 * half} codes in its last axis, no multiple of {MXFP4_GROUP}"
        raise _fail(op, reason, fix="read whole groups of 32 codes, which are 16 bytes")
    want = TileType(u8, (*lead, 2 * half // MXFP4_GROUP))
    if scale != want:
        raise _fail(op, f"packed codes {packed} need scales {want}, got {scale}", fix="one scale for 32 codes of a row")
    return [TileType(bf16, (*lead, 2 * half))]


def access_shape(op: Op, tensor: TensorParam) -> tuple[int, ...]:
    """The shape of the tile that the op's index reads or writes."""
    if len(op.index) != tensor.rank:
        raise _fail(
            op, f"{tensor.name} has {tensor.rank} axes, the index has {len(op.index)}", fix="give one index an axis"
        )
    gathers = [op.operands[i.start].shape for i in op.index if i.kind == "tile" and i.start is not None]
    joint: tuple[int, ...] = ()
    if gathers:
        if len(set(gathers)) != 1:
            raise _fail(op, f"index tiles differ in shape: {gathers}", fix="broadcast them to one shape")
        joint = gathers[0]
    shape: list[int] = []
    gathered = False
    for axis, index in enumerate(op.index):
        if index.kind == "full":
            extent = tensor.shape[axis].constant
            if extent is None or extent != index.shape[0]:
                raise _fail(op, f"':' needs a static axis, axis {axis} of {tensor.name} is {tensor.shape[axis]}")
            shape.append(extent)
        elif index.kind == "span":
            shape.extend(index.shape)
        elif index.kind == "tile" and not gathered:
            shape.extend(joint)
            gathered = True
    for index in op.index:
        for slot in (index.start, index.end):
            if slot is None:
                continue
            v = op.operands[slot]
            if not v.dtype.is_int or (v.shape != () and not (index.kind == "tile" and slot == index.start)):
                raise _fail(op, f"indices must be integers, got {v.type}")
    return tuple(shape)


def _mask_checked(op: Op, shape: tuple[int, ...]) -> None:
    slot = op.attrs.get("mask_slot")
    if slot is not None and op.operands[slot].type != TileType(i1, shape):
        raise _fail(op, f"the mask must be {TileType(i1, shape)}, got {op.operands[slot].type}")


def _tensor(op: Op, tensors: dict[str, TensorParam]) -> TensorParam:
    name = op.attrs["tensor"]
    if name not in tensors:
        raise _fail(op, f"unknown tensor {name!r}")
    return tensors[name]


def _load(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    tensor = _tensor(op, tensors)
    shape = access_shape(op, tensor)
    _mask_checked(op, shape)
    if tensor.role == "out":
        raise _fail(op, f"{tensor.name} is declared Out and cannot be read", fix="declare it InOut")
    return [TileType(tensor.dtype, shape)]


def _store(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    tensor = _tensor(op, tensors)
    want = TileType(tensor.dtype, access_shape(op, tensor))
    _mask_checked(op, want.shape)
    if tensor.role == "in":
        raise _fail(op, f"{tensor.name} is declared In and cannot be written", fix="declare it Out or InOut")
    got = op.operands[op.attrs["value_slot"]].type
    if got != want:
        raise _fail(
            op, f"{tensor.name} at this index takes {want}, got {got}", fix="reshape, broadcast or cast the value"
        )
    return []


def _loop(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    """Operands: start, stop, step constant in attrs, then the initial carries."""
    region = op.regions[0]
    if op.operands[0].type != TileType(i32) or op.operands[1].type != TileType(i32):
        raise _fail(op, "start and stop must be i32 scalars")
    if op.attrs["step"] < 1:
        raise _fail(op, f"step must be at least 1, got {op.attrs['step']}", fix="use reverse=True to run backwards")
    carries = [v.type for v in op.operands[2:]]
    if [v.type for v in region.args] != [TileType(i32), *carries]:
        raise _fail(op, "region arguments do not match the index and the carries")
    got = [v.type for v in region.yields]
    if got != carries:
        raise _fail(
            op,
            f"the body returns ({', '.join(map(str, got))}) but carries ({', '.join(map(str, carries))})",
            fix="return one value for each init, of the same shape and dtype",
        )
    return carries


def _when(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _operands(op, 1)
    if op.operands[0].type != TileType(i1):
        raise _fail(
            op, f"the condition must be a bool scalar, got {op.operands[0].type}", fix="reduce it with any()/all()"
        )
    return []


def _assume(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    _operands(op, 1)
    t = op.operands[0].type
    if t.shape != () or not t.dtype.is_int:
        raise _fail(op, f"takes an integer scalar, got {t}")
    return [t]


OPSET: dict[str, OpInfo] = {
    "program_id": OpInfo("the program's position along a grid axis", _program_id),
    "dim": OpInfo("the value of an expression over runtime dims", _dim),
    "const": OpInfo("a constant, as a scalar or a filled tile", _const),
    "iota": OpInfo("0, 1, ..., size - 1", _iota),
    "cast": OpInfo("converts the dtype, rounding to nearest even; the rounding is never optimised away", _cast),
    "broadcast": OpInfo("repeats along axes of extent 1", _broadcast),
    "reshape": OpInfo("the same elements in row-major order under another shape", _reshape),
    "permute": OpInfo("reorders axes", _permute),
    "where": OpInfo("a where the condition holds, else b; the other branch's NaN does not leak", _where),
    "reduce": OpInfo("reduces along an axis, by a named kind or a combine region", _reduce),
    "argmax": OpInfo("position of the maximum, the lowest on ties", _argreduce),
    "argmin": OpInfo("position of the minimum, the lowest on ties", _argreduce),
    "scan": OpInfo("inclusive scan along an axis, forward or reverse", _scan),
    "select": OpInfo("the slice at a static position of an axis", _select),
    "dot": OpInfo("matrix product with fp32 accumulation: a @ b (+ acc)", _dot),
    "unit_lower_inverse": OpInfo("inverse of (I + strictly lower part of a)", _inverse),
    "dequantize_mxfp4": OpInfo(
        "4-bit codes, two in a byte, times a power of two for every 32, as bf16", _dequantize_mxfp4
    ),
    "load": OpInfo("reads a tile of a tensor", _load),
    "store": OpInfo("writes a tile of a tensor", _store),
    "atomic_add": OpInfo("adds a tile to a tensor atomically; the order is not fixed", _store),
    "loop": OpInfo("runs a region for each index, with carried values", _loop),
    "when": OpInfo("runs a region of side effects if a scalar holds", _when),
    "assume": OpInfo("states a fact about a scalar: divisor, bounds", _assume),
}
for _name, _doc in UNARY_FLOAT.items():
    OPSET[_name] = OpInfo(_doc, _unary(True))
for _name, _doc in UNARY_ANY.items():
    OPSET[_name] = OpInfo(_doc, _unary(False))
for _name, _doc in BINARY.items():
    OPSET[_name] = OpInfo(_doc, _binary)
for _name, _doc in BITWISE.items():
    OPSET[_name] = OpInfo(_doc, _bitwise)
for _name, _doc in COMPARE.items():
    OPSET[_name] = OpInfo(_doc, _compare)
OPSET["not"] = OpInfo("logical not of bools, bitwise not of integers", _not)


def default_precision(dtype: DType) -> str:
    """The dot precision that a dtype has when none is named: its own for 16-bit floats, exact products for f32."""
    return {"bf16": "bf16", "f16": "fp16"}.get(dtype.name, "ieee")


def infer(op: Op, tensors: dict[str, TensorParam]) -> list[TileType]:
    """Result types of an op. Raises VerifyError when the op breaks its rule."""
    info = OPSET.get(op.opcode)
    if info is None:
        raise VerifyError(f"unknown op {op.opcode!r}", where=op.loc)
    return info.infer(op, tensors)
