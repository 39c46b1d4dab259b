"""What the model layer says of wrong arguments: which one, why, what to do; and that nothing was written before it said so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from k3dsl.errors import ArgumentError
from k3dsl.model import KimiK3ForCausalLM
from k3dsl.model.cache import Cache, KDASlots

IDS = torch.arange(1, 9)[None].repeat(2, 1)


@pytest.fixture(scope="module")
def model() -> KimiK3ForCausalLM:
    return KimiK3ForCausalLM.from_config("K3-tiny", dtype=torch.float32)


@pytest.fixture(scope="module")
def other() -> KimiK3ForCausalLM:
    return KimiK3ForCausalLM.from_config("Kimi-Linear-tiny", dtype=torch.float32)


Model = KimiK3ForCausalLM
WRONG: dict[str, tuple[Callable[[Model], Any], str, str]] = {
    "labels": (lambda m: m(IDS, labels=[[1]]), "labels: is a list", "a label a token"),
    "labels' numbers": (lambda m: m(IDS, labels=IDS + 10**6), "labels: has 1000001", "-100"),
    "mask": (lambda m: m(IDS, attention_mask=[1]), "attention_mask: is a list", "[B, T]"),
    "a mask without tokens": (lambda m: m(IDS, attention_mask=0 * IDS), "attention_mask: leaves no token", "bos"),
    "no tokens": (lambda m: m(IDS[:, :0]), "input_ids: leaves no token", "bos"),
    "offsets": (lambda m: m(IDS[:1], cu_seqlens=[0, 8]), "cu_seqlens: is a list", "as a tensor"),
    "ids": (lambda m: m(IDS - 5), "input_ids: has -4, and the vocabulary is 0 to", "tokenizer"),
    "kept": (lambda m: m(IDS, logits_to_keep=-1), "logits_to_keep: is -1", "0 for all"),
    "half a token": (lambda m: m(IDS, logits_to_keep=1.5), "logits_to_keep: is 1.5", "0 for all"),
    "more than there are": (
        lambda m: m(IDS[:, :1], past=m.new_cache(2), logits_to_keep=5), "logits_to_keep: is 5, but a sequence has 1 token",
        "the shortest",
    ),
    "rows without a cache": (lambda m: m(IDS, rows=[0, 1]), "rows: is given without past", "pass the cache"),
    "padding in a prefill": (
        lambda m: m(IDS, past=m.new_cache(3), rows=[0, -1]), r"rows: is \[0, -1\]", "calls of one token"
    ),
    "a row twice": (
        lambda m: m(IDS, past=m.new_cache(3), rows=torch.tensor([1, 1])), r"rows: names a row twice: \[1, 1\]", "its own"
    ),
    "half a row": (lambda m: m(IDS, past=m.new_cache(2), rows=[1.5, 0]), "rows: is 1.5", "as integers"),
    "a mask of a decode step": (
        lambda m: m(IDS[:, :1], past=m.new_cache(2), attention_mask=torch.ones(1, 1)), "attention_mask: has shape", "B = 2"
    ),
    "past": (lambda m: m(IDS, past=()), "past: is a tuple", "new_cache"),
    "another dtype": (lambda m: m(IDS, past=Cache(m.config, 2)), "past: holds bfloat16, the network float32", "new_cache"),
    "a cache of half a row": (lambda m: m.new_cache(1.5), "rows: is 1.5", "at least one"),
    "a cache of integers": (lambda m: m.new_cache(2, dtype=torch.int32), "dtype: is torch.int32", "new_cache"),
    "forks": (lambda m: m.new_cache(1).fork(1.5), "n: is 1.5", "at least one"),
    "what to empty": (lambda m: m.new_cache(1).reset("0"), "rows: is '0'", "as integers"),
    "config": (lambda m: Model.from_config({}), "config: is a dict", "K3-tiny"),
    "folder": (lambda m: Model.from_pretrained("moonshotai/Kimi-K3"), "folder: 'moonshotai/Kimi-K3' does not exist", "machine"),
    "prompts": (lambda m: m.generate(None), "prompts: is a NoneType", "lists of integers"),
    "prompts of text": (lambda m: m.generate(b"hello"), "prompts: is a bytes", "lists of integers"),
    "prompts of fractions": (lambda m: m.generate([[1.7, 2.2]]), "prompts: is 1.7", "lists of integers"),
    "prompts of truths": (lambda m: m.generate(IDS > 3), "prompts: is torch.bool", "token ids"),
    "most tokens": (lambda m: m.generate([1], max_new_tokens=2.5), "max_new_tokens: is 2.5", "at least 1"),
    "chunk": (lambda m: m.generate([1], prefill_chunk=-1), "prefill_chunk: is -1", "0 for all"),
    "eos": (lambda m: m.generate([1], eos_token_id="x"), "eos_token_id: is 'x'", "a token id"),
    "seed": (lambda m: m.generate([1], seed=1.5), "seed: is 1.5", "an integer"),
    "temperature": (lambda m: m.generate([1], temperature="hot"), "temperature: is 'hot'", "most likely"),
    "next to no temperature": (lambda m: m.generate([1], temperature=1e-45), "temperature: is 1", "from 1e-06 on"),
    "top_k": (lambda m: m.generate([1], top_k=2.5), "top_k: is 2.5", "0 for all"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_argument_is_named_with_the_reason_and_the_remedy(what: str, model: KimiK3ForCausalLM) -> None:
    call, message, remedy = WRONG[what]
    with pytest.raises(ArgumentError, match=message) as caught:
        call(model)
    assert remedy in (caught.value.fix or "")


def test_a_cache_of_another_network_is_refused(model: KimiK3ForCausalLM, other: KimiK3ForCausalLM) -> None:
    for network, cache in ((model, other.new_cache(2)), (other, model.new_cache(2))):
        for call in (lambda n=network, c=cache: n(IDS, past=c), lambda n=network, c=cache: n.generate(IDS, past=c)):
            with pytest.raises(ArgumentError, match="past: is of another network"):
                call()


def test_a_cache_of_inference_mode_is_refused_outside_of_it(model: KimiK3ForCausalLM) -> None:
    with torch.inference_mode():
        cache = model.new_cache(2)
        model(IDS, past=cache)
    with pytest.raises(ArgumentError, match=r"past: was made or filled under torch.inference_mode\(\)"):
        model(IDS[:, :1], past=cache)


def test_autocast_is_refused(model: KimiK3ForCausalLM) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ArgumentError, match=r"torch.autocast: is on for cpu"):
        model(IDS)


def test_a_refused_call_leaves_the_cache_as_it_was(model: KimiK3ForCausalLM) -> None:
    cache = model.new_cache(3)
    model(IDS[:1], past=cache, rows=[2])

    def held() -> list[torch.Tensor]:
        parts = [cache.lengths, cache.page_table]
        for layer in cache.layers:
            parts += [layer.state, layer.windows] if isinstance(layer, KDASlots) else [layer.pages]
        return [x.clone() for x in parts]

    before = held()
    for rows in ([0, -1], torch.tensor([1, 1]), [0, 7]):
        with pytest.raises(ArgumentError, match="rows: "):
            model(IDS, past=cache, rows=rows)
    assert all(torch.equal(a, b) for a, b in zip(before, held(), strict=True))
    assert cache.length(2) == 8


def test_padding_in_a_decode_step_leaves_its_row_alone(model: KimiK3ForCausalLM) -> None:
    cache = model.new_cache(2)
    model(IDS, past=cache)
    model(IDS[:, :1], past=cache, rows=torch.tensor([0, -1]))
    assert [cache.length(row) for row in (0, 1)] == cache.lengths.tolist() == [9, 8]


@pytest.mark.parametrize("kind", [int, np.int64, torch.tensor, lambda n: [torch.tensor(n)], lambda n: {n}])
def test_an_end_token_may_be_any_kind_of_integer(kind: Callable[[int], Any], model: KimiK3ForCausalLM) -> None:
    first = model.generate(IDS, max_new_tokens=3, eos_token_id=[]).tokens[0][0]
    found = model.generate(IDS, max_new_tokens=3, eos_token_id=kind(first))
    assert found.stopped[0] == "eos"
    assert found.tokens[0] == (first,)


@pytest.mark.parametrize("prompts", [[1, 2], [np.int64(1), 2], [[1, 2]], [torch.tensor([1, 2])], torch.tensor([1, 2])])
def test_prompts_may_be_any_kind_of_integers(prompts: Any, model: KimiK3ForCausalLM) -> None:
    assert model.generate(prompts, max_new_tokens=1).prompts == ((1, 2),)


def test_a_config_file_stands_for_its_folder(model: KimiK3ForCausalLM, tmp_path: Any) -> None:
    model.save_pretrained(tmp_path)
    again = KimiK3ForCausalLM.from_pretrained(tmp_path / "config.json")
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: m.save_pretrained(None), "folder: is None"),
        (lambda m: m.save_pretrained("nowhere", max_shard_size=None), "max_shard_size: None is no size"),
        (lambda m: type(m).from_pretrained(None), "folder: is None"),
        (lambda m: type(m).from_config("K3-tiny", dtype="float31"), "dtype: is 'float31'"),
        (lambda m: m.warmup(batch="a"), "batch: is 'a'"),
        (lambda m: m.warmup(lengths=[]), r"lengths: is \[\]"),
    ],
)
def test_what_is_no_folder_no_size_no_dtype_and_no_count_is_named(call, says):
    from k3dsl.model import KimiK3ForCausalLM

    network = KimiK3ForCausalLM.from_config("K3-tiny", dtype="float32")
    with pytest.raises(ArgumentError, match=says):
        call(network)


def test_mxfp4_experts_say_which_dtype_a_network_needs():
    from k3dsl.model import KimiK3Config, KimiK3ForCausalLM

    network = KimiK3ForCausalLM.from_config(KimiK3Config.k3_tiny().with_mxfp4_experts(), dtype=torch.float32)
    with pytest.raises(ArgumentError, match="dtype: is float32, and MXFP4 experts are multiplied as bfloat16"):
        network(torch.ones(1, 3, dtype=torch.long))
