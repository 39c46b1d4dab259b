"""The network: against the formulas in fp64, layer by layer; kinds of residuals; padding and packing; gradients; dtypes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from model_examples import random_checkpoint, write_checkpoint
from reference_network import ReferenceNetwork

from k3dsl.errors import ArgumentError
from k3dsl.model import KimiK3Config, KimiK3ForCausalLM
from k3dsl.model.functions import TORCH

TINY = {"K3-tiny": KimiK3Config.k3_tiny(), "Kimi-Linear-tiny": KimiK3Config.kimi_linear_tiny()}
T = 21


def relative(x: torch.Tensor, want: torch.Tensor) -> float:
    """Relative RMS error."""
    return float((x.double() - want.double()).norm() / want.double().norm())


def made(tmp_path, config, seed=0, dtype=torch.float64, functions=TORCH):
    """A network of a random checkpoint, and the formulas on the same tensors."""
    tensors = random_checkpoint(config, seed, torch.float32 if dtype == torch.float64 else dtype)
    network = KimiK3ForCausalLM.from_pretrained(write_checkpoint(tmp_path / f"{seed}", config, tensors), dtype=dtype)
    if functions is not None:
        network.functions = functions
    return network, ReferenceNetwork(config.to_dict(), tensors)


def ids(batch=1, tokens=T, seed=0):
    return torch.randint(0, 256, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", TINY)
def test_every_layer_and_the_logits_are_those_of_the_formulas(tmp_path, name):
    network, formulas = made(tmp_path, TINY[name])
    x = ids()
    out, want = network(x, output_hidden_states=True), formulas(x[0])
    embedded, *streams, final = out.hidden_states
    torch.testing.assert_close(embedded, formulas.w("model.embed_tokens.weight")[x[0]])
    assert len(streams) == network.config.num_hidden_layers
    for layer, (got, stream) in enumerate(zip(streams, want.stream, strict=True)):
        assert relative(got, stream) < 1e-12, layer
    assert relative(final, want.final) < 1e-12
    assert relative(out.logits[0], want.logits) < 1e-12


@pytest.mark.parametrize("block", [1, 2, 4, 12, None])
def test_attnres_with_every_block_length_and_without(tmp_path, block):
    """Block 1: every layer is a row of its own. 4: the last block is short. 12: one block, longer than the network."""
    config = replace(TINY["K3-tiny"], attn_res_block_size=block)
    network, formulas = made(tmp_path, config)
    x = ids(seed=1)
    assert relative(network(x).logits[0], formulas(x[0]).logits) < 1e-12


def test_mxfp4_experts_are_those_of_the_formulas(tmp_path):
    network, formulas = made(tmp_path, TINY["K3-tiny"].with_mxfp4_experts())
    assert network.model.layers[1].block_sparse_moe.experts.w13_packed.dtype == torch.uint8
    x = ids(seed=2)
    assert relative(network(x).logits[0], formulas(x[0]).logits) < 1e-12


@pytest.mark.parametrize("heads", [3, 12])
def test_head_counts_that_are_no_power_of_two(tmp_path, heads):
    config = TINY["K3-tiny"]
    inner = replace(config.linear_attn_config, num_heads=heads, head_dim=16)
    config = replace(config, linear_attn_config=inner, num_attention_heads=heads, extra={})
    network, formulas = made(tmp_path, config)
    x = ids(tokens=9)
    assert relative(network(x).logits[0], formulas(x[0]).logits) < 1e-12


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(tmp_path, side):
    network, formulas = made(tmp_path, TINY["K3-tiny"])
    x, lengths = ids(batch=3, tokens=12, seed=3), (12, 5, 1)
    mask = torch.zeros(3, 12, dtype=torch.int64)
    for row, n in enumerate(lengths):
        mask[row, slice(12 - n, None) if side == "left" else slice(n)] = 1
    logits = network(x, attention_mask=mask).logits
    for row in range(3):
        held = mask[row] == 1
        assert relative(logits[row, held], formulas(x[row, held]).logits) < 1e-12
        assert not logits[row, ~held].any()


def test_packed_sequences_do_not_see_each_other(tmp_path):
    network, formulas = made(tmp_path, TINY["K3-tiny"])
    x, ends = ids(tokens=16, seed=4), [0, 1, 8, 8, 16]
    logits = network(x, cu_seqlens=torch.tensor(ends)).logits
    assert logits.shape == (1, 16, 272)
    for start, end in pairwise(ends):
        if end > start:
            assert relative(logits[0, start:end], formulas(x[0, start:end]).logits) < 1e-12


def test_logits_of_the_last_tokens_only(tmp_path):
    network, _ = made(tmp_path, TINY["Kimi-Linear-tiny"])
    x = ids(batch=2, tokens=6)
    torch.testing.assert_close(network(x, logits_to_keep=2).logits, network(x).logits[:, -2:])


def test_loss_is_the_mean_over_next_tokens_within_each_sequence(tmp_path):
    network, formulas = made(tmp_path, TINY["Kimi-Linear-tiny"])
    x, ends = ids(tokens=10, seed=5), [0, 4, 10]
    labels = x.clone()
    labels[0, 6] = -100
    loss = network(x, labels=labels, cu_seqlens=torch.tensor(ends)).loss
    terms = []
    for start, end in ((0, 4), (4, 10)):
        scores = torch.log_softmax(formulas(x[0, start:end]).logits, -1)
        terms += [-scores[t - start, x[0, t + 1]] for t in range(start, end - 1) if t + 1 != 6]
    torch.testing.assert_close(loss, torch.stack(terms).mean())


def test_gradients_are_those_of_the_formulas(tmp_path):
    """Autograd through the formulas themselves, in fp64, on parameters of every kind of layer."""
    network, formulas = made(tmp_path, TINY["K3-tiny"])
    names = (
        "model.layers.2.self_attn.A_log",
        "model.layers.2.self_attn.dt_bias",
        "model.layers.1.mlp_res_proj.weight",
        "model.layers.3.self_attn.kv_b_proj.weight",
        "model.layers.1.block_sparse_moe.gate.weight",
        "model.output_attn_res_norm.weight",
        "model.embed_tokens.weight",
    )
    leaves = {n: formulas.tensors[n].double().requires_grad_() for n in names}
    conv = formulas.tensors["model.layers.0.self_attn.k_conv1d.weight"].double().requires_grad_()
    x = ids(tokens=11, seed=6)
    used = int(formulas(x[0]).experts[4][0, 0])
    expert = f"model.layers.4.block_sparse_moe.experts.{used}.w3.weight"
    w3 = formulas.tensors[expert].double().requires_grad_()
    formulas.tensors |= leaves | {"model.layers.0.self_attn.k_conv1d.weight": conv, expert: w3}
    want = torch.nn.functional.cross_entropy(formulas(x[0]).logits[:-1], x[0, 1:])
    want.backward()
    network.train()
    loss = network(x, labels=x).loss
    loss.backward()
    torch.testing.assert_close(loss, want)
    own = dict(network.named_parameters())
    for name, leaf in leaves.items():
        grad = own[name].grad
        assert relative(grad, leaf.grad.view(-1)[: grad.numel()].view(grad.shape)) < 1e-9, name
    width = network.config.kda_width
    k_conv = own["model.layers.0.self_attn.qkv_conv1d.weight"].grad[width : 2 * width]
    assert relative(k_conv, conv.grad[:, 0]) < 1e-9
    inner = network.config.moe_intermediate_size
    assert relative(own["model.layers.4.block_sparse_moe.experts.w13"].grad[used, inner:], w3.grad) < 1e-9
    assert own["model.layers.1.block_sparse_moe.gate.e_score_correction_bias"].grad is None


def test_training_mode_has_gradients_and_inference_has_none(tmp_path):
    network, _ = made(tmp_path, TINY["Kimi-Linear-tiny"], dtype=torch.float32)
    x = ids(tokens=5)
    assert not network(x).logits.requires_grad
    assert network(x, differentiable=True).logits.requires_grad
    assert network.train()(x).logits.requires_grad
    with torch.no_grad():
        assert not network(x).logits.requires_grad


def test_a_model_wide_cast_leaves_what_must_be_precise_in_fp32(tmp_path):
    network, _ = made(tmp_path, TINY["K3-tiny"], dtype=torch.float32)
    before = {n: p.clone() for n, p in network.named_parameters()}
    network.to(torch.bfloat16)
    precise = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "moe.gate.weight", "e_score_correction_bias")
    for name, p in network.named_parameters():
        if name.endswith(precise):
            assert p.dtype == torch.float32
            assert torch.equal(p, before[name]), name
        else:
            assert p.dtype == torch.bfloat16, name
    assert network(ids(tokens=4)).logits.dtype == torch.float32
    assert all(p.dtype == torch.float64 for p in network.double().parameters())


def test_saved_and_loaded_again_it_gives_the_same_logits(tmp_path):
    network, _ = made(tmp_path, TINY["K3-tiny"], dtype=torch.bfloat16)
    network.save_pretrained(tmp_path / "again", max_shard_size="500KB")
    again = KimiK3ForCausalLM.from_pretrained(tmp_path / "again")
    again.functions = network.functions
    x = ids(tokens=6)
    assert torch.equal(again(x).logits, network(x).logits)


def test_tied_embeddings(tmp_path):
    network, formulas = made(tmp_path, replace(TINY["Kimi-Linear-tiny"], tie_word_embeddings=True))
    x = ids(tokens=6)
    assert "lm_head.weight" not in network.state_dict()
    assert relative(network(x).logits[0], formulas(x[0]).logits) < 1e-12


def test_what_it_cannot_take_is_refused_by_name(tmp_path):
    network, _ = made(tmp_path, TINY["Kimi-Linear-tiny"], dtype=torch.float32)
    x = ids(batch=2, tokens=4)
    mask = torch.ones(2, 4)
    for wrong, message in (
        (lambda: network(x.float()), "input_ids: is float32"),
        (lambda: network(x[0]), r"input_ids: has shape \[4\]"),
        (
            lambda: network(x, attention_mask=torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])),
            "padding between the tokens of row 0",
        ),
        (lambda: network(x, attention_mask=mask[:, :3]), "attention_mask: has shape"),
        (lambda: network(x, cu_seqlens=torch.tensor([0, 8])), "input_ids: has 2 rows"),
        (lambda: network(x[:1], cu_seqlens=torch.tensor([0, 3])), "cu_seqlens: ends at 3"),
        (lambda: network(x[:1], cu_seqlens=torch.tensor([0, 4]), attention_mask=mask[:1]), "beside cu_seqlens"),
        (lambda: network(x, labels=x[:, 1:]), "labels: has shape"),
        (lambda: network(x, logits_to_keep=5), "logits_to_keep: is 5"),
        (lambda: network(x, past=network.new_cache(3)), "past: holds 3 sequences"),
        (lambda: network(x, past=network.new_cache(3), rows=[0]), "rows: names 1 rows for 2"),
        (lambda: network(x, past=network.new_cache(3), rows=[1, 1]), "rows: names a row twice"),
        (lambda: network(x, past=network.new_cache(3), rows=[1, 3]), "rows: names row 3"),
        (lambda: KimiK3ForCausalLM(network.config, dtype=torch.int32), "dtype: is int32"),
    ):
        with pytest.raises(ArgumentError, match=message):
            wrong()
