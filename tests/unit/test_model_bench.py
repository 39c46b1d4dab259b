"""`k3dsl model bench`: cells of prompts, contexts and batches, made-up contexts, what does not fit, what is printed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from k3dsl.cli.main import app
from k3dsl.errors import ArgumentError, LaunchError
from k3dsl.model import Cache, KimiK3Config, KimiK3ForCausalLM
from k3dsl.model.bench import bench, fill
from k3dsl.runtime.executable import recording

CONFIG = KimiK3Config.kimi_linear_tiny()
K3 = KimiK3Config.k3_tiny()


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return KimiK3ForCausalLM.from_config(CONFIG, dtype=torch.float32)


def times(result):
    return [(cell.phase, cell.batch, cell.tokens) for cell in result.cells]


def test_every_length_and_every_context_with_every_batch_is_a_cell(network):
    seen = []
    settings = {"lengths": (5, 9), "prompts": 2, "contexts": (1, 70), "batches": (1, 3)}
    result = bench(network, **settings, rep_ms=1, on_cell=lambda so_far: seen.append(len(so_far.cells)))
    decodes = [("decode", 1, 1), ("decode", 3, 1), ("decode", 1, 70), ("decode", 3, 70)]
    assert times(result) == [("prefill", 2, 5), ("prefill", 2, 9), *decodes]
    assert seen == [1, 2, 3, 4, 5, 6]
    for cell in result.cells:
        tokens = cell.batch * (cell.tokens if cell.phase == "prefill" else 1)
        assert cell.problem is None
        assert cell.tokens_per_s == pytest.approx(1000 * tokens / cell.time_ms)
        assert [op.time_ms for op in cell.ops] == sorted((op.time_ms for op in cell.ops), reverse=True)
        assert cell.rest_ms == pytest.approx(cell.time_ms - sum(op.time_ms for op in cell.ops))
        calls = {op.op: op.calls for op in cell.ops}
        assert calls["kda.step" if cell.phase == "decode" else "kda.forward"] == 3, "the KDA layers"
        assert calls["mla.decode" if cell.phase == "decode" else "mla.prefill"] == 2, "the MLA layers"
        assert calls["moe.experts"] == 4, "all but the first layer"
    data = json.loads(json.dumps(result.to_json()))
    assert [cell["rest_ms"] for cell in data["cells"]] == [cell.rest_ms for cell in result.cells]
    assert (data["dtype"], data["experts"], data["copy_gbps"]) == ("float32", "float32", None)


def test_bytes_are_those_that_the_calls_must_move(network):
    prefill, decode = bench(network, lengths=(8,), contexts=(130,), batches=(2,), rep_ms=1).cells
    # per norm of 8 tokens: x, weight and y of 128 floats each row; the last one of one token... all rows are normed
    norms = 2 * CONFIG.num_hidden_layers + 1
    latent = len(CONFIG.mla_layers) * (2 * 8 + 1) * CONFIG.kv_lora_rank
    assert {op.op: op.bytes for op in prefill.ops}["rmsnorm"] == 4 * (norms * (2 * 8 + 1) * 128 + latent)
    # 2 rows of 130 tokens lie in 3 pages of 64 each; beside them queries, outputs, page table, lengths
    width, heads, rank = CONFIG.mla_cache_width, CONFIG.num_attention_heads, CONFIG.kv_lora_rank
    cache = 2 * 3 * 64 * width * 4
    moved = {op.op: op.bytes for op in decode.ops}["mla.decode"] / len(CONFIG.mla_layers)
    assert moved >= cache + 2 * heads * (width + rank) * 4 + 2 * 3 * 4 + 2 * 4
    assert moved < 2 * cache
    linear = sum(m.weight.numel() for m in network.modules() if isinstance(m, torch.nn.Linear))
    assert prefill.projection_bytes == decode.projection_bytes == 4 * linear


def test_a_made_up_context_runs_the_ops_that_a_read_one_does(network):
    """Same ops, same runtime dims, same lengths; and a step on it gives finite logits."""
    ids = torch.arange(2 * 70).view(2, 70) % 256
    read = Cache(CONFIG, 2, capacity=71, dtype=torch.float32)
    network(ids, past=read)
    made = Cache(CONFIG, 2, capacity=71, dtype=torch.float32)
    fill(made, 70)
    assert made.lengths.tolist() == read.lengths.tolist() == [70, 70]
    assert [made.length(row) for row in (0, 1)] == [70, 70]
    assert torch.equal(made.page_table, read.page_table)
    for layer in made.layers:
        for x in vars(layer).values():
            assert 0.05 < float(x.std()) < 0.2
    kinds = []
    for cache in (read, made):
        with recording() as calls:
            logits = network(ids[:, :1], past=cache).logits
        assert torch.isfinite(logits).all()
        kinds.append([(call.executable.plan.op, call.dims) for call in calls])
    assert kinds[0] == kinds[1]


def test_a_prefill_in_chunks_reads_every_token_and_attends_to_all(network):
    whole, _ = bench(network, lengths=(12,), contexts=(1,), rep_ms=1).cells
    (parts,) = bench(network, lengths=(12,), contexts=(), chunk=5, rep_ms=1).cells
    calls = [{op.op: op.calls for op in cell.ops} for cell in (whole, parts)]
    assert calls[1]["mla.prefill"] == 3 * calls[0]["mla.prefill"], "chunks of 5, 5 and 2"


def test_what_does_not_fit_is_reported_and_the_rest_goes_on(network, monkeypatch):
    make = KimiK3ForCausalLM.new_cache

    def new_cache(self, rows, **settings):
        if rows == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 3 GiB free.")
        if rows == 5:
            raise RuntimeError("CUDA error: out of memory")
        if rows == 6:
            raise LaunchError("kernel mla_decode: a grid of 1 x 1 x 70000 programs")
        return make(self, rows, **settings)

    monkeypatch.setattr(KimiK3ForCausalLM, "new_cache", new_cache)
    result = bench(network, lengths=(), contexts=(3,), batches=(4, 5, 6, 1), rep_ms=1)
    assert [cell.time_ms is None for cell in result.cells] == [True, True, True, False]
    assert [cell.out_of_memory for cell in result.cells] == [True, True, False, False]
    assert result.cells[0].problem == "out of memory: Tried to allocate 20.00 GiB"
    assert result.cells[0].rest_ms is None
    assert "70000 programs" in result.cells[2].problem

    def other(self, rows, **settings):
        raise RuntimeError("something else")

    monkeypatch.setattr(KimiK3ForCausalLM, "new_cache", other)
    with pytest.raises(RuntimeError, match="something else"):
        bench(network, lengths=(3,), rep_ms=1)


@pytest.mark.parametrize(
    "settings", [{"lengths": (0,)}, {"contexts": (5, 0)}, {"batches": (0,)}, {"prompts": 0}, {"chunk": -1}]
)
def test_counts_that_cannot_be_are_named(network, settings):
    with pytest.raises(ArgumentError, match=next(iter(settings))):
        bench(network, **settings)


def test_random_experts_in_mxfp4_have_codes_of_all_kinds_and_give_finite_logits():
    torch.manual_seed(0)
    packed = KimiK3ForCausalLM.from_config(replace(K3.with_mxfp4_experts(), dtype="bfloat16"))
    experts = packed.model.layers[1].block_sparse_moe.experts
    assert len(experts.w13_packed.unique()) == 256
    # E2M1's root mean square is 2.61, the config's deviation 0.02: a scale of 2^-7 gives 0.0204
    assert experts.w13_scale.unique().tolist() == [127 - 7]
    logits = packed(torch.arange(40)[None] % 256).logits
    assert torch.isfinite(logits).all()
    assert 0.01 < float(logits.std()) < 10


# ---- the command -------------------------------------------------------------------------------------------------------


def run(*args: str, status: int = 0):
    result = CliRunner().invoke(app, ["model", "bench", *args])
    assert result.exit_code == status, result.output
    return result


SHORT = ("--backend", "torch", "--rep-ms", "1")


def test_the_command_times_lengths_contexts_and_batches(tmp_path):
    file = tmp_path / "out.json"
    options = ("--lengths", "6", "--contexts", "3,1k", "--batches", "1,2", "--output", str(file))
    text = run("K3-tiny", *options, "--experts", "mxfp4", *SHORT).stdout
    for words in (
        "bfloat16, experts in mxfp4",
        "prefill, 1 x 6 tokens",
        "decode, batch 2, context 1,024",
        "the rest: projections, host",
    ):
        assert words in text
    data = json.loads(file.read_text())
    assert (data["model"], data["experts"], len(data["cells"])) == ("K3-tiny", "mxfp4", 5)


def test_the_command_prints_json_alone_and_decodes_at_the_lengths_by_default():
    data = json.loads(run("Kimi-Linear-tiny", "--lengths", "4", *SHORT, "--json").stdout)
    assert [(cell["phase"], cell["tokens"]) for cell in data["cells"]] == [("prefill", 4), ("decode", 4)]


def test_the_command_says_what_failed_and_its_status_tells(monkeypatch):
    def refuse(self, rows, **settings):
        raise LaunchError("a grid too large") if rows == 2 else torch.OutOfMemoryError("no room")

    monkeypatch.setattr(KimiK3ForCausalLM, "new_cache", refuse)
    text = run("Kimi-Linear-tiny", "--lengths", "none", "--contexts", "4", "--batches", "1", *SHORT).stdout
    assert "decode, batch 1, context 4: out of memory: no room" in text
    text = run("Kimi-Linear-tiny", "--lengths", "none", "--contexts", "4", "--batches", "1,2", *SHORT, status=1).stdout
    assert "a grid too large" in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("K3-slice",), "K3-slice is a configuration without weights; random ones would take 66.78 GB"),
        (("K3-slice", "--experts", "mxfp4"), "28.74 GB, and the CPU is for tiny networks"),
        (("K3-tiny", "--experts", "fp4"), "unknown experts 'fp4'"),
        (("K3-tiny", "--batches", "0"), "--batches has 0"),
        (("K3-tiny", "--lengths", "8x"), "--lengths takes numbers with commas"),
        (("K3-tiny", "--lengths", "none"), "there is nothing to time"),
    ],
)
def test_the_command_names_a_mistake(args, words):
    assert words in " ".join(run(*args, *SHORT, status=2).stderr.split())
