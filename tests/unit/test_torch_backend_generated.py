"""Generated programs: random graphs of language operations, on the torch backend and in a small numpy evaluator.

Two families. Exact: small integers in f32 and bf16, where every operation is exact or correctly rounded, so that results
must agree bit for bit. Smooth: real numbers and transcendental functions in fp64, which must agree to 1e-9.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from evaluation import apply, poisoned, run
from hypothesis import given, settings
from hypothesis import strategies as st

from k3dsl import language as tl

PROGRAMS = 3
EXTENTS = (1, 2, 3, 4, 6)


def round_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 rounded to bf16 by its bits, to nearest even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


class Numpy:
    """The reference: tiles are [programs, *shape] arrays, rounded by `round` after every operation."""

    def __init__(self, dtype, rounding):
        self.dtype, self.rounding = dtype, rounding

    def settle(self, x):
        return self.rounding(np.asarray(x, dtype=self.dtype))

    def run(self, op, xs, arg):
        a = xs[0]
        b = xs[1] if len(xs) > 1 else None
        if op in ("add", "sub", "mul", "min", "max"):
            shape = np.broadcast_shapes(a.shape[1:], b.shape[1:])
            a, b = self._pad(a, len(shape)), self._pad(b, len(shape))
            f = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum}[op]
            return self.settle(f(a, b))
        if op == "clamp":
            return np.minimum(np.maximum(a, self.dtype(-arg)), self.dtype(arg))
        if op == "where":
            return np.where(a > self.dtype(arg), b, -b)
        if op == "neg_abs":
            return -np.abs(a)
        if op == "reshape":
            return a.reshape(len(a), *arg)
        if op == "permute":
            return a.transpose(0, *(axis + 1 for axis in arg))
        if op == "broadcast":
            return np.broadcast_to(a, (len(a), *arg))
        if op == "select":
            return a.take(arg[1], axis=arg[0] + 1)
        if op == "reduce":
            return self.settle(getattr(np, arg[0])(a, axis=arg[1] + 1, keepdims=arg[2]))
        if op == "scan":
            kind, axis, reverse = arg
            a = np.flip(a, axis + 1) if reverse else a
            f = {"sum": np.cumsum, "max": np.maximum.accumulate, "min": np.minimum.accumulate}[kind]
            out = self.settle(f(a, axis=axis + 1))
            return np.flip(out, axis + 1) if reverse else out
        if op == "dot":
            return self.settle(a @ b)
        if op == "smooth":
            return {
                "exp2": lambda x: np.exp2(np.minimum(x, 3.0)),
                "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
                "tanh": np.tanh,
                "softplus": lambda x: np.logaddexp(x, 0.0),
                "sqrt": lambda x: np.sqrt(np.abs(x) + 1.0),
                "reciprocal": lambda x: 1 / (np.abs(x) + 1.0),
                "cos": np.cos,
            }[arg](a)
        raise AssertionError(op)

    @staticmethod
    def _pad(x, rank):
        return x.reshape(len(x), *(1,) * (rank - x.ndim + 1), *x.shape[1:])


class Language:
    """The same operations in the language; `dtype` is that of every tile."""

    def __init__(self, dtype):
        self.dtype = dtype

    def run(self, op, xs, arg):
        a = xs[0]
        b = xs[1] if len(xs) > 1 else None
        if op == "add":
            return a + b
        if op == "sub":
            return a - b
        if op == "mul":
            return a * b
        if op == "min":
            return tl.minimum(a, b)
        if op == "max":
            return tl.maximum(a, b)
        if op == "clamp":
            return tl.minimum(tl.maximum(a, float(-arg)), float(arg))
        if op == "where":
            return tl.where(a > float(arg), b, -b)
        if op == "neg_abs":
            return -abs(a)
        if op == "reshape":
            return a.reshape(arg)
        if op == "permute":
            return a.permute(*arg)
        if op == "broadcast":
            return a.broadcast(*arg)
        if op == "select":
            return a.select(*arg)
        if op == "reduce":
            return getattr(a, arg[0])(arg[1], arg[2])
        if op == "scan":
            kind, axis, reverse = arg
            return {"sum": tl.cumsum, "max": tl.cummax, "min": tl.cummin}[kind](a, axis, reverse=reverse)
        if op == "dot":
            return tl.dot(a, b).to(self.dtype)
        f = {
            "exp2": lambda x: tl.exp2(tl.minimum(x, 3.0)),
            "sqrt": lambda x: tl.sqrt(abs(x) + 1.0),
            "reciprocal": lambda x: tl.reciprocal(abs(x) + 1.0),
        }.get(arg, getattr(tl, arg))
        return f(a)


@st.composite
def programs(draw, smooth: bool):
    """(input shapes, instructions): each instruction is (op, numbers of earlier tiles, argument)."""
    shapes = [tuple(draw(st.lists(st.sampled_from(EXTENTS), min_size=1, max_size=3))) for _ in range(2)]
    inputs, code = list(shapes), []
    names = ["add", "sub", "mul", "clamp", "reshape", "permute", "broadcast", "select", "reduce", "scan", "dot"]
    names += ["smooth"] * 3 if smooth else ["min", "max", "where", "neg_abs"]

    def emit(op, operands, arg, out):
        code.append((op, operands, arg))
        shapes.append(tuple(out))
        return len(shapes) - 1

    for _ in range(draw(st.integers(1, 10))):
        op = draw(st.sampled_from(names))
        i = draw(st.integers(0, len(shapes) - 1))
        if op == "broadcast" and 1 not in shapes[i] and len(shapes[i]) < 3:
            place = draw(st.integers(0, len(shapes[i])))
            split = (*shapes[i][:place], 1, *shapes[i][place:])
            i = emit("reshape", [i], split, split)
        if op == "dot" and len(shapes[i]) in (2, 3):  # so that there is a partner
            axes = (*range(len(shapes[i]) - 2), len(shapes[i]) - 1, len(shapes[i]) - 2)
            emit("permute", [i], axes, [shapes[i][a] for a in axes])
        shape, operands, arg, out = shapes[i], [i], None, None
        axis = draw(st.integers(0, len(shape) - 1)) if shape else 0
        if op in ("add", "sub", "mul", "min", "max"):
            fits = [j for j, other in enumerate(shapes) if _broadcasts(shape, other)]
            operands.append(draw(st.sampled_from(fits)))
            out = np.broadcast_shapes(shape, shapes[operands[1]])
        elif op == "where":
            operands.append(draw(st.sampled_from([j for j, other in enumerate(shapes) if other == shape])))
            arg, out = draw(st.integers(-2, 2)), shape
        elif op in ("neg_abs", "clamp"):
            arg, out = draw(st.integers(1, 8)), shape
        elif op == "smooth":
            arg = draw(st.sampled_from(["exp2", "sigmoid", "tanh", "softplus", "sqrt", "reciprocal", "cos"]))
            out = shape
        elif op == "reshape":
            size = int(np.prod(shape))
            choices = [(size,), (1, size), (size, 1), *((size // n, n) for n in (2, 3) if size % n == 0)]
            arg = out = draw(st.sampled_from(choices))
        elif op == "broadcast" and 1 in shape and np.prod(shape) <= 64:
            arg = out = tuple(draw(st.sampled_from(EXTENTS)) if n == 1 else n for n in shape)
        elif op == "permute":
            arg = tuple(draw(st.permutations(range(len(shape)))))
            out = tuple(shape[a] for a in arg)
        elif op == "select" and shape:
            arg = (axis, draw(st.integers(0, shape[axis] - 1)))
            out = shape[:axis] + shape[axis + 1 :]
        elif op == "reduce" and shape:
            keep = draw(st.booleans())
            arg = (draw(st.sampled_from(["sum", "max", "min"])), axis, keep)
            out = shape[:axis] + ((1,) if keep else ()) + shape[axis + 1 :]
        elif op == "scan" and shape:
            arg, out = (draw(st.sampled_from(["sum", "max", "min"])), axis, draw(st.booleans())), shape
        elif op == "dot":
            pairs = [
                (j, k)
                for j, s in enumerate(shapes)
                for k, t in enumerate(shapes)
                if len(s) == len(t) in (2, 3) and s[-1] == t[-2] and s[:-2] == t[:-2]
            ]
            if pairs:
                operands = list(draw(st.sampled_from(pairs)))
                out = (*shapes[operands[0]][:-1], shapes[operands[1]][-1])
        if out is None or np.prod(out, dtype=int) > 512:
            continue
        last = emit(op, operands, arg, out)
        if not smooth and op in ("add", "sub", "mul", "dot", "reduce", "scan"):  # integers stay small, sums exact
            emit("clamp", [last], 64, out)
    return inputs, code


def _broadcasts(a, b) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a[::-1], b[::-1], strict=False))


def both(program, data, dtype, reference, tile_dtype, **options):
    """The last tile of a program, from the backend and from numpy."""
    _, code = program
    tiles = [x.astype(np.float64) for x in data]
    arrays = [reference.settle(x) for x in tiles]
    for op, operands, arg in code:
        arrays.append(reference.run(op, [arrays[i] for i in operands], arg))

    def f(*inputs):
        values, language = [x.to(tile_dtype) for x in inputs], Language(tile_dtype)
        for op, operands, arg in code:
            values.append(language.run(op, [values[i] for i in operands], arg))
        return values[-1]

    got = apply(f, *(torch.from_numpy(x).to(dtype) for x in tiles), **options)
    return got.double().numpy(), arrays[-1].astype(np.float64)


@pytest.mark.parametrize("name", ["f32", "bf16"])
@given(program=programs(smooth=False), seed=st.integers(0, 2**16), slab=st.sampled_from([1, 2**28]))
@settings(max_examples=150)
def test_exact_programs_agree_bit_for_bit(name, program, seed, slab):
    generator = np.random.default_rng(seed)
    data = [generator.integers(-4, 5, (PROGRAMS, *shape)) for shape in program[0]]
    rounding = round_bf16 if name == "bf16" else lambda x: x
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    got, want = both(program, data, dtype, Numpy(np.float32, rounding), getattr(tl, name), slab_bytes=slab)
    np.testing.assert_array_equal(got, want)


@given(program=programs(smooth=True), seed=st.integers(0, 2**16))
@settings(max_examples=150)
def test_smooth_programs_agree_in_fp64(program, seed):
    generator = np.random.default_rng(seed)
    data = [generator.standard_normal((PROGRAMS, *shape)) for shape in program[0]]
    reference = Numpy(np.float64, lambda x: x)
    got, want = both(program, data, torch.float64, reference, tl.f32, compute_dtype=torch.float64)
    scale = max(1.0, float(np.abs(want).max()))
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9 * scale)


@given(
    extent=st.integers(1, 40),
    starts=st.lists(st.integers(0, 45), min_size=1, max_size=6),
    size=st.sampled_from([1, 3, 8, 12]),
    stride=st.integers(1, 3),
    offset=st.integers(0, 5),
)
@settings(max_examples=150)
def test_a_ragged_span_reads_what_python_slicing_reads(extent, starts, size, stride, offset):
    """Any start, end at the tensor's, any stride and offset of the tensor."""

    @tl.kernel(grid=lambda d, c: (d.N,))
    def copy(d, c, start=tl.In("N", tl.i32), x=tl.In("T 2"), y=tl.Out("N S 2")):
        rows = tl.span(start[tl.program_id(0)], d.S, end=d.T)
        y[tl.program_id(0), :, :] = x.load(rows, slice(None), other=-1.0)

    whole = torch.arange(float(offset + extent * stride * 2)).contiguous()
    x = whole.as_strided((extent, 2), (stride * 2, 1) if stride > 1 else (1, extent), offset)
    y = poisoned(len(starts), size, 2)
    run(copy, {"start": torch.tensor(starts, dtype=torch.int32), "x": x, "y": y},
        {"N": tl.Sym("N"), "T": tl.Sym("T"), "S": size})  # fmt: skip
    for p, start in enumerate(starts):
        rows = x[start : start + size]
        assert torch.equal(y[p, : len(rows)], rows)
        assert (y[p, len(rows) :] == -1).all()
