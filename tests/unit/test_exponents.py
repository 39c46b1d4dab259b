"""Exps that can overflow are reported; those that are safe by construction, or state a bound, are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3dsl.ir.graph import Kernel
from k3dsl.ir.types import DType
from k3dsl.language import (
    In,
    Out,
    Scalar,
    Tile,
    arange,
    bf16,
    cummax,
    cumsum,
    exp,
    exp2,
    f16,
    f32,
    f64,
    kernel,
    log,
    loop,
    maximum,
    minimum,
    reciprocal,
    sigmoid,
    softplus,
    tanh,
    where,
    zeros,
)
from k3dsl.passes.exponents import ExponentLint, check_exponents
from k3dsl.passes.intervals import ranges

ROWS, COLS = 16, 32


def kernel_of(make: Callable[..., Tile], dtype: DType = f32) -> Kernel:
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("16 32"), y=In("16 32"), s=Scalar(f32), o=Out("16 32")):
        o[:, :] = make(x[:, :], y[:, :], s)

    return k.trace({}, {}, {"x": dtype, "y": dtype, "o": dtype})


def reports(make: Callable[..., Tile], dtype: DType = f32) -> list[str]:
    return [str(r) for r in check_exponents(kernel_of(make, dtype))]


def online_softmax(x: Tile, y: Tile, s: Tile) -> Tile:
    """Two tiles of scores, as attention does it: both exps are of differences to a running maximum."""

    @loop(4, init=(zeros((ROWS,)) - 1e30, zeros((ROWS,)), zeros((ROWS, COLS))))
    def out(i, m, total, acc):
        new = maximum(m, x.max(1))
        p = exp(x - new[:, None])
        scale = exp(m - new)
        return new, total * scale + p.sum(1), acc * scale[:, None] + p

    return out[2] / out[1][:, None]


def decay(x: Tile) -> Tile:
    """A gate from -5 to 0, nats."""
    return sigmoid(x) * -5.0


def anchored(x: Tile, y: Tile, s: Tile) -> Tile:
    """Sums of up to 16 gates on either side of row 15's: at most 5 * 15 = 75 nats."""
    total = cumsum(decay(x), 0)
    return exp(total - total.select(0, ROWS - 1)[None, :]) + exp(total.select(0, ROWS - 1)[None, :] - total)


SAFE: dict[str, Callable[..., Tile]] = {
    "cut off": lambda x, y, s: exp(minimum(x, 0.0)),
    "cut off at the limit": lambda x, y, s: exp2(minimum(x, 127.0)) + exp(minimum(x, 88.0)),
    "minus a size": lambda x, y, s: exp(-abs(x)) + exp(-(x * x)),
    "minus the row's maximum": lambda x, y, s: exp(x - x.max(1)[:, None]),
    "minus the row's maximum, kept": lambda x, y, s: exp(x - x.max(1, keepdim=True)),
    "minus the column's maximum": lambda x, y, s: exp2((x - x.max(0)[None, :]) * 1.4426950408889634),
    "minus a larger maximum": lambda x, y, s: exp(x - maximum(x, y).max(1)[:, None]),
    "minus a running maximum": lambda x, y, s: exp(x - cummax(x, 1)),
    "online softmax": online_softmax,
    "masked scores": lambda x, y, s: (lambda z: exp(z - z.max(1)[:, None]))(where(y > 0.0, x, float("-inf"))),
    "bounded gates": lambda x, y, s: exp(cumsum(decay(x), 0)) + exp2(sigmoid(x) * 100.0),
    "unbounded gates, summed": lambda x, y, s: exp(cumsum(softplus(x) * -exp(minimum(y, 10.0)), 0)),
    "sums of gates over a row": lambda x, y, s: x * exp(decay(x).sum(1))[:, None],
    "anchored gates": anchored,
    "the rest of a chunk": lambda x, y, s: exp((lambda g: g[ROWS - 1, :][None, :] - g)(cumsum(-softplus(x), 0))),
    "the rest of a chunk, by its sum": lambda x, y, s: (lambda g: exp(g.sum(0)[None, :] - cumsum(g, 0)))(-softplus(x)),
    "backwards sums": lambda x, y, s: exp(cumsum(decay(x), 0, reverse=True)),
    "masked rows": lambda x, y, s: exp(where(arange(ROWS)[:, None] < 3, decay(x), 0.0)),
    "through views and 16 bits": lambda x, y, s: exp(minimum(x, 0.0).to(bf16).to(f32).T.reshape(ROWS, COLS)),
    "a stated bound": lambda x, y, s: exp(x, bound=80) + exp2(x, bound=118),
    "a sigmoid spelled out": lambda x, y, s: 1.0 / (1.0 + exp(-x)) + reciprocal(1.0 + exp2(x)),
    "logarithms of shares": lambda x, y, s: exp(log(sigmoid(x))),
    "bounded functions": lambda x, y, s: exp(tanh(x) * 80.0),
    "a decaying carry": lambda x, y, s: carried(x, lambda g, c: exp(c), lambda g, c: c + g),
}


def carried(x: Tile, use: Callable[..., Tile], step: Callable[..., Tile]) -> Tile:
    """A loop whose carry starts at 0 and changes by `step(gate, carry)`."""
    gate = decay(x)

    @loop(8, init=(zeros((ROWS, COLS)), zeros((ROWS, COLS))))
    def out(i, c, seen):
        return step(gate, c), seen + use(gate, c)

    return out[1]


UNSAFE: dict[str, tuple[Callable[..., Tile], str]] = {
    "an input": (lambda x, y, s: exp(x), "the argument of exp has no upper bound"),
    "a scalar argument": (lambda x, y, s: exp2(x * 0.0 + s), "the argument of exp2 has no upper bound"),
    "just above the limit": (lambda x, y, s: exp(minimum(x, 88.5)), "can reach 88.5; f32 overflows above 88 nats"),
    "log2 above the limit": (lambda x, y, s: exp2(minimum(x, 128.0)), "can reach 128; f32 overflows above 127 in log2"),
    "a growing sum": (lambda x, y, s: exp(cumsum(sigmoid(x) * 6.0, 0)), "can reach 96"),
    "another row's maximum": (lambda x, y, s: exp(x - y.max(1)[:, None]), "has no upper bound"),
    "the maximum of a part": (lambda x, y, s: exp(x - where(y > 0.0, x, -1e9).max(1)[:, None]), "has no upper bound"),
    "the minimum": (lambda x, y, s: exp(x - x.min(1)[:, None]), "has no upper bound"),
    "the first row of a sum": (lambda x, y, s: exp(100.0 - cumsum(abs(x) + 1.0, 0)), "can reach 99"),
    "an anchor far away": (lambda x, y, s: far(x), "can reach 155"),
    "a carry that grows": (lambda x, y, s: carried(x, lambda g, c: exp(c), lambda g, c: c - g), "has no upper bound"),
    "a product of signs unknown": (lambda x, y, s: exp(minimum(x, 0.0) * y), "has no upper bound"),
    "a sigmoid that is used twice": (lambda x, y, s: (lambda e: e / (1.0 + e))(exp(x)), "has no upper bound"),
    "one over a sum with who knows what": (lambda x, y, s: reciprocal(exp(x) + y), "has no upper bound"),
    "a log of a sum": (lambda x, y, s: log(1.0 + exp(x)), "has no upper bound"),
    "a stated bound that is too large": (lambda x, y, s: exp(x, bound=100), "exp states bound=100, but overflows f32 above 88"),
}  # fmt: skip


def far(x: Tile) -> Tile:
    """Sums over 32 columns less the first one's: 31 gates of 5."""
    total = cumsum(decay(x), 1)
    return exp(total.select(1, 0)[:, None] - total)


@pytest.mark.parametrize("name", SAFE)
def test_safe_by_construction(name: str) -> None:
    assert reports(SAFE[name]) == []


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_ones_are_reported_with_their_place(name: str) -> None:
    make, expected = UNSAFE[name]
    first = reports(make)[0]
    assert "unit/test_exponents.py:" in first
    assert expected in first


def test_a_report_says_what_to_write_instead() -> None:
    message = reports(lambda x, y, s: exp2(x))[0]
    assert "at most 0 (minimum(x, 0), or subtract the maximum)" in message
    assert "exp2(x, bound=127)" in message


def test_each_exp_is_reported_once_and_has_a_stable_code() -> None:
    found = check_exponents(kernel_of(lambda x, y, s: exp(x) + exp2(y)))
    assert [r.code for r in found] == ["unbounded_exponent"] * 2


@pytest.mark.parametrize(("dtype", "limit"), [(f16, 11), (bf16, 88), (f32, 88), (f64, 709)])
def test_the_limit_is_the_dtypes(dtype: DType, limit: int) -> None:
    assert reports(lambda x, y, s: exp(minimum(x, float(limit))), dtype) == []
    assert len(reports(lambda x, y, s: exp(minimum(x, limit + 1.0)), dtype)) == 1


def test_a_square_tiles_row_maximum_is_not_its_column_maximum() -> None:
    @kernel(grid=lambda d, c: (1,))
    def k(d, c, x=In("16 16", f32), o=Out("16 16", f32)):
        t = x[:, :]
        o[:, :] = exp(t - t.max(1)[None, :])

    assert len(check_exponents(k.trace({}))) == 1


# -- soundness --------------------------------------------------------------------------------------------------------

Pair = tuple[Tile, np.ndarray]


def grown(draw: Any, pool: list[Pair]) -> Pair:
    """One more value, as a tile and as the numbers it has."""
    (a, u), (b, v) = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
    c = draw(st.sampled_from([-3.0, -0.5, 0.0, 2.0]))
    axis, row = draw(st.integers(0, 1)), draw(st.integers(0, ROWS - 1))
    sums, reversed_sums = np.cumsum(u, axis), np.flip(np.cumsum(np.flip(u, axis), axis), axis)
    made: list[Callable[[], Pair]] = [
        lambda: (a + b, u + v),
        lambda: (a - b, u - v),
        lambda: (a * b, u * v),
        lambda: (a * c, u * c),
        lambda: (a * a, u * u),
        lambda: (-a, -u),
        lambda: (abs(a), np.abs(u)),
        lambda: (abs(a) + 1.0, np.abs(u) + 1),
        lambda: (minimum(a, c), np.minimum(u, c)),
        lambda: (maximum(a, b), np.maximum(u, v)),
        lambda: (where(a > b, a, c), np.where(u > v, u, c)),
        lambda: (sigmoid(a), 1 / (1 + np.exp(-u))),
        lambda: (tanh(a), np.tanh(u)),
        lambda: (softplus(minimum(a, 5.0)), np.log1p(np.exp(np.minimum(u, 5.0)))),
        lambda: (exp(minimum(a, 1.0)), np.exp(np.minimum(u, 1.0))),
        lambda: (reciprocal(abs(a) + 1.0), 1 / (np.abs(u) + 1)),
        lambda: (b / (a * a + 0.5), v / (u * u + 0.5)),
        lambda: (a.sum(1)[:, None] + zeros((ROWS, COLS)), np.repeat(u.sum(1)[:, None], COLS, 1)),
        lambda: (a - a.max(axis, keepdim=True), u - u.max(axis, keepdims=True)),
        lambda: (b - maximum(b, a).max(1)[:, None], v - np.maximum(v, u).max(1)[:, None]),
        lambda: (a - cummax(a, axis), u - np.maximum.accumulate(u, axis)),
        lambda: (cumsum(a, axis), sums),
        lambda: (cumsum(a, axis, reverse=True), reversed_sums),
        lambda: (cumsum(a, 0) - cumsum(a, 0)[row, :][None, :], np.cumsum(u, 0) - np.cumsum(u, 0)[row]),
        lambda: anchored_pair(a, sums if axis == 0 else np.cumsum(u, 0), row),
        lambda: (a.select(0, row)[None, :] + zeros((ROWS, COLS)), np.repeat(u[row][None], ROWS, 0)),
        lambda: (a.to(bf16).to(f32), u),
        lambda: (a.T.reshape(ROWS, COLS), u.T.reshape(ROWS, COLS)),
    ]
    return draw(st.sampled_from(made))()


def anchored_pair(a: Tile, sums: np.ndarray, row: int) -> Pair:
    """A sum less the same sum at one row, with one scan op, both ways round."""
    total = cumsum(a, 0)
    at = total.select(0, row)[None, :]
    return (at - total if row % 2 else total - at, sums[row] - sums if row % 2 else sums - sums[row])


@settings(max_examples=80)
@given(st.data())
def test_ranges_hold(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 3)))
    x, y = rng.normal(size=(2, ROWS, COLS)) * data.draw(st.sampled_from([0.1, 3.0]))
    pool: list[Pair] = []

    @kernel(grid=lambda d, c: (1,))
    def k(d, c, xs=In("16 32", f32), ys=In("16 32", f32), o=Out("16 32", f32)):
        pool.extend([(xs[:, :], x), (sigmoid(ys[:, :]), 1 / (1 + np.exp(-y)))])
        for _ in range(data.draw(st.integers(1, 8))):
            pool.append(grown(data.draw, pool))
        o[:, :] = pool[-1][0]

    traced = k.trace({})
    known, lint = ranges(traced), ExponentLint(traced)
    for tile, numbers in pool:
        slack = 1e-2 * (1 + np.abs(numbers).max())  # bf16 rounding is left out of `numbers`
        assert known[id(tile.value)].low <= numbers.min() + slack
        assert known[id(tile.value)].high >= numbers.max() - slack
        assert lint.upper(tile.value) >= numbers.max() - slack
