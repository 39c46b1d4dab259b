"""k3dsl.ops.causal_conv1d and its update on the CPU backend: right on edge shapes, and well behaved as torch functions."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from op_examples import BF16, F32, numbers

from k3dsl import ops
from k3dsl.errors import ArgumentError, EvaluationError, LegalityError
from k3dsl.ops.causal_conv1d import api
from k3dsl.ops.causal_conv1d.reference import causal_conv1d as reference
from k3dsl.ops.causal_conv1d.space import CAUSAL_CONV1D, CAUSAL_CONV1D_UPDATE
from k3dsl.runtime.executable import Executable, recording
from k3dsl.runtime.judge import cases_of, judge
from k3dsl.runtime.metrics import assert_close_rms
from k3dsl.runtime.op import Case, forced

CASES = cases_of(CAUSAL_CONV1D)
UPDATES = cases_of(CAUSAL_CONV1D_UPDATE)


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_whole_sequences_meet_their_limits_and_repeat_bitwise(case: Case) -> None:
    (verdict,) = judge(CAUSAL_CONV1D, [case])
    assert verdict.problem is None


@pytest.mark.parametrize("case", UPDATES, ids=[c.name for c in UPDATES])
def test_an_update_meets_its_limits_and_repeats_bitwise(case: Case) -> None:
    (verdict,) = judge(CAUSAL_CONV1D_UPDATE, [case])
    assert verdict.problem is None


@pytest.mark.parametrize("knobs", [{"rows": 2, "steps": 1}, {"rows": 2, "steps": 2}, {"rows": 4, "steps": 16}])
@pytest.mark.parametrize("packed", [False, True])
def test_every_split_of_the_tokens_gives_right_numbers(knobs, packed, poisoned_memory: None) -> None:
    x, w = numbers(1, 45, 130), numbers(130, 4, seed=1)
    offsets = torch.tensor([0, 3, 3, 4, 21, 45]) if packed else None
    state = numbers(5 if packed else 1, 3, 130, seed=2)
    with forced(CAUSAL_CONV1D, {"block_p": 128, **knobs}, {}):
        y, last = ops.causal_conv1d(x, w, initial_state=state, output_final_state=True, cu_seqlens=offsets)
    expected, expected_last = reference(x, w, initial_state=state, cu_seqlens=offsets)
    assert_close_rms("y", y, expected, 2e-6)
    assert_close_rms("state", last, expected_last, 1e-12)


def test_numbers_worked_out_by_hand() -> None:
    x = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])
    w = torch.tensor([[1000.0, 100.0, 10.0, 1.0]])
    y, state = ops.causal_conv1d(x, w, activation=None, output_final_state=True)
    assert y.flatten().tolist() == [1, 12, 123, 1234]
    assert state.flatten().tolist() == [2, 3, 4]
    y, state = ops.causal_conv1d(x[:, :1], w, activation=None, initial_state=state, output_final_state=True)
    assert y.flatten().tolist() == [2341]
    assert state.flatten().tolist() == [3, 4, 1]  # one token: two older inputs stay
    bias = torch.tensor([-2341.0])
    assert ops.causal_conv1d(x[:, :1], w, bias, initial_state=torch.tensor([[[2.0], [3], [4]]]))[0].item() == 0.0
    one = ops.causal_conv1d(x[:, :1], w)[0].item()
    assert one == pytest.approx(1 / (1 + 2.718281828459045**-1), rel=1e-6)  # silu(1)


def test_packed_sequences_equal_each_one_alone_to_the_last_bit() -> None:
    x, w = numbers(1, 70, 96, dtype=BF16), numbers(96, 4, seed=1)
    lengths = [0, 1, 2, 3, 4, 0, 31, 28, 1, 0]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    states = numbers(len(lengths), 3, 96, dtype=BF16, seed=2)
    y, last = ops.causal_conv1d(x, w, initial_state=states, output_final_state=True, cu_seqlens=offsets)
    for n, length in enumerate(lengths):
        part = x[:, offsets[n] : offsets[n + 1]]
        alone, after = ops.causal_conv1d(part, w, initial_state=states[n : n + 1], output_final_state=True)
        assert alone.shape[1] == length
        assert torch.equal(y[:, offsets[n] : offsets[n + 1]], alone)
        assert torch.equal(last[n : n + 1], after)


def test_a_poisoned_neighbour_changes_nothing() -> None:
    x, w = numbers(1, 20, 64), numbers(64, 4, seed=1)
    offsets = torch.tensor([0, 7, 20])
    clean, state = ops.causal_conv1d(x, w, output_final_state=True, cu_seqlens=offsets)
    x[:, :7] = torch.nan
    y, after = ops.causal_conv1d(x, w, output_final_state=True, cu_seqlens=offsets)
    assert torch.equal(y[:, 7:], clean[:, 7:])
    assert torch.equal(after[1], state[1])
    assert y[:, :7].isnan().all()


def test_rows_past_the_last_sequence_are_zero(monkeypatch, poisoned_memory: None) -> None:
    monkeypatch.setattr(api, "check_offset_values", lambda *_: None)  # as on a GPU
    x, w = numbers(1, 40, 64), numbers(64, 4, seed=1)
    offsets = torch.tensor([0, 10, 33])
    with recording() as calls:
        y, last = ops.causal_conv1d(x, w, cu_seqlens=offsets, output_final_state=True)
    expected, expected_last = reference(x, w, cu_seqlens=offsets)
    assert (y[:, 33:] == 0).all()
    assert_close_rms("y", y, expected, 2e-6)
    assert_close_rms("state", last, expected_last, 1e-12)
    assert calls[0].tensors["sequence"].tolist() == [0] * 10 + [1] * 23 + [2] * 7


def test_tokens_find_their_sequence_among_many(poisoned_memory: None) -> None:
    """More sequences than a program compares with at a time, some of them empty, and tokens of several programs."""
    lengths = [(5 * n) % 7 for n in range(150)]
    x, w = numbers(1, sum(lengths), 32), numbers(32, 4, seed=1)
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    with recording() as calls:
        y, _ = ops.causal_conv1d(x, w, cu_seqlens=offsets)
    assert calls[0].tensors["sequence"].tolist() == [n for n, length in enumerate(lengths) for _ in range(length)]
    assert_close_rms("y", y, reference(x, w, cu_seqlens=offsets)[0], 2e-6)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_prefill_equals_token_by_token_to_the_last_bit(width: int) -> None:
    x, w = numbers(3, 13, 96, dtype=BF16), numbers(96, width, seed=1)
    state = numbers(3, width - 1, 96, dtype=BF16, seed=2)
    y, last = ops.causal_conv1d(x, w, initial_state=state, output_final_state=True)
    pool = torch.zeros(5, width - 1, 96, dtype=BF16)
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)
    pool[slots.long()] = state
    tokens = [ops.causal_conv1d_update(x[:, t], pool, w, slots) for t in range(10)]
    tokens += [*ops.causal_conv1d_update(x[:, 10:], pool, w, slots).unbind(1)]
    assert torch.equal(torch.stack(tokens, 1), y)
    assert torch.equal(pool[slots.long()], last)
    assert (pool[[1, 3]] == 0).all()


def test_a_split_prefill_equals_one_whole() -> None:
    x, w = numbers(2, 50, 64, dtype=BF16), numbers(64, 4, seed=1)
    whole, last = ops.causal_conv1d(x, w, output_final_state=True)
    state, parts = None, []
    for part in x.split([1, 2, 30, 0, 17], 1):
        y, state = ops.causal_conv1d(part, w, initial_state=state, output_final_state=True)
        parts.append(y)
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(state, last)


def test_padding_gives_zero_and_touches_no_slot(poisoned_memory: None) -> None:
    x, w = numbers(4, 2, 64), numbers(64, 4, seed=1)
    pool = numbers(6, 3, 64, seed=2)
    pool[3] = torch.nan  # a slot that nobody uses
    before = pool.clone()
    x[1] = torch.nan  # rows of padding hold anything
    slots = torch.tensor([5, -1, 0, -7], dtype=torch.int32)
    y = ops.causal_conv1d_update(x, pool, w, slots)
    assert (y[[1, 3]] == 0).all()
    assert y[[0, 2]].isfinite().all()
    assert torch.equal(pool[[1, 2, 4]], before[[1, 2, 4]])
    assert pool[3].isnan().all()
    assert torch.equal(pool[[5, 0], 1:], x[[0, 2]])
    assert torch.equal(pool[[5, 0], 0], before[[5, 0], 2])


def test_slices_of_a_fused_projection_are_read_in_place() -> None:
    qkv, w = numbers(2, 20, 3 * 64, dtype=BF16), numbers(64, 1, 4, seed=1)
    for n in range(3):
        part = qkv[..., 64 * n : 64 * (n + 1)]
        assert torch.equal(ops.causal_conv1d(part, w)[0], ops.causal_conv1d(part.contiguous(), w)[0])
    wide = w.flatten(1).T.contiguous().T  # channels contiguous
    assert torch.equal(ops.causal_conv1d(qkv[..., :64], wide)[0], ops.causal_conv1d(qkv[..., :64], w)[0])
    pool = numbers(2, 3, 3 * 64, dtype=BF16)
    expected = pool[..., :64].contiguous()
    y = ops.causal_conv1d_update(qkv[:, 0, :64], expected, w)
    assert torch.equal(ops.causal_conv1d_update(qkv[:, 0, :64], pool[..., :64], w), y)
    assert torch.equal(pool[..., :64], expected)


@pytest.mark.parametrize("packed", [False, True])
def test_without_tokens_the_state_stays(packed: bool) -> None:
    x, w, state = torch.zeros(1, 0, 64), numbers(64, 4), numbers(2 if packed else 1, 3, 64)
    offsets = torch.tensor([0, 0, 0]) if packed else None
    y, last = ops.causal_conv1d(x, w, initial_state=state, output_final_state=True, cu_seqlens=offsets)
    assert y.shape == (1, 0, 64)
    assert torch.equal(last, state)
    assert ops.causal_conv1d(x, w)[1] is None
    assert ops.causal_conv1d_update(torch.zeros(0, 64), numbers(0, 3, 64), w).shape == (0, 64)


def test_two_requests_on_one_slot_are_found_by_the_cpu_backend() -> None:
    plan = CAUSAL_CONV1D_UPDATE.point({"B": 2, "P": 64, "pool": 3}, {"dtype": "f32"}).plan("torch")
    tensors = {"x": numbers(2, 1, 64), "weight": numbers(64, 4), "conv_state": numbers(3, 3, 64)}
    with pytest.raises(EvaluationError, match="conv_state"):
        Executable(plan, None, "cpu")({**tensors, "slots": torch.tensor([1, 1], dtype=torch.int32)}, {})


def test_knobs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LegalityError, match="take more warps"):
        CAUSAL_CONV1D.point({}, {"block_p": 2048, "rows": 16, "num_warps": 1}).plan("torch")
    with pytest.raises(LegalityError, match="W = 5 taps"):
        CAUSAL_CONV1D.point({"W": 5}, {}).plan("torch")
    for op in (CAUSAL_CONV1D, CAUSAL_CONV1D_UPDATE):
        for channels in (1, 64, 200, 1536, 4608, 12288, 36864):
            for size in (1, 7, 300):
                for dtype in ("bf16", "f32"):
                    dims = {"P": channels, "B": size, **({"T": size} if op is CAUSAL_CONV1D else {})}
                    assert op.point(dims, {"dtype": dtype}).reasons() == []


X, W = torch.zeros(2, 5, 8), torch.zeros(8, 4)
POOL = torch.zeros(4, 3, 8)
SLOTS = torch.tensor([0, 1], dtype=torch.int32)
WRONG = [
    (lambda: ops.causal_conv1d(X[0], W), "x", "needs 3 dims [B, T, P]", "unsqueeze"),
    (lambda: ops.causal_conv1d(X.transpose(1, 2), W), "x", "last dim must be contiguous", "contiguous()"),
    (lambda: ops.causal_conv1d(X.double(), W), "x", "float64", "bfloat16"),
    (lambda: ops.causal_conv1d(X, W.T), "weight", "needs [P, W] or [P, 1, W] with P = 8", "a channel"),
    (lambda: ops.causal_conv1d(X, torch.zeros(8, 5)), "weight", "W from 2 to 4", "a channel"),
    (lambda: ops.causal_conv1d(X, W.half()), "weight", "float16, x is float32", "weight.float()"),
    (lambda: ops.causal_conv1d(X, W, torch.zeros(4)), "bias", "needs [P] = [8]", "a channel"),
    (lambda: ops.causal_conv1d(X, W, activation="gelu"), "activation", "'gelu'", "silu"),
    (lambda: ops.causal_conv1d(X, W, initial_state=POOL[:1]), "initial_state", "holds 1 states", "every sequence"),
    (lambda: ops.causal_conv1d(X, W, initial_state=torch.zeros(2, 8, 4)), "initial_state", "[., 3, 8]", "fla"),
    (lambda: ops.causal_conv1d(X, W, initial_state=POOL[:2].half()), "initial_state", "float16", "x.dtype"),
    (lambda: ops.causal_conv1d(X, W, cu_seqlens=torch.tensor([0, 5])), "cu_seqlens", "B = 2", "flatten"),
    (lambda: ops.causal_conv1d(X[:1], W, cu_seqlens=torch.tensor([0, 4])), "cu_seqlens", "ends at 4", "end at T"),
    (lambda: ops.causal_conv1d_update(X[0, 0], POOL, W), "x", "needs [B, P] or [B, Tq, P]", "a request"),
    (lambda: ops.causal_conv1d_update(torch.zeros(2, 17, 8), POOL, W), "x", "Tq = 17", "causal_conv1d"),
    (lambda: ops.causal_conv1d_update(X, POOL, W), "conv_state", "4 slots for 2 requests", "pass slots"),
    (lambda: ops.causal_conv1d_update(X, POOL, W, SLOTS.long()), "slots", "int64, needs int32", "int32"),
    (lambda: ops.causal_conv1d_update(X, POOL, W, SLOTS[:1]), "slots", "needs [B] = [2]", "a request"),
    (lambda: ops.causal_conv1d_update(X, POOL, W, SLOTS + 3), "slots", "slot 4 of a pool of 4", "-1 is padding"),
    (lambda: ops.causal_conv1d_update(X, POOL, W, SLOTS * 0), "slots", "slot 0 twice", "its own slot"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "argument", "reason", "remedy"), WRONG)
def test_a_wrong_argument_is_named_with_the_reason_and_the_remedy(call, argument, reason, remedy) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.message.startswith(f"{argument}: ")
    assert reason in caught.value.message
    assert remedy in (caught.value.fix or "")


def plain(x, w, bias, state, offsets):
    """The convolution in torch operations, sequence by sequence, for autograd to differentiate."""
    bounds = [(0, x.shape[1])] if offsets is None else list(pairwise(offsets))
    outputs, states = [], []
    for n, (a, b) in enumerate(bounds):
        padded = torch.cat([state[n : n + 1], x[:, a:b]], 1)
        states.append(padded[:, padded.shape[1] - w.shape[1] + 1 :])
        if a == b:  # torch's conv1d takes no empty result
            continue
        out = torch.nn.functional.conv1d(padded.transpose(1, 2), w[:, None], bias, groups=x.shape[2]).transpose(1, 2)
        outputs.append(torch.nn.functional.silu(out))
    return torch.cat(outputs, 1), torch.cat(states)


@pytest.mark.parametrize("offsets", [None, [0, 1, 1, 6, 9]])
def test_gradients_are_those_of_plain_torch(offsets) -> None:
    n = 1 if offsets is None else 4
    inputs = [numbers(1, 9, 5), numbers(5, 4, seed=1), numbers(5, seed=2), numbers(n, 3, 5, seed=3)]
    ours = [t.clone().requires_grad_() for t in inputs]
    theirs = [t.double().requires_grad_() for t in inputs]
    x, w, bias, state = ours
    cu = None if offsets is None else torch.tensor(offsets)
    y, last = ops.causal_conv1d(x, w, bias, initial_state=state, output_final_state=True, cu_seqlens=cu)
    expected, expected_last = plain(*theirs, offsets)
    a, b = numbers(*y.shape, seed=8), numbers(*last.shape, seed=9)
    got = torch.autograd.grad((y * a).sum() + (last * b).sum(), ours)
    wanted = torch.autograd.grad((expected * a).sum() + (expected_last * b).sum(), theirs)
    for name, g, e in zip(("x", "weight", "bias", "state"), got, wanted, strict=True):
        assert_close_rms(f"gradient of {name}", g, e, 1e-5)
    (alone,) = torch.autograd.grad(ops.causal_conv1d(x, w)[0].sum(), x)
    double = x.detach().double().requires_grad_()
    (wanted_alone,) = torch.autograd.grad(
        plain(double, theirs[1], None, torch.zeros(1, 3, 5).double(), None)[0].sum(), double
    )
    assert_close_rms("gradient without a state", alone, wanted_alone, 1e-5)


def test_the_registrations_hold_under_opcheck_and_torch_compile() -> None:
    x, w, state = numbers(2, 6, 64), numbers(64, 4, seed=1), numbers(2, 3, 64, seed=2)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.k3dsl.causal_conv1d.default, (x, w, None, state, None, True, True), test_utils=checks
    )
    slots = torch.tensor([1, -1], dtype=torch.int32)
    update = torch.ops.k3dsl.causal_conv1d_update_.default
    torch.library.opcheck(update, (x, state, w, slots, None, True), test_utils=checks)

    def block(x: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        y, _ = ops.causal_conv1d(x, w)
        return ops.causal_conv1d_update(y[:, 0], pool, w)

    ours, compiled_pool = state.clone(), state.clone()
    expected = block(x, ours)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, compiled_pool), expected)
    assert torch.equal(compiled_pool, ours)
    assert ours.dtype == F32
