"""What is run through Triton's interpreter: small kernels that use every construct, the ops, and KDA, all in fp32.

`python interpreter_cases.py OUT.json` (with TRITON_INTERPRET=1) runs every case and writes what came out. The interpreter
knows neither bf16 nor the rounding of tf32, so neither occurs here.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton_interpreter import interpret

from k3dsl.backends.torch import evaluate, from_torch, to_torch
from k3dsl.ir.graph import Kernel as IRKernel
from k3dsl.ir.types import f32
from k3dsl.language import (
    In,
    InOut,
    Kernel,
    Out,
    Scalar,
    Sym,
    arange,
    argmax,
    argmin,
    assume,
    cdiv,
    cummax,
    cumprod,
    cumsum,
    dequantize_mxfp4,
    dot,
    erf,
    exp,
    exp2,
    f16,
    full,
    i1,
    i8,
    i16,
    i32,
    i64,
    kernel,
    log1p,
    loop,
    maximum,
    minimum,
    program_id,
    reciprocal,
    reduce,
    rsqrt,
    scan,
    sigmoid,
    softplus,
    span,
    sqrt,
    tanh,
    unit_lower_inverse,
    when,
    where,
    zeros,
)
from k3dsl.ops.kda import plans
from k3dsl.ops.kda.inputs import Case, make, make_decode
from k3dsl.ops.kda.reference import recurrence
from k3dsl.ops.kda.space import DECODE, FORWARD
from k3dsl.ops.moe import reference as moe_reference
from k3dsl.ops.registry import get_op
from k3dsl.passes.simplify import simplify
from k3dsl.runtime.metrics import relative_rms
from k3dsl.runtime.plan import Plan

CONSTRUCT_LIMIT = 2e-6
"""Of a construct against the torch backend, both in fp32."""
Outcome = dict[str, tuple[float, float]]  # relative RMS error and its limit, by name
CASES: dict[str, Callable[[], Outcome]] = {}


class Construct(NamedTuple):
    """A kernel, the values of its runtime dims and scalars, and its input tensors by parameter name."""

    kernel: Kernel
    dims: Mapping[str, int]
    scalars: Mapping[str, float]
    inputs: Mapping[str, torch.Tensor]

    def ir(self) -> IRKernel:
        dtypes = {n: from_torch(t.dtype) for n, t in self.inputs.items()}
        return simplify(self.kernel.trace({n: Sym(n) for n in self.dims}, {}, dtypes))

    def tensors(self, ir: IRKernel) -> dict[str, torch.Tensor]:
        """The inputs, and outputs that show what nobody wrote."""
        made = {}
        for t in ir.tensors:
            shape, dtype = tuple(e.evaluate(self.dims) for e in t.shape), to_torch(t.dtype)
            fill = float("nan") if dtype.is_floating_point else 77 if dtype != torch.bool else False
            known = self.inputs.get(t.name)
            made[t.name] = torch.full(shape, fill, dtype=dtype) if known is None else known.clone()
        return made


CONSTRUCTS: dict[str, Construct] = {}


# ---- constructs: against the torch backend -----------------------------------------------------------------------------


def construct(dims: Mapping[str, Any] | None = None, scalars: Mapping[str, float] | None = None, **inputs: Any) -> Any:
    """Declares a kernel as a case. dims: values of runtime dims; inputs: tensors by parameter name."""

    def declare(k: Kernel) -> Kernel:
        made = CONSTRUCTS[k.name] = Construct(k, dims or {}, scalars or {}, inputs)
        CASES[k.name] = lambda: compare(made)
        return k

    return declare


def compare(c: Construct) -> Outcome:
    ir = c.ir()
    theirs, ours = c.tensors(ir), c.tensors(ir)
    evaluate(ir, theirs, c.dims, c.scalars)
    interpret(ir, ours, c.dims, c.scalars)
    written = [t.name for t in ir.tensors if t.role != "in"]
    return {n: (relative_rms(ours[n], theirs[n]), CONSTRUCT_LIMIT) for n in written}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(*shape: int, low: int = -9, high: int = 9, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


FOUR = lambda d, c: (4,)  # noqa: E731  # a grid


@construct(
    packed=whole(4, 3, 48, low=0, high=256, dtype=torch.uint8),
    scale=whole(4, 3, 3, low=110, high=140, dtype=torch.uint8),
)
@kernel(grid=FOUR)
def packed_numbers(d, c, packed=In("4 3 48"), scale=In("4 3 3"), o=Out("4 3 96", f32), p=Out("4 8 64", f32)):
    """Codes of 4 bits with scales, in tiles whose extents are powers of two and others."""
    i = program_id(0)
    o[i] = dequantize_mxfp4(packed[i], scale[i]).to(f32)
    same = arange(8) % 3
    p[i] = dequantize_mxfp4(packed[i, same, span(16, 32)], scale[i, same, span(1, 2)]).to(f32)


POISON = random(4, 96)
POISON[1, 7] = POISON[2, 90] = float("nan")


@construct(x=random(4, 64) * 3)
@kernel(grid=FOUR)
def functions(d, c, x=In("4 64", f32), o=Out("4 64", f32), p=Out("4 64", f32)):
    i = program_id(0)
    t = x[i]
    a = abs(t)
    o[i] = exp(-a) + exp2(t) + log1p(a) + sqrt(a) + rsqrt(a + 1.0) + tanh(t) + sigmoid(t) + softplus(t)
    p[i] = reciprocal(a + 0.5) + erf(t) + where(t > 0.0, 1.0, -2.5) - t / (a + 1.0) + (t > 1.0).to(f32)


@construct(x=whole(4, 48), y=whole(4, 48, dtype=torch.int8), z=whole(4, 48, low=0, dtype=torch.int16))
@kernel(grid=FOUR)
def integers(
    d, c, x=In("4 48", i32), y=In("4 48", i8), z=In("4 48", i16), o=Out("4 48", i32), p=Out("4 48", i8), q=Out("4", i16)
):
    i = program_id(0)
    a, b, e = x[i], y[i], z[i]
    o[i] = (minimum(a, 3) * 5 ^ (a << 2)) + maximum(a, 0) % 7 // 2 - cumsum(a, 0, reverse=True)
    p[i] = b + b.max(0) - b.min(0) + b.sum(0)
    q[i] = e.sum(0) + e.select(0, 5) + argmax(a, 0).to(i16)


@construct(x=whole(4, 24, low=0, high=2, dtype=torch.bool))
@kernel(grid=FOUR)
def bools(d, c, x=In("4 24", i1), o=Out("4 24", i1), p=Out("4 3", i1)):
    i = program_id(0)
    b = x[i]
    o[i] = (~b & b.any(0)) | b.select(0, 3)
    p[i, 0], p[i, 1], p[i, 2] = b.all(0), b.any(0), b.sum(0) > 3


@construct(x=random(4, 33, 40), y=random(4, 40, 24, seed=1))
@kernel(grid=FOUR)
def odd_extents(
    d, c, x=In("4 33 40", f32), y=In("4 40 24", f32), o=Out("4 33 24", f32), r=Out("4 33", f32), s=Out("4 33 40", f32)
):
    i = program_id(0)
    a, b = x[i], y[i]
    product = dot(a * 2.0 + 1.0, b + 1.0)
    o[i] = cumsum(product, 0, reverse=True) + cumsum(product, 0)
    r[i] = (product + 1.0).max(1) - product.sum(1) + (a * 0.1 + 1.0).prod(1) + a.sum(1) + (a * a).sum(1)
    s[i] = cummax(a, 1) + cumprod(a * 0.1 + 1.0, 0, reverse=True)


@construct(x=POISON)
@kernel(grid=FOUR)
def nan_is_the_extreme(d, c, x=In("4 96", f32), o=Out("4 2", f32), p=Out("4 2", i32), q=Out("4 96", f32)):
    i = program_id(0)
    t = x[i]
    o[i, 0], o[i, 1] = t.max(0), t.min(0)
    p[i, 0], p[i, 1] = argmax(t, 0), argmin(t, 0)
    q[i] = maximum(t, 0.5) + minimum(t, t.select(0, 7))


@construct(x=random(4, 16), n=torch.tensor([0, 1, 5, 9], dtype=torch.int32))
@kernel(grid=FOUR)
def carries(d, c, x=In("4 16", f32), n=In("4", i32), o=Out("4 16", f32), p=Out("4", i64), h=Out("4", f16)):
    i = program_id(0)
    a = x[i]

    @loop(n[i], init=(a, a * 2.0, a + 3.0))
    def swapped(k, u, v, w):
        return v, w * 0.5, u

    @loop(n[i], start=1, step=3, reverse=True, init=(swapped[0], full((), 2, i64), full((), 0.0, f16)))
    def backwards(k, u, count, last):
        return u * 0.5 + k.to(f32), count * 3 + k.to(i64), 1.5

    o[i] = swapped[1] - swapped[2] + backwards[0]
    p[i], h[i] = backwards[1], backwards[2]


@construct(x=random(4, 8), n=torch.tensor([-1, 1, 3, 6], dtype=torch.int32))
@kernel(grid=FOUR)
def nested(d, c, x=In("4 8", f32), n=In("4", i32), o=InOut("4 8", f32), p=InOut("4", i32)):
    i = program_id(0)
    count, a = n[i], x[i]
    o[i] = a * 0.0
    p[i] = 0

    @when(count > 0)
    def positive():
        b = a * 2.0

        @when(count > 2)
        def many():
            @loop(count, init=b)
            def rows(j, s):
                @loop(j, init=s)
                def inner(k, t):
                    return t + a * (full((8,), 1, i32) * k).to(f32)  # in the interpreter k is a plain int

                return inner

            o[i] = rows

        @when(count <= 2)
        def few():
            o[i] = b

        p[i] = count


@construct(x=random(4, 20, 7), ids=whole(4, 12, low=0, high=20), a=torch.zeros(4, 20))
@kernel(grid=FOUR)
def gathers(
    d, c, x=In("4 20 7", f32), ids=In("4 12", i32), a=InOut("4 20", f32), o=Out("4 12 7", f32), z=Out("4 20", f32)
):
    i = program_id(0)
    k = ids[i]
    t = x[i, k, :]
    o[i] = t
    a.atomic_add(i, k, value=t.sum(1), mask=k > 3)
    z[i] = 0.0
    z.store(i, minimum(arange(12) + 5, 19), value=2.0, mask=arange(12) < 9)


@construct(dims={"T": 37}, x=random(37, 3, 20), o=torch.zeros(37, 3, 20))
@kernel(grid=lambda d, c: (cdiv(d.T, 16), 3))
def ragged_rows(d, c, x=In("T 3 20", f32), o=InOut("T 3 20", f32)):
    rows = span(program_id(0) * 16, 16, end=d.T).reshape(2, 8)
    t = x.load(rows, program_id(1), slice(None), order=(2, 1, 0), contiguity=4, other=5.0)
    o[rows, program_id(1), :] = t + t.sum(0)[None, :, :] * 0.1


@construct(x=random(4, 32, 8), m=random(4, 32, 8, seed=3))
@kernel(grid=FOUR)
def shapes(d, c, x=In("4 32 8", f32), m=In("4 32 8", f32), o=Out("4 8 32", f32), p=Out("4 2 8 8", f32)):
    i = program_id(0)
    t = x.load(i, mask=m[i] > 0.0, other=-1.0)
    cube = t.reshape(4, 8, 8)
    o[i] = (cube.permute(0, 2, 1).reshape(4, 64).T.reshape(8, 32) + t.T) * t.select(0, 31)[:, None]
    halves = t.reshape(2, 16, 8)
    p[i] = dot(halves.T, halves) + halves.select(1, 2)[:, None, :]


@construct(x=random(4, 16) * 0.3, y=random(4, 16, seed=1))
@kernel(grid=FOUR)
def combines(d, c, x=In("4 16", f32), y=In("4 16", f32), o=Out("4 16", f32), p=Out("4 2", f32)):
    i = program_id(0)
    a, b = x[i], y[i]
    forward, _ = scan((b, a), 0, lambda h, g, k, f: (h * f + k, g * f))
    backward, _ = scan((b, a), 0, lambda h, g, k, f: (h * f + k, g * f), reverse=True)
    best, tied = reduce((b, a), 0, lambda h, g, k, f: (where(h > k, h, k), where(h > k, g, f)))
    o[i] = forward + backward
    p[i, 0], p[i, 1] = best, tied


@construct(dims={"T": 71, "n": 6}, x=random(71, 6, 12), ids=whole(4, low=0, high=6))
@kernel(grid=lambda d, c: (cdiv(d.T, 30),))
def rows_over_axes(d, c, x=In("T n 12", f32), ids=In("4", i32), o=Out("T n 12", f32), p=Out("T 4 12", f32)):
    rows = span(program_id(0) * 30, 30, end=d.T).reshape(2, 3, 5)
    heads = span(0, 6, end=d.n).reshape(3, 2)
    t = x.load(rows, heads, slice(None), order=(2, 0, 1, 4, 3, 5))
    o[rows, heads, :] = t * 2.0
    p[rows, :, :] = x[rows, ids[:], :]


@construct(dims={"n": 3}, scalars={"factor": 0.25}, x=random(3, 8))
@kernel(grid=lambda d, c: (d.n,))
def numbers(d, c, x=In("n 8", f32), factor=Scalar(f32), o=Out("n 8", f32), w=Out("n", i64)):
    i = program_id(0)
    one = full((), 1.0, f32)
    o[i] = x[i] * factor + exp2(one) - (-one) + maximum(one, full((), 2.0, f32)) + zeros((8,))
    w[i] = full((), 7, i64) + i.to(i64) * 2**40 + assume(i, min=0, max=2).to(i64)


@construct(x=random(4, 32, 32) * 0.3)
@kernel(grid=FOUR)
def inverses(d, c, x=In("4 32 32", f32), o=Out("4 32 32", f32), p=Out("4 2 16 16", f32)):
    i = program_id(0)
    t = x[i]
    o[i] = unit_lower_inverse(t) + unit_lower_inverse(t, method="substitution")
    p[i] = unit_lower_inverse(t.reshape(2, 16, 32).select(0, 0).reshape(2, 16, 16), method="substitution")


# ---- ops: against float64 ----------------------------------------------------------------------------------------------


def run_plan(plan: Plan, tensors: dict[str, torch.Tensor], dims: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Every launch of a plan through the interpreter, into poisoned buffers."""
    for b in plan.buffers.values():
        shape, dtype = tuple(e.evaluate(dims) for e in b.shape), to_torch(b.dtype)
        if b.role in ("out", "scratch"):
            tensors[b.name] = torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype)
    for launch in plan.launches:
        arguments = {t.name: tensors[launch.buffer_of(t.name)] for t in launch.kernel.tensors}
        interpret(launch.kernel, arguments, dims)
    return {b.name: tensors[b.name] for b in plan.outputs()}


def op_case(name: str, dims: Mapping[str, int], **settings: Any) -> None:
    def run() -> Outcome:
        op = get_op(name)
        point = op.point(dims, {"dtype": "f32", **settings}, symbolic=True)
        sizes = op.point(dims, {"dtype": "f32", **settings}).dims
        assert op.inputs is not None
        assert op.reference is not None
        drawn = op.inputs(dims, point.options, "cpu", 0)
        expected = op.reference(**drawn)
        tensors = {n: x for n, x in drawn.items() if isinstance(x, torch.Tensor)}
        got = run_plan(point.plan("torch"), tensors, sizes)
        return {n: (relative_rms(got[n], expected[n]), 1e-5) for n in expected}

    CASES[f"{name}-{'-'.join(map(str, [*dims.values(), *settings.values()]))}"] = run


SMALL = {"block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 4}
op_case("matmul", {"M": 33, "N": 20, "K": 40}, **SMALL, group=2)
op_case("matmul", {"M": 16, "N": 32, "K": 1}, **SMALL, group=1)
op_case("softmax", {"R": 5, "N": 33})
op_case("softmax", {"R": 5, "N": 100}, passes=2, block=32, rows=2)
op_case("rmsnorm", {"R": 5, "D": 96})
op_case("rmsnorm", {"R": 3, "D": 2304}, rows=1)
ATTENTION = {"block_q": 16, "block_k": 16, "num_warps": 4}
op_case("attention", {"B": 1, "T": 40, "S": 40, "H": 2, "HK": 1, "D": 32, "V": 48}, **ATTENTION)
op_case("attention", {"B": 2, "T": 17, "S": 50, "H": 1, "HK": 1, "D": 16, "V": 16}, **ATTENTION, causal=False)
op_case("segment_sum", {"T": 70, "N": 9, "D": 20}, block_t=8)
op_case("causal_conv1d.update", {"B": 3, "T": 2, "P": 130, "W": 4, "pool": 5}, block_p=128)
op_case("gated_rmsnorm", {"N": 5, "H": 3, "D": 48}, tokens=2, heads=2, activation="silu")


# ---- KDA: against the recurrence in float64, and factor by factor against the torch backend ----------------------------


def kda_forward(gram: str, own_tails: bool = False, **changes: Any) -> Outcome:
    case = Case("interpreted", T=40, H=2, K=64, V=64, dtype=torch.float32, state_v_first=True, **changes)
    kwargs = make(case)
    options = FORWARD.resolve_options(
        {
            "dtype": f32,
            "gate_dtype": from_torch(kwargs["g"].dtype),
            "beta_dtype": from_torch(kwargs["beta"].dtype),
            "gate": "softplus" if kwargs.get("lower_bound") is None else "bounded",
            "lower_bound": kwargs.get("lower_bound"),
            "dt_bias": kwargs.get("dt_bias") is not None,
            "v_first": True,
        }
    )
    sizes = {"B": 1, "T": 40, "N": 1}
    dims = {"H": 2, "HK": 2, "K": 64, "V": 64, "B": 1, "N": 1, "T": Sym("T", min=1)}
    knobs = FORWARD.resolve_knobs({"chunk": 16, "block_v": 32, "vector": 4})
    original = plans.variant
    forced = {"gram": gram, "gram_dtype": f32, "own_tails": own_tails}
    with mock.patch.object(plans, "variant", lambda *x: {**original(*x), **forced}):
        plan = plans.forward(dims, knobs, options, "torch")
    tensors = {n: kwargs[n] for n in ("q", "k", "v", "g", "beta", "A_log")}
    if options["dt_bias"]:
        tensors["dt_bias"] = kwargs["dt_bias"].view(2, 64)
    out = run_plan(plan, tensors, sizes)
    expected_o, expected_state = recurrence(**kwargs)
    assert expected_state is not None
    found = {"o": (relative_rms(out["o"], expected_o), 1e-5)}
    found["final_state"] = (relative_rms(out["final_state"], expected_state), 1e-5)
    again = {n: torch.full_like(t, float("nan")) if n in plans.FACTORS else t for n, t in tensors.items()}
    prep = plan.launches[0]
    evaluate(prep.kernel, {t.name: again[t.name] for t in prep.kernel.tensors}, {"T": 40})
    for n in plans.FACTORS:
        found[n] = (relative_rms(tensors[n], again[n]), 1e-5)
    return found


CASES["kda-anchor"] = lambda: kda_forward("anchor")
CASES["kda-anchor-own-tails"] = lambda: kda_forward("anchor", own_tails=True)
CASES["kda-levels-bounded"] = lambda: kda_forward("levels")
CASES["kda-levels-softplus"] = lambda: kda_forward("levels", gate="softplus")


def kda_decode() -> Outcome:
    case = Case("interpreted", H=2, K=64, V=64, dtype=torch.float32, state_v_first=True)
    kwargs = make_decode(case, batch=3, device="cpu")
    options = DECODE.resolve_options(
        {
            "dtype": f32,
            "gate_dtype": from_torch(kwargs["g"].dtype),
            "beta_dtype": from_torch(kwargs["beta"].dtype),
            "lower_bound": kwargs["lower_bound"],
            "v_first": True,
        }
    )
    slots = kwargs["state"].shape[0]
    dims = {"H": 2, "HK": 2, "K": 64, "V": 64, "B": Sym("B", min=1), "slots": Sym("slots", min=1)}
    plan = plans.decode(dims, DECODE.resolve_knobs({"block_v": 32}), options, "torch")
    tensors = {n: kwargs[n].squeeze(1) for n in ("q", "k", "v", "g", "beta")}
    tensors |= {"A_log": kwargs["A_log"], "dt_bias": kwargs["dt_bias"].view(2, 64), "state": kwargs["state"].clone()}
    tensors["state_indices"] = kwargs["state_indices"]
    theirs = {n: t.clone() for n, t in tensors.items()} | {"o": torch.full((3, 2, 64), float("nan"))}
    sizes = {"B": 3, "slots": slots}
    out = run_plan(plan, tensors, sizes)
    evaluate(plan.launches[0].kernel, theirs)
    return {n: (relative_rms(out[n], theirs[n]), 1e-5) for n in ("o", "state")}


CASES["kda-decode"] = kda_decode


def kda_step(**settings: Any) -> Outcome:
    """Two requests and one of padding, three tokens, against the chain of fp64 references."""
    op, dims = get_op("kda.step"), {"B": 3, "T": 3, "H": 2, "K": 64, "V": 64, "W": 4, "pool": 6}
    chosen = {"dtype": "f32", "gate_dtype": "f32", "beta_dtype": "f32", **settings}
    point = op.point(dims, chosen, symbolic=True)
    assert op.inputs is not None
    assert op.reference is not None
    drawn = op.inputs(dims, point.options, "cpu", 0)
    if not settings:
        drawn["slots"][1] = -1
    expected = op.reference(**drawn)
    q, k, v = (part.unflatten(-1, (2, 64)).contiguous() for part in drawn["qkv"].split(128, -1))
    tensors = {n: x for n, x in drawn.items() if isinstance(x, torch.Tensor) and n != "qkv"}
    tensors |= {"q": q, "k": k, "v": v, "dt_bias": drawn["dt_bias"].view(2, 64)}
    got = run_plan(point.plan("torch"), tensors, dims)
    return {n: (relative_rms(got[n], expected[n]), 1e-5) for n in expected}


def moe_choice(name: str, dims: Mapping[str, int], **settings: Any) -> None:
    """Selection and sorting, whose tensors have no dtype to choose, against their references."""

    def run() -> Outcome:
        op = get_op(name)
        point = op.point(dims, settings, symbolic=True)
        assert op.inputs is not None
        drawn = op.inputs(dims, point.options, "cpu", 0)
        if name == "moe.sort":
            got = run_plan(point.plan("torch"), {"ids": drawn["ids"].flatten()}, dims)
            return {n: (relative_rms(got[n], x), 0.0) for n, x in moe_reference.sort(**drawn).items()}
        drawn["logits"][1] = float("nan")
        weights, ids = moe_reference.topk(**drawn)
        got = run_plan(point.plan("torch"), {"partial": drawn["logits"][None], "bias": drawn["bias"]}, dims)
        return {"weights": (relative_rms(got["weights"], weights), 1e-5), "ids": (relative_rms(got["ids"], ids), 0.0)}

    CASES[f"{name}-{'-'.join(map(str, [*dims.values(), *settings.values()]))}"] = run


moe_choice("moe.topk", {"T": 6, "E": 40, "K": 6}, rows=4)
moe_choice("moe.topk", {"T": 3, "E": 64, "K": 4}, scoring="softmax", scale=2.5)
moe_choice("moe.sort", {"T": 50, "E": 9, "K": 3}, chunk=64, block_m=16)
op_case("moe.situ", {"R": 5, "I": 70}, block=64)
op_case("moe.situ", {"R": 5, "I": 70}, block=64, backward=True)
EXPERTS = {"block_m": 16, "block_n": 32, "block_k": 32, "block_d": 128, "chunk": 64}
op_case("moe.experts", {"T": 9, "E": 5, "K": 2, "D": 48, "I": 40}, **EXPERTS)
op_case("moe.experts", {"T": 9, "E": 5, "K": 2, "D": 48, "I": 40}, **EXPERTS, swap_ab=True, group=4, ranks=2)
op_case("moe.experts", {"T": 9, "E": 5, "K": 2, "D": 48, "I": 40}, **EXPERTS, gather="before", wide_down=True)

CASES["kda-step"] = kda_step
CASES["kda-step-kept"] = lambda: kda_step(kept=True, v_first=True)


def main(path: str) -> None:
    results: dict[str, Any] = {}
    for name, run in CASES.items():
        try:
            results[name] = run()
        except Exception:
            results[name] = traceback.format_exc()
    with open(path, "w", encoding="utf-8") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(sys.argv[1])
