"""Random kernels for hypothesis, made through the language itself."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from k3dsl.ir.graph import Kernel
from k3dsl.language import (
    In,
    InOut,
    Out,
    Scalar,
    Sym,
    Tile,
    arange,
    argmax,
    assume,
    bf16,
    cummax,
    cumsum,
    dot,
    exp2,
    f32,
    full,
    i32,
    i64,
    kernel,
    loop,
    maximum,
    minimum,
    program_id,
    reduce,
    rsqrt,
    scan,
    sigmoid,
    span,
    unit_lower_inverse,
    when,
    where,
    zeros,
)

Draw = Any
ROWS, COLS = 4, 8


@st.composite
def any_kernels(draw: Draw) -> Kernel:
    """Kernels that use every part of the IR: float and integer tiles, regions, gathers, masks, hints, facts."""

    def number() -> float:
        return draw(st.floats(-1e6, 1e6, allow_nan=False) | st.sampled_from([0.0, -0.0, float("inf"), float("-inf")]))

    def tile(pool: list[Tile]) -> Tile:
        return draw(st.sampled_from(pool))

    def grow(pool: list[Tile], integers: list[Tile]) -> None:
        """Adds one [ROWS, COLS] f32 tile made from the pool by a random op."""
        a, b = tile(pool), tile(pool)
        made: list[Any] = [
            lambda: a + b * number(),
            lambda: maximum(-abs(a), minimum(b, 1.5)),
            lambda: where(a > b, a, number()),
            lambda: where((a <= b) & ~(a == 0.0), a, b / 3.0),
            lambda: exp2(minimum(a, 0.0), approx=draw(st.booleans()), bound=draw(st.none() | st.just(0.0))),
            lambda: rsqrt(a * a + 1.0) * sigmoid(b),
            lambda: a.to(bf16).to(f32),
            lambda: a.T.reshape(ROWS, COLS),
            lambda: a - a.sum(1, keepdim=True) + b.max(0)[None, :],
            lambda: cumsum(a, axis=draw(st.sampled_from([0, 1])), reverse=draw(st.booleans())) + cummax(b, axis=1),
            lambda: a + argmax(b, axis=1)[:, None].to(f32),
            lambda: a.select(0, draw(st.integers(0, ROWS - 1)))[None, :] + b,
            lambda: dot(a, b.T, precision=draw(st.sampled_from(["ieee", "tf32", "bf16"]))).sum(1)[:, None] + a,
            lambda: dot(unit_lower_inverse(dot(a, a.T)), b, acc=a),
            lambda: scan((a, b), axis=1, combine=lambda p, q, r, s: (p * s + r, q * s))[draw(st.integers(0, 1))],
            lambda: a + reduce((a, b), axis=1, combine=lambda p, q, r, s: (where(p > r, p, r), q + s), keepdim=True)[0],
            lambda: a * tile(integers).to(f32),
        ]
        pool.append(draw(st.sampled_from(made))())

    def grow_integer(integers: list[Tile], x: Any) -> None:
        a, b = tile(integers), tile(integers)
        made: list[Any] = [
            lambda: a + b,
            lambda: (a - b) * draw(st.integers(0, 5)),
            lambda: minimum(a, b) // draw(st.integers(1, 4)),
            lambda: (a % 7) ^ (b << 1),
            lambda: where(a < b, a, b),
            lambda: assume(a, divisible_by=draw(st.integers(1, 8)), min=draw(st.none() | st.integers(0, 3))),
            lambda: a.to(i64).to(i32),
            lambda: x[0],
        ]
        integers.append(draw(st.sampled_from(made))())

    @kernel(grid=lambda d, c: (d.T // ROWS, d.n)[: draw(st.integers(1, 2))])
    def generated(
        d, c, x=In("T 8"), ids=In("64", i32), state=InOut("T 8", f32), out=Out("T 8", f32), scale=Scalar(f32)
    ):
        block = program_id(0)
        start = block * ROWS
        rows = span(start, ROWS, end=draw(st.sampled_from([None, d.T])))
        load = x.load(
            rows,
            draw(st.sampled_from([slice(None), span(0, 8).reshape(2, 4)])),
            mask=None,
            other=draw(st.sampled_from([0.0, 1.0])),
            contiguity=draw(st.sampled_from([None, 4])),
        )
        pool = [load.reshape(ROWS, COLS).to(f32), full((ROWS, COLS), number(), f32), zeros((ROWS, COLS)) + scale]
        integers = [block, ids[block], scalar_of(d.T)]
        for _ in range(draw(st.integers(0, 6))):
            draw(st.sampled_from([lambda: grow(pool, integers), lambda: grow_integer(integers, ids)]))()
        if draw(st.booleans()):
            gathered = x.load(minimum(arange(ROWS) + start, d.T - 1), slice(None), mask=pool[0] > 0.0, order=(1, 0))
            pool.append(gathered.to(f32))
        if draw(st.booleans()):
            label = draw(st.sampled_from([None, "chunks", "a label"]))

            @loop(draw(st.sampled_from([3, d.n, integers[-1]])), init=(pool[-1], integers[0]), step=draw(st.integers(1, 2)),
                  label=label, reverse=draw(st.booleans()))  # fmt: skip
            def carried(i, s, count):
                inner = [*pool, s]
                for _ in range(draw(st.integers(0, 3))):
                    grow(inner, [*integers, i, count])
                return inner[-1], count + i

            pool.append(carried[0])
            integers.append(carried[1])
        if draw(st.booleans()):

            @when(integers[-1] >= 0)
            def guarded():
                state[rows] = pool[-1]
                state.atomic_add(rows, value=pool[0], mask=pool[0] < 1.0)

        out.store(rows, value=pool[-1], contiguity=draw(st.sampled_from([None, 2])))

    T = Sym("T", divisible_by=draw(st.sampled_from([4, 16])), min=16)
    return generated.trace({"T": T, "n": Sym("n", max=100)}, {}, {"x": draw(st.sampled_from([bf16, f32]))})


def scalar_of(expr: Any) -> Tile:
    """The value of a dim expression as a traced scalar."""
    from k3dsl.frontend.builder import Builder

    return Tile(Builder.current().dim(expr))


@st.composite
def index_kernels(draw: Draw) -> Kernel:
    """Kernels that copy spans at random affine places, in loops with random bounds. Places may be out of bounds."""

    def expression(scalars: list[Any], d: Any) -> Any:
        out = draw(st.sampled_from([0, 0, 0, 1, -4, 8]))
        for _ in range(draw(st.integers(1, 3))):
            term = draw(st.sampled_from(scalars))
            change = draw(st.sampled_from(["plain", "plain", "div", "mod", "min", "max", "rest"]))
            if change == "div":
                term = term // draw(st.sampled_from([2, 4]))
            elif change == "mod":
                term = term % draw(st.sampled_from([2, 3, 8]))
            elif change == "min":
                term = minimum(term, draw(st.sampled_from([0, 3, d.T])))
            elif change == "max":
                term = maximum(term, draw(st.sampled_from([-2, 0, 5])))
            elif change == "rest":
                term = draw(st.sampled_from([d.T, d.n])) - term
            out = term * draw(st.sampled_from([1, 2, 4, 4, 8, 8, -1])) + out
        return out

    def copy(x: Any, o: Any, scalars: list[Any], d: Any) -> None:
        end = draw(st.sampled_from([None, "T", "expression"]))
        limit = None if end is None else d.T if end == "T" else expression(scalars, d)
        rows = span(expression(scalars, d), draw(st.sampled_from([1, 4, 8])), end=limit)
        value = x[rows]
        o[rows] = value

    def block(x: Any, o: Any, scalars: list[Any], d: Any, depth: int) -> None:
        for _ in range(draw(st.integers(1, 2))):
            if depth and draw(st.booleans()):
                stop = draw(st.sampled_from([3, d.n, d.T // 4, cdiv_of(d.T, 8), "scalar"]))
                stop = draw(st.sampled_from(scalars)) + 1 if isinstance(stop, str) else stop
                start = draw(st.sampled_from([0, 0, 1, *scalars]))

                @loop(stop, start=start, step=draw(st.sampled_from([1, 1, 2, 4])), reverse=draw(st.booleans()))
                def body(i):
                    block(x, o, [*scalars, i], d, depth - 1)
            else:
                copy(x, o, scalars, d)

    grid = draw(st.sampled_from(["floor", "up", "n"]))

    @kernel(grid=lambda d, c: ({"floor": d.T // 8, "up": cdiv_of(d.T, 8), "n": d.n}[grid], 2))
    def generated(d, c, x=In("T", i32), o=Out("T", i32)):
        block(x, o, [program_id(0), program_id(1)], d, 2)

    T = Sym("T", divisible_by=draw(st.sampled_from([1, 4, 8])), min=draw(st.sampled_from([0, 8])))
    return generated.trace({"T": T, "n": Sym("n", min=draw(st.sampled_from([0, 1])))})


@st.composite
def integer_kernels(draw: Draw) -> Kernel:
    """Kernels over integer tiles, full of what `simplify` looks for: neutral constants, views of views, known conditions."""

    def grow(pool: list[Tile], scalars: list[Any], d: Any) -> Tile:
        a, b, s = draw(st.sampled_from(pool)), draw(st.sampled_from(pool)), draw(st.sampled_from(scalars))
        made: list[Any] = [
            lambda: a + s,
            lambda: a - draw(st.sampled_from([0, 1, s])),
            lambda: a * draw(st.sampled_from([0, 1, 2])),
            lambda: minimum(a, b) + maximum(a, a),
            lambda: where(draw(st.sampled_from([a < b, True, False])), a, b),
            lambda: where((a > 0) & draw(st.booleans()) | draw(st.sampled_from([b != 1, False])), a, s),
            lambda: a.reshape(COLS, ROWS).reshape(ROWS, COLS),
            lambda: a.T.permute(1, 0) + a.T.reshape(ROWS, COLS),
            lambda: (zeros((1, COLS), i32) + s) + a,
            lambda: full((COLS, ROWS), draw(st.integers(-1, 1)), i32).T * b,
            lambda: a.to(i64).to(i32) + a.to(i64).to(i64).to(i32),
            lambda: a.sum(1, keepdim=True) + a.max(0)[None, :],
            lambda: a.select(1, 2)[:, None] + b,
            lambda: arange(COLS, start=s)[None, :] + a,
            lambda: where(scalar_of(d.T) + 1 > s, a, b),
            lambda: -a + abs(b),
        ]
        return draw(st.sampled_from(made))()

    def grow_scalar(scalars: list[Any], d: Any) -> Any:
        t = scalar_of(draw(st.sampled_from([d.T, d.n, d.T // 4, d.T * 2 // 4])))
        made = [t + 4, t // 2, t * 2 - t, minimum(t, 5), t % 3, t * 0, maximum(t, 0) // 1, (t + 8) // 4, -t]
        return draw(st.sampled_from(made)) + draw(st.sampled_from([0, *scalars]))

    def body(o: Any, pool: list[Tile], scalars: list[Any], d: Any, depth: int) -> None:
        for _ in range(draw(st.integers(1, 4))):
            kind = draw(st.sampled_from(["tile", "tile", "scalar", "store", "loop", "when"]))
            if kind == "scalar":
                scalars.append(grow_scalar(scalars, d))
            elif kind == "loop" and depth:
                stop = draw(st.sampled_from([0, 1, 3, d.n, scalar_of(d.n) - d.n]))

                @loop(stop, init=(pool[-1], pool[0]), step=draw(st.sampled_from([1, 2])), reverse=draw(st.booleans()))
                def carried(i: Tile, p: Tile, q: Tile) -> tuple[Tile, Tile]:
                    inner = [*pool, p, q]
                    body(o, inner, [*scalars, i], d, depth - 1)
                    return inner[-1], draw(st.sampled_from([p, q, pool[0]]))

                pool.append(carried[0] + carried[1])
            elif kind == "when" and depth:

                @when(
                    draw(st.sampled_from([scalars[-1] > 2, scalar_of(d.T) >= 0, scalar_of(d.n) < 0, scalars[0] == 0]))
                )
                def guarded() -> None:
                    body(o, [*pool], [*scalars], d, depth - 1)

            elif kind == "store":
                o[draw(st.sampled_from([0, scalars[0]])), :, :] = draw(st.sampled_from(pool))
            else:
                pool.append(grow(pool, scalars, d))

    @kernel(grid=lambda d, c: (2,))
    def generated(d, c, x=In("2 4 8", i32), o=Out("3 4 8", i32)):
        block = program_id(0)
        pool = [x[block, :, :], x[1, :, :], full((ROWS, COLS), draw(st.integers(0, 1)), i32)]
        body(o, pool, [block, 1], d, 2)
        o[block, :, :] = pool[-1]

    return generated.trace({"T": Sym("T", divisible_by=4, min=8), "n": Sym("n", max=2)})


def cdiv_of(a: Any, b: int) -> Any:
    """a / b rounded up, of a dim."""
    from k3dsl.ir.symbols import cdiv

    return cdiv(a, b)
