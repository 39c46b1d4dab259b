"""Parameters and bytes, against the figures that were audited on the published checkpoints."""

from __future__ import annotations

import json

import pytest
import torch
from model_examples import random_checkpoint, write_checkpoint
from safetensors import safe_open
from typer.testing import CliRunner

from k3dsl.cli.main import app
from k3dsl.errors import UnknownNameError
from k3dsl.model.config import KimiK3Config
from k3dsl.model.info import describe, load_config


@pytest.fixture(scope="module")
def k3():
    return describe(KimiK3Config.k3(), "K3")


def test_k3_has_the_audited_number_of_parameters(k3):
    assert k3.total == 2_779_484_478_208
    assert k3.parameters["routed_experts"] == 92 * 896 * 3 * 3584 * 3072 == 2_722_740_830_208
    assert k3.total - k3.parameters["routed_experts"] == 56_743_648_000
    assert sum(k3.parameters.values()) == k3.total


def test_k3_activates_104_billion_parameters_for_a_token(k3):
    """104,185,593,600 in projections, experts and lm_head; and the vectors of all norms and AttnRes sites."""
    norms = (93 * 2 + 1) * 7168
    attn_res = (93 * 2 + 1) * 2 * 7168
    assert k3.active == 104_185_593_600 + norms + attn_res


def test_k3_keeps_what_was_published_for_a_token_and_a_request(k3):
    assert k3.cache.per_token == 24 * 576 * 2 == 27_648
    assert k3.cache.kda_state == 69 * 96 * 128 * 128 * 4 == 434_110_464
    assert k3.cache.conv_state == 69 * 3 * 3 * 12288 * 2 == 15_261_696
    assert k3.cache.attn_res_bank_per_token == 8 * 7168 * 2 == 114_688
    assert k3.cache.at(1_000_000) == 27_648_000_000 + 434_110_464 + 15_261_696
    assert (k3.cache.break_even_tokens - 1) * 27_648 < 434_110_464 + 15_261_696 <= k3.cache.break_even_tokens * 27_648


def test_k3_weighs_1_56_terabytes_as_published_and_5_56_in_bf16(k3):
    float32 = 69 * (3 * 12288 * 4 + 128 + 12288 + 128) + 92 * 896  # convolution, A_log, dt_bias, o_norm; router bias
    others = 2 * (56_743_648_000 - float32) + 4 * float32
    assert k3.mxfp4_weight_bytes == others + 2_722_740_830_208 * 17 // 32
    assert k3.weight_bytes == k3.mxfp4_weight_bytes == pytest.approx(1.56e12, rel=1e-3)
    assert k3.bf16_weight_bytes == others + 2 * 2_722_740_830_208


def test_kimi_linear_has_49_12_billion_parameters_and_activates_3_1():
    info = describe(KimiK3Config.kimi_linear_48b())
    assert round(info.total / 1e9, 2) == 49.12
    assert round(info.active / 1e9, 1) == 3.1
    assert round((info.active + info.parameters["embedding"]) / 1e9, 2) == 3.48
    assert info.cache.per_token == 7 * 576 * 2


def test_the_slice_of_k3_fits_one_gpu_of_80_gigabytes():
    info = describe(KimiK3Config.k3_slice())
    kda = 7168 * (5 * 12288 + 128 + 96) + 128 * 12288 + 3 * 12288 * 4 + 128 + 12288 + 128  # A_log is stored as 128
    mla = 7168 * (1536 + 576 + 2 * 12288) + 1536 * (1 + 18432) + 512 * (1 + 96 * 256)
    moe = 112 * 7169 + 112 * 3 * 3584 * 3072 + 3 * 7168 * 6144 + 2 * 7168 * 3584 + 3584
    vectors = (17 + 2 * 17) * 7168  # norms; queries and key norms of AttnRes
    total = 6 * kda + 2 * mla + 7 * moe + 3 * 7168 * 33792 + 2 * 163840 * 7168 + vectors
    assert info.total == total == 33_388_457_744
    assert info.bf16_weight_bytes == pytest.approx(2 * total, rel=1e-4)
    assert info.mxfp4_weight_bytes == info.bf16_weight_bytes - 7 * 112 * 3 * 3584 * 3072 * (64 - 17) // 32
    assert (info.cache.per_token, info.cache.kda_state) == (2 * 576 * 2, 6 * 96 * 128 * 128 * 4)


@pytest.mark.parametrize("packed", [False, True])
def test_weight_bytes_are_those_of_the_files(tmp_path, packed):
    config = KimiK3Config.k3_tiny().with_mxfp4_experts() if packed else KimiK3Config.k3_tiny()
    write_checkpoint(tmp_path, config, random_checkpoint(config))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    info = describe(config)
    assert info.weight_bytes == sum(one.numel() * one.element_size() for one in tensors)
    codes = sum(one.numel() * (2 if one.shape[1] in (48, 32) else 0) for one in tensors if one.dtype == torch.uint8)
    floats = sum(one.numel() for one in tensors if one.dtype != torch.uint8)
    assert info.total == floats + codes


def test_a_folder_or_a_name_will_do(tmp_path):
    folder = tmp_path / "mine"
    KimiK3Config.kimi_linear_tiny().save_pretrained(folder)
    assert load_config(folder) == ("mine", KimiK3Config.kimi_linear_tiny())
    assert load_config(folder / "config.json") == ("mine", KimiK3Config.kimi_linear_tiny())
    assert load_config("k3_tiny") == ("K3-tiny", KimiK3Config.k3_tiny())
    with pytest.raises(UnknownNameError, match="neither a configuration nor a folder"):
        load_config(str(tmp_path / "none"))


# ---- the command -------------------------------------------------------------------------------------------------------


def run(*args: str, status: int = 0):
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == status, result.output
    return result


def test_the_command_prints_the_figures_that_people_quote():
    text = run("model", "info", "K3").stdout
    for figure in (
        "2,779,484,478,208",
        "2.779 T",
        "104.2 B",
        "27,648",
        "434,110,464",
        "15,261,696",
        "1.56 TB",
        "91-92",
    ):
        assert figure in text
    assert "AttnRes snapshots at layers 0, 12, 24, 36, 48, 60, 72, 84" in text


def test_the_command_prints_json_alone():
    data = json.loads(run("model", "info", "Kimi-Linear-48B-A3B", "--json").stdout)
    assert data["total"] == 49_122_681_728
    assert data["layer_types"].count("mla") == 7
    assert data["cache"]["kda_state"] == 20 * 32 * 128 * 128 * 4


def test_the_command_says_what_it_cannot_find(tmp_path):
    assert "known names: K3, K3-tiny" in run("model", "info", "K2", status=2).stderr
    assert "config.json: No such file" in run("model", "info", str(tmp_path), status=2).stderr


def test_the_group_lists_its_commands():
    assert "info" in run("model").stdout
