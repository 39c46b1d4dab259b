"""Checkpoints: every tensor lands in its place, none is lost or held twice, and what does not fit is named."""

from __future__ import annotations

import contextlib
import json
import shutil
import weakref
from dataclasses import replace

import pytest
import torch
from model_examples import random_checkpoint, write_checkpoint
from safetensors.torch import load_file, save_file

from k3dsl.errors import ArgumentError, CheckpointError
from k3dsl.model import checkpoint_files
from k3dsl.model.checkpoint import CheckpointMismatch, config_of, empty_state, load_checkpoint, save_checkpoint
from k3dsl.model.config import KimiK3Config
from k3dsl.model.shapes import layer_parameters, parameters

K3, LINEAR = replace(KimiK3Config.k3_tiny(), num_experts=4), KimiK3Config.kimi_linear_tiny()
CONFIGS = {"k3": K3, "k3-mxfp4": K3.with_mxfp4_experts(), "kimi-linear": LINEAR}
P = "language_model."


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return random_checkpoint(K3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tensors):
    return write_checkpoint(tmp_path_factory.mktemp("k3") / "tiny", K3, tensors)


@pytest.fixture(scope="module")
def linear(tmp_path_factory) -> dict[str, torch.Tensor]:
    """The state of a small Kimi Linear: 3 MB, 187 tensors."""
    place = write_checkpoint(tmp_path_factory.mktemp("linear"), LINEAR, random_checkpoint(LINEAR))
    return loaded(place, LINEAR)


def loaded(folder, config: KimiK3Config = K3, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The state after loading; what loading does not write stays NaN, or 255 in bytes."""
    state = empty_state(config, dtype)
    for one in state.values():
        one.fill_(255 if one.dtype == torch.uint8 else torch.nan)
    load_checkpoint(folder, config, state)
    return state


def saved(folder) -> dict[str, torch.Tensor]:
    return {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()}


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(
        actual[n].dtype == x.dtype and actual[n].shape == x.shape and torch.equal(actual[n], x)
        for n, x in expected.items()
    )


def refused(folder, config: KimiK3Config = K3) -> CheckpointMismatch:
    with pytest.raises(CheckpointMismatch) as error:
        loaded(folder, config)
    return error.value


# ---- places ------------------------------------------------------------------------------------------------------------


def test_names_and_shapes_of_k3_are_the_published_ones():
    """The whole list for one layer of each kind, as the published checkpoint has it."""
    config = KimiK3Config.k3()
    counts = {one.name: len(one.sources) for one in parameters(config)}
    assert sum(n for name, n in counts.items() if ".experts." not in name) == 2460
    assert sum(n for name, n in counts.items() if ".experts." in name) == 2 * 247_296
    layers = [one for i in (0, 92) for one in layer_parameters(config, i)]
    stored = {source.name: (source.shape, one.kind) for one in layers for source in one.sources}
    kda = {
        name.removeprefix("model.layers.0.self_attn."): x for name, x in stored.items() if ".layers.0.self_attn" in name
    }
    weight = {
        **{f"{n}_proj.weight": (12288, 7168) for n in "qkvg"}, "f_a_proj.weight": (128, 7168),
        "f_b_proj.weight": (12288, 128), "b_proj.weight": (96, 7168), "o_proj.weight": (7168, 12288),
    }  # fmt: skip
    float32 = {
        **{f"{n}_conv1d.weight": (12288, 1, 4) for n in "qkv"}, "A_log": (128,), "dt_bias": (12288,), "o_norm.weight": (128,)
    }  # fmt: skip
    assert kda == {n: (x, "weight") for n, x in weight.items()} | {n: (x, "float32") for n, x in float32.items()}
    mla = {
        name.removeprefix("model.layers.92.self_attn."): x[0] for name, x in stored.items() if ".92.self_attn." in name
    }
    assert mla == {
        "q_a_proj.weight": (1536, 7168), "q_a_layernorm.weight": (1536,), "q_b_proj.weight": (18432, 1536),
        "kv_a_proj_with_mqa.weight": (576, 7168), "kv_a_layernorm.weight": (512,), "kv_b_proj.weight": (24576, 512),
        "g_proj.weight": (12288, 7168), "o_proj.weight": (7168, 12288),
    }  # fmt: skip
    prefix = "model.layers.92.block_sparse_moe."
    moe = {name.removeprefix(prefix): x[0] for name, x in stored.items() if name.startswith(prefix)}
    last = {name: x for name, x in moe.items() if name.startswith("experts.895.")}
    assert last == {
        "experts.895.w1.weight_packed": (3072, 1792), "experts.895.w1.weight_scale": (3072, 112),
        "experts.895.w3.weight_packed": (3072, 1792), "experts.895.w3.weight_scale": (3072, 112),
        "experts.895.w2.weight_packed": (3584, 1536), "experts.895.w2.weight_scale": (3584, 96),
    }  # fmt: skip
    assert {name: x for name, x in moe.items() if not name.startswith("experts.")} == {
        "gate.weight": (896, 7168), "gate.e_score_correction_bias": (896,), "routed_expert_norm.weight": (3584,),
        "routed_expert_down_proj.weight": (3584, 7168), "routed_expert_up_proj.weight": (7168, 3584),
        "shared_experts.gate_proj.weight": (6144, 7168), "shared_experts.up_proj.weight": (6144, 7168),
        "shared_experts.down_proj.weight": (7168, 6144),
    }  # fmt: skip


def test_stacked_projections_are_in_the_order_that_their_names_say(folder, tensors):
    state = loaded(folder)
    attention, moe = "model.layers.1.self_attn.", "model.layers.1.block_sparse_moe."
    expected = torch.cat([tensors[f"{P}{attention}{n}_proj.weight"] for n in "qkv"])
    assert torch.equal(state[f"{attention}qkv_proj.weight"], expected)
    expected = torch.cat([tensors[f"{P}{attention}{n}_conv1d.weight"] for n in "qkv"])[:, 0]
    assert torch.equal(state[f"{attention}qkv_conv1d.weight"], expected)
    for e in range(4):
        w1, w2, w3 = (tensors[f"{P}{moe}experts.{e}.{n}.weight"] for n in ("w1", "w2", "w3"))
        assert torch.equal(state[f"{moe}experts.w13"][e], torch.cat([w1, w3])), "gate first"
        assert torch.equal(state[f"{moe}experts.w2"][e], w2)
    gate, up = (tensors[f"{P}model.layers.0.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    assert torch.equal(state["model.layers.0.mlp.gate_up_proj.weight"], torch.cat([gate, up]))


def test_packed_experts_stay_packed(tmp_path):
    config = CONFIGS["k3-mxfp4"]
    tensors = random_checkpoint(config)
    state = loaded(write_checkpoint(tmp_path, config, tensors), config)
    moe = "model.layers.8.block_sparse_moe.experts."
    for form in ("packed", "scale"):
        w1, w2, w3 = (tensors[f"{P}{moe}3.{n}.weight_{form}"] for n in ("w1", "w2", "w3"))
        assert torch.equal(state[f"{moe}w13_{form}"][3], torch.cat([w1, w3]))
        assert torch.equal(state[f"{moe}w2_{form}"][3], w2)
        assert state[f"{moe}w2_{form}"].dtype == torch.uint8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parameters_that_are_float32_stay_so_and_exact(folder, tensors, dtype):
    state = loaded(folder, dtype=dtype)
    exact = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
    assert all(x.dtype == (torch.float32 if name.endswith(exact) else dtype) for name, x in state.items())
    name = "model.layers.0.self_attn.dt_bias"
    assert torch.equal(state[name], tensors[P + name])
    assert not torch.equal(state[name], state[name].bfloat16().float())


def test_a_log_is_cut_to_its_heads(folder, tensors):
    name = "model.layers.0.self_attn.A_log"
    assert tensors[P + name].shape == (128,)
    assert torch.equal(loaded(folder)[name], tensors[P + name][:2])


# ---- other spellings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling",
    [
        lambda name: name.removeprefix(P),
        lambda name: name.replace("_res_proj.weight", "_res.proj_weight").replace(
            "_res_norm.weight", "_res.norm_weight"
        ),
    ],
    ids=["without the prefix", "older names of AttnRes"],
)
def test_another_spelling_is_read_too(tmp_path, folder, tensors, spelling):
    other = {spelling(name): x for name, x in tensors.items()}
    assert other.keys() != tensors.keys()
    assert same(loaded(write_checkpoint(tmp_path, K3, other)), loaded(folder))


@pytest.mark.parametrize("shape", [(2,), (1, 1, 2, 1), (128,)])
def test_a_log_may_have_any_of_its_shapes(tmp_path, folder, tensors, shape):
    other = dict(tensors)
    for i in K3.kda_layers:
        padded = torch.zeros(shape)
        padded.view(-1)[:2] = tensors[f"{P}model.layers.{i}.self_attn.A_log"][:2]
        other[f"{P}model.layers.{i}.self_attn.A_log"] = padded
    assert same(loaded(write_checkpoint(tmp_path, K3, other)), loaded(folder))


def test_the_vision_tower_is_skipped(tmp_path, folder, tensors):
    vision = {"vision_tower.encoder.0.weight": torch.zeros(3), "mm_projector.linear.weight": torch.zeros(2, 2)}
    assert same(loaded(write_checkpoint(tmp_path, K3, tensors | vision)), loaded(folder))


def test_a_file_of_its_own_will_do(folder):
    assert same(loaded(folder / "model.safetensors"), loaded(folder))
    assert config_of(folder / "model.safetensors") == config_of(folder) == K3


# ---- saving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shards", [1, 3])
def test_saving_gives_back_what_was_loaded(tmp_path, name, shards):
    config = CONFIGS[name]
    tensors = random_checkpoint(config, seed=3)
    state = loaded(write_checkpoint(tmp_path / "in", config, tensors, shards), config)
    save_checkpoint(tmp_path / "out", config, state, "1MB")
    assert same(saved(tmp_path / "out"), tensors)
    assert config_of(tmp_path / "out") == config
    assert same(loaded(tmp_path / "out", config), state)


def test_shards_have_the_sizes_and_the_index_that_others_expect(tmp_path, folder, tensors):
    save_checkpoint(tmp_path / "out", K3, loaded(folder), 500_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [one.name for one in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: one.name for one in files for name in load_file(one)}
    total = sum(x.numel() * x.element_size() for x in tensors.values())
    assert index["metadata"]["total_size"] == total
    assert all(sum(x.numel() * x.element_size() for x in load_file(one).values()) <= 500_000 for one in files)
    assert len(files) < 2 * total / 500_000 + 1


def test_config_json_says_the_dtype_that_was_saved(tmp_path, folder):
    save_checkpoint(tmp_path / "out", K3, loaded(folder, dtype=torch.float32))
    assert config_of(tmp_path / "out") == replace(K3, dtype="float32")
    with pytest.raises(ArgumentError, match="its weights are float64"):
        save_checkpoint(tmp_path / "no", K3, empty_state(K3, torch.float64))


def test_a_router_in_float32_is_saved_in_the_networks_dtype_only_if_that_loses_nothing(tmp_path, folder):
    state = loaded(folder)
    exact, trained = "model.layers.1.block_sparse_moe.gate.weight", "model.layers.2.block_sparse_moe.gate.weight"
    state |= {exact: state[exact].float(), trained: state[trained].float() + 1e-6}
    save_checkpoint(tmp_path / "out", K3, state)
    out = saved(tmp_path / "out")
    assert out[P + exact].dtype == torch.bfloat16
    assert out[P + trained].dtype == torch.float32
    assert torch.equal(out[P + trained], state[trained])


@pytest.mark.parametrize(("before", "after"), [(None, "1MB"), ("1MB", None), ("1MB", "2MB"), ("2MB", "1MB")])
def test_saving_over_a_checkpoint_leaves_the_new_one_alone(tmp_path, linear, before, after):
    save_checkpoint(tmp_path, LINEAR, {name: x + 1 for name, x in linear.items()}, before or "5GB")
    (tmp_path / "tokenizer.json").write_text("{}")
    save_checkpoint(tmp_path, LINEAR, linear, after or "5GB")
    assert same(loaded(tmp_path, LINEAR), linear)
    assert (tmp_path / "model.safetensors").exists() == (after is None)
    assert (tmp_path / "model.safetensors.index.json").exists() == (after is not None)
    assert (tmp_path / "tokenizer.json").exists()
    assert sum(len(load_file(file)) for file in tmp_path.glob("*.safetensors")) == 187


def test_a_save_that_fails_leaves_the_old_checkpoint_and_nothing_beside_it(tmp_path, linear, monkeypatch):
    target = tmp_path / "mine"
    save_checkpoint(target, LINEAR, linear)
    calls = []

    def full(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise OSError("No space left on device")
        return save_file(*args, **kwargs)

    monkeypatch.setattr(checkpoint_files, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(target, LINEAR, {name: torch.zeros_like(x) for name, x in linear.items()}, "1MB")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["mine"]
    assert same(loaded(target, LINEAR), linear)


@pytest.mark.parametrize("moves", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize(("before", "after"), [(None, "1MB"), ("1MB", None), ("1MB", "2MB")])
def test_a_save_that_is_killed_leaves_the_old_one_or_the_new_one_or_none(
    tmp_path, linear, monkeypatch, before, after, moves
):
    save_checkpoint(tmp_path, LINEAR, linear, before or "5GB")
    replace_file, moved = checkpoint_files.os.replace, []

    def killed(source, target):
        if len(moved) == moves:
            raise KeyboardInterrupt
        moved.append(target)
        replace_file(source, target)

    new = {name: torch.zeros_like(x) for name, x in linear.items()}
    monkeypatch.setattr(checkpoint_files.os, "replace", killed)
    with contextlib.suppress(KeyboardInterrupt):
        save_checkpoint(tmp_path, LINEAR, new, after or "5GB")
    monkeypatch.undo()
    try:
        state = loaded(tmp_path, LINEAR)
    except CheckpointError as error:
        assert "no model.safetensors.index.json" in str(error)  # noqa: PT017
    else:
        assert same(state, linear) or same(state, new)


@pytest.mark.parametrize("size", ["5 apples", "GB", 0, "0GB", -1])
def test_a_size_that_is_none_is_refused(tmp_path, size):
    with pytest.raises(ArgumentError, match="max_shard_size"):
        save_checkpoint(tmp_path, K3, empty_state(K3), size)


@pytest.mark.parametrize(("text", "number"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("7", 7), (12, 12)])
def test_sizes_have_units(text, number):
    assert checkpoint_files.size_in_bytes(text) == number


# ---- memory ------------------------------------------------------------------------------------------------------------


def test_loading_holds_one_tensor_of_the_checkpoint_at_a_time(folder, tensors, monkeypatch):
    """Counts the bytes of all tensors that reading has given out and that are still alive."""
    held, most, total = 0, 0, 0
    opened = checkpoint_files.opened

    class Counting:
        def __init__(self, file):
            self.file = opened(file)

        def __enter__(self):
            self.handle = self.file.__enter__()
            return self

        def __exit__(self, *args):
            return self.file.__exit__(*args)

        def __getattr__(self, name):
            return getattr(self.handle, name)

        def get_tensor(self, name):
            nonlocal held, most, total
            tensor = self.handle.get_tensor(name)
            size = tensor.numel() * tensor.element_size()
            held, total = held + size, total + size
            most = max(most, held)
            weakref.finalize(tensor, release, size)
            return tensor

    def release(size):
        nonlocal held
        held -= size

    monkeypatch.setattr(checkpoint_files, "opened", Counting)
    loaded(folder)
    sizes = sorted(x.numel() * x.element_size() for x in tensors.values())
    assert total >= sum(sizes)
    assert held == 0
    assert most <= sizes[-1] + sizes[-2], "the one that is copied, and the next one that is read"


def test_saving_copies_one_shard_at_a_time(tmp_path, linear, monkeypatch):
    sizes = []

    def write(tensors, *args, **kwargs):
        alive = [x for x in (one() for one in given) if x is not None]
        sizes.append(sum(x.numel() * x.element_size() for x in (*alive, *tensors.values())))
        given.extend(weakref.ref(x) for x in tensors.values())
        save_file(tensors, *args, **kwargs)

    given: list[weakref.ref] = []
    monkeypatch.setattr(checkpoint_files, "save_file", write)
    save_checkpoint(tmp_path / "out", LINEAR, linear, "500KB")
    assert len(sizes) > 5
    assert max(sizes) <= 500_000


# ---- what does not fit -------------------------------------------------------------------------------------------------


def test_all_that_is_missing_unused_or_wrong_is_named_in_one_error(tmp_path, tensors):
    other = dict(tensors)
    del other[f"{P}model.layers.3.block_sparse_moe.routed_expert_norm.weight"]
    del other[f"{P}model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    other[f"{P}model.layers.1.extra.weight"] = torch.zeros(2)
    other[f"{P}model.norm.weight"] = torch.zeros(64)
    other[f"{P}lm_head.weight"] = torch.zeros(272, 128, dtype=torch.int64)
    other[f"{P}model.layers.0.self_attn.A_log"] = torch.ones(128)
    other["model.embed_tokens.weight"] = torch.zeros(272, 128)
    error = refused(write_checkpoint(tmp_path, K3, other, shards=2))
    assert error.mismatch.missing == [
        "model.layers.1.block_sparse_moe.experts.3.w2.weight",
        "model.layers.3.block_sparse_moe.routed_expert_norm.weight",
    ]
    assert error.mismatch.unused == ["model.layers.1.extra.weight"]
    assert error.mismatch.repeated == ["model.embed_tokens.weight"]
    assert sorted(error.mismatch.wrong) == [
        "lm_head.weight is I64, needs BF16 or F16 or F32 or F64",
        "model.layers.0.self_attn.A_log has 128 values of which only the first 2 may differ from zero",
        "model.norm.weight has shape [64], needs [128]",
    ]
    text = str(error)
    assert all(name in text for name in (*error.mismatch.missing, *error.mismatch.unused, *error.mismatch.wrong))


def test_nothing_is_written_into_the_network_unless_all_fits(tmp_path, tensors):
    other = dict(tensors)
    other[f"{P}lm_head.weight"] = torch.zeros(3, 3)
    state = empty_state(K3)
    for one in state.values():
        one.fill_(7)
    with pytest.raises(CheckpointMismatch):
        load_checkpoint(write_checkpoint(tmp_path, K3, other), K3, state)
    assert all(bool((one == 7).all()) for one in state.values())


def test_a_swapped_shape_is_no_match(tmp_path, tensors):
    name = "model.layers.1.self_attn.f_a_proj.weight"
    other = tensors | {P + name: tensors[P + name].T.contiguous()}
    assert refused(write_checkpoint(tmp_path, K3, other)).mismatch.wrong == [
        f"{name} has shape [128, 64], needs [64, 128]"
    ]


def test_packed_and_plain_experts_are_told_apart(tmp_path, folder):
    packed = CONFIGS["k3-mxfp4"]
    other = write_checkpoint(tmp_path, packed, random_checkpoint(packed))
    assert "with_mxfp4_experts" in str(refused(other, K3).fix)
    assert "drop quantization_config" in str(refused(folder, packed).fix)


def test_k3_is_not_loaded_as_kimi_linear(folder):
    error = refused(folder, KimiK3Config.kimi_linear_tiny())
    assert "model.output_attn_res_proj.weight" in error.mismatch.unused
    assert "config.json that belongs to the checkpoint" in str(error.fix)


@pytest.mark.parametrize("keep", [5, 100, -1])
def test_a_file_that_was_cut_short_is_named(tmp_path, folder, keep):
    copy = shutil.copytree(folder, tmp_path / "copy")
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is no safetensors file, or cut short") as error:
        loaded(copy)
    assert "again" in str(error.value.fix)


def test_a_git_lfs_pointer_is_told_from_weights(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        loaded(file)


def test_a_lost_shard_is_named(tmp_path, tensors):
    place = write_checkpoint(tmp_path, K3, tensors, shards=3)
    (place / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 shards are missing: model-00002-of-00003\.safetensors"):
        loaded(place)


def test_an_index_that_promises_more_than_a_shard_has_is_named(tmp_path, tensors):
    place = write_checkpoint(tmp_path, K3, tensors, shards=2)
    path = place / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lost.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks tensors that .* places there: lost\.weight"):
        loaded(place)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ("{", "is no index"),
        ("{}", "is no index"),
        ('{"weight_map": {"a": 1}}', "does not give a file"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "outside its folder"),
    ],
)
def test_an_index_that_is_none_is_named(tmp_path, index, text):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=text):
        loaded(tmp_path)


def test_a_place_without_weights_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="has no safetensors file"):
        loaded(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such file or folder"):
        loaded(tmp_path / "none")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.pop("lm_head.weight"), "lacks lm_head.weight"),
        (lambda state: state.update(more=torch.zeros(1)), "has more, which is no parameter"),
        (lambda state: state.update({"model.norm.weight": torch.zeros(2)}), r"model.norm.weight has shape \[2\]"),
        (
            lambda state: state.update({"model.layers.0.self_attn.A_log": torch.zeros(2).bfloat16()}),
            "A_log is torch.bfloat16, needs torch.float32",
        ),
        (lambda state: state.update({"model.norm.weight": torch.zeros(128, device="meta")}), "has no memory yet"),
    ],
)
def test_a_state_that_is_not_of_the_config_is_refused(folder, change, text):
    state = empty_state(K3)
    change(state)
    with pytest.raises(ArgumentError, match=text):
        load_checkpoint(folder, K3, state)


def test_tied_embeddings_have_no_lm_head(tmp_path, tensors):
    config = replace(K3, tie_word_embeddings=True)
    other = {name: x for name, x in tensors.items() if "lm_head" not in name}
    state = loaded(write_checkpoint(tmp_path, config, other), config)
    assert "lm_head.weight" not in state
    assert torch.equal(state["model.embed_tokens.weight"], tensors[f"{P}model.embed_tokens.weight"])
