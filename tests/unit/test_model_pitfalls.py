"""Mistakes that other implementations of this network have made, one test each, by the numbers of a list (P1 to P32).

Not here: P1 P2 P31 test_kda_reference, test_kda_op, test_kda_inputs. P3 P5 P27 P30 P32 test_model_checkpoint,
test_model_config, test_mxfp4. P4 P16 P26 test_moe_experts. P6 P10 P17 test_model_cache. P10 test_model_generate. P11
test_kda_step_op. P13 P19 P29 P32 test_model_network. P14 test_moe_routing. P21 P22 test_attnres_op. P18 test_model_config.
The rest concerns training (P28), several devices (P20), or settings that races make look fast (P9: the tuner's gate).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_examples import random_checkpoint, write_checkpoint
from reference_network import ReferenceNetwork
from torch import nn

from k3dsl.model import DecodeStep, KimiK3Config, KimiK3ForCausalLM
from k3dsl.model.attention_layers import KDA, MLA
from k3dsl.model.functions import COMPILED, TORCH

CONFIG = KimiK3Config.k3_tiny()
TABLES = pytest.mark.parametrize("table", [TORCH, COMPILED], ids=lambda t: t.name)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    tensors = random_checkpoint(CONFIG, 7, torch.float32)
    return write_checkpoint(tmp_path_factory.mktemp("pitfalls") / "k3", CONFIG, tensors), tensors


def network_of(checkpoint, table=TORCH, dtype=torch.float32):
    network = KimiK3ForCausalLM.from_pretrained(checkpoint[0], dtype=dtype)
    network.functions = table
    return network


def ids(batch, tokens, seed=0):
    return torch.randint(0, 256, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def relative(x, want):
    return float((x.double() - want.double()).norm() / want.double().norm())


def test_p5_the_latent_norm_is_applied(checkpoint):
    network = network_of(checkpoint, dtype=torch.float64)
    x = ids(1, 6)
    before = network(x).logits
    with torch.no_grad():
        network.model.layers[4].block_sparse_moe.routed_expert_norm.weight.mul_(2)
    assert relative(network(x).logits, before) > 1e-3


def test_p7_a_prefix_is_reused_from_the_state_at_its_own_end(checkpoint):
    """130 tokens, pages of 64: what serves a prefix of 128 is the state after 128, not the one after 130."""
    network = network_of(checkpoint, dtype=torch.float64)
    x, other = ids(1, 130, seed=1), ids(1, 5, seed=2)
    cache = network.new_cache(1, page_size=64)
    network(x[:, :128], past=cache, logits_to_keep=1)
    boundary = cache.fork(1)
    network(x[:, 128:], past=cache, logits_to_keep=1)
    assert not torch.equal(boundary.layers[0].state, cache.layers[0].state)
    got = network(other, past=boundary).logits[0]
    want = ReferenceNetwork(CONFIG.to_dict(), checkpoint[1])(torch.cat([x[0, :128], other[0]])).logits[-5:]
    assert relative(got, want) < 1e-12


@TABLES
def test_p8_sequences_of_one_token_beside_long_ones(checkpoint, table):
    """New tokens of running requests in one batch with a prompt, through the kernels for whole sequences."""
    network = network_of(checkpoint, table)
    formulas = ReferenceNetwork(CONFIG.to_dict(), checkpoint[1])
    texts = [ids(1, n, seed=n)[0] for n in (1, 4, 9)]
    cache = network.new_cache(3)
    network(texts[1][None, :3], past=cache, rows=[1])
    new = torch.cat([texts[0], texts[1][3:], texts[2]])
    logits = network(new[None], past=cache, cu_seqlens=torch.tensor([0, 1, 2, 11])).logits[0]
    for got, text in zip((logits[0], logits[1], logits[10]), texts, strict=True):
        assert relative(got, formulas(text).logits[-1]) < 1e-3


def test_p12_a_decode_step_follows_the_rows_of_each_call(checkpoint):
    """One set of static buffers, rows that come and go; rows of -1 and the rest of the batch own no slot."""
    network = network_of(checkpoint, dtype=torch.float64)
    formulas = ReferenceNetwork(CONFIG.to_dict(), checkpoint[1])
    texts = [list(ids(1, 3 + n, seed=20 + n)[0]) for n in range(3)]
    cache = network.new_cache(3)
    for row, text in enumerate(texts):
        network(torch.tensor([text]), past=cache, rows=[row])
    step = DecodeStep(network, cache, batch=3)
    for rows in ([0, 1, 2], [2], [1, -1], [2, 0], [0, 1, 2]):
        tokens = [10 + r for r in rows]
        logits = step(torch.tensor(tokens), rows)
        for got, token, row in zip(logits, tokens, rows, strict=True):
            if row >= 0:
                texts[row].append(torch.tensor(token))
                assert relative(got, formulas(torch.tensor(texts[row])).logits[-1]) < 1e-12
    assert cache.lengths.tolist() == [len(t) for t in texts]


@TABLES
def test_p14_experts_are_chosen_in_fp32_by_biased_scores_and_weighed_by_unbiased_ones(table):
    """Logits that are equal in bf16 and differ in fp32; a bias that turns the choice around."""
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    weight = torch.zeros(4, 64)
    weight[:, 0] = torch.tensor([1.0, 1.0 + 2**-12, 1.0 + 2**-11, 0.5])
    ids, weights = table.router(x, weight, torch.zeros(4), 2, True, 1.0)
    assert ids[0].tolist() == [2, 1]
    bias = torch.tensor([0.0, 0.0, -1.0, 1.0])
    ids, weights = table.router(x, weight, bias, 2, True, 2.0)
    assert ids[0].tolist() == [3, 1]
    s = torch.sigmoid(weight[[3, 1], 0])
    torch.testing.assert_close(weights[0], 2 * s / s.sum())


@TABLES
def test_p15_equal_scores_go_to_the_first_experts_and_random_weights_make_none(table):
    ids_, _ = table.router(torch.ones(3, 32), torch.zeros(8, 32), torch.zeros(8), 2, True, 1.0)
    assert ids_.tolist() == [[0, 1]] * 3
    torch.manual_seed(0)
    gate = KimiK3ForCausalLM.from_config(CONFIG, dtype=torch.float32).model.layers[1].block_sparse_moe.gate
    chosen, _ = table.router(torch.randn(256, 128), gate.weight, gate.e_score_correction_bias, 4, True, 1.0)
    assert len(chosen.unique()) == 16


def test_p16_experts_have_the_latent_width():
    with torch.device("meta"):
        moe = KimiK3ForCausalLM(CONFIG).model.layers[1].block_sparse_moe
    assert moe.experts.w13.shape == (16, 2 * 64, 96)
    assert moe.experts.w2.shape == (16, 96, 64)
    assert moe.gate.weight.shape == (16, 128)


def test_p18_the_last_two_layers_of_k3_are_both_mla():
    with torch.device("meta"):
        layers = KimiK3ForCausalLM(KimiK3Config.k3()).model.layers
    kinds = [type(layer.self_attn) for layer in layers]
    assert [i for i, kind in enumerate(kinds) if kind is MLA] == [*range(3, 92, 4), 92]
    assert kinds[91] is kinds[92] is MLA
    assert kinds.count(KDA) == 69
    assert not layers[0].sparse
    assert all(layer.sparse for layer in layers[1:])


class Wrapped(nn.Module):
    """As adapters and offloading hooks wrap a projection: another module in its place."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@TABLES
def test_p23_the_output_gate_is_part_of_the_layer_not_of_its_projection(checkpoint, table):
    """A wrapped o_proj changes nothing, and the gate comes from the layer's input."""
    network = network_of(checkpoint, table)
    x = ids(1, 7)
    want = network(x).logits
    for layer in network.model.layers:
        layer.self_attn.o_proj = Wrapped(layer.self_attn.o_proj)
    assert torch.equal(network(x).logits, want)
    with torch.no_grad():
        network.model.layers[3].self_attn.g_proj.weight.zero_()  # MLA: sigmoid(0) = 1/2 of every output
    halved = dict(checkpoint[1])
    name = "language_model.model.layers.3.self_attn.g_proj.weight"
    halved[name] = torch.zeros_like(halved[name])
    assert relative(network(x).logits[0], ReferenceNetwork(CONFIG.to_dict(), halved)(x[0]).logits) < 1e-3


def test_p24_g_proj_is_what_its_layer_makes_of_it(checkpoint):
    """Same name, same shape, in both kinds of layers: each matters, and each as its own layer's gate."""
    network = network_of(checkpoint, dtype=torch.float64)
    x = ids(1, 6)
    for layer, kind in ((2, KDA), (3, MLA)):
        attention = network.model.layers[layer].self_attn
        assert isinstance(attention, kind)
        before, kept = network(x).logits, attention.g_proj.weight.clone()
        with torch.no_grad():
            attention.g_proj.weight.neg_()
            changed = {**checkpoint[1]}
            name = f"language_model.model.layers.{layer}.self_attn.g_proj.weight"
            changed[name] = -changed[name]
            got = network(x).logits
            assert relative(got, before) > 1e-3
            assert relative(got[0], ReferenceNetwork(CONFIG.to_dict(), changed)(x[0]).logits) < 1e-12
            attention.g_proj.weight.copy_(kept)


@TABLES
def test_p25_the_shared_part_of_the_keys_counts_unrotated_and_the_scale_is_of_the_whole_width(table):
    """Two keys whose latents say nothing: scores are q_p k_p (nope + rope)^-0.5, wherever the tokens stand."""
    packing = _packing([3])
    nope, rope, width, rank = 16, 16, 16, 16
    q = torch.zeros(3, 1, nope + rope)
    q[:, 0, nope] = 3.0
    latents = torch.zeros(3, rank + rope)
    latents[:, 0] = torch.tensor([1.0, 2.0, 4.0])  # through kv_b only into the values
    latents[0, rank] = 2.0
    kv_b = torch.zeros(nope + width, rank)
    kv_b[nope, 0] = 1.0
    o = table.mla_prefill(q, latents, kv_b, packing, packing, nope, (nope + rope) ** -0.5)
    scores = torch.tensor([6.0, 0.0, 0.0]) / 32**0.5
    for t in range(3):
        want = (torch.softmax(scores[: t + 1], 0) * torch.tensor([1.0, 2.0, 4.0])[: t + 1]).sum()
        torch.testing.assert_close(o[t, 0, 0], want)


@TABLES
def test_p26_the_gate_comes_first_and_saturates_at_4_the_linear_part_at_25(table):
    both = torch.tensor([[100.0, 2.0, 1.0, 1000.0]])  # gates 100 and 2, ups 1 and 1000
    got = table.activate(both, "situ", (4.0, 25.0))[0]
    up = 25 * torch.tanh(torch.tensor(1 / 25))
    torch.testing.assert_close(got[0], 4 * up)
    torch.testing.assert_close(got[1], 4 * torch.tanh(torch.tensor(0.5)) * torch.sigmoid(torch.tensor(2.0)) * 25)
    torch.testing.assert_close(
        table.activate(both, "silu", (0.0, 0.0))[0], torch.tensor([100.0, 2000 / (1 + torch.e**-2)])
    )


def test_p29_three_heads_run_on_the_compiled_ops(tmp_path):
    data = CONFIG.to_dict()
    data["text_config"] |= {"num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 5}
    data["text_config"]["linear_attn_config"] |= {"num_heads": 3, "kda_layers": [1, 2, 3], "full_attn_layers": [4, 5]}
    config = KimiK3Config.from_dict(data)
    tensors = random_checkpoint(config, 1, torch.float32)
    network = network_of((write_checkpoint(tmp_path / "three", config, tensors), tensors), COMPILED)
    x = ids(1, 10)
    want = ReferenceNetwork(config.to_dict(), tensors)(x[0]).logits
    cache = network.new_cache(1)
    got = torch.cat([network(part, past=cache).logits[0] for part in x.split([8, 1, 1], 1)])
    assert relative(got, want) < 1e-3


@TABLES
def test_p31_a_raw_beta_of_0_writes_a_half_and_the_norms_epsilon_is_added_to_the_sum(table):
    """One token from an empty state: o = v (q k) / (2 sqrt K); tiny q and k are not blown up to norm 1."""
    K, V = 64, 64
    q = torch.zeros(1, 1, K)
    q[..., 0] = 3.0
    k, v = q.clone(), torch.randn(1, 1, V)
    gate = (torch.zeros(1, 1, K), torch.zeros(1, 1), torch.zeros(1), torch.zeros(K), -5.0)
    o, _ = table.kda(q, k, v, *gate, _packing([1]), None, True)
    torch.testing.assert_close(o, v * 0.5 * K**-0.5, rtol=1e-4, atol=1e-6)
    small = 1e-3 * q / 3  # sum of squares 1e-6, as large as the epsilon: each is scaled by 1 / sqrt(2e-6)
    o, _ = table.kda(small, small, v, *gate, _packing([1]), None, True)
    torch.testing.assert_close(o, v * 0.5 * K**-0.5 * 0.5, rtol=1e-4, atol=1e-6)


def test_p32_a_network_in_bf16_keeps_its_precise_parameters_exact(tmp_path):
    config = replace(CONFIG, dtype="bfloat16")
    tensors = random_checkpoint(config, 2)
    network = KimiK3ForCausalLM.from_pretrained(write_checkpoint(tmp_path / "bf16", config, tensors))
    assert network.dtype == torch.bfloat16
    attention = network.model.layers[0].self_attn
    prefix = "language_model.model.layers.0.self_attn."
    assert torch.equal(attention.dt_bias, tensors[f"{prefix}dt_bias"])
    assert torch.equal(attention.A_log, tensors[f"{prefix}A_log"].view(-1)[:2])
    assert not torch.equal(attention.dt_bias, attention.dt_bias.bfloat16().float())


def _packing(lengths):
    from k3dsl.model.packing import Packing

    return Packing.of(lengths, torch.device("cpu"))
