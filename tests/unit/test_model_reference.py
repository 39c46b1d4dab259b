"""The float64 reference network, against two other implementations and against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_examples import random_checkpoint, write_checkpoint
from reference_network import ReferenceNetwork, Trace, causal_conv, dequantized
from safetensors.torch import load_file

from k3dsl.model.checkpoint import empty_state, load_checkpoint, save_checkpoint
from k3dsl.model.config import KimiK3Config

DATA = Path(__file__).parents[1] / "data"


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def float32(config: KimiK3Config) -> KimiK3Config:
    return replace(config, dtype="float32")


# ---- Kimi Linear: transformers -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers_model(tmp_path_factory):
    """transformers' network with the weights of a checkpoint of ours, the checkpoint, and its folder."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = float32(KimiK3Config.kimi_linear_tiny())
    tensors = random_checkpoint(config, dtype=torch.float32)
    folder = write_checkpoint(tmp_path_factory.mktemp("ours"), config, tensors)
    model, loading = transformers.KimiLinearForCausalLM.from_pretrained(folder, output_loading_info=True)
    return model.eval(), loading, config, tensors


def test_transformers_finds_all_tensors_by_our_names(transformers_model):
    _, loading, _, _ = transformers_model
    assert [loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [set(), set(), set()]


def test_the_logits_and_every_layer_are_those_of_transformers(transformers_model):
    model, _, config, tensors = transformers_model
    ids = torch.arange(90) * 37 % 256  # more than one of its chunks of 64, and no whole number of them
    mine = ReferenceNetwork(config.to_dict(), tensors)(ids)
    with torch.no_grad():
        theirs = model(ids[None], output_hidden_states=True)
    assert relative(theirs.logits[0], mine.logits) < 1e-5
    *layers, final = theirs.hidden_states[1:]
    assert len(layers) == len(mine.stream) - 1 == 4
    assert max(relative(a[0], b) for a, b in zip(layers, mine.stream, strict=False)) < 1e-5
    assert relative(final[0], mine.final) < 1e-5


def test_what_transformers_saves_is_loaded_and_gives_its_logits(transformers_model, tmp_path):
    """Its own random weights, its config.json, its spelling of names: into our state, out again in the published layout."""
    model, _, _, tensors = transformers_model
    model.save_pretrained(tmp_path / "theirs")
    config = KimiK3Config.from_pretrained(tmp_path / "theirs")
    state = empty_state(config)
    load_checkpoint(tmp_path / "theirs", config, state)
    save_checkpoint(tmp_path / "ours", config, state)
    again = load_file(tmp_path / "ours" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


# ---- Kimi K3: mlx-lm ---------------------------------------------------------------------------------------------------


def test_the_logits_of_k3_tiny_are_those_that_mlx_lm_gave():
    """Recorded: mlx-lm loaded random_checkpoint(K3-tiny, seed 0, float32), found every tensor, and ran in float32."""
    recorded = json.loads((DATA / "k3_tiny_mlx_lm.json").read_text())
    config = float32(KimiK3Config.k3_tiny())
    network = ReferenceNetwork(config.to_dict(), random_checkpoint(config, dtype=torch.float32))
    logits = network(torch.tensor(recorded["tokens"])).logits[:, recorded["columns"]]
    assert relative(torch.tensor(recorded["logits"]), logits) < 5e-5


# ---- by hand -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 2, 3])
def test_attn_res_mixes_the_rows_that_the_paper_says(block):
    """With zero queries every mix is a plain mean, so the rows can be followed through three layers on paper."""
    data = KimiK3Config.k3_tiny().to_dict()
    data["text_config"] |= {"num_hidden_layers": 3, "attn_res_block_size": block}
    zero = torch.zeros(1, 2)
    sites = [f"model.layers.{i}.{n}" for i in range(3) for n in ("self_attention_res", "mlp_res")]
    tensors = {f"{site}_proj.weight": zero for site in (*sites, "model.output_attn_res")}
    tensors |= {f"{site}_norm.weight": torch.ones(2) for site in (*sites, "model.output_attn_res")}
    network = ReferenceNetwork(data, tensors)
    seen = []

    def sub_layer(i, h, trace):
        seen.append(h[0, 0].item())
        return torch.full_like(h, 10.0 ** len(seen))

    network._attention = network._ffn = sub_layer
    out = network._attn_res(torch.ones(1, 2, dtype=torch.float64), Trace())[0, 0].item()
    e, a0, f0, a1, f1, a2, f2 = (10.0**n for n in range(7))
    expected = {
        1: (e, (e + a0) / 2, (e + a0 + f0) / 2, (e + a0 + f0 + a1) / 3, (e + a0 + f0 + a1 + f1) / 3,
            (e + a0 + f0 + a1 + f1 + a2) / 4, (e + a0 + f0 + a1 + f1 + a2 + f2) / 4),
        2: (e, (e + a0) / 2, (e + a0 + f0) / 2, (e + a0 + f0 + a1) / 2, (e + a0 + f0 + a1 + f1) / 2,
            (e + a0 + f0 + a1 + f1 + a2) / 3, (e + a0 + f0 + a1 + f1 + a2 + f2) / 3),
        3: (e, (e + a0) / 2, (e + a0 + f0) / 2, (e + a0 + f0 + a1) / 2, (e + a0 + f0 + a1 + f1) / 2,
            (e + a0 + f0 + a1 + f1 + a2) / 2, (e + a0 + f0 + a1 + f1 + a2 + f2) / 2),
    }[block]  # fmt: skip
    assert [*seen, out] == pytest.approx(expected)


def test_situ_at_a_point():
    network = ReferenceNetwork(KimiK3Config.k3().to_dict(), {})
    value = network._activate(torch.tensor(2.0), torch.tensor(50.0)).item()
    assert value == pytest.approx(4 * math.tanh(0.5) / (1 + math.exp(-2)) * 25 * math.tanh(2), rel=1e-6)


def test_the_last_tap_of_the_convolution_is_the_current_token():
    x = torch.tensor([[1.0], [10.0], [100.0]])
    assert causal_conv(x, torch.tensor([[4.0, 3.0, 2.0, 1.0]]))[:, 0].tolist() == [1, 12, 123]


def test_mxfp4_has_the_even_input_in_the_low_nibble_and_one_scale_for_32():
    packed = torch.zeros(1, 32, dtype=torch.uint8)
    packed[0, 0], packed[0, 16] = 0xA7, 0x0F  # inputs 0 and 1: 6 and -1; input 32: -6
    values = dequantized(packed, torch.tensor([[128, 125]], dtype=torch.uint8))[0]
    assert values[[0, 1, 2, 32, 33]].tolist() == [12.0, -2.0, 0.0, -1.5, 0.0]


@pytest.mark.parametrize("name", ["K3-tiny", "Kimi-Linear-tiny"])
def test_a_longer_text_does_not_change_what_came_before(name):
    config = KimiK3Config.from_name(name)
    network = ReferenceNetwork(config.to_dict(), random_checkpoint(config))
    ids = torch.arange(12) * 37 % 256
    long, short = network(ids), network(ids[:7])
    assert relative(short.logits, long.logits[:7]) < 1e-12
    assert relative(short.latents[config.mla_layers[0]], long.latents[config.mla_layers[0]][:7]) < 1e-12
