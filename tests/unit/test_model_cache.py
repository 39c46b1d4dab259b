"""The cache: chunked prefill, single steps and ragged batches agree with whole prompts; pages, growth, copies, resets."""

from __future__ import annotations

import pytest
import torch
from model_examples import random_checkpoint, write_checkpoint
from reference_network import ReferenceNetwork

from k3dsl.errors import ArgumentError
from k3dsl.model import Cache, DecodeStep, KimiK3Config, KimiK3ForCausalLM
from k3dsl.model.cache import KDASlots, MLAPages
from k3dsl.model.functions import COMPILED

CONFIG = KimiK3Config.k3_tiny()


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """The same weights in fp64 on plain torch, in fp32 on the compiled ops, and as formulas."""
    tensors = random_checkpoint(CONFIG, 0, torch.float32)
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny") / "k3", CONFIG, tensors)
    plain = KimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float64)
    compiled = KimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return plain, compiled, ReferenceNetwork(CONFIG.to_dict(), tensors)


def ids(batch, tokens, seed=0):
    return torch.randint(0, 256, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def relative(x, want):
    return float((x.double() - want.double()).norm() / want.double().norm())


def in_steps(network, x, sizes, page_size=16, **settings):
    """Logits of x read in calls of so many tokens, and the cache."""
    cache = network.new_cache(x.shape[0], page_size=page_size, capacity=page_size)
    found = [network(part, past=cache, **settings).logits for part in x.split(sizes, 1)]
    return torch.cat(found, 1), cache


@pytest.mark.parametrize("sizes", [[20], [1] * 20, [7, 13], [1, 2, 3, 14], [16, 1, 1, 2], [19, 1]], ids=str)
def test_any_division_into_calls_gives_the_logits_states_and_latents_of_the_formulas(networks, sizes):
    network, _, formulas = networks
    x = ids(1, 20)
    logits, cache = in_steps(network, x, sizes)
    want = formulas(x[0])
    assert relative(logits[0], want.logits) < 1e-12
    assert cache.length(0) == 20
    assert cache.lengths.tolist() == [20]
    for layer, held in enumerate(cache.layers):
        if isinstance(held, KDASlots):
            assert relative(held.state[0].mT, want.states[layer]) < 1e-12  # in memory the values lie first
            assert relative(held.windows[0], want.inputs[layer][-3:]) < 1e-12
        else:
            kept = held.pages[cache.page_table[0].long()].flatten(0, 1)[:20]
            assert relative(kept, want.latents[layer]) < 1e-12


@pytest.mark.parametrize("sizes", [[20], [7, 6, 1, 1, 1, 4]], ids=str)
def test_the_compiled_ops_agree(networks, sizes):
    network = networks[1]
    assert network.functions is COMPILED
    x = ids(1, 20, seed=1)  # no token's 4th and 5th expert are closer than rounding reaches: 8e-4, with seed 0 2e-6
    logits, cache = in_steps(network, x, sizes)
    want = networks[2](x[0])
    assert relative(logits[0], want.logits) < 2e-4
    kda = cache.layers[0]
    assert isinstance(kda, KDASlots)
    assert relative(kda.state[0].mT, want.states[0]) < 1e-5


def test_a_ragged_batch_gives_each_sequence_what_it_gets_alone(networks):
    """Chunks of different lengths, one of a single token, rows in any order; then single steps for some rows."""
    network, _, formulas = networks
    texts = [ids(1, n, seed=n)[0] for n in (17, 3, 9)]
    cache = network.new_cache(4, page_size=16)
    got: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    done = [0, 0, 0]
    rows = [3, 0, 2]  # of the cache
    for sizes in ((5, 1, 4), (11, 1, 4), (1, 1, 1)):
        parts = [t[d : d + n] for t, d, n in zip(texts, done, sizes, strict=True)]
        ends = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])
        if sizes == (1, 1, 1):
            logits = network(torch.stack(parts), past=cache, rows=rows).logits[:, 0]
            split = list(logits.split(1))
        else:
            logits = network(torch.cat(parts)[None], past=cache, rows=rows, cu_seqlens=ends).logits[0]
            split = list(logits.split(sizes))
        for n in range(3):
            got[n].append(split[n])
            done[n] += sizes[n]
    for n, text in enumerate(texts):
        assert relative(torch.cat(got[n]), formulas(text).logits) < 1e-12
    assert [cache.length(row) for row in range(4)] == [3, 0, 9, 17]


def test_padding_of_a_decode_step_owns_no_row(networks):
    """A mask of 0 and a row of -1: nothing of the cache changes, and the others get what they get alone."""
    for network in networks[:2]:
        x = ids(2, 6, seed=4)
        _, cache = in_steps(network, x, [6])
        before = [(s.state.clone(), s.windows.clone()) for s in cache.layers if isinstance(s, KDASlots)]
        step = DecodeStep(network, cache, batch=3)
        logits = step(torch.tensor([5, 9]), [-1, 1])
        assert cache.lengths.tolist() == [6, 7]
        after = [s for s in cache.layers if isinstance(s, KDASlots)]
        for (state, windows), s in zip(before, after, strict=True):
            assert torch.equal(state[0], s.state[0])
            assert torch.equal(windows[0], s.windows[0])
            assert not torch.equal(state[1], s.state[1])
        want = networks[2](torch.cat([x[1], torch.tensor([9])])).logits[-1]
        assert relative(logits[1], want) < (1e-12 if network is networks[0] else 2e-4)
        masked = network(torch.tensor([[7], [8]]), past=cache, attention_mask=torch.tensor([[0], [1]]))
        assert masked.logits.shape == (2, 1, 272)
        assert [cache.length(0), cache.length(1)] == [6, 8]


def test_forked_copies_go_their_own_ways_and_the_original_stays(networks):
    network, _, formulas = networks
    x = ids(2, 18, seed=5)
    _, cache = in_steps(network, x, [18])
    copies = cache.fork(2)
    more = ids(4, 3, seed=6)
    logits = network(more, past=copies).logits
    for n in range(4):
        want = formulas(torch.cat([x[n // 2], more[n]])).logits[-3:]
        assert relative(logits[n], want) < 1e-12
    again = network(more[::2], past=cache).logits
    torch.testing.assert_close(again, logits[::2])


def test_a_reset_row_starts_anew_whatever_it_held(networks):
    """NaN in states, windows and pages of a row that is given out again reaches nothing."""
    for network in networks[:2]:
        x = ids(2, 20, seed=7)
        _, cache = in_steps(network, x, [20])
        for layer in cache.layers:
            if isinstance(layer, KDASlots):
                layer.state[0] = layer.windows[0] = torch.nan
            else:
                layer.pages[cache.page_table[0].long()] = torch.nan
        cache.reset([0])
        assert cache.lengths.tolist() == [0, 20]
        y = ids(1, 5, seed=8)
        limit = 1e-12 if network is networks[0] else 2e-4
        assert relative(network(y, past=cache, rows=[0]).logits[0], networks[2](y[0]).logits) < limit
        token = ids(1, 1, seed=9)
        got = network(token.expand(2, 1), past=cache).logits[:, 0]
        assert relative(got[0], networks[2](torch.cat([y[0], token[0]])).logits[-1]) < limit
        assert relative(got[1], networks[2](torch.cat([x[1], token[0]])).logits[-1]) < limit


def test_pages_grow_by_need_and_are_reused(networks):
    network = networks[1]
    cache = network.new_cache(2, page_size=16, capacity=16)
    assert cache.capacity == 32
    generation = cache.generation
    network(ids(2, 16), past=cache)
    assert cache.generation == generation
    network(ids(2, 1), past=cache)  # a second page for each
    assert cache.generation > generation
    pools = [layer.pages for layer in cache.layers if isinstance(layer, MLAPages)]
    assert len(pools) == 3  # one for each MLA layer, none for the other six
    held = {int(p) for p in cache.page_table.flatten() if p >= 0}
    assert len(held) == 4
    capacity = cache.capacity
    cache.reset()
    network(ids(2, 17), past=cache)
    assert cache.capacity == capacity


def test_a_cache_that_may_not_grow_says_so(networks):
    network = networks[1]
    cache = network.new_cache(1, page_size=16, capacity=16, growable=False)
    network(ids(1, 16), past=cache)
    with pytest.raises(ArgumentError, match=r"(?s)past: holds 16 tokens in 1 pages.*larger capacity"):
        network(ids(1, 1), past=cache)
    assert cache.lengths.tolist() == [16]


def test_bytes_by_part():
    """2 heads of 64 x 64 fp32 in 6 layers; 3 inputs of 3 x 128 channels; 96 numbers a token in 3 layers."""
    found = Cache(CONFIG, 5, capacity=100, page_size=64, dtype=torch.bfloat16).nbytes()
    assert found["kda_state"] == 5 * 6 * 2 * 64 * 64 * 4
    assert found["conv_window"] == 5 * 6 * 3 * 384 * 2
    assert found["mla_latent"] == 5 * 128 * 3 * 96 * 2
    assert found["total"] == sum(n for part, n in found.items() if part != "total")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cache(CONFIG, 0), "rows: is 0"),
        (lambda: Cache(CONFIG, 1, page_size=0), "page_size: is 0"),
        (lambda: Cache(CONFIG, 1, page_size=17), "page_size: is 17"),
        (lambda: Cache(CONFIG, 1).fork(0), "n: is 0"),
        (lambda: Cache(CONFIG, 2).reset([2]), "rows: names row 2"),
        (lambda: Cache(CONFIG, 2).reset([0, 0]), "rows: names a row twice"),
    ],
)
def test_what_it_cannot_do_is_refused(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


# ---- what a call that fails leaves behind ----------------------------------------------------------------------------------


def test_what_is_wrong_with_a_call_is_said_before_a_row_changes(networks):
    network, x = networks[1], ids(1, 45)
    wanted = network(x).logits
    cache = network.new_cache(1)
    network(x[:, :20], past=cache)
    with pytest.raises(ArgumentError, match="logits_to_keep"):
        network(x[:, 20:], past=cache, logits_to_keep=x.shape[1])
    with pytest.raises(ArgumentError, match="labels: is float32"):
        network(x[:, 20:], past=cache, labels=x[:, 20:].float())
    got = network(x[:, 20:], past=cache).logits
    assert relative(got, wanted[:, 20:]) < 1e-4


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_rows_that_a_call_left_half_changed_are_refused_until_they_are_reset(networks, monkeypatch, tokens, error):
    """The KDA states have moved on, and the count of tokens has not: going on from there would be wrong without a word."""
    network, x = networks[1], ids(1, 45)
    cache = network.new_cache(2)
    network(x[:, :20].repeat(2, 1), past=cache)
    layer = network.model.layers[-1]

    def stop(*_, **__):
        raise error("stop")

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", stop)
        with pytest.raises(error):
            network(x[:, 20 : 20 + tokens], past=cache, rows=[1])
    for torn in (cache, cache.fork(2)):
        rows = [1] if torn is cache else [2, 3]
        with pytest.raises(ArgumentError, match=rf"left half changed: \[{rows[0]}\](.|\n)*reset"):
            network(x[:, 20:21], past=torn, rows=rows[:1])
    wanted = network(x).logits
    assert relative(network(x[:, 20:], past=cache, rows=[0]).logits, wanted[:, 20:]) < 1e-4
    cache.reset([1])
    assert relative(network(x, past=cache, rows=[1]).logits, wanted) < 1e-4
