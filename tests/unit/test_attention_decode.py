"""Attention over a cache on the CPU backend: every length, every group of heads, and nothing of a slot that is not filled."""

from __future__ import annotations

import math

import pytest
import torch
from op_examples import BF16, F16, F32, numbers

from k3dsl import ops
from k3dsl.errors import ArgumentError, LegalityError
from k3dsl.ops.attention import reference
from k3dsl.ops.attention.decode_space import ATTENTION_DECODE
from k3dsl.ops.registry import get_op
from k3dsl.runtime.metrics import assert_close_rms
from k3dsl.runtime.op import forced

LIMIT = {BF16: 5e-3, F16: 8e-4, F32: 5e-6}


def drawn(lengths: list[int], T: int, S: int, H: int, HK: int, D: int, V: int, dtype=BF16) -> dict[str, torch.Tensor]:
    """Queries, and caches with NaN in every slot that is not filled."""
    B = len(lengths)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    empty = (torch.arange(S)[None, :] >= seqlens[:, None])[..., None, None]
    caches = {
        n: numbers(B, S, HK, w, dtype=dtype, seed=i + 1) for i, (n, w) in enumerate((("k_cache", D), ("v_cache", V)))
    }
    caches = {n: x.masked_fill(empty, math.nan) for n, x in caches.items()}
    return {"q": numbers(B, T, H, D, dtype=dtype), **caches, "cache_seqlens": seqlens}


def agree(x: dict[str, torch.Tensor]) -> None:
    o, lse = ops.attention_decode(**x, return_lse=True)
    expected, expected_lse = reference.attention_decode(**x)
    assert_close_rms("o", o, expected, LIMIT[x["q"].dtype])
    unseen = expected_lse.isinf()
    assert torch.equal(lse.isinf(), unseen)
    assert (o.transpose(1, 2)[unseen] == 0).all()
    assert_close_rms("lse", lse.masked_fill(unseen, 0.0), expected_lse.masked_fill(unseen, 0.0), 1e-5)
    again, again_lse = ops.attention_decode(**x, return_lse=True)
    assert torch.equal(o, again)
    assert torch.equal(lse, again_lse)


CASES = {
    "one-token": drawn([1, 64, 65, 300, 299], 1, 300, 4, 2, 64, 64),
    "zero-lengths": drawn([0, 5, 0], 1, 40, 2, 1, 64, 64),
    "fewer-keys-than-queries": drawn([3, 8, 0, 20], 8, 20, 3, 1, 32, 48),
    "several-queries": drawn([70, 200, 129], 5, 200, 6, 2, 64, 32),
    "prefill-in-parts": drawn([100, 90], 70, 100, 2, 2, 64, 64),
    "many-heads-a-key": drawn([33, 1], 2, 33, 24, 2, 32, 32),
    "fp16": drawn([33, 100], 3, 100, 4, 4, 96, 96, F16),
    "fp32": drawn([33, 100], 3, 100, 4, 2, 64, 128, F32),
}
KNOBS = ({}, {"splits": 1}, {"splits": 16, "block_k": 16}, {"rows": 64, "splits": 4})


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_float64_and_repeats_bitwise(name: str, knobs: dict, poisoned_memory) -> None:
    with forced(ATTENTION_DECODE, knobs, {}):
        agree(CASES[name])


def test_a_full_cache_of_as_many_tokens_is_plain_causal_attention() -> None:
    q, k, v = (numbers(2, 50, 4, 64, dtype=BF16, seed=n) for n in range(3))
    lengths = torch.tensor([50, 50], dtype=torch.int32)
    assert_close_rms("o", ops.attention_decode(q, k, v, lengths), ops.attention(q, k, v).double(), 4e-3)


def test_decoding_token_by_token_is_the_whole_prefill() -> None:
    q, k, v = (numbers(1, 12, 2, 32, seed=n) for n in range(3))
    whole = ops.attention(q, k, v)
    k_cache, v_cache = torch.full((1, 16, 2, 32), math.nan), torch.full((1, 16, 2, 32), math.nan)
    for t in range(12):
        k_cache[:, t], v_cache[:, t] = k[:, t], v[:, t]
        o = ops.attention_decode(q[:, t : t + 1], k_cache, v_cache, torch.tensor([t + 1], dtype=torch.int32))
        assert_close_rms("o", o, whole[:, t : t + 1].double(), 1e-6)


def test_scores_far_apart_pick_the_largest_in_whichever_part_it_is() -> None:
    q = torch.zeros(1, 1, 1, 16)
    q[..., 0] = 1.0
    k, v = torch.zeros(1, 64, 1, 16), numbers(1, 64, 1, 16)
    k[..., 0] = -1e4
    k[0, 37, 0, 0] = 2e4
    with forced(ATTENTION_DECODE, {"splits": 4, "block_k": 16}, {}):
        lengths = torch.tensor([64], dtype=torch.int32)
        o, lse = ops.attention_decode(q, k, v, lengths, scale=1.0, return_lse=True)
    torch.testing.assert_close(o[0, 0], v[0, 37])
    assert lse.item() == 2e4


def test_caches_need_no_copy_whatever_their_strides() -> None:
    x = CASES["several-queries"]
    expected = ops.attention_decode(**x)
    moved = {n: x[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k_cache", "v_cache")}
    assert torch.equal(ops.attention_decode(**{**x, **moved}), expected)


def test_a_cache_without_slots_or_requests() -> None:
    lengths = torch.zeros(2, dtype=torch.int32)
    o, lse = ops.attention_decode(
        numbers(2, 3, 2, 16), numbers(2, 0, 1, 16), numbers(2, 0, 1, 16), lengths, return_lse=True
    )
    assert (o == 0).all()
    assert (lse == -math.inf).all()
    assert (
        ops.attention_decode(numbers(0, 1, 2, 16), numbers(0, 4, 1, 16), numbers(0, 4, 1, 16), lengths[:0]).numel() == 0
    )


def test_the_registration_passes_opcheck() -> None:
    x = CASES["zero-lengths"]
    overload = torch.ops.k3dsl.attention_decode.default
    arguments = (*x.values(), None, True, "ieee")
    torch.library.opcheck(overload, arguments, test_utils=("test_schema", "test_faketensor"))


def test_the_registry_has_what_the_command_line_asks_of_an_op() -> None:
    op = get_op("attention.decode")
    dims = {"B": 3, "T": 2, "S": 70, "H": 4, "HK": 2, "D": 32, "V": 0}
    options = op.resolve_options({})
    x = op.inputs(dims, options, "cpu", 0)
    outputs, expected = op.call(**x), op.reference(**x)
    for key, limit in op.limits(options).items():
        assert_close_rms(key, outputs[key], expected[key], limit)
    for peer in op.peers().values():
        assert_close_rms("peer's o", peer(**x)["o"], expected["o"], 1e-2)
    for dtype in ("bf16", "f16", "f32"):
        for given in ({}, {"B": 1, "S": 100_000}, {"T": 100, "HK": 0}, {"H": 96, "HK": 1}):
            assert op.point(given, {"dtype": dtype}).reasons() == []
    for seed in op.seeds:
        assert op.point({}, seed).reasons() == []
    with pytest.raises(LegalityError, match="hold no query of a group of 32 heads"):
        op.point({"H": 32, "HK": 1}, {"rows": 16}).plan("torch")


def test_one_request_with_a_long_cache_is_split_and_a_full_batch_is_not() -> None:
    op = get_op("attention.decode")
    alone = op.point({"B": 1, "S": 32768, "H": 32, "HK": 8}, {}).knobs["splits"]
    assert alone == 32
    assert op.point({"B": 256, "S": 32768, "H": 32, "HK": 8}, {}).knobs["splits"] == 1


Q, C, N = torch.zeros(2, 1, 4, 32), torch.zeros(2, 8, 2, 32), torch.tensor([3, 8], dtype=torch.int32)
WRONG = [
    (lambda: ops.attention_decode(Q, C, C, N.long()), "cache_seqlens", "int64, needs int32", "int32"),
    (lambda: ops.attention_decode(Q, C, C, N[:1]), "cache_seqlens", "needs [B] = [2]", "a request"),
    (lambda: ops.attention_decode(Q, C, C, N + 1), "cache_seqlens", "is 9 for request 1", "filled slots"),
    (lambda: ops.attention_decode(Q, C, C, N - 4), "cache_seqlens", "is -1 for request 0", "filled slots"),
    (lambda: ops.attention_decode(Q, C[..., :16], C, N), "k_cache", "D = 32", "as wide as q"),
    (lambda: ops.attention_decode(Q, C, C[:, :4], N), "v_cache", "of k_cache", "one value a key"),
    (lambda: ops.attention_decode(Q[:, :, :3], C, C, N), "k_cache", "HK = 2 heads", "heads"),
    (lambda: ops.attention_decode(Q, C, C, N, scale=-1.0), "scale", "-1.0", "positive"),
    (lambda: ops.attention_decode(Q, C, C, N, precision="bf8"), "precision", "'bf8'", "tf32"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "argument", "reason", "remedy"), WRONG)
def test_a_wrong_argument_is_named_with_the_reason_and_the_remedy(call, argument, reason, remedy) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.message.startswith(f"{argument}: ")
    assert reason in caught.value.message
    assert remedy in (caught.value.fix or "")
