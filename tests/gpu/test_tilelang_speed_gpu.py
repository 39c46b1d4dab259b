"""How fast TileLang's code is beside the Triton lowering and the best library, each pair timed in one process.

`python -m pytest -m gpu -o addopts= -s tests/gpu/test_tilelang_speed_gpu.py` prints the figures.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from k3dsl.ops.registry import get_op
from k3dsl.runtime.executable import Executable
from k3dsl.runtime.metrics import relative_rms
from k3dsl.runtime.timing import measure
from k3dsl.targets import detect

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def executable(op: str, dims: dict[str, int], settings: dict[str, Any], backend: str) -> Executable:
    return Executable(get_op(op).point(dims, settings, symbolic=True).plan(backend), detect(), "cuda")


def time_ms(call: Any) -> float:
    return measure(call, "cuda").median_ms


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def test_matmul_reaches_85_percent_of_torch() -> None:
    n = 4096
    a, b = draw(n, n), draw(n, n)
    settings = {"block_n": 256, "num_warps": 8, "stages": 3}
    run = executable("matmul", {"M": n, "N": n, "K": n}, settings, "tilelang")
    dims = {"M": n, "N": n, "K": n}
    assert relative_rms(run({"a": a, "b": b}, dims)["o"], a.double() @ b.double()) < 3e-3
    ours, theirs = time_ms(lambda: run({"a": a, "b": b}, dims)), time_ms(lambda: a @ b)
    print(f"matmul {n}: {ours:.4f} ms, torch {theirs:.4f} ms, {theirs / ours:.3f} of its rate")
    assert theirs / ours >= 0.85


def test_attention_reaches_60_percent_of_cudnn() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = {"B": 1, "T": 8192, "H": 32, "D": 128}
    q, k, v = (draw(1, 8192, 32, 128) for _ in range(3))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    run = executable("attention", shape, {"block_q": 128, "block_k": 128, "stages": 2}, "tilelang")
    tensors, dims = {"q": q, "k": k, "v": v}, {"B": 1, "T": 8192, "S": 8192}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        call = lambda: torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)  # noqa: E731
        expected, theirs = call().transpose(1, 2), time_ms(call)
    assert relative_rms(run(tensors, dims)["o"], expected) < 5e-3
    ours = time_ms(lambda: run(tensors, dims))
    print(f"attention: {ours:.4f} ms, cuDNN {theirs:.4f} ms, {theirs / ours:.3f} of its rate")
    assert theirs / ours >= 0.60


NARROW = {"chunk": 64, "block_v": 64, "scan.threads": 128, "scan.stages.chunks": 2}
SCANS = [
    (8192, 96, {"chunk": 32, "block_v": 128, "scan.threads": 256, "scan.stages.chunks": 3}, 0.90),
    (8192, 32, NARROW, 0.85),
    (32768, 12, {**NARROW, "scan.overlap": True}, 0.80),
]


@pytest.mark.parametrize("factors", ["f16", "bf16"])
@pytest.mark.parametrize(("tokens", "heads", "settings", "limit"), SCANS)
def test_the_scan_beats_the_triton_lowering(
    tokens: int, heads: int, settings: dict, limit: float, factors: str
) -> None:
    inputs = {name: draw(1, tokens, heads, 128) for name in ("q", "k", "v", "g")}
    inputs |= {"beta": draw(1, tokens, heads), "A_log": torch.rand(heads, device="cuda")}
    inputs["dt_bias"] = torch.rand(heads, 128, device="cuda")
    common = {"factors": factors, "v_first": True, "segments": 1}
    dims = {"B": 1, "T": tokens, "N": 1}
    times, states = {}, {}
    for name, own in (("triton", {}), ("tilelang", {**settings, "scan.backend": "tilelang"})):
        run = executable("kda.forward", {"B": 1, "T": tokens, "H": heads}, {**common, **own}, "triton")
        held = dict(inputs)
        for buffer, shape, dtype in run.made:
            held[buffer] = torch.full(shape(dims), float("nan"), device="cuda").to(dtype)
        for launch in run.launches:
            launch.run(held, dims)
        scan = next(launch for launch in run.launches if launch.launch.label == "scan")
        states[name] = held["final_state"].clone()
        o = held["o"].clone()
        for _ in range(30):
            scan.run(held, dims)
            assert torch.equal(held["o"], o)
            assert torch.equal(held["final_state"], states[name])
        times[name] = time_ms(lambda scan=scan, held=held: scan.run(held, dims))
    ratio = times["tilelang"] / times["triton"]
    print(
        f"scan T{tokens} H{heads} {factors}: TileLang {times['tilelang']:.4f} ms, Triton {times['triton']:.4f}, {ratio:.3f}"
    )
    assert relative_rms(states["tilelang"], states["triton"]) < 2e-3
    assert ratio <= limit
