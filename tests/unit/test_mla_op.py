"""The MLA ops on the CPU backend: right on every family, clear about wrong arguments, and well behaved in torch."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch

from k3dsl import ops
from k3dsl.backends.torch.evaluate import evaluate
from k3dsl.errors import ArgumentError, LegalityError
from k3dsl.ops.mla import reference, space
from k3dsl.ops.mla.inputs import DecodeCase, PrefillCase, make_decode, make_prefill, make_write
from k3dsl.ops.registry import get_op
from k3dsl.runtime.dispatch import planning
from k3dsl.runtime.executable import recording
from k3dsl.runtime.judge import cases_of, judge
from k3dsl.runtime.metrics import assert_close_rms
from k3dsl.runtime.op import Case, forced

NAMES = ("mla.prefill", "mla.decode", "mla.cache_write")
CASES = [(name, case) for name in NAMES for case in cases_of(get_op(name), "small")]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{n}-{c.name}" for n, c in CASES])
def test_an_op_keeps_its_limits_into_poisoned_memory_and_repeats_bitwise(name: str, case: Case) -> None:
    (verdict,) = judge(get_op(name), [case])
    assert verdict.problem is None
    assert set(verdict.errors) == set(case.limits)


@pytest.mark.parametrize("name", NAMES)
def test_the_registry_has_what_the_command_line_asks_of_an_op(name: str) -> None:
    op = get_op(name)
    options = op.resolve_options({})
    drawn = op.inputs(
        op.resolve_dims({**op.cpu_dims, **({"T": 40} if name == "mla.prefill" else {})}), options, "cpu", 0
    )
    outputs, expected, limits = op.call(**op.fresh(drawn)), op.reference(**drawn), op.limits(options)
    assert set(outputs) == set(expected) == set(limits)
    for key, limit in limits.items():
        assert_close_rms(key, outputs[key], expected[key], limit)
    for size in (1, 16, 100, 5000, 70000):
        for dtype in ("bf16", "f16", "f32"):
            dims = {d.name: size for d in op.dims if not d.static and d.name not in ("B", "S")}
            assert op.point(dims, {"dtype": dtype}).reasons() == []
    for seed in op.seeds:
        assert op.point({}, seed).reasons() == []


def test_the_sdpa_peer_computes_what_the_op_computes_and_refuses_what_it_cannot() -> None:
    op = get_op("mla.prefill")
    peer = op.peers()["torch SDPA"]
    drawn = make_prefill(PrefillCase("peer", T=33, gate=True), "cpu", 0) | {"return_lse": False}
    assert_close_rms("o", peer(**drawn)["o"], op.reference(**drawn)["o"], 1e-2)
    for shape in ({"S": 50}, {"lengths": (3, 4)}):
        with pytest.raises(NotImplementedError):
            peer(**make_prefill(PrefillCase("peer", **shape), "cpu", 0))


# ---- knobs ---------------------------------------------------------------------------------------------------------------

PREFILL_KNOBS = [
    {"block_q": 16, "block_k": 64, "head_group": 2},
    {"block_q": 64, "block_k": 16, "head_group": 3},
    {"block_q": 256, "block_k": 128, "head_group": 6},
]


@pytest.mark.parametrize("knobs", PREFILL_KNOBS)
@pytest.mark.parametrize("lengths", [None, (40, 0, 1, 90)])
def test_every_tile_and_order_of_prefill_gives_the_same(
    knobs: dict, lengths: tuple | None, poisoned_memory: None
) -> None:
    kwargs = make_prefill(PrefillCase("knobs", T=131, H=6, gate=True, lengths=lengths), "cpu", 1)
    expected, expected_lse = reference.prefill(**kwargs)
    with forced(space.PREFILL, knobs, {}):
        o, lse = ops.mla_prefill(**kwargs, return_lse=True)
    assert_close_rms("o", o, expected, 5e-3)
    assert_close_rms("lse", lse, expected_lse, 1e-5)


DECODE_KNOBS = [
    {"block_h": 16, "block_n": 16, "num_splits": 1, "tail": "masked"},
    {"block_h": 16, "block_n": 64, "num_splits": 2},
    {"block_h": 32, "block_n": 32, "num_splits": 3, "tail": "masked"},
    {"block_h": 64, "block_n": 128, "num_splits": 8},
    {"block_h": 64, "block_n": 32, "num_splits": 132},
]


@pytest.mark.parametrize("knobs", DECODE_KNOBS)
@pytest.mark.parametrize("page", [16, 48, 64, 128])
def test_every_tile_split_and_page_size_of_decode_gives_the_same(knobs: dict, page: int, poisoned_memory: None) -> None:
    case = DecodeCase("knobs", (0, 1, 200, 97, 3), T=3, H=7, C=128, E=32, page=page, garbage=True, scale=0.1)
    kwargs = make_decode(case, "cpu", 1)
    expected, expected_lse = reference.decode(**kwargs)
    with forced(space.DECODE, knobs, {}), recording() as calls:
        o, lse = ops.mla_decode(**kwargs, return_lse=True)
    assert [x.kernel.name for x in calls[0].executable.launches] == ["mla_decode", "mla_combine"][
        : 1 if knobs["num_splits"] == 1 else 2
    ]
    assert_close_rms("o", o, expected, 5e-3)
    assert_close_rms("lse", lse, expected_lse, 1e-5)


def test_splits_fill_the_gpu_and_no_more() -> None:
    assert space.splits_for(programs=128, keys=8192, block_n=32, places=132) == 1
    assert space.splits_for(programs=2, keys=65536, block_n=32, places=132) == 64  # 128 of 132 places
    assert space.splits_for(programs=1, keys=65536, block_n=32, places=132) == 132
    assert space.splits_for(programs=64, keys=8192, block_n=32, places=132) == 2
    assert space.splits_for(programs=256, keys=8192, block_n=32, places=132) == 1  # 1.94 waves
    assert (
        space.splits_for(programs=80, keys=8192, block_n=32, places=132) == 3
    )  # 240 of 264 places; one split leaves 52
    assert space.splits_for(programs=1, keys=127, block_n=32, places=132) == 1  # too short to cut
    assert space.splits_for(programs=1, keys=0, block_n=32, places=132) == 1


def test_splits_follow_from_what_the_page_table_has_room_for_and_the_lengths_are_not_read() -> None:
    kwargs = make_decode(DecodeCase("short", (3, 5)), "cpu", 0, room=4096)
    with planning("triton") as calls:
        ops.mla_decode(**kwargs)
    assert calls[0].executable.plan.knobs["num_splits"] == 32
    with recording() as calls:
        whole = ops.mla_decode(**kwargs)
    assert calls[0].executable.plan.knobs["num_splits"] == 1  # programs cost time on the CPU
    with forced(space.DECODE, {"num_splits": 32}, {}):
        assert_close_rms("o", ops.mla_decode(**kwargs), whole.double(), 4e-3)


def test_knobs_that_do_not_fit_are_refused_with_the_reason() -> None:
    with pytest.raises(LegalityError, match="head_group 16 does not divide H = 4"):
        space.PREFILL.point({"H": 4}, {"head_group": 16}).plan("torch")
    with pytest.raises(ArgumentError, match="block_h cannot be 128"):
        space.DECODE.point({}, {"block_h": 128})


def table_of(queries: list[int], keys: list[int], block: int, causal: bool = True) -> list[list[int]]:
    """The block table that a call on packed sequences of these lengths works out."""
    cu_q, cu_k = (torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in (queries, keys))
    dims = {"N": len(queries), "blocks": sum(queries) // block + len(queries)}
    settings = {"varlen": True, "causal": causal, "block_q": block}
    plan = space.PREFILL.point({"N": len(queries)}, settings, symbolic=True).plan("torch")
    found = torch.full((dims["blocks"], 6), -7, dtype=torch.int32)
    table = torch.full((dims["blocks"], 5), -7, dtype=torch.int32)
    given = {"cu_seqlens": cu_q, "cu_seqlens_k": cu_k, "found": found, "block_table": table}
    for launch in plan.launches[:2]:
        evaluate(launch.kernel, {t.name: given[t.name] for t in launch.kernel.tensors}, dims)
    return table.tolist()


def test_the_block_table_has_every_block_once_those_with_most_keys_first() -> None:
    queries, keys = [20, 0, 16, 4], [20, 8, 80, 4]
    # blocks of 16: sequence 0 has blocks that see 16 and 20 keys, sequence 2 one that sees 80, sequence 3 one that sees 4
    long, late, early, last = [20, 36, 28, 80, 64], [16, 20, 0, 20, 16], [0, 20, 0, 20, 0], [36, 40, 108, 4, 0]
    none = [0, 0, 0, 0, 0]
    assert table_of(queries, keys, 16) == [long, late, early, last, none, none]
    assert table_of(queries, keys, 16, causal=False) == [long, early, late, last, none, none]
    assert table_of([0], [9], 16) == [none]


def test_the_block_table_of_many_sequences_is_in_order() -> None:
    """More blocks than a program writes at once, and more sequences than one counts at once."""
    queries = [(37 * n) % 90 for n in range(300)] + [16 * 300]
    keys = [n + (11 * i) % 40 for i, n in enumerate(queries)]
    table = table_of(queries, keys, 16)
    first, first_key = [0, *accumulate(queries)], [0, *accumulate(keys)]
    rows = []
    for n, (own, seen) in enumerate(zip(queries, keys, strict=True)):
        for at in range(0, own, 16):
            diagonal = at + seen - own
            rows.append((min(diagonal + 16, seen), [first[n] + at, first[n + 1], first_key[n], seen, diagonal]))
    rows.sort(key=lambda row: -row[0])  # stable
    assert table == [row for _, row in rows] + [[0] * 5] * (len(table) - len(rows))


# ---- numbers worked out by hand ------------------------------------------------------------------------------------------


def flat_cache(lengths: list[int], page: int = 16, spare: int = 2, width: int = 32) -> dict:
    """A decode call whose scores are all 0, and whose latent of key n is n + 1 in every channel."""
    columns = max(-(-n // page) for n in lengths) + spare
    table = torch.arange(len(lengths) * columns, dtype=torch.int32).view(len(lengths), columns)
    places = torch.arange(columns * page).float().repeat(len(lengths)) + 1
    return {
        "q": torch.zeros(len(lengths), 1, 2, width),
        "kv_cache": places.view(-1, page, 1).repeat(1, 1, width),
        "page_table": table,
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
        "kv_lora_rank": width - 16,
    }


@pytest.mark.parametrize("splits", [1, 2, 3, 132])
def test_equal_scores_give_the_mean_and_the_natural_log_of_the_count_however_the_keys_are_split(
    splits: int, poisoned_memory: None
) -> None:
    """Splits of unequal length carry weights 2 and 8 where a wrong base of the logarithm would show."""
    kwargs = flat_cache([40, 0, 10, 1])
    with forced(space.DECODE, {"num_splits": splits}, {}):
        o, lse = ops.mla_decode(**kwargs, return_lse=True)
    mean = torch.tensor([20.5, 0.0, 5.5, 1.0])
    torch.testing.assert_close(o[:, 0, 0, 0], mean)
    log = torch.tensor([math.log(40), -math.inf, math.log(10), 0.0])
    torch.testing.assert_close(lse[:, 1, 0], log)


def test_new_tokens_see_the_keys_before_them_and_their_own() -> None:
    """Lengths 5 and 2 with four new tokens: token t sees 5 - 4 + t + 1 keys, or none."""
    kwargs = flat_cache([5, 2])
    kwargs["q"] = torch.zeros(2, 4, 2, 32)
    o, lse = ops.mla_decode(**kwargs, return_lse=True)
    # means of 1..2, 1..3, 1..4, 1..5; of the short request nothing, nothing, 1, 1..2
    torch.testing.assert_close(o[:, :, 1, 3], torch.tensor([[1.5, 2.0, 2.5, 3.0], [0.0, 0.0, 1.0, 1.5]]))
    counts = torch.tensor([[2.0, 3.0, 4.0, 5.0], [0.0, 0.0, 1.0, 2.0]])
    torch.testing.assert_close(lse[:, 0], counts.log())
    assert (ops.mla_decode(**kwargs, causal=False)[1, :, 0, 0] == 1.5).all()


def test_a_score_far_above_the_others_takes_all_and_lse_says_how_far() -> None:
    kwargs = flat_cache([48])
    kwargs["q"][..., :1] = 1.0
    kwargs["kv_cache"][..., 0] = (
        torch.tensor([-1e6, 2e6, 1e6]).repeat_interleave(16)[:, None].view(3, 16).repeat(2, 1)[:5]
    )
    with forced(space.DECODE, {"num_splits": 3, "block_n": 16}, {}):
        o, lse = ops.mla_decode(**kwargs, scale=1.0, return_lse=True)
    torch.testing.assert_close(o[0, 0, 0, 1], torch.tensor((17 + 32) / 2))
    torch.testing.assert_close(lse[0, 0, 0], torch.tensor(2e6 + math.log(16)))


def test_queries_without_keys_give_zero_and_minus_infinity() -> None:
    """8 queries, 3 keys, aligned at the end: the first five queries come before every key."""
    kwargs = make_prefill(PrefillCase("masked", T=8, S=3), "cpu", 0)
    kwargs["q"].zero_()
    o, lse = ops.mla_prefill(**kwargs, return_lse=True)
    assert (o[:, :5] == 0).all()
    assert (lse[..., :5] == -math.inf).all()
    torch.testing.assert_close(lse[0, 0, 5:], torch.tensor([1.0, 2.0, 3.0]).log())
    torch.testing.assert_close(o[0, 5].float(), kwargs["v"][0, 0].float())


def test_a_sequence_without_keys_beside_one_with_keys() -> None:
    kwargs = make_prefill(PrefillCase("ragged", lengths=(4, 4), key_lengths=(0, 9)), "cpu", 0)
    o, lse = ops.mla_prefill(**kwargs, return_lse=True)
    assert (o[:, :4] == 0).all()
    assert (lse[..., :4] == -math.inf).all()
    alone = {n: x for n, x in kwargs.items() if not n.startswith("cu_")} | {"q": kwargs["q"][:, 4:]}
    assert torch.equal(ops.mla_prefill(**alone), o[:, 4:])


def test_the_gate_multiplies_the_rounded_output() -> None:
    kwargs = make_prefill(PrefillCase("gate", T=20, gate=True), "cpu", 0)
    gate = kwargs.pop("gate")
    plain = ops.mla_prefill(**kwargs)
    expected = (plain.float() * torch.sigmoid(gate.float())).to(plain.dtype)
    assert (
        ops.mla_prefill(**kwargs, gate=gate) == expected
    ).float().mean() > 0.99  # sigmoid may differ in its last bit


def test_absorbed_decode_is_expanded_prefill() -> None:
    """W_UK moved to the query and W_UV behind the sum: the same numbers, on the last three of 37 tokens."""
    T, H, C, D = 37, 3, 64, 32
    latent, k_pe, q_nope, q_pe = (
        numbers(1, T, C, seed=1), numbers(1, T, 16, seed=2), numbers(1, T, H, D, seed=3), numbers(1, T, H, 16, seed=4)
    )  # fmt: skip
    w_uk, w_uv = numbers(H, D, C, seed=5) / 8, numbers(H, D, C, seed=6) / 8
    k_nope, v = torch.einsum("hdc,btc->bthd", w_uk, latent), torch.einsum("hdc,btc->bthd", w_uv, latent)
    expanded = ops.mla_prefill((q_nope, q_pe), k_nope, k_pe, v, scale=0.2)
    cache = torch.zeros(4, 16, C + 16)
    ops.mla_cache_write(latent[0], k_pe[0], cache, torch.arange(T) + 16)
    absorbed = torch.cat([torch.einsum("hdc,bthd->bthc", w_uk, q_nope), q_pe], -1)[:, -3:]
    o = ops.mla_decode(
        absorbed, cache, torch.tensor([[1, 2, 3]], dtype=torch.int32), torch.tensor([T], dtype=torch.int32), scale=0.2,
        kv_lora_rank=C,
    )  # fmt: skip
    assert_close_rms("o", torch.einsum("hdc,bthc->bthd", w_uv, o), expanded[:, -3:].double(), 2e-6)


def test_the_second_chunk_of_a_prefill_with_the_first_as_context_is_the_end_of_one_prefill() -> None:
    kwargs = make_prefill(PrefillCase("chunks", T=90, dtype=torch.float32), "cpu", 0)
    whole = ops.mla_prefill(**kwargs)
    part = ops.mla_prefill(**{**kwargs, "q": kwargs["q"][:, 50:]})
    assert_close_rms("o", part, whole[:, 50:].double(), 1e-6)


# ---- what other tokens hold does not matter ------------------------------------------------------------------------------


def test_what_lies_past_a_request_does_not_reach_it_to_the_last_bit() -> None:
    case = DecodeCase("past", (1, 65, 130), H=3, T=2)
    clean = make_decode(case, "cpu", 3)
    wild = make_decode(DecodeCase("past", case.lengths, H=3, T=2, garbage=True), "cpu", 3)
    for splits in (1, 4):
        with forced(space.DECODE, {"num_splits": splits}, {}):
            assert torch.equal(ops.mla_decode(**clean), ops.mla_decode(**wild))


def test_a_packed_sequence_is_computed_as_if_it_were_alone() -> None:
    kwargs = make_prefill(PrefillCase("packed", lengths=(30, 45, 20), gate=True), "cpu", 0)
    before = ops.mla_prefill(**kwargs)[:, 30:75]
    for name in ("q", "k_nope", "k_pe", "v", "gate"):
        kwargs[name] = kwargs[name].clone()
        kwargs[name][:, :30] = torch.nan
        kwargs[name][:, 75:] = torch.nan
    assert torch.equal(ops.mla_prefill(**kwargs)[:, 30:75], before)


def test_prefill_never_looks_at_later_keys_to_the_last_bit() -> None:
    kwargs = make_prefill(PrefillCase("causal", T=150), "cpu", 0)
    before = ops.mla_prefill(**kwargs)
    for t in (1, 63, 64, 100, 149):
        changed = {n: kwargs[n].clone() for n in ("q", "k_nope", "k_pe", "v")}
        for x in changed.values():
            x[:, t:] = 100 * x[:, t:].flip(1)
        assert torch.equal(ops.mla_prefill(**{**kwargs, **changed})[:, :t], before[:, :t])


def test_pages_past_2_31_elements_are_read_where_they_are() -> None:
    """Page 233100 of 16 x 576 starts at element 2148249600. Pages that nobody touches take no memory."""
    pages, far = 233_102, 233_100
    cache = torch.empty(pages, 16, 576, dtype=torch.bfloat16)
    cache[far:] = numbers(2, 16, 576, dtype=torch.bfloat16)
    table, length = torch.tensor([[far, far + 1]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    q = numbers(1, 1, 4, 576, dtype=torch.bfloat16, seed=2)
    for block in (16, 32):  # a page number by itself, and gathered
        with forced(space.DECODE, {"block_n": block}, {}):
            there = ops.mla_decode(q, cache, table, length)
            assert torch.equal(there, ops.mla_decode(q, cache[far:].clone(), table - far, length))


def test_tokens_and_requests_lie_on_the_grids_first_axis() -> None:
    """The others end at 65535 programs: heads and batch of prefill, splits of decode."""
    prefill = space.PREFILL.point({"T": 10_000_000}, {"head_group": 4}).plan("torch").launches[0].kernel
    assert [extent.evaluate({}) for extent in prefill.grid] == [4 * 78_125, 24, 1]
    first, second = space.DECODE.point({"B": 70_000, "S": 64}, {"num_splits": 2}).plan("torch").launches
    assert [extent.evaluate({}) for extent in first.kernel.grid] == [2 * 70_000, 2]
    assert [extent.evaluate({}) for extent in second.kernel.grid] == [96 * 70_000]


# ---- cache write ---------------------------------------------------------------------------------------------------------


def test_only_the_named_slots_change_and_the_norm_leaves_the_shared_key_alone() -> None:
    kwargs = make_write(20, 3, 16, 512, 64, torch.bfloat16, torch.bfloat16, "cpu", 0)
    before = kwargs["kv_cache"].clone()
    assert ops.mla_cache_write(**kwargs) is kwargs["kv_cache"]
    live = kwargs["slot_mapping"] >= 0
    slots = kwargs["slot_mapping"][live]
    after, old = kwargs["kv_cache"].view(-1, 576), before.view(-1, 576)
    others = torch.ones(48, dtype=torch.bool)
    others[slots] = False
    assert torch.equal(after[others], old[others])
    assert torch.equal(after[slots, 512:], kwargs["k_pe"][live])
    rounded = ops.rmsnorm(kwargs["latent"][live], kwargs["norm_weight"], kwargs["eps"])
    assert torch.equal(after[slots, :512], rounded)


def test_pages_may_lie_apart_in_memory() -> None:
    pool = torch.zeros(3, 2, 16, 80)  # [pages, layers, page, width]
    cache = pool[:, 1]
    latent, k_pe = numbers(40, 64), numbers(40, 16, seed=1)
    ops.mla_cache_write(latent, k_pe, cache, torch.arange(40))
    assert (pool[:, 0] == 0).all()
    assert torch.equal(cache.reshape(48, 80)[:40], torch.cat([latent, k_pe], 1))
    table, length = torch.tensor([[0, 1, 2]], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    q = numbers(1, 1, 2, 80, seed=2)
    for block in (16, 32):  # within a page, and gathered from two
        with forced(space.DECODE, {"block_n": block}, {}):
            apart = ops.mla_decode(q, cache, table, length, kv_lora_rank=64)
            assert torch.equal(apart, ops.mla_decode(q, cache.contiguous(), table, length, kv_lora_rank=64))


# ---- empty calls ---------------------------------------------------------------------------------------------------------


def test_empty_calls() -> None:
    q, k, pe = torch.zeros(1, 0, 2, 48), torch.zeros(1, 5, 2, 32), torch.zeros(1, 5, 16)
    assert ops.mla_prefill(q, k, pe, k).shape == (1, 0, 2, 32)
    o, lse = ops.mla_prefill(torch.ones(1, 3, 2, 48), k[:, :0], pe[:, :0], k[:, :0], return_lse=True)
    assert (o == 0).all()
    assert (lse == -math.inf).all()
    assert lse.shape == (1, 2, 3)
    table, lengths = torch.zeros(0, 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    cache = torch.zeros(1, 16, 576)
    assert ops.mla_decode(torch.zeros(0, 1, 4, 576), cache, table, lengths).shape == (0, 1, 4, 512)
    none = torch.zeros(2, 0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    o, lse = ops.mla_decode(torch.ones(2, 1, 4, 576), cache, *none, return_lse=True)
    assert (o == 0).all()
    assert (lse == -math.inf).all()
    kept = cache.clone()
    ops.mla_cache_write(torch.zeros(0, 512), torch.zeros(0, 64), cache, torch.zeros(0, dtype=torch.int64))
    assert torch.equal(cache, kept)


# ---- torch ---------------------------------------------------------------------------------------------------------------


def test_a_pair_of_neighbouring_views_is_the_tensor_they_are_parts_of() -> None:
    kwargs = make_prefill(PrefillCase("pair", T=20), "cpu", 0)
    q = kwargs.pop("q")
    whole = ops.mla_prefill(q, **kwargs)
    with recording() as calls:
        assert torch.equal(ops.mla_prefill((q[..., :128], q[..., 128:]), **kwargs), whole)
    assert calls[0].tensors["q"].data_ptr() == q.data_ptr()
    assert torch.equal(ops.mla_prefill((q[..., :128].clone(), q[..., 128:].clone()), **kwargs), whole)


def reference_gradients(kwargs: dict, weight: torch.Tensor, names: list[str]) -> tuple[torch.Tensor, ...]:
    """Of the sum of weighted outputs and log-sum-exps, through the float64 reference."""
    leaves = {n: kwargs[n].detach().double().requires_grad_() for n in names}
    o, lse = [], []
    cu, cu_k = (kwargs[n] for n in ("cu_seqlens", "cu_seqlens_k"))
    q, k_nope, k_pe, v = (leaves[n] for n in names[:4])
    k = torch.cat([k_nope, k_pe[:, :, None].expand(-1, -1, q.shape[2], -1)], -1)
    rows = [0, q.shape[1]] if cu is None else cu.tolist()
    keys = [0, k.shape[1]] if cu is None else (cu if cu_k is None else cu_k).tolist()
    for n in range(len(rows) - 1):
        a, b = slice(*rows[n : n + 2]), slice(*keys[n : n + 2])
        scale = q.shape[-1] ** -0.5
        part = reference.attend(q[0, a], k[0, b], v[0, b], scale, True)
        o.append(part[0])
        lse.append(part[1])
    out = torch.cat(o)[None]
    if kwargs["gate"] is not None:
        out = out * torch.sigmoid(leaves["gate"])
    loss = (out * weight.double()).sum() + torch.cat(lse, -1).sum()
    return torch.autograd.grad(loss, list(leaves.values()))


@pytest.mark.parametrize(
    "shape",
    [{"T": 9, "gate": True}, {"T": 5, "S": 12}, {"lengths": (4, 1, 6), "gate": True},
     {"lengths": (3, 4), "key_lengths": (5, 6)}],
)  # fmt: skip
def test_gradients_are_those_of_the_float64_reference(shape: dict) -> None:
    kwargs = make_prefill(PrefillCase("grad", D=32, E=16, V=32, dtype=torch.float32, **shape), "cpu", 0)
    names = ["q", "k_nope", "k_pe", "v"] + (["gate"] if kwargs["gate"] is not None else [])
    leaves = {n: kwargs[n].detach().clone().requires_grad_() for n in names}
    o, lse = ops.mla_prefill(**{**kwargs, **leaves}, return_lse=True)
    weight = numbers(*o.shape, seed=9)
    got = torch.autograd.grad((o * weight).sum() + lse.sum(), list(leaves.values()))
    for name, g, w in zip(names, got, reference_gradients(kwargs, weight, names), strict=True):
        assert_close_rms(f"gradient of {name}", g, w, 1e-5)


def test_gradients_of_queries_without_keys_are_zero() -> None:
    kwargs = make_prefill(PrefillCase("grad", T=5, S=2, D=32, E=16, V=32, dtype=torch.float32), "cpu", 0)
    leaves = {n: kwargs[n].detach().clone().requires_grad_() for n in ("q", "k_nope", "v")}
    ops.mla_prefill(**{**kwargs, **leaves}).sum().backward()
    assert (leaves["q"].grad[:, :3] == 0).all()
    assert all(x.grad.isfinite().all() for x in leaves.values())


def test_a_pair_that_wants_gradients_gets_one_for_each_part() -> None:
    kwargs = make_prefill(PrefillCase("pair", T=7, D=32, E=16, V=32, dtype=torch.float32), "cpu", 0)
    q = kwargs.pop("q").requires_grad_()
    ops.mla_prefill((q[..., :32], q[..., 32:]), **kwargs).sum().backward()
    pair, q.grad = q.grad, None
    ops.mla_prefill(q, **kwargs).sum().backward()
    assert torch.equal(pair, q.grad)


def test_opcheck_accepts_the_registrations() -> None:
    checks = ("test_schema", "test_faketensor")
    p = make_prefill(PrefillCase("opcheck", lengths=(3, 5), gate=True), "cpu", 0)
    arguments = tuple(p[n] for n in ("q", "k_nope", "k_pe", "v", "gate", "cu_seqlens", "cu_seqlens_k"))
    for lse in (True, False):
        torch.library.opcheck(torch.ops.k3dsl.mla_prefill.default, (*arguments, None, True, lse), test_utils=checks)
    d = make_decode(DecodeCase("opcheck", (3, 20)), "cpu", 0)
    arguments = tuple(d[n] for n in ("q", "kv_cache", "page_table", "cache_seqlens"))
    for lse in (True, False):
        torch.library.opcheck(torch.ops.k3dsl.mla_decode.default, (*arguments, None, 512, True, lse), test_utils=checks)
    w = make_write(5, 1, 16, 512, 64, torch.bfloat16, torch.bfloat16, "cpu", 0)
    torch.library.opcheck(torch.ops.k3dsl.mla_cache_write_.default, tuple(w.values()), test_utils=checks)


def test_works_under_torch_compile_without_graph_breaks() -> None:
    p = make_prefill(PrefillCase("compile", T=20, gate=True), "cpu", 0)
    w = make_write(20, 2, 16, 512, 64, torch.bfloat16, torch.bfloat16, "cpu", 0, skipped=0)
    w["slot_mapping"] = torch.arange(20)
    q = numbers(1, 1, 4, 576, dtype=torch.bfloat16)
    table, length = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)

    def block(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ops.mla_cache_write(**{**w, "kv_cache": cache})
        return ops.mla_prefill(**p), ops.mla_decode(q, cache, table, length)

    expected = block(w["kv_cache"].clone())
    got = torch.compile(block, backend="aot_eager", fullgraph=True)(w["kv_cache"].clone())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# ---- wrong arguments -----------------------------------------------------------------------------------------------------

Q, KN, KP, VV = torch.zeros(2, 4, 3, 48), torch.zeros(2, 6, 3, 32), torch.zeros(2, 6, 16), torch.zeros(2, 6, 3, 32)
Q1, KN1, KP1 = Q[:1], KN[:1, :4], KP[:1, :4]
CU = torch.tensor([0, 2, 4])
DQ, CACHE = torch.zeros(2, 1, 4, 80), torch.zeros(3, 16, 80)
TABLE, LENGTHS = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([3, 20], dtype=torch.int32)
LATENT, PE, SLOTS = torch.zeros(2, 64), torch.zeros(2, 16), torch.tensor([0, -1])


def decode(q=DQ, cache=CACHE, table=TABLE, lengths=LENGTHS, C=64, **more) -> torch.Tensor:
    return ops.mla_decode(q, cache, table, lengths, kv_lora_rank=C, **more)


def write(latent=LATENT, pe=PE, cache=CACHE, slots=SLOTS, **more) -> torch.Tensor:
    return ops.mla_cache_write(latent, pe, cache, slots, **more)


WRONG = [
    (lambda: ops.mla_prefill(Q[0], KN, KP, VV), "q", "needs 4 dims [B, T, H, D+E]", "[B, T, H, D+E]"),
    (lambda: ops.mla_prefill([Q], KN, KP, VV), "q", "is a sequence of 1", "(q_nope, q_pe)"),
    (lambda: ops.mla_prefill((Q, Q[:1]), KN, KP, VV), "q", "is a pair", "alike"),
    (lambda: ops.mla_prefill((Q, None), KN, KP, VV), "q[1]", "NoneType", "torch.Tensor"),
    (lambda: ops.mla_prefill(Q.long(), KN, KP, VV), "q", "int64, needs bfloat16", "bfloat16"),
    (lambda: ops.mla_prefill(Q, KN.half(), KP, VV), "k_nope", "float16, q is float32", "q.dtype"),
    (lambda: ops.mla_prefill(Q, KN[:, :, :2], KP, VV), "k_nope", "H = 3", "a key a head"),
    (lambda: ops.mla_prefill(Q, KN, KP[:, :5], VV), "k_pe", "needs [2, 6, E]", "all heads"),
    (lambda: ops.mla_prefill(Q, KN, KP[..., None, :], VV), "k_pe", "needs 3 dims", "[B, S, E]"),
    (lambda: ops.mla_prefill(Q[..., :40], KN, KP, VV), "q", "width 40, k_nope and k_pe have 32 + 16", "shared"),
    (lambda: ops.mla_prefill(Q, KN, KP, VV[:, :5]), "v", "needs [B, S, H, V]", "one value a key"),
    (lambda: ops.mla_prefill(Q, KN, KP, VV[..., :20]), "v", "V = 20", "zeros"),
    (lambda: ops.mla_prefill(Q, KN, KP, VV.transpose(2, 3)), "v", "last dim must be contiguous", "contiguous()"),
    (lambda: ops.mla_prefill(Q, KN, KP, VV, scale=-1.0), "scale", "-1.0", "D + E"),
    (lambda: ops.mla_prefill((Q[..., 32:], Q[..., :32]), KN, KP, VV), "q[0]", "has width", "(q_nope, q_pe)"),
    (lambda: ops.mla_prefill(Q, KN, KP, VV, gate=Q), "gate", "needs [2, 4, 3, 32]", "view"),
    (lambda: ops.mla_prefill(Q, KN, KP, VV, cu_seqlens=CU), "cu_seqlens", "q has B = 2", "B = 1"),
    (lambda: ops.mla_prefill(Q, KN, KP, VV, cu_seqlens_k=CU), "cu_seqlens_k", "without cu_seqlens", "cu_seqlens"),
    (lambda: ops.mla_prefill(Q1, KN[:1], KP[:1], VV[:1], cu_seqlens=CU), "k_nope", "S = 6 keys", "cu_seqlens_k"),
    (lambda: ops.mla_prefill(Q1, KN1, KP1, KN1, cu_seqlens=CU[:2]), "cu_seqlens", "ends at 2", "end at T"),
    (lambda: ops.mla_prefill(Q1, KN1, KP1, KN1, cu_seqlens=CU, cu_seqlens_k=CU[:2]), "cu_seqlens_k", "for 1", "each"),
    (lambda: decode(q=DQ[0]), "q", "needs 4 dims", "[B, T, H, C+E]"),
    (lambda: decode(q=torch.zeros(2, 9, 4, 80)), "q", "T = 9 new tokens, needs 1 to 8", "mla_prefill"),
    (lambda: decode(C=60), "kv_lora_rank", "is 60", "latent"),
    (lambda: decode(C=80), "q", "0 is left beside kv_lora_rank = 80", "the shared key's width"),
    (lambda: decode(cache=CACHE.half()), "kv_cache", "float16, q is float32", "q.dtype"),
    (lambda: decode(cache=torch.zeros(3, 12, 80)), "kv_cache", "pages of 12 tokens", "multiple of 16"),
    (lambda: decode(cache=torch.zeros(3, 16, 96)), "kv_cache", "rows of 96, q of 80", "latent"),
    (lambda: decode(cache=torch.zeros(3 * 16 * 80 + 1)[1:].view(3, 16, 80)), "kv_cache", "16 bytes", "on its own"),
    (lambda: decode(table=TABLE.long()), "page_table", "int64, needs int32", "int32"),
    (lambda: decode(table=TABLE[:1]), "page_table", "for 1 requests, q for 2", "a request"),
    (lambda: decode(table=TABLE + 3), "page_table", "and the cache has 3", "past a request's length"),
    (lambda: decode(lengths=LENGTHS + 40), "cache_seqlens", "is 60 for request 1", "more columns"),
    (lambda: decode(lengths=-LENGTHS), "cache_seqlens", "is -3 for request 0", "count the tokens"),
    (lambda: decode(lengths=LENGTHS[:1]), "cache_seqlens", "for 1 requests", "a request"),
    (lambda: decode(scale=0.0), "scale", "0.0", "positive"),
    (lambda: write(latent=LATENT[0]), "latent", "needs 2 dims [T, C]", "[T, C]"),
    (lambda: write(latent=torch.zeros(2, 60)), "latent", "width 60", "512"),
    (lambda: write(pe=PE[:1]), "k_pe", "1 rows, latent has 2", "a token"),
    (lambda: write(pe=PE.half()), "k_pe", "float16, kv_cache is float32", "dtype"),
    (lambda: write(cache=torch.zeros(3, 16, 96)), "kv_cache", "rows of 96, latent and k_pe of 80", "latent"),
    (lambda: write(slots=SLOTS.int()), "slot_mapping", "int32, needs int64", "int64"),
    (lambda: write(slots=SLOTS[:1]), "slot_mapping", "needs [2]", "a token"),
    (lambda: write(slots=SLOTS + 48), "slot_mapping", "names slot 48, the cache has 48", "page_size"),
    (lambda: write(slots=torch.tensor([5, 5])), "slot_mapping", "twice", "a slot"),
    (lambda: write(norm_weight=torch.zeros(16)), "norm_weight", "needs [64]", "a channel"),
    (lambda: write(norm_weight=torch.zeros(64).half()), "norm_weight", "float16, latent is float32", "fp32"),
    (lambda: write(eps=-1.0), "eps", "-1.0", "at least 0"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "argument", "reason", "remedy"), WRONG)
def test_a_wrong_argument_is_named_with_the_reason_and_the_remedy(call, argument, reason, remedy) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.message.startswith(f"{argument}: ")
    assert reason in caught.value.message
    assert remedy in (caught.value.fix or "")
