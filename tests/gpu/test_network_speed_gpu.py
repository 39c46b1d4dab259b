"""How fast the network's ops are beside the best library and the memory's rate, each pair timed in one process.

`python -m pytest -m gpu -o addopts= -s tests/gpu/test_network_speed_gpu.py` prints the figures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from k3dsl.ops import kda_step
from k3dsl.ops.moe.inputs import sorted_pairs
from k3dsl.ops.registry import get_op
from k3dsl.runtime.timing import BenchResult, bench, measure, measure_graph

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def timed(op: str, options: dict[str, Any] | None = None, *, peers: bool = False, **dims: int) -> BenchResult:
    return bench(get_op(op), dims=dims, options=options, device="cuda", with_peers=peers)


def apart(result: BenchResult) -> str:
    """Which timing a figure is of, and what a call takes beside it."""
    kind = "in a CUDA graph" if result.graph is not None else "by calls"
    return f", {kind}; a call {result.timing.median_ms:.4f} ms, of the host {result.host_us:.0f} us"


def time_ms(call: Callable[[], Any]) -> float:
    return measure(call, "cuda").median_ms


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def copied_ms(moved: int) -> float:
    """What torch's copy takes that reads and writes as many bytes in all, as a CUDA graph. Between samples the timer fills the
    L2 cache, which has to be written back first: about 12 us, whatever is timed.

    The best of four distances between source and target: at some a copy takes half as long again."""
    size, found = moved // 2, []
    memory = torch.empty(2 * size + (8 << 20), dtype=torch.uint8, device="cuda")
    for apart in (0, 64 << 10, 1 << 20, 5 << 20):
        start = -(-size // 4096) * 4096 + apart
        source, target = memory[:size], memory[start : start + size]
        timing = measure_graph(lambda source=source, target=target: target.copy_(source), "cuda")
        assert timing is not None
        found.append(timing.median_ms)
    return min(found)


# ---- bound by the memory -------------------------------------------------------------------------------------------------
# Shares of the copy rate are those of a replayed CUDA graph: a call of a short op is bound by the host. They are told twice, of
# the rate of a copy of 1 GiB and of a copy as large as the op; the second is judged.


@pytest.mark.parametrize(
    ("op", "dims"), [("causal_conv1d", {"T": 8192, "P": 12288}), ("gated_rmsnorm", {"N": 8192, "H": 96, "D": 128})]
)
def test_what_stands_around_kda_reaches_85_percent_of_a_copy(op: str, dims: dict[str, int]) -> None:
    result = timed(op, **dims)
    taken = result.on_device.median_ms
    like, share = copied_ms(result.launches[0].bytes) / taken, result.launches[0].floor_ms / taken
    print(f"{op} {dims}: {taken:.4f} ms, {share:.3f} of the copy rate, {like:.3f} of a like copy's{apart(result)}")
    assert like >= 0.85


@pytest.mark.parametrize(("requests", "heads"), [(64, 96), (256, 96), (256, 12), (128, 32)])
@pytest.mark.parametrize("op", ["kda.decode", "kda.step"])
def test_kda_decode_reaches_88_percent_of_a_copy(op: str, requests: int, heads: int) -> None:
    result = timed(op, B=requests, H=heads, **{"slots" if op == "kda.decode" else "pool": requests})
    taken = result.on_device.median_ms
    moved = requests * heads * 128 * 128 * 8
    like, share = copied_ms(moved) / taken, moved / taken / 1e6 / (result.copy_gbps or 0.0)
    print(f"{op} B{requests} H{heads}: {taken:.4f} ms, state traffic {share:.3f} of the copy rate, {like:.3f}", end="")
    print(f" of a like copy's{apart(result)}")
    assert like >= (0.88 if op == "kda.decode" else 0.8)


def test_one_request_steps_in_less_than_8_us() -> None:
    """In a CUDA graph of 40 steps, each on a state of its own, so that no state is in the L2 cache."""
    layers, op = 40, get_op("kda.step")
    known = op.resolve_dims({"B": 1, "H": 96, "pool": 1})
    sets = [op.inputs(known, op.resolve_options({}), "cuda", seed) for seed in range(layers)]  # type: ignore[misc]
    kda_step(**sets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in sets:
            kda_step(**each)
    taken = time_ms(graph.replay) * 1e3 / layers
    print(f"kda.step B1 H96: {taken:.2f} us in a CUDA graph")
    assert taken < 8


@pytest.mark.parametrize("heads", [12, 24, 32, 48, 64, 96])
def test_mla_decode_reaches_75_percent_of_a_copy(heads: int) -> None:
    result = timed("mla.decode", B=128, H=heads, S=8192)
    taken = result.on_device.median_ms
    share = 128 * 8192 * 576 * 2 / taken / 1e6 / (result.copy_gbps or 0.0)
    print(f"mla.decode B128 S8192 H{heads}: {taken:.4f} ms, latents {share:.3f} of the copy rate{apart(result)}")
    assert share >= 0.75 or heads > 64


@pytest.mark.parametrize("rows", [9, 5])
def test_attnres_is_no_slower_than_fla(rows: int) -> None:
    pytest.importorskip("fla")
    result = timed("attnres.site", peers=True, T=8192, N=rows - 1)
    fla = next(peer for peer in result.peers if peer.name.startswith("fla"))
    ratio = result.ratio(fla)
    print(
        f"attnres.site T8192, {rows} rows: {result.timing.median_ms:.4f} ms, {result.launches[0].share:.3f} of the copy",
        end="",
    )
    print(f" rate, {ratio:.3f} of fla's time" if ratio else f" rate; fla: {fla.problem}")
    assert ratio is not None
    assert ratio <= 1.0 or rows != 9


# ---- bound by the matrix units -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "tokens", "heads"), [(1, 8192, 96), (1, 32768, 12), (4, 4096, 32)])
def test_mla_prefill_reaches_70_percent_of_cudnn(batch: int, tokens: int, heads: int) -> None:
    """cuDNN gets keys that are joined already, and has no output gate to apply."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    result = timed("mla.prefill", B=batch, T=tokens, H=heads)
    q, k = (draw(batch, tokens, heads, 192).transpose(1, 2) for _ in range(2))
    v = draw(batch, tokens, heads, 128).transpose(1, 2)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        theirs = time_ms(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    ours, flops = result.timing.median_ms, batch * heads * tokens * tokens * 320
    print(f"mla.prefill B{batch} T{tokens} H{heads}: {ours:.3f} ms, {flops / ours / 1e9:.0f} TFLOP/s", end="")
    print(f", cuDNN {theirs:.3f} ms, {theirs / ours:.3f} of its rate")
    assert theirs / ours >= 0.7


EXPERTS = {"E": 112, "K": 16, "D": 3584, "I": 3072}


def beside_torch(result: BenchResult, what: str) -> dict[str, float]:
    """Prints gate_up and down of moe.experts beside torch's grouped product; returns the shares of its rate. torch gets rows
    that are gathered already and bf16 weights, and applies no activation; a gather of ours counts to gate_up."""
    ours = {launch.label: launch for launch in result.launches}
    tokens, (E, K, D, I) = result.dims["T"], EXPERTS.values()
    ids = torch.stack([torch.randperm(E, device="cuda")[:K] for _ in range(tokens)]).int()
    offsets, shares = sorted_pairs(ids, E)[2][1:], {}
    for label, wide, narrow in (("gate_up", 2 * I, D), ("down", D, I)):
        weight, x = draw(E, wide, narrow), draw(tokens * K, narrow)
        theirs = time_ms(lambda w=weight, x=x: torch._grouped_mm(x, w.transpose(-2, -1), offs=offsets))
        del weight
        mine = ours[label].timing.median_ms
        if label == "gate_up" and "gather" in ours:
            mine += ours["gather"].timing.median_ms
        shares[label] = theirs / mine
        rate = 2 * tokens * K * wide * narrow / mine / 1e9
        print(
            f"{label} {what} {tokens * K} rows: {mine:.4f} ms, {rate:.0f} TFLOP/s, {ours[label].share:.3f} of its",
            end="",
        )
        print(f" roofline; torch._grouped_mm {theirs:.4f} ms, {shares[label]:.3f} of its rate")
    return shares


@pytest.mark.parametrize("weights", ["plain", "mxfp4"])
@pytest.mark.parametrize("rows", [128, 2048, 16384, 131072])
def test_grouped_products_reach_80_percent_of_torch(rows: int, weights: str) -> None:
    """Over 112 experts, as the op chooses by itself."""
    result = timed("moe.experts", {"weights": weights}, **EXPERTS, T=rows // EXPERTS["K"])
    shares = beside_torch(result, weights)
    if weights == "plain" and rows == 2048:
        assert min(launch.share or 0.0 for launch in result.launches if launch.label in shares) >= 0.80
    if weights == "plain" and rows > 2048:
        assert min(shares.values()) >= 0.80


@pytest.mark.parametrize("rows", [16384])
def test_grouped_products_of_gathered_rows_through_tilelang(rows: int) -> None:
    """Blocks of 192 rows, all operands by the tensor memory accelerator: the first of the op's seeds through TileLang."""
    pytest.importorskip("tilelang")
    op = get_op("moe.experts")
    high = next(seed for seed in op.seeds if seed["block_m"] == 192)
    knobs, _, schedules = op.split_settings(high)
    dims = {**EXPERTS, "T": rows // EXPERTS["K"]}
    result = bench(op, dims=dims, knobs=knobs, schedules=schedules, device="cuda", with_peers=False)
    assert min(beside_torch(result, "through TileLang").values()) >= 0.80
