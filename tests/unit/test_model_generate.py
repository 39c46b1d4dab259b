"""Generating: greedy as the formulas choose, drawn by the stated distribution, ragged batches, stops, streams, refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from model_examples import random_checkpoint, write_checkpoint
from reference_network import ReferenceNetwork

import k3dsl
from k3dsl.errors import ArgumentError, NonFiniteError
from k3dsl.model import DecodeStep, KimiK3Config, KimiK3ForCausalLM
from k3dsl.model.functions import TORCH
from k3dsl.model.sampling import Sampling, probabilities, sample
from k3dsl.model.tokens import ByteTokenizer, tokenizer_of
from k3dsl.model.tuning import problems
from k3dsl.runtime.executable import Executable

CONFIG = KimiK3Config.kimi_linear_tiny()
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11], [12]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tensors = random_checkpoint(CONFIG, 3, torch.float32)
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "kl", CONFIG, tensors), tensors


@pytest.fixture(scope="module")
def network(folder):
    return KimiK3ForCausalLM.from_pretrained(folder[0], dtype=torch.float32)


@pytest.fixture(scope="module")
def plain(folder):
    """In fp64 on plain torch functions."""
    return KimiK3ForCausalLM.from_pretrained(folder[0], dtype=torch.float64)


def greedy(formulas, prompt, count):
    """By the formulas, the whole text again for every token."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(formulas(torch.tensor(text)).logits[-1].argmax()))
    return tuple(text[len(prompt) :])


@pytest.mark.parametrize("which", ["plain", "network"])
def test_greedy_tokens_of_a_ragged_batch_are_those_of_the_formulas(request, folder, which):
    model = request.getfixturevalue(which)
    formulas = ReferenceNetwork(CONFIG.to_dict(), folder[1])
    out = model.generate(PROMPTS, max_new_tokens=6, eos_token_id=[])
    assert out.tokens == tuple(greedy(formulas, p, 6) for p in PROMPTS)
    assert out.stopped == ("length",) * 3
    assert [out.past.length(row) for row in range(3)] == [len(p) + 5 for p in PROMPTS]


def test_padded_tensors_chunks_and_single_prompts_give_the_same(plain):
    want = plain.generate(PROMPTS, max_new_tokens=5, eos_token_id=[]).tokens
    padded, mask = torch.zeros(3, 8, dtype=torch.int64), torch.zeros(3, 8)
    for row, p in enumerate(PROMPTS):
        padded[row, 8 - len(p) :] = torch.tensor(p)
        mask[row, 8 - len(p) :] = 1
    assert plain.generate(padded, attention_mask=mask, max_new_tokens=5, eos_token_id=[]).tokens == want
    assert plain.generate(PROMPTS, max_new_tokens=5, eos_token_id=[], prefill_chunk=3).tokens == want
    for prompt, tokens in zip(PROMPTS, want, strict=True):
        assert plain.generate(prompt, max_new_tokens=5, eos_token_id=[]).tokens == (tokens,)


def test_each_row_stops_at_its_own_end(plain):
    """The second token of row 0 is made an end token: it stops there, the others go on as before."""
    free = plain.generate(PROMPTS, max_new_tokens=6, eos_token_id=[]).tokens
    end = free[0][1]
    out = plain.generate(PROMPTS, max_new_tokens=6, eos_token_id=[end, 271])
    for row in range(3):
        cut = next((n for n, t in enumerate(free[row]) if t in (end, 271)), None)
        assert out.tokens[row] == (free[row] if cut is None else free[row][: cut + 1])
        assert out.stopped[row] == ("length" if cut is None else "eos")
    assert out.stopped[0] == "eos"
    held = out.sequences(pad=999)
    assert held.shape == (3, max(len(p) + len(t) for p, t in zip(PROMPTS, out.tokens, strict=True)))
    assert held[0].tolist() == [*PROMPTS[0], *out.tokens[0], *[999] * (held.shape[1] - 3 - len(out.tokens[0]))]


def test_tokens_are_streamed_as_they_come(plain):
    want = plain.generate(PROMPTS, max_new_tokens=4, eos_token_id=[])
    seen = []
    plain.generate(PROMPTS, max_new_tokens=4, eos_token_id=[], on_tokens=seen.append)
    steps = list(plain.stream(PROMPTS, max_new_tokens=4, eos_token_id=[]))
    assert seen == steps
    assert tuple(zip(*[s.tokens for s in steps], strict=True)) == want.tokens
    assert [s.stopped for s in steps] == [(None,) * 3] * 3 + [("length",) * 3]


def test_a_text_goes_on_where_it_stopped(plain):
    whole = plain.generate(PROMPTS, max_new_tokens=6, eos_token_id=[]).tokens
    first = plain.generate(PROMPTS, max_new_tokens=3, eos_token_id=[])
    rest = plain.generate([[t[-1]] for t in first.tokens], max_new_tokens=3, eos_token_id=[], past=first.past)
    assert tuple(a + b for a, b in zip(first.tokens, rest.tokens, strict=True)) == whole


def test_a_seed_gives_the_same_draws(plain):
    settings = {"max_new_tokens": 8, "temperature": 1.5, "eos_token_id": []}
    a, b, c = (plain.generate(PROMPTS, **settings, seed=seed).tokens for seed in (1, 1, 2))
    assert a == b != c


# ---- sampling ----------------------------------------------------------------------------------------------------------

LOGITS = torch.log(torch.tensor([[0.1, 0.4, 0.3, 0.2]]))


@pytest.mark.parametrize(
    ("how", "want"),
    [
        (Sampling(1.0), [0.1, 0.4, 0.3, 0.2]),
        (Sampling(0.5), [1 / 30, 16 / 30, 9 / 30, 4 / 30]),  # squares, normalised
        (Sampling(1.0, top_k=2), [0, 4 / 7, 3 / 7, 0]),
        (Sampling(1.0, top_p=0.7), [0, 4 / 7, 3 / 7, 0]),
        (Sampling(1.0, top_p=0.71), [0, 4 / 9, 3 / 9, 2 / 9]),
        (Sampling(1.0, top_p=0.01), [0.0, 1.0, 0.0, 0.0]),
        (Sampling(1.0, top_k=2, top_p=0.5), [0.0, 1.0, 0.0, 0.0]),  # 4/7 alone is more than half
    ],
    ids=str,
)
def test_the_distribution_is_the_filtered_one(how, want):
    torch.testing.assert_close(probabilities(LOGITS, how), torch.tensor([want]))


def test_draws_have_that_distribution():
    generator = torch.Generator().manual_seed(0)
    drawn = sample(LOGITS.expand(20000, 4), Sampling(1.0, top_k=3), generator)
    shares = torch.bincount(drawn, minlength=4) / 20000
    torch.testing.assert_close(shares, torch.tensor([0, 4 / 9, 3 / 9, 2 / 9]), atol=0.012, rtol=0)


def test_greedy_takes_the_first_of_equal_logits():
    assert sample(torch.tensor([[1.0, 3.0, 3.0]]), Sampling()).tolist() == [1]


# ---- what must not pass unseen -----------------------------------------------------------------------------------------


def test_logits_that_are_not_finite_make_an_error_and_no_token(plain):
    """A poisoned state of one row: it is named, and no token 0 comes out."""
    first = plain.generate(PROMPTS, max_new_tokens=1, eos_token_id=[])
    first.past.layers[0].state[1] = torch.nan
    seen = []
    with pytest.raises(NonFiniteError, match=r"(?s)row 1: the logits of new token 1 .*reset the row"):
        plain.generate([[1], [2], [3]], max_new_tokens=3, eos_token_id=[], past=first.past, on_tokens=seen.append)
    assert seen == []


def test_what_makes_no_sense_is_refused_by_name(plain):
    for settings, message in (
        ({"prompts": []}, "prompts: is empty"),
        ({"prompts": [[1], []]}, "prompts: has no tokens in row 1"),
        ({"prompts": [[1]], "max_new_tokens": 0}, "max_new_tokens: is 0"),
        ({"prompts": [[1]], "temperature": -1.0}, "temperature: is -1"),
        ({"prompts": [[1]], "top_k": -1}, "top_k: is -1"),
        ({"prompts": [[1]], "top_p": 1.5}, "top_p: is 1.5"),
        ({"prompts": [[1]], "attention_mask": torch.ones(1, 1)}, "attention_mask: is given beside lists"),
        ({"prompts": torch.ones(1, 2)}, "prompts: is torch.float32"),
        ({"prompts": [[1]], "past": plain.new_cache(2)}, "past: holds 2 sequences"),
        ({"prompts": [[1]], "seed": 1, "generator": torch.Generator()}, "seed: is given beside"),
    ):
        with pytest.raises(ArgumentError, match=message):
            plain.generate(**settings)
    with pytest.raises(ArgumentError, match="graph: is asked for on cpu"):
        DecodeStep(plain, plain.new_cache(1), 1, graph=True)
    with pytest.raises(ArgumentError, match="tokens: has shape"):
        DecodeStep(plain, plain.new_cache(2), 1)(torch.zeros(2, dtype=torch.int64), [0, 1])


def test_after_a_warmup_nothing_is_built_any_more(network, monkeypatch):
    """Prompts of the lengths that were warmed up, whole, ragged and in chunks, and the steps after them."""
    network.warmup(batch=(1, 2), lengths=5)
    built = []
    monkeypatch.setattr(Executable, "__init__", lambda self, plan, *rest: built.append(plan.op))
    with k3dsl.lock():
        for prompts in ([[1, 2, 3, 4, 5]], [[1, 2, 3, 4, 5], [6, 7, 8, 9]], [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]):
            network.generate(prompts, max_new_tokens=3, eos_token_id=[])
    assert built == []


def test_problems_to_tune_are_the_ops_at_the_shapes_of_the_network(network):
    found = {p.op.name: p for p in problems(network, batch=2, length=24)}
    assert {"kda.forward", "kda.step", "mla.prefill", "mla.decode", "moe.router", "moe.experts", "rmsnorm"} <= set(
        found
    )
    forward = found["kda.forward"].dims
    assert {n: forward[n] for n in ("T", "H", "K", "V")} == {"T": 24, "H": 2, "K": 64, "V": 64}
    assert found["kda.step"].dims["B"] == 2
    assert found["moe.experts"].dims["E"] == 8
    assert found["mla.decode"].dims["S"] == 64  # a page
    assert found["kda.forward"].options["gate"] == "softplus"


# ---- text and the command line -----------------------------------------------------------------------------------------


def test_bytes_are_tokens_of_the_small_networks():
    tokenizer = tokenizer_of(CONFIG, None)
    assert tokenizer.encode("aé") == [256, 97, 195, 169]
    assert tokenizer.decode([97, 195, 169, 257, 98]) == "aéb"
    assert ByteTokenizer().encode("a") == [97]
    with pytest.raises(ArgumentError, match=r"(?s)prompt: cannot be split.*163,840.*--ids"):
        tokenizer_of(KimiK3Config.k3(), None)


def test_the_command_generates_with_a_checkpoint(folder, plain):
    want = plain.generate([[256, 97, 98]], max_new_tokens=4).tokens[0]
    command = [sys.executable, "-m", "k3dsl.cli.main", "generate", str(folder[0]), "--prompt", "ab", "--json"]
    done = subprocess.run(
        [*command, "--max-new-tokens", "4", "--dtype", "float32"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    import json

    assert tuple(json.loads(done.stdout)["results"][0]["tokens"]) == want


def test_compiled_and_plain_functions_have_the_same_table(network):
    names = {f for f in vars(TORCH) if callable(getattr(TORCH, f))}
    assert names == {f for f in vars(network.functions) if callable(getattr(network.functions, f))}
    assert all(getattr(TORCH, n).__name__ == getattr(network.functions, n).__name__ for n in names)


# ---- Kimi Linear as transformers has it --------------------------------------------------------------------------------


def test_a_kimi_linear_that_transformers_saved_gives_its_logits_and_its_tokens(tmp_path):
    """Its random weights, its files: a prompt at once and token by token on the compiled ops, and its greedy tokens."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    CONFIG.save_pretrained(tmp_path / "config")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "config")
    theirs = transformers.KimiLinearForCausalLM(config).float().eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = KimiK3ForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    x = torch.randint(0, 256, (1, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = theirs(x).logits
    scale = want.norm()
    assert (ours(x).logits - want).norm() < 1e-4 * scale
    cache = ours.new_cache(1)
    steps = torch.cat([ours(x[:, t : t + 1], past=cache).logits for t in range(24)], 1)
    assert (steps - want[:, :24]).norm() < 1e-4 * want[:, :24].norm()
    greedy = theirs.generate(x[:, :20], max_new_tokens=12, do_sample=False, eos_token_id=None)[0, 20:].tolist()
    assert list(ours.generate(x[:, :20], max_new_tokens=12, eos_token_id=[]).tokens[0]) == greedy
