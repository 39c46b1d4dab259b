"""The functions of the language: constructors, elementwise maths, products, control flow."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from k3dsl.errors import TraceError
from k3dsl.frontend.builder import Builder, constant_of, user_location
from k3dsl.frontend.tile import Operand, Tile, as_dim, binary, lift, unary
from k3dsl.ir import opset, symbols
from k3dsl.ir.graph import Region, Value
from k3dsl.ir.symbols import Expr
from k3dsl.ir.types import DType, TileType, f32, i1, i32, promote


def program_id(axis: int) -> Tile:
    """This program's position along a grid axis, i32."""
    builder = Builder.current()
    if not 0 <= axis < len(builder.grid):
        raise TraceError(
            f"program_id({axis}): the grid has {len(builder.grid)} axes",
            where=user_location(),
            fix="return one extent an axis from grid=",
        )
    if builder.grid[axis].constant == 1:
        return Tile(builder.constant(0, i32))
    return Tile(builder.emit("program_id", [], {"axis": axis}).result)


def arange(size: int, start: Operand = 0) -> Tile:
    """start, start + 1, ... of `size` elements, i32."""
    if isinstance(size, int) and size < 1:
        raise TraceError(
            f"arange of {size} elements", where=user_location(), fix="arange(size, start): the size is first"
        )
    t = Tile(Builder.current().emit("iota", [], {"size": int(size)}).result)
    return t + start if not (isinstance(start, int) and start == 0) else t


def scalar(value: Operand) -> Tile:
    """A number or dim as a traced scalar, for comparisons in where() and when()."""
    return lift(value)


def full(shape: Sequence[int], value: Operand, dtype: DType) -> Tile:
    """A tile filled with a number or a traced scalar."""
    b = Builder.current()
    plain = isinstance(value, (int, float))
    v = b.constant(value, dtype) if plain else b.cast(lift(value).value, dtype)
    return Tile(b.broadcast(v, tuple(shape)))


def zeros(shape: Sequence[int], dtype: DType = f32) -> Tile:
    """A tile of zeros."""
    return full(shape, 0, dtype)


def ones(shape: Sequence[int], dtype: DType = f32) -> Tile:
    """A tile of ones."""
    return full(shape, 1, dtype)


def where(cond: Operand, a: Operand, b: Operand) -> Tile:
    """a where cond holds, else b. A NaN or infinity in the branch not taken does not leak."""
    builder = Builder.current()
    c = lift(cond)
    x = lift(a, b.dtype if isinstance(b, Tile) else None)
    y = lift(b, x.dtype)
    dtype = promote(x.dtype, y.dtype)
    if dtype is None:
        raise TraceError(f"where: {x.dtype} and {y.dtype} have no common dtype", where=user_location(), fix="cast one")
    u, v = builder.cast(x.value, dtype), builder.cast(y.value, dtype)
    shape = builder.joint_shape(builder.joint_shape(c.shape, u.shape), v.shape)
    operands = [builder.broadcast(t, shape) for t in (c.value, u, v)]
    return Tile(builder.emit("where", operands).result)


def _unary_function(opcode: str) -> Callable[..., Tile]:
    approximate = opcode in opset.APPROXIMATE

    def function(x: Operand, approx: bool = False) -> Tile:
        return unary(opcode, x, approx)

    function.__name__ = opcode
    note = " approx=True allows the target's fast instruction (about 1e-6 relative)." if approximate else ""
    function.__doc__ = f"{opset.UNARY_FLOAT[opcode]}, elementwise.{note}"
    return function


def _exponential(opcode: str) -> Callable[..., Tile]:
    def function(x: Operand, approx: bool = False, bound: float | None = None) -> Tile:
        t = lift(x)
        attrs: dict[str, Any] = {"approx": True} if approx else {}
        if bound is not None:
            attrs["bound"] = float(bound)
        if not t.dtype.is_float:
            t = t.to(f32)
        return Tile(Builder.current().emit(opcode, [t.value], attrs).result)

    function.__name__ = opcode
    function.__doc__ = (
        f"{opset.UNARY_FLOAT[opcode]}, elementwise. An argument that is not provably at most 0 overflows for large inputs: "
        "bound states the largest value it can take, and why it cannot be exceeded belongs in a comment."
    )
    return function


exp = _exponential("exp")
exp2 = _exponential("exp2")
log = _unary_function("log")
log2 = _unary_function("log2")
log1p = _unary_function("log1p")
sqrt = _unary_function("sqrt")
rsqrt = _unary_function("rsqrt")
tanh = _unary_function("tanh")
sigmoid = _unary_function("sigmoid")
softplus = _unary_function("softplus")
reciprocal = _unary_function("reciprocal")
sin = _unary_function("sin")
cos = _unary_function("cos")
erf = _unary_function("erf")
floor = _unary_function("floor")
ceil = _unary_function("ceil")


def maximum(a: Operand, b: Operand) -> Any:
    """The larger, elementwise; also of plain numbers and dims."""
    if not isinstance(a, Tile) and not isinstance(b, Tile):
        return _static(symbols.larger, a, b)
    return binary("max", a, b)


def minimum(a: Operand, b: Operand) -> Any:
    """The smaller, elementwise; also of plain numbers and dims."""
    if not isinstance(a, Tile) and not isinstance(b, Tile):
        return _static(symbols.smaller, a, b)
    return binary("min", a, b)


def cdiv(a: Operand, b: Operand) -> Any:
    """a / b rounded up, of numbers, dims or traced integers."""
    if not isinstance(a, Tile) and not isinstance(b, Tile):
        return _static(symbols.cdiv, a, b)
    return (a + (b - 1)) // b


def _static(f: Callable[[Any, Any], Expr], a: Any, b: Any) -> Any:
    e = f(a, b)
    return e.constant if e.constant is not None else e


def dot(a: Tile, b: Tile, acc: Tile | None = None, precision: str | None = None) -> Tile:
    """a @ b (+ acc), accumulated in fp32. 2-D, or 3-D with one batch axis.

    precision: how products are formed: 'bf16' or 'fp16' (what 16-bit operands have), 'tf32', 'tf32x3', 'ieee' for f32
    operands (default 'ieee').
    """
    builder = Builder.current()
    name = precision or opset.default_precision(a.dtype)
    operands = [a.value, b.value]
    if name in ("bf16", "fp16") and a.dtype == f32:
        from k3dsl.ir.types import bf16, f16

        narrow = bf16 if name == "bf16" else f16
        operands = [builder.cast(v, narrow) for v in operands]
    if acc is not None:
        operands.append(acc.value)
    return Tile(builder.emit("dot", operands, {"precision": name}).result)


def unit_lower_inverse(a: Tile, method: str = "doubling", precision: str = "ieee") -> Tile:
    """The inverse of I + (strictly lower part of a), for a [n, n] or [b, n, n], n a power of two.

    method 'doubling': blocks of 2, 4, 8, ... merged by X - X M X, with products in `precision`. 'substitution': forward
    substitution in 16-row blocks in fp32, then merges. Both are stable for alike keys, where a Neumann series is not.
    """
    attrs = {"method": method, "precision": precision}
    return Tile(Builder.current().emit("unit_lower_inverse", [a.value], attrs).result)


def dequantize_mxfp4(packed: Tile, scale: Tile) -> Tile:
    """MXFP4 numbers as bf16: E2M1 codes times a power of two for every 32 neighbours of the last axis (OCP MX v1.0, 5.2).

    packed: u8 [..., K/2], element 2i in the low four bits of byte i and 2i + 1 in the high four. Codes 0 to 7 are 0, 0.5, 1,
    1.5, 2, 3, 4, 6; bit 3 is the sign. scale: u8 [..., K/32]; byte b is 2^(b - 127), and 255 is NaN. Returns bf16 [..., K],
    exact; what is above bf16's range (from b = 253 on) is infinite.
    """
    return Tile(Builder.current().emit("dequantize_mxfp4", [packed.value, scale.value]).result)


def assume(x: Tile, *, divisible_by: int = 1, min: int | None = None, max: int | None = None) -> Tile:
    """States facts about a traced integer scalar. Broken facts are undefined on a GPU and raise on the torch backend."""
    attrs = {"divisible_by": divisible_by, "min": min, "max": max}
    return Tile(Builder.current().emit("assume", [x.value], attrs).result)


def argmax(x: Tile, axis: int, keepdim: bool = False) -> Tile:
    """Position of the maximum along an axis, i32; the lowest on ties."""
    attrs = {"axis": x._axis(axis), "keepdim": keepdim}
    return Tile(Builder.current().emit("argmax", [x.value], attrs).result)


def argmin(x: Tile, axis: int, keepdim: bool = False) -> Tile:
    """Position of the minimum along an axis, i32; the lowest on ties."""
    attrs = {"axis": x._axis(axis), "keepdim": keepdim}
    return Tile(Builder.current().emit("argmin", [x.value], attrs).result)


def _combine_region(builder: Builder, tiles: Sequence[Tile], combine: Callable[..., Any]) -> Region:
    dtypes = [t.dtype for t in tiles]
    region = Region([Value(TileType(d)) for d in dtypes + dtypes])
    with builder.region(region):
        out = combine(*(Tile(v) for v in region.args))
        outs = out if isinstance(out, tuple) else (out,)
        if len(outs) != len(tiles):
            raise TraceError(f"combine must return {len(tiles)} values, got {len(outs)}", where=user_location())
        region.yields = [builder.cast(lift(o, d).value, d) for o, d in zip(outs, dtypes, strict=True)]
    return region


def reduce(tiles: Sequence[Tile], axis: int, combine: Callable[..., Any], keepdim: bool = False) -> tuple[Tile, ...]:
    """Reduces a tuple of tiles together: combine(*left, *right) -> tuple, associative."""
    builder = Builder.current()
    region = _combine_region(builder, tiles, combine)
    attrs = {"axis": tiles[0]._axis(axis), "keepdim": keepdim}
    op = builder.emit("reduce", [t.value for t in tiles], attrs, regions=[region])
    return tuple(Tile(v) for v in op.results)


def scan(tiles: Sequence[Tile], axis: int, combine: Callable[..., Any], reverse: bool = False) -> tuple[Tile, ...]:
    """Inclusive scan of a tuple of tiles: combine(*left, *right) -> tuple, associative."""
    builder = Builder.current()
    region = _combine_region(builder, tiles, combine)
    attrs = {"axis": tiles[0]._axis(axis), "reverse": reverse}
    op = builder.emit("scan", [t.value for t in tiles], attrs, regions=[region])
    return tuple(Tile(v) for v in op.results)


def _named_scan(kind: str) -> Callable[..., Tile]:
    def function(x: Tile, axis: int, reverse: bool = False) -> Tile:
        builder = Builder.current()
        attrs = {"kind": kind, "axis": x._axis(axis), "reverse": reverse}
        value = builder.cast(x.value, i32) if x.dtype.is_bool else x.value  # bools are counted, as by sum
        return Tile(builder.emit("scan", [value], attrs).result)

    function.__doc__ = f"{opset.SCAN[kind].capitalize()} along an axis; reverse=True runs from the end."
    return function


cumsum = _named_scan("sum")
cumprod = _named_scan("prod")
cummax = _named_scan("max")
cummin = _named_scan("min")


def loop(
    stop: Operand,
    init: Any = None,
    *,
    start: Operand = 0,
    step: int = 1,
    label: str | None = None,
    reverse: bool = False,
) -> Callable[[Callable[..., Any]], Any]:
    """Runs the decorated body for each index; the decorated name becomes the final carries.

    The body takes (i, *carries) and returns the new carries, in the shapes and dtypes of `init` (a Tile or a tuple; None
    for a body with side effects only). `stop` may be a traced scalar, so that each program has its own trip count.
    label: the name by which a schedule sets pipeline stages.
    """
    builder = Builder.current()

    def decorate(body: Callable[..., Any]) -> Any:
        single = init is not None and not isinstance(init, (tuple, list))
        carries = [lift(x) for x in ((init,) if single else init or ())]
        _check_body(body, "loop", ["i", *(f"carry {n}" for n in range(1, len(carries) + 1))])
        region = Region([Value(TileType(i32))] + [Value(c.type) for c in carries])
        outer = _closed_over(body)
        with builder.region(region):
            out = body(*(Tile(v) for v in region.args))
            for name, held in _closed_over(body).items():
                if isinstance(held, Tile) and held is not outer.get(name):
                    raise TraceError(
                        f"the loop body binds {name!r} of the code around it, which only its first run would see",
                        where=user_location(),
                        fix=f"carry {name} with init=, and return it",
                    )
            outs = () if out is None else (out,) if not isinstance(out, (tuple, list)) else tuple(out)
            if len(outs) != len(carries):
                raise TraceError(
                    f"the loop body returns {len(outs)} values but carries {len(carries)}",
                    where=user_location(),
                    fix="return one value for each init",
                )
            region.yields = [
                o.value if isinstance(o, Tile) else builder.broadcast(lift(o, c.dtype).value, c.shape)
                for o, c in zip(outs, carries, strict=True)
            ]
        operands = [builder.cast(as_dim(bound), i32) for bound in (start, stop)] + [c.value for c in carries]
        # bounds are evaluated before the loop; they were emitted after the region was traced, into the outer block
        attrs: dict[str, Any] = {"step": int(step), "reverse": bool(reverse)}
        if label:
            attrs["label"] = label
        op = builder.emit("loop", operands, attrs, regions=[region])
        tiles = tuple(Tile(v) for v in op.results)
        return None if not carries else tiles[0] if single else tiles

    return decorate


def _closed_over(body: Callable[..., Any]) -> dict[str, Any]:
    """What a function sees of the variables around it, by name."""
    cells = getattr(body, "__closure__", None) or ()
    names = body.__code__.co_freevars if cells else ()
    found = {}
    for name, cell in zip(names, cells, strict=True):
        with suppress(ValueError):  # not bound yet
            found[name] = cell.cell_contents
    return found


def _check_body(body: Callable[..., Any], what: str, given: Sequence[str]) -> None:
    """Raises TraceError for a body that cannot take what it is given."""
    try:
        signature = inspect.signature(body)
    except ValueError:  # a function of C, which says nothing of itself
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        raise TraceError(
            f"the body of a {what} takes ({', '.join(given)}): {error}",
            where=user_location(),
            fix="give it one parameter for each; the carries are those of init" if given else "give it no parameters",
        ) from None


def when(cond: Operand) -> Callable[[Callable[[], Any]], None]:
    """Runs the decorated body's writes only if a scalar condition holds."""
    builder = Builder.current()
    c = lift(cond)

    def decorate(body: Callable[[], Any]) -> None:
        _check_body(body, "when", [])
        known = constant_of(c.value)
        if known is not None:
            if known:
                body()
            return
        region = Region()
        with builder.region(region):
            if body() is not None:
                raise TraceError(
                    "a when body returns nothing", where=user_location(), fix="choose values with where(cond, a, b)"
                )
        builder.emit("when", [builder.cast(c.value, i1) if not c.dtype.is_bool else c.value], regions=[region])

    return decorate
