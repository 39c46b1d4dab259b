"""Calls again on a GPU: they give what the op's function gives, also in a CUDA graph, and take the host a few tens of us.

`python -m pytest -m gpu -o addopts= -s tests/gpu/test_replay_gpu.py` prints the host's time of every op.
"""

from __future__ import annotations

import pytest
import torch
from op_examples import called, drawn

from k3dsl import ops
from k3dsl.ops.registry import get_op, op_names
from k3dsl.runtime.dispatch import using_backend
from k3dsl.runtime.executable import recording
from k3dsl.runtime.op import forced
from k3dsl.runtime.timing import host_us

pytestmark = pytest.mark.gpu
DIMS: dict[str, dict[str, int]] = {
    "kda.decode": {"B": 64, "H": 12, "slots": 64},
    "kda.step": {"B": 64, "H": 12, "pool": 64},
    "kda.forward": {"T": 1024, "H": 4},
    "mla.decode": {"B": 8, "H": 12, "S": 1024},
    "mla.prefill": {"T": 512, "S": 512, "H": 4},
    "moe.experts": {"T": 64, "E": 16, "K": 2, "D": 256, "I": 256},
}
MOST_US = {"kda.decode": 60, "kda.step": 65, "rmsnorm": 40, "gated_rmsnorm": 40, "softmax": 40, "moe.situ": 40}


@pytest.mark.parametrize("name", op_names())
def test_a_call_again_gives_every_bit_of_the_long_way(name: str) -> None:
    op = get_op(name)
    for seed in (0, 1):
        called(op, drawn(op, DIMS.get(op.name, {}), "cuda", seed))
    inputs = drawn(op, DIMS.get(op.name, {}), "cuda", 2)
    again = called(op, inputs)
    with recording():  # goes the long way
        expected = called(op, inputs)
    for n, x in again.items():
        assert x.shape == expected[n].shape
        assert torch.equal(x.nan_to_num(7.0), expected[n].nan_to_num(7.0)), n


@pytest.mark.parametrize("name", op_names())
def test_the_host_enqueues_a_call_in_a_few_tens_of_us(name: str) -> None:
    op = get_op(name)
    inputs = op.fresh(drawn(op, DIMS.get(op.name, {}), "cuda", 0))
    call = op.call
    assert call is not None
    with torch.inference_mode():
        for _ in range(3):
            call(**inputs)
        taken = host_us(lambda: call(**inputs), "cuda")
    assert taken is not None
    print(f"{name}: {taken:.1f} us of the host")
    assert taken <= MOST_US.get(name, 1e9)


SLICED = {"segments": 1, "slices": 3}


@pytest.mark.parametrize("backend", ["triton", "tilelang"])
@pytest.mark.parametrize("knobs", [{}, SLICED], ids=["whole", "slices"])
@pytest.mark.parametrize("packed", [False, True])
def test_kda_again_by_addresses_alone(knobs: dict[str, int], packed: bool, backend: str) -> None:
    """Launches of both backends, descriptors, tables of packed sequences and streams beside the caller's."""
    if backend == "tilelang":
        pytest.importorskip("tilelang")
    op = get_op("kda.forward")
    dims, options = op.resolve_dims({"T": 1024, "H": 4, "N": 3}), op.resolve_options({"varlen": packed})
    with using_backend(backend), forced(op, knobs, {}):
        for seed in (0, 1):
            called(op, op.inputs(dims, options, "cuda", seed))
        for seed in (2, 3):
            inputs = op.inputs(dims, options, "cuda", seed)
            again = called(op, inputs)
            with recording() as calls:
                expected = called(op, inputs)
            assert calls
            for n, x in again.items():
                assert torch.equal(x, expected[n]), n


def test_replayed_calls_can_be_captured_in_a_cuda_graph() -> None:
    x, w = (torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        ops.rmsnorm(x, w[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.rmsnorm(x, w[0])
    x.copy_(torch.randn_like(x))
    graph.replay()
    xf = x.double()
    expected = xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + 1e-6) * w[0].double()
    assert ((y.double() - expected).norm() / expected.norm()).item() < 5e-3
