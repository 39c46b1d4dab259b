"""The network on a GPU: the formulas' logits, a decode step as a CUDA graph, and nothing that waits for the device."""

from __future__ import annotations

import pytest
import torch
from cuda_calls import no_waiting
from model_examples import random_checkpoint, write_checkpoint
from reference_network import ReferenceNetwork

from k3dsl.model import DecodeStep, KimiK3Config, KimiK3ForCausalLM
from k3dsl.model.bench import bench

pytestmark = pytest.mark.gpu
CONFIG = KimiK3Config.k3_tiny()


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """In fp32 on the GPU, and the formulas in fp64."""
    tensors = random_checkpoint(CONFIG, 0, torch.float32)
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny") / "k3", CONFIG, tensors)
    network = KimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float32, device="cuda")
    return network, ReferenceNetwork(CONFIG.to_dict(), tensors)


def ids(batch, tokens, seed=0):
    return torch.randint(0, 256, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def relative(x, want):
    return float((x.double().cpu() - want).norm() / want.norm())


@pytest.mark.parametrize("sizes", [[40], [17, 20, 1, 1, 1]], ids=str)
def test_logits_are_those_of_the_formulas(networks, sizes):
    network, formulas = networks
    x = ids(1, 40)
    cache = network.new_cache(1, page_size=16)
    logits = torch.cat([network(part.cuda(), past=cache).logits[0] for part in x.split(sizes, 1)])
    assert relative(logits, formulas(x[0]).logits) < 5e-4


def test_a_captured_decode_step_gives_what_the_eager_one_gives_bit_for_bit(networks):
    """Over many steps, with rows that come and go, and pages that grow under the graph."""
    network, _ = networks
    x = ids(3, 13).cuda()
    caches = [network.new_cache(3, page_size=16, capacity=16) for _ in range(2)]
    for cache in caches:
        network(x, past=cache)
    captured = DecodeStep(network, caches[0], batch=3)
    eager = DecodeStep(network, caches[1], batch=3, graph=False)
    for n in range(12):
        rows = [[0, 1, 2], [2, -1], [1]][n % 3]
        tokens = torch.arange(len(rows), device="cuda") + n
        a, b = captured(tokens, rows).clone(), eager(tokens, rows)
        real = [i for i, row in enumerate(rows) if row >= 0]
        assert torch.equal(a[real], b[real]), n
    assert caches[0].lengths.tolist() == caches[1].lengths.tolist()
    assert [caches[0].length(row) for row in range(3)] == caches[0].lengths.tolist()


def test_a_decode_step_never_waits_for_the_device(networks):
    network, _ = networks
    cache = network.new_cache(2, capacity=64)
    network(ids(2, 5).cuda(), past=cache)
    token = ids(2, 1).cuda()
    network.decode(token, cache, cache.slots)  # builds what is not there yet
    cache.advance([1, 1])
    with no_waiting():
        network.decode(token, cache, cache.slots)


def test_the_gpu_writes_the_tokens_that_the_cpu_writes(networks):
    network, _ = networks
    on_cpu = KimiK3ForCausalLM(CONFIG, dtype=torch.float32).eval()
    on_cpu.load_state_dict({name: t.cpu() for name, t in network.state_dict().items()})
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    got = network.generate(prompts, max_new_tokens=12, eos_token_id=[]).tokens
    assert got == on_cpu.generate(prompts, max_new_tokens=12, eos_token_id=[]).tokens


@pytest.mark.parametrize("packed", [False, True])
def test_the_bench_times_replayed_steps_and_sets_each_op_beside_its_bytes(packed):
    """Contexts are made up; afterwards no cell's memory is kept, and a cell that is too large is said to be."""
    torch.manual_seed(0)
    network = KimiK3ForCausalLM.from_config(CONFIG.with_mxfp4_experts() if packed else CONFIG, device="cuda")
    torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps 32 MiB for each stream that it has seen
    before = torch.cuda.memory_allocated()
    result = bench(network, lengths=(100,), contexts=(64, 1000), batches=(1, 3, 1 << 22), chunk=60, rep_ms=20)
    fits = [cell for cell in result.cells if cell.batch < 1 << 22]
    assert [cell.problem for cell in fits] == [None] * 5
    assert all(cell.out_of_memory for cell in result.cells if cell not in fits)
    for cell in fits:
        assert {op.op for op in cell.ops} >= {"moe.experts", "attnres.site", "rmsnorm"}
        for op in cell.ops:
            assert 0 < op.bytes_ms == pytest.approx(op.bytes / result.copy_gbps / 1e6)
            assert op.time_ms > 0
        assert cell.peak_bytes >= result.weight_bytes
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() - before < 64 << 20
