"""k3dsl.ops.kda_step and kda_commit on the CPU backend: the fp64 chain, our own three ops, slots, kept states, rollback."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from k3dsl import ops
from k3dsl.errors import ArgumentError, EvaluationError, LegalityError
from k3dsl.ops.kda.inputs import Case as KdaCase
from k3dsl.ops.kda_step import api, reference
from k3dsl.ops.kda_step.judge import draw
from k3dsl.ops.kda_step.space import COMMIT, STEP
from k3dsl.runtime.executable import Executable
from k3dsl.runtime.judge import cases_of, judge
from k3dsl.runtime.metrics import assert_close_rms
from k3dsl.runtime.op import Case

CASES = cases_of(STEP)
BENCH = KdaCase("bench", H=2, K=64)
PER_TOKEN = ("g", "beta", "output_gate", "qkv")


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_every_case_meets_its_limits_and_repeats_bitwise(case: Case) -> None:
    (verdict,) = judge(STEP, [case])
    assert verdict.problem is None


def pools(kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return kwargs["state"].clone(), kwargs["conv_state"].clone()


def tokens(kwargs: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    return {n: x[:, first:last] if n in PER_TOKEN else x for n, x in kwargs.items()}


# ---- against its parts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["bench", "softplus"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_equal_the_chain_of_prefill_ops(gate: str, dtype: torch.dtype) -> None:
    """Convolution, chunked KDA and gated norm over the whole sequence against steps of 1, 2, 4 and 5 tokens."""
    H, K, T = 2, 64, 12
    kwargs = draw(replace(BENCH, gate=gate, dtype=dtype), 2, T)
    slots = kwargs["slots"].long()
    y, window = ops.causal_conv1d(
        kwargs["qkv"],
        kwargs["conv_weight"],
        initial_state=kwargs["conv_state"][slots],
        output_final_state=True,
    )
    q, k, v = (part.unflatten(-1, (H, K)) for part in y.split(H * K, -1))
    o, state = ops.kda(
        q,
        k,
        v,
        kwargs["g"],
        kwargs["beta"],
        A_log=kwargs["A_log"],
        dt_bias=kwargs["dt_bias"],
        lower_bound=kwargs["lower_bound"],
        initial_state=kwargs["state"][slots],
        output_final_state=True,
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )
    chain = ops.gated_rmsnorm(o, kwargs["output_gate"], kwargs["norm_weight"])
    outputs, first = [], 0
    for count in (1, 2, 4, 5):
        outputs.append(ops.kda_step(**tokens(kwargs, first, first + count)))
        first += count
    limit = 1e-5 if dtype == torch.float32 else 1e-2  # the chain rounds q, k, v and o on the way
    assert_close_rms("o", torch.cat(outputs, 1), chain, limit)
    assert_close_rms("state", kwargs["state"][slots], state, limit)
    assert torch.equal(kwargs["conv_state"][slots], window)


def test_one_token_equals_the_chain_of_decode_ops() -> None:
    kwargs = draw(replace(BENCH, dtype=torch.float32), 3, 1)
    chain_state, chain_window = pools(kwargs)
    y = ops.causal_conv1d_update(kwargs["qkv"], chain_window, kwargs["conv_weight"], kwargs["slots"])
    o, _ = ops.kda_decode(
        *(part.unflatten(-1, (2, 64)) for part in y.split(128, -1)),
        kwargs["g"],
        kwargs["beta"],
        chain_state,
        kwargs["slots"],
        A_log=kwargs["A_log"],
        dt_bias=kwargs["dt_bias"],
        lower_bound=kwargs["lower_bound"],
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )
    got = ops.kda_step(**kwargs)
    assert_close_rms("o", got, ops.gated_rmsnorm(o, kwargs["output_gate"], kwargs["norm_weight"]), 2e-6)
    assert_close_rms("state", kwargs["state"], chain_state, 1e-6)
    assert torch.equal(kwargs["conv_state"], chain_window)


def test_separate_q_k_v_of_either_rank_give_the_same_bits() -> None:
    kwargs = draw(BENCH, 2, 3)
    state, window = pools(kwargs)
    parts = kwargs["qkv"].split(128, -1)
    expected = ops.kda_step(**kwargs)
    for split in (tuple(parts), [p.unflatten(-1, (2, 64)).contiguous() for p in parts]):
        again = {**kwargs, "qkv": split, "state": state.clone(), "conv_state": window.clone()}
        assert torch.equal(ops.kda_step(**again), expected)
        assert torch.equal(again["state"], kwargs["state"])
        assert torch.equal(again["conv_state"], kwargs["conv_state"])


# ---- several tokens, kept states, rollback -----------------------------------------------------------------------------


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_first", [False, True])
def test_kept_states_are_those_of_one_token_at_a_time(state: torch.dtype, v_first: bool, poisoned_memory: None) -> None:
    kwargs = draw(replace(BENCH, state_v_first=v_first), 2, 4)
    kwargs["state"] = kwargs["state"].to(state)
    before = pools(kwargs)
    slots = kwargs["slots"].long()
    o, states, windows = ops.kda_step(**kwargs, output_states=True)
    assert torch.equal(kwargs["state"], before[0])  # the pools are left alone
    assert torch.equal(kwargs["conv_state"], before[1])
    for t in range(4):
        assert torch.equal(ops.kda_step(**tokens(kwargs, t, t + 1)), o[:, t : t + 1])
        assert torch.equal(kwargs["state"][slots], states[:, t])
        assert torch.equal(kwargs["conv_state"][slots], windows[:, t])


def test_a_commit_leaves_what_the_accepted_tokens_alone_would_have_left() -> None:
    kwargs = draw(BENCH, 5, 3)
    kwargs["slots"][4] = -1
    accepted = torch.tensor([0, 1, 2, 3, 2], dtype=torch.int32)
    expected_state, expected_window = pools(kwargs)
    for row, count in enumerate(accepted.tolist()):
        if count and row != 4:
            alone = {n: x[row : row + 1] if n in (*PER_TOKEN, "slots") else x for n, x in kwargs.items()}
            alone |= {"state": expected_state, "conv_state": expected_window}
            ops.kda_step(**tokens(alone, 0, count))
    _, states, windows = ops.kda_step(**kwargs, output_states=True)
    states[4], windows[4] = torch.nan, torch.nan  # undefined for padding
    ops.kda_commit(kwargs["state"], kwargs["conv_state"], states, windows, accepted, kwargs["slots"])
    assert torch.equal(kwargs["state"], expected_state)
    assert torch.equal(kwargs["conv_state"], expected_window)


def test_a_count_beyond_the_tokens_or_below_0_reads_nothing_outside(monkeypatch) -> None:
    monkeypatch.setattr(api, "check_numbers", lambda *_: None)  # as on a GPU, where it is not checked
    kept = torch.randn(4, 2, 3, 5, generator=torch.Generator().manual_seed(0))
    pool, window = torch.zeros(4, 3, 5), torch.zeros(4, 7)
    counts = torch.tensor([-3, 0, 9, 1], dtype=torch.int32)
    ops.kda_commit(pool, window, kept, torch.ones(4, 2, 7), counts)
    assert (pool[:2] == 0).all()
    assert torch.equal(pool[2:], torch.stack([kept[2, 1], kept[3, 0]]))
    assert window[:, 0].tolist() == [0, 0, 1, 1]


def test_the_commit_meets_its_reference() -> None:
    for settings in ({}, {"dtype": "bf16", "indexed": False}):
        (verdict,) = judge(COMMIT, cases_of(COMMIT, dims={"B": 5, "E": 4100}, options=settings))
        assert verdict.problem is None


# ---- slots -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_padding_gives_zero_and_touches_no_slot(count: int, poisoned_memory: None) -> None:
    kwargs = draw(BENCH, 4, count)
    kwargs["slots"] = torch.tensor([5, -1, 0, -9], dtype=torch.int32)
    for name in PER_TOKEN:
        kwargs[name][[1, 3]] = torch.nan  # rows of padding hold anything
    kwargs["state"][2], kwargs["conv_state"][2] = torch.nan, torch.nan  # a poisoned slot that nobody uses
    state, window = pools(kwargs)
    o = ops.kda_step(**kwargs)
    assert (o[[1, 3]] == 0).all()
    assert o[[0, 2]].isfinite().all()
    others = [1, 3, 4, 6]
    assert torch.equal(kwargs["state"][others], state[others])
    assert torch.equal(kwargs["conv_state"][others], window[others])
    assert kwargs["state"][2].isnan().all()
    assert not torch.equal(kwargs["state"][[5, 0]], state[[5, 0]])


def test_a_poisoned_state_stays_in_its_slot_and_a_cleared_one_is_a_new_sequence() -> None:
    kwargs = draw(BENCH, 3, 2)
    slots = kwargs["slots"].tolist()
    clean_state, clean_window = pools(kwargs)
    expected = ops.kda_step(**{**kwargs, "state": clean_state, "conv_state": clean_window})
    kwargs["state"][slots[1]] = torch.nan
    kwargs["conv_state"][slots[2]] = torch.inf
    o = ops.kda_step(**kwargs)
    assert torch.equal(o[0], expected[0])
    assert torch.equal(kwargs["state"][slots[0]], clean_state[slots[0]])
    assert not o[1].isfinite().any()
    kwargs["state"][slots[1]], kwargs["conv_state"][slots[1]] = 0.0, 0.0
    fresh = reference.kda_step(**kwargs)
    assert_close_rms("o", ops.kda_step(**kwargs)[1], fresh.o[1], 4e-3)


def test_two_requests_on_one_slot_are_found_by_the_cpu_backend() -> None:
    plan = STEP.point({"B": 2, "H": 1, "K": 64, "V": 64, "pool": 5}, {"weight_dtype": "f32"}).plan("torch")
    kwargs = draw(replace(BENCH, H=1), 2, 1)
    q, k, v = (part.unflatten(-1, (1, 64)) for part in kwargs["qkv"].split(64, -1))
    names = ("g", "beta", "output_gate", "conv_weight", "A_log", "norm_weight", "state", "conv_state")
    tensors = {"q": q, "k": k, "v": v, **{n: kwargs[n] for n in names}, "dt_bias": kwargs["dt_bias"].view(1, 64)}
    with pytest.raises(EvaluationError, match="state"):
        Executable(plan, None, "cpu")({**tensors, "slots": torch.tensor([2, 2], dtype=torch.int32)}, {})


def test_pools_whose_slots_lie_apart_and_no_requests() -> None:
    kwargs = draw(BENCH, 2, 2)
    wide = torch.full((5, 3, 2, 64, 64), torch.nan)
    wide[:, 1] = kwargs["state"]
    expected = ops.kda_step(**kwargs)
    assert torch.equal(ops.kda_step(**{**kwargs, **fresh_window(2), "state": wide[:, 1]}), expected)
    assert torch.equal(wide[:, 1], kwargs["state"])
    assert wide[:, [0, 2]].isnan().all()
    none = {n: x[:0] if n in (*PER_TOKEN, "slots") else x for n, x in kwargs.items()}
    o, states, windows = ops.kda_step(**none, output_states=True)
    assert (o.shape, states.shape, windows.shape) == ((0, 2, 2, 64), (0, 2, 2, 64, 64), (0, 2, 3, 384))
    ops.kda_commit(kwargs["state"], kwargs["conv_state"], states, windows, none["slots"], none["slots"])


def fresh_window(count: int) -> dict[str, torch.Tensor]:
    return {"conv_state": draw(BENCH, 2, count)["conv_state"]}


# ---- wrong arguments and torch -----------------------------------------------------------------------------------------


def changed(**changes: Any) -> Any:
    kwargs = draw(BENCH, 2, 1)
    return lambda: ops.kda_step(**{**kwargs, **{n: f(kwargs[n]) for n, f in changes.items()}})


WRONG = [
    (changed(qkv=lambda x: x[..., :-1]), "qkv", "needs [B, Tq, 2 H K + H V] = [2, 1, 384]", "side by side"),
    (changed(qkv=lambda x: (x, x)), "qkv", "is a tuple", "(q, k, v)"),
    (changed(qkv=lambda x: (*x.split(128, -1)[:2], x)), "v", "needs [2, 1, 128] or [2, 1, 2, 64]", "output_gate"),
    (changed(g=lambda x: x.flatten(2)), "g", "needs 4 dims [B, Tq, H, K]", "unflatten"),
    (changed(g=lambda x: x.expand(2, 9, 2, 64)), "g", "Tq = 9", "kda for more"),
    (changed(g=lambda x: x[..., :40]), "g", "K = 40", "zeros"),
    (changed(g=lambda x: x.half()), "g", "float16, needs q's bfloat16", "g.float()"),
    (changed(output_gate=lambda x: x[..., :8]), "output_gate", "V = 8", "three ops"),
    (changed(output_gate=lambda x: x[:1]), "output_gate", "needs [2, 1, 2, 64]", "from g"),
    (changed(beta=lambda x: x[..., None]), "beta", "needs [2, 1, 2]", "a head"),
    (changed(conv_weight=lambda x: x[:9]), "conv_weight", "C = 2 H K + H V = 384", "torch.cat"),
    (changed(A_log=lambda x: torch.zeros(128)), "A_log", "needs H = 2", "padding"),
    (changed(norm_weight=lambda x: x[:5]), "norm_weight", "needs V = 64", "V numbers"),
    (changed(state=lambda x: x[:, :1]), "state", "needs [., 2, 64, 64]", "[slots, H, K, V]"),
    (changed(state=lambda x: x.half()), "state", "float16", "float32"),
    (changed(state=lambda x: x.transpose(2, 3)), "state", "slot must be contiguous", "[slots, ...]"),
    (changed(conv_state=lambda x: x[:, :2]), "conv_state", "needs [slots, W-1, C] = [., 3, 384]", "side by side"),
    (changed(conv_state=lambda x: x[:4]), "conv_state", "4 slots, state has 5", "both pools"),
    (changed(slots=lambda x: x.long()), "slots", "int64, needs int32", "int32"),
    (changed(slots=lambda x: x * 0), "slots", "slot 0 twice", "its own slot"),
    (changed(lower_bound=lambda x: 5.0), "lower_bound", "below 0", "-5.0"),
    (changed(scale=lambda x: float("nan")), "scale", "nan", "finite"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "argument", "reason", "remedy"), WRONG)
def test_a_wrong_argument_is_named_with_the_reason_and_the_remedy(call, argument, reason, remedy) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.message.startswith(f"{argument}: ")
    assert reason in caught.value.message
    assert remedy in (caught.value.fix or "")


def test_a_wrong_commit_is_named_with_the_reason_and_the_remedy() -> None:
    pool, window = torch.zeros(4, 2, 3), torch.zeros(4, 5)
    kept, rows = torch.zeros(3, 2, 2, 3), torch.zeros(3, 2, 5)
    slots = torch.tensor([0, 1, 2], dtype=torch.int32)
    wrong = [
        ((pool, window, kept[..., :2], rows, slots, slots), "states: has shape"),
        ((pool, window, kept, rows[:2], slots, slots), "windows: has shape"),
        ((pool, window, kept.half(), rows, slots, slots), "states: is float16, state is float32"),
        ((pool, window, kept, rows, slots.long(), slots), "num_accepted: is int64"),
        ((pool, window, kept, rows, slots[:2], slots), r"num_accepted: has shape \[2\], needs \[B\] = \[3\]"),
        ((pool, window, kept, rows, slots - 1, slots), "num_accepted: is -1, needs 0 to Tq = 2"),
        ((pool, window, kept, rows, slots + 1, slots), "num_accepted: is 3, needs 0 to Tq = 2"),
        ((pool, window, kept, rows, slots, slots + 2), "slots: names slot 4 of a pool of 4"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            ops.kda_commit(*arguments)


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LegalityError, match="take more warps"):
        STEP.point({}, {"num_warps": 2}).plan("torch")
    with pytest.raises(LegalityError, match="T = 9 tokens"):
        STEP.point({"T": 9}, {}).plan("torch")
    with pytest.raises(LegalityError, match="V = 256"):
        STEP.point({"V": 256}, {"num_warps": 16}).plan("torch")
    for K, V in ((64, 16), (64, 64), (128, 96), (128, 128)):
        assert STEP.point({"K": K, "V": V}, {}).reasons() == []


def test_the_registrations_hold_under_opcheck_and_torch_compile() -> None:
    kwargs = draw(replace(BENCH, H=1), 2, 2)
    q, k, v = (part.unflatten(-1, (1, 64)) for part in kwargs["qkv"].split(64, -1))
    names = (
        "g",
        "beta",
        "output_gate",
        "conv_weight",
        "A_log",
        "dt_bias",
        "norm_weight",
        "state",
        "conv_state",
        "slots",
    )
    arguments = (q, k, v, *(kwargs[n] for n in names), -5.0, None, 1e-5, "sigmoid", False)
    for overload in (torch.ops.k3dsl.kda_step_.default, torch.ops.k3dsl.kda_step.default):
        torch.library.opcheck(overload, arguments, test_utils=("test_schema", "test_faketensor"))
    accepted = torch.tensor([1, 2], dtype=torch.int32)

    def speculate(state: torch.Tensor, conv_state: torch.Tensor) -> torch.Tensor:
        o, states, windows = ops.kda_step(**{**kwargs, "state": state, "conv_state": conv_state}, output_states=True)
        ops.kda_commit(state, conv_state, states, windows, accepted, kwargs["slots"])
        return o + ops.kda_step(**{**kwargs, "state": state, "conv_state": conv_state})

    eager, compiled_pools = pools(kwargs), pools(kwargs)
    expected = speculate(*eager)
    compiled = torch.compile(speculate, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*compiled_pools), expected)
    assert all(torch.equal(a, b) for a, b in zip(compiled_pools, eager, strict=True))
