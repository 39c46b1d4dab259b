"""The small ops, and every construct of the language, on the GPU through Triton. Run with `-n 8`: compiling dominates."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_calls import check_replays, no_waiting
from interpreter_cases import CONSTRUCTS
from op_examples import BF16, F16, F32, SMALL, Example, attention, matmul, numbers, rmsnorm, segment_sum, softmax

import k3dsl
from k3dsl import ops
from k3dsl.backends.torch import evaluate
from k3dsl.backends.triton.build import import_function, write_module
from k3dsl.backends.triton.schedule import TritonSchedule
from k3dsl.language import In, Out, Sym, argmax, cdiv, cumsum, dot, exp2, f32, kernel, maximum, program_id, span
from k3dsl.ops.registry import get_op
from k3dsl.runtime.executable import BoundLaunch
from k3dsl.runtime.metrics import assert_close_rms
from k3dsl.runtime.op import forced
from k3dsl.runtime.plan import Launch
from k3dsl.targets import detect

pytestmark = pytest.mark.gpu

LARGE = [
    matmul(1000, 1100, 1200, BF16),
    matmul(2048, 4096, 1024, F16),
    matmul(8, 4096, 4096, BF16),
    matmul(511, 513, 515, BF16),
    matmul(300, 500, 700, F32),
    matmul(300, 512, 704, F32, precision="tf32x3"),
    matmul(1024, 1024, 1024, BF16, "transposed"),
    softmax(1000, 4096, BF16),
    softmax(100, 50_000, F32),
    softmax(4096, 16, F16),
    rmsnorm(4096, 7168, BF16),
    rmsnorm(1000, 2304, F32),
    rmsnorm(10, 65536, BF16),
    attention(2, 1024, 1024, 8, 2, 128, 128, BF16),
    attention(1, 1000, 1000, 4, 4, 64, 64, F16),
    attention(1, 300, 1300, 4, 1, 96, 96, BF16, view=True),
    attention(1, 257, 400, 2, 2, 192, 128, BF16, causal=False),
    segment_sum([0, 1, 5000, 0, 33, 700, 2000, 1], 1000, BF16),
    segment_sum([10] * 3000, 128, F32),
]
ALL = [*SMALL, *LARGE]


def agree(example: Example) -> tuple[torch.Tensor, ...]:
    got, expected, limit = example.run("cuda", 0)
    for n, (actual, wanted) in enumerate(zip(got, expected, strict=True)):
        assert_close_rms(f"output {n}", actual, wanted, limit)
    return got


@pytest.mark.parametrize("example", ALL, ids=[e.name for e in ALL])
def test_an_op_agrees_with_float64_and_repeats_bitwise(example: Example, poisoned_memory: None) -> None:
    first = agree(example)
    for _ in range(10):
        again, _, _ = example.run("cuda", 0)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


SEEDS = [(name, dict(seed)) for name in ("matmul", "attention") for seed in get_op(name).seeds]


@pytest.mark.parametrize(("name", "knobs"), SEEDS)
def test_every_seed_of_an_op_is_right(name: str, knobs: dict[str, Any], poisoned_memory: None) -> None:
    with forced(get_op(name), knobs, {}):
        agree(matmul(700, 520, 648, BF16) if name == "matmul" else attention(1, 700, 700, 4, 2, 128, 128, BF16))


@pytest.mark.parametrize("shape", [(700, 520, 648), (128, 256, 64), (65, 8, 8)])
def test_matmul_through_descriptors(shape: tuple[int, int, int], poisoned_memory: None) -> None:
    with forced(get_op("matmul"), {}, {"matmul": {"descriptors": ("a", "b", "o")}}):
        agree(matmul(*shape, BF16))


@pytest.mark.parametrize("tokens", [1, 130, 1024])
def test_attention_through_descriptors(tokens: int, poisoned_memory: None) -> None:
    with forced(get_op("attention"), {}, {"attention": {"descriptors": ("q", "k", "v", "o")}}):
        agree(attention(1, tokens, tokens, 4, 2, 128, 128, BF16))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_softmax_and_segment_sum_at_other_pipeline_depths(stages: int, poisoned_memory: None) -> None:
    with forced(get_op("softmax"), {"passes": 2, "block": 256, "stages": stages}, {}):
        agree(softmax(50, 3000, F32))
    with forced(get_op("segment_sum"), {"stages": stages}, {}):
        agree(segment_sum([0, 1, 500, 0, 33], 100, BF16))


# ---- graphs, streams, long tensors -------------------------------------------------------------------------------------


def calls() -> dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]:
    x = numbers(64, 128, dtype=BF16, device="cuda")
    q = numbers(1, 64, 2, 64, dtype=BF16, device="cuda")
    offsets = torch.tensor([0, 10, 64], device="cuda", dtype=torch.int32)
    return {
        "matmul": (ops.matmul, (x, numbers(128, 96, dtype=BF16, device="cuda"))),
        "softmax": (ops.softmax, (x,)),
        "rmsnorm": (ops.rmsnorm, (x, numbers(128, dtype=BF16, device="cuda"))),
        "attention": (ops.attention, (q, q.clone(), q.clone())),
        "segment_sum": (lambda v: ops.segment_sum(v, offsets), (x,)),
    }


@pytest.mark.parametrize("name", ["matmul", "softmax", "rmsnorm", "attention", "segment_sum"])
def test_an_op_can_be_captured_in_a_cuda_graph_and_replayed_on_new_data(name: str) -> None:
    function, inputs = calls()[name]
    check_replays(function, inputs)


@pytest.mark.parametrize("name", ["matmul", "softmax", "rmsnorm", "attention", "segment_sum"])
def test_an_op_never_waits_for_the_gpu(name: str) -> None:
    function, inputs = calls()[name]
    function(*inputs)
    with no_waiting():
        function(*inputs)


def test_tensors_beyond_2_31_elements() -> None:
    rows, width = 40_000, 65_536
    values = torch.zeros(rows, width, dtype=BF16, device="cuda")
    values[-1] = 1.0
    offsets = torch.tensor([0, rows - 1, rows], dtype=torch.int32, device="cuda")
    sums = ops.segment_sum(values, offsets)
    assert (sums[0] == 0).all()
    assert (sums[1] == 1).all()
    values[-3:] = torch.randn_like(values[-3:])
    b = torch.randn(width, 16, device="cuda").to(BF16)
    assert_close_rms("o", ops.matmul(values, b)[-3:], values[-3:].double() @ b.double(), 3e-3)
    assert_close_rms("y", ops.softmax(values)[-3:], torch.softmax(values[-3:].double(), -1), 4e-3)


# ---- the language ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONSTRUCTS)
@pytest.mark.parametrize("num_warps", [1, 4])
def test_a_construct_does_on_the_gpu_what_it_does_on_the_cpu(name: str, num_warps: int) -> None:
    c = CONSTRUCTS[name]
    ir = c.ir()
    expected = c.tensors(ir)
    evaluate(ir, expected, c.dims, c.scalars)
    launch = BoundLaunch(
        Launch(name, ir, "triton", TritonSchedule(num_warps=num_warps)), detect(), torch.device("cuda", 0)
    )
    ours = {n: t.cuda() for n, t in c.tensors(ir).items()}
    launch.run_with(ours, c.dims, c.scalars)
    for t in ir.tensors:
        if t.role != "in":
            # functions are the GPU's own: a few units in the last place, more where they are subtracted
            assert_close_rms(t.name, ours[t.name].cpu(), expected[t.name], 2e-5)


@kernel(grid=lambda d, c: (4,))
def narrow_floats(d, c, x=In("4 48"), o=Out("4 48"), p=Out("4 16 16", f32)):
    """Arithmetic, functions, reductions, scans and products of 16-bit floats."""
    i = program_id(0)
    t = x[i]
    a = abs(t) + 1.0
    o[i] = (1.0 / a + exp2(-a) + t * t.max(0) + maximum(t, 0.5) - cumsum(t, 0)) * t.sum(0) + argmax(t, 0).to(x.dtype)
    rows = x.load(i, span(0, 48).reshape(3, 16)).select(0, 1)
    square = (rows[:, None] * rows[None, :]).to(x.dtype)
    p[i] = dot(square, square.T)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_16_bit_floats_round_where_the_cpu_backend_rounds(dtype: torch.dtype) -> None:
    x = numbers(4, 48, dtype=dtype)
    made = k3dsl.compile(narrow_floats, dims={}, tensors={"x": dtype, "o": dtype})
    o, p = torch.full((4, 48), float("nan"), dtype=dtype), torch.full((4, 16, 16), float("nan"))
    evaluate(made.ir, {"x": x, "o": o, "p": p})
    ours = {"x": x.cuda(), "o": torch.full_like(o, float("nan")).cuda(), "p": torch.full_like(p, float("nan")).cuda()}
    made(**ours)
    # an approximate quotient may round to the other neighbour now and then
    assert_close_rms("o", ours["o"].cpu(), o, 5e-3 if dtype == BF16 else 6e-4)
    assert_close_rms("p", ours["p"].cpu(), p, 1e-6)


# ---- launch overhead ---------------------------------------------------------------------------------------------------


@kernel(grid=lambda d, c: (cdiv(d.T, 256),))
def add(d, c, x=In("T", f32), y=In("T", f32), z=Out("T", f32)):
    """A kernel so small that only launching it takes time."""
    rows = span(program_id(0) * 256, 256, end=d.T)
    z[rows] = x[rows] + y[rows]


def microseconds(launch: Callable[[], None], launches: int = 2000, rounds: int = 5) -> float:
    """Host time of one launch: the best of some rounds."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(launches):
            launch()
        best = min(best, (time.perf_counter() - start) / launches * 1e6)
    torch.cuda.synchronize()
    return best


def test_calling_a_compiled_kernel_costs_at_most_1_3_times_a_triton_launch(record_property: Any) -> None:
    x, y, z = (torch.randn(256, device="cuda") for _ in range(3))
    made = k3dsl.compile(add, dims={"T": Sym("T")}, schedule={"num_warps": 4})
    assert made.source is not None
    function = import_function(made.source, write_module(made.source))
    made(x=x, y=y, z=z)
    torch.testing.assert_close(z, x + y)
    assert [a.name for a in made.source.args] == ["x", "y", "z", "T"]
    times = {
        "triton": microseconds(lambda: function[(1,)](x, y, z, 256, num_warps=4)),
        "k3dsl": microseconds(lambda: made(x=x, y=y, z=z)),
        "op": microseconds(lambda: ops.softmax(x[None])),
    }
    for name, value in times.items():
        record_property(name, round(value, 2))
    print(" ".join(f"{name} {value:.2f} us" for name, value in times.items()))
    assert times["k3dsl"] <= 1.3 * times["triton"]
