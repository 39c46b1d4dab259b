"""config.json: what the published networks are, the spellings that are read, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from k3dsl.errors import ArgumentError, UnknownNameError
from k3dsl.model.config import KimiK3Config

NAMES = ("K3", "K3-tiny", "K3-slice", "Kimi-Linear-48B-A3B", "Kimi-Linear-tiny")


def content(name: str = "Kimi-Linear-tiny") -> dict:
    return KimiK3Config.from_name(name).to_dict()


def changed(field: str, value: object, name: str = "Kimi-Linear-tiny") -> dict:
    """A config.json with one field replaced; 'linear.x' is a field of linear_attn_config, value ... drops it."""
    data = content(name)
    place = data.get("text_config", data)
    if field.startswith("linear."):
        place, field = place["linear_attn_config"], field.removeprefix("linear.")
    place[field] = value
    if value is ...:
        del place[field]
    return data


# ---- the published networks --------------------------------------------------------------------------------------------


def test_k3_has_an_mla_layer_after_every_three_kda_layers_and_one_more_at_the_end():
    config = KimiK3Config.k3()
    assert config.num_hidden_layers == 93
    assert config.mla_layers == (*range(3, 92, 4), 92)
    assert (len(config.kda_layers), len(config.mla_layers)) == (69, 24)
    assert config.layer_types[90:] == ("kda", "mla", "mla")


def test_k3_takes_snapshots_every_twelve_layers_and_its_last_block_is_short():
    config = KimiK3Config.k3()
    assert config.snapshot_layers == (0, 12, 24, 36, 48, 60, 72, 84)
    rows = [config.bank_rows(i) for i in range(94)]
    assert rows == [-(-i // 12) for i in range(94)]
    assert rows[93] == 8


def test_k3_has_the_dims_that_were_published():
    config = KimiK3Config.k3()
    assert (config.hidden_size, config.vocab_size, config.intermediate_size) == (7168, 163840, 33792)
    assert (config.kda_num_heads, config.kda_head_dim, config.kda_width, config.short_conv_kernel_size) == (
        96,
        128,
        12288,
        4,
    )
    assert (config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank) == (96, 1536, 512)
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (128, 64, 128)
    assert (config.qk_head_dim, config.mla_cache_width) == (192, 576)
    assert (config.num_experts, config.num_experts_per_token, config.moe_intermediate_size) == (896, 16, 3072)
    assert (config.expert_hidden_size, config.shared_intermediate_size) == (3584, 6144)
    assert (config.activation_situ_beta, config.activation_situ_linear_beta) == (4.0, 25.0)
    assert (config.gate_lower_bound, config.rms_norm_eps, config.mla_norm_eps) == (-5.0, 1e-5, 1e-6)
    assert [config.is_moe(i) for i in (0, 1, 92)] == [False, True, True]


def test_the_slice_is_k3s_first_eight_layers_with_an_eighth_of_the_experts():
    whole, part = KimiK3Config.k3(), KimiK3Config.k3_slice()
    assert part.layer_types == whole.layer_types[:8] == ("kda", "kda", "kda", "mla") * 2
    assert part.moe_layers == tuple(range(1, 8))
    assert (part.num_experts, part.num_experts_per_token) == (896 // 8, 16)
    linear = replace(whole.linear_attn_config, kda_layers=(1, 2, 3, 5, 6, 7), full_attn_layers=(4, 8))
    cut = replace(whole, num_hidden_layers=8, num_experts=112, linear_attn_config=linear, quantization_config=None)
    assert part == cut, "nothing else differs"


def test_kimi_linear_has_its_own():
    config = KimiK3Config.kimi_linear_48b()
    assert config.mla_layers == (3, 7, 11, 15, 19, 23, 26)
    assert len(config.kda_layers) == 20
    assert (config.kda_width, config.num_experts, config.num_experts_per_token) == (4096, 256, 8)
    assert (config.expert_hidden_size, config.routed_scaling_factor, config.hidden_act) == (2304, 2.446, "silu")
    assert config.q_lora_rank is None
    assert config.gate_lower_bound is None
    assert not config.use_full_rank_gate
    assert (config.eos_token_ids, config.snapshot_layers) == ((163586,), ())


@pytest.mark.parametrize(("large", "small"), [("K3", "K3-tiny"), ("Kimi-Linear-48B-A3B", "Kimi-Linear-tiny")])
def test_a_tiny_network_has_all_that_the_large_one_has(large, small):
    config, tiny = KimiK3Config.from_name(large), KimiK3Config.from_name(small)
    assert set(tiny.features) == set(config.features) - {"mxfp4_experts"}
    assert tiny.layer_types[-2:] == ("mla", "mla")
    assert not tiny.is_moe(0)
    assert tiny.num_hidden_layers % (tiny.attn_res_block_size or 1) == (1 if config.is_k3 else 0), "a short last block"
    assert tiny.kda_head_dim in (64, 128), "what the KDA kernels take"
    assert set(tiny.with_mxfp4_experts().features) == set(tiny.features) | {"mxfp4_experts"}


def test_k3_is_told_from_kimi_linear_by_features_for_both_have_one_model_type():
    k3, linear = content("K3")["text_config"], content("Kimi-Linear-48B-A3B")
    assert k3["model_type"] == linear["model_type"] == "kimi_linear"
    assert KimiK3Config.from_dict(k3).is_k3
    assert not KimiK3Config.from_dict(linear).is_k3


# ---- reading and writing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_config_survives_a_folder(tmp_path, name):
    config = KimiK3Config.from_name(name)
    config.save_pretrained(tmp_path / "new" / "folder")
    assert KimiK3Config.from_pretrained(tmp_path / "new" / "folder") == config


@pytest.mark.parametrize("spelling", ["k3_tiny", "K3-TINY", "KimiK3Tiny", "Kimi-K3-Tiny"])
def test_names_do_not_mind_case_and_dashes(spelling):
    assert KimiK3Config.from_name(spelling) == KimiK3Config.k3_tiny()


def test_fields_that_are_not_known_are_kept():
    data = changed("some_new_field", {"deep": [1, 2]}, "K3-tiny")
    data["text_config"]["linear_attn_config"]["another"] = 3
    data["vision_config"] = {"patch_size": 14}
    again = KimiK3Config.from_dict(data).to_dict()
    assert again["text_config"]["some_new_field"] == {"deep": [1, 2]}
    assert again["text_config"]["linear_attn_config"]["another"] == 3
    assert again["vision_config"] == {"patch_size": 14}


def test_without_a_lower_bound_the_gate_is_softplus():
    assert KimiK3Config.from_dict(changed("linear.gate_lower_bound", ..., "K3-tiny")).gate_lower_bound is None


def test_quantization_config_may_stand_beside_text_config():
    data = content("K3")
    data["quantization_config"] = data["text_config"].pop("quantization_config")
    assert KimiK3Config.from_dict(data).experts_mxfp4


def test_a_nested_config_takes_tokens_from_outside_where_the_text_has_none():
    data = content("K3")
    data["eos_token_id"] = [5, 7]
    config = KimiK3Config.from_dict(data)
    assert config.eos_token_ids == (5, 7)
    assert config.pad_token_id == 0
    assert config.bos_token_id is None


def test_the_flat_fields_that_transformers_writes_are_read():
    data = content()
    linear = data.pop("linear_attn_config")
    types = ["linear_attention" if i in linear["kda_layers"] else "full_attention" for i in range(1, 6)]
    data |= {"layer_types": types, "linear_num_heads": 2, "linear_head_dim": 64, "linear_conv_kernel_dim": 4}
    data["mlp_layer_types"] = ["dense"] + ["sparse"] * 4
    for ours, theirs in {"num_experts": "num_local_experts", "num_shared_experts": "n_shared_experts"}.items():
        data[theirs] = data.pop(ours)
    del data["first_k_dense_replace"]
    config = KimiK3Config.from_dict(data)
    assert replace(config, extra={}) == replace(KimiK3Config.kimi_linear_tiny(), extra={})


# ---- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("hidden_size", ..., "hidden_size: is missing"),
        ("rms_norm_eps", ..., "rms_norm_eps: is missing"),
        ("first_k_dense_replace", ..., "first_k_dense_replace: is missing"),
        ("linear.num_heads", ..., "linear_attn_config.num_heads: is missing"),
        ("linear_attn_config", ..., "linear_attn_config: is missing"),
        ("linear_attn_config", [1], "linear_attn_config: is a list"),
        ("hidden_size", "128", "hidden_size: is '128', needs a whole number"),
        ("hidden_size", 128.5, "hidden_size: is 128.5, needs a whole number"),
        ("hidden_size", 0, "hidden_size: is 0, needs to be positive"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps: is nan, needs a number"),
        ("moe_renormalize", 1, "moe_renormalize: is 1, needs true or false"),
        ("hidden_act", "gelu", "hidden_act: is 'gelu'"),
        ("hidden_act", "situ", "activation_situ_beta: is missing"),
        ("activation_situ_beta", 4.0, "activation_situ_beta: is 4.0, but hidden_act is 'silu'"),
        ("linear.kda_layers", [0, 1, 2], "linear_attn_config.kda_layers: names layer 0; layers are counted from 1"),
        ("linear.kda_layers", [1, 2, 3, 4], "linear_attn_config.full_attn_layers: names layer 4, which"),
        ("linear.kda_layers", [1, 3], "linear_attn_config: neither kda_layers nor full_attn_layers names layer 2"),
        ("linear.full_attn_layers", [4, 6], "linear_attn_config.full_attn_layers: names layer 6"),
        ("linear.gate_lower_bound", 5.0, "linear_attn_config.gate_lower_bound: is 5.0, needs to be negative"),
        ("num_experts_per_token", 9, "num_experts_per_token: is 9, but num_experts is 8"),
        ("num_experts_per_token", ..., "num_experts_per_token: is missing"),
        ("num_experts", None, "num_experts: is missing, but num_experts_per_token is 2"),
        ("latent_moe_use_norm", True, "latent_moe_use_norm: is true, but there is no routed_expert_hidden_size"),
        ("num_expert_group", 4, "num_expert_group: is 4 with topk_group 1"),
        ("mla_use_nope", False, "mla_use_nope: is False"),
        ("moe_router_activation_func", "softmax", "moe_router_activation_func: is 'softmax'"),
        ("num_nextn_predict_layers", 1, "num_nextn_predict_layers: is 1"),
        ("num_key_value_heads", 1, "num_key_value_heads: is 1, but num_attention_heads is 2"),
        ("dtype", "int8", "dtype: is 'int8'"),
        ("eos_token_id", 272, "eos_token_id: is 272, but vocab_size is 272"),
        ("n_shared_experts", 2, "n_shared_experts: is 2, but num_shared_experts, the same field, is 1"),
        ("linear_head_dim", 128, "linear_head_dim: contradicts linear_attn_config.head_dim"),
        ("layer_types", ["full_attention"] * 5, "layer_types: contradicts linear_attn_config.kda_layers"),
        ("layer_types", ["mamba"] * 5, "layer_types: layer 0 is 'mamba'"),
        ("mlp_layer_types", ["sparse", "dense"], "mlp_layer_types: has a dense layer after a sparse one"),
    ],
)
def test_a_field_that_cannot_be_is_named(field, value, text):
    with pytest.raises(ArgumentError) as error:
        KimiK3Config.from_dict(changed(field, value))
    assert error.value.message.startswith(text)
    assert error.value.fix


def test_mxfp4_needs_widths_that_are_multiples_of_32():
    config = replace(KimiK3Config.k3_tiny(), moe_intermediate_size=48)
    with pytest.raises(ArgumentError, match="moe_intermediate_size: is 48, not a multiple of 32"):
        config.with_mxfp4_experts()


def test_a_name_that_does_not_exist_lists_those_that_do():
    with pytest.raises(
        UnknownNameError, match="known names: K3, K3-tiny, K3-slice, Kimi-Linear-48B-A3B, Kimi-Linear-tiny"
    ):
        KimiK3Config.from_name("K2")


@pytest.mark.parametrize(("text", "reason"), [("{", "is no JSON"), ("[1]", "holds a list"), (None, "No such file")])
def test_a_file_that_is_no_config_is_named(tmp_path, text, reason):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ArgumentError, match=reason) as error:
        KimiK3Config.from_pretrained(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_config_json_is_what_a_checkpoint_of_k3_has(tmp_path):
    KimiK3Config.k3().save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["model_type"] == "kimi_k3"
    assert data["architectures"] == ["KimiK3ForConditionalGeneration"]
    assert data["text_config"]["linear_attn_config"]["full_attn_layers"][-2:] == [92, 93]
    assert "mla_norm_eps" not in data["text_config"], "a setting of ours, written only where it was changed"
