"""KDA on the GPU: every family at full width, repeats, CUDA graphs, long tensors. Run with `-n 8`: compiling dominates."""

from __future__ import annotations

import pytest
import torch
from cuda_calls import no_waiting

from k3dsl.ops import kda, kda_decode
from k3dsl.ops.kda.inputs import Case, correctness_cases, make, make_decode
from k3dsl.ops.kda.reference import recurrence
from k3dsl.runtime.metrics import assert_close_rms

pytestmark = pytest.mark.gpu
WHOLE = correctness_cases("whole")


@pytest.mark.parametrize("case", WHOLE, ids=[c.name for c in WHOLE])
def test_forward_meets_its_limits_and_repeats_bitwise(case: Case, poisoned_memory: None) -> None:
    kwargs = make(case, "cuda")
    o, state = kda(**kwargs)
    expected, expected_state = recurrence(**kwargs)
    assert_close_rms("o", o, expected, case.limit_o)
    assert_close_rms("final state", state, expected_state, case.limit_state)
    for _ in range(10):
        again, state_again = kda(**kwargs)
        assert torch.equal(o, again)
        assert torch.equal(state, state_again)


@pytest.mark.parametrize("gate", ["bench", "softplus", "log-sigmoid", "cut-10"])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("heads", [1, 12, 96])
def test_decode_updates_its_slots_and_no_others(gate: str, v_first: bool, heads: int, poisoned_memory: None) -> None:
    case = Case("decode", gate=gate, H=heads, K=128, state_v_first=v_first)
    kwargs = make_decode(case, batch=5, device="cuda")
    pool = kwargs["state"].clone()
    indices = kwargs["state_indices"].tolist()
    o, updated = kda_decode(**kwargs)
    untouched = [s for s in range(pool.shape[0]) if s not in indices]
    assert torch.equal(updated[untouched], pool[untouched])
    rows = [r for r, slot in enumerate(indices) if slot >= 0]
    flags = {n: x for n, x in kwargs.items() if n not in ("state", "state_indices")}
    tokens = {n: (x[rows] if n in ("q", "k", "v", "g", "beta") else x) for n, x in flags.items()}
    slots = torch.tensor([indices[r] for r in rows], device="cuda")
    expected, expected_state = recurrence(**tokens, initial_state=pool[slots])
    assert_close_rms("o", o[rows], expected, 5e-3)
    assert_close_rms("state", updated[slots], expected_state, 1e-5)
    padded = [r for r, slot in enumerate(indices) if slot < 0]
    assert torch.equal(o[padded], torch.zeros_like(o[padded]))


@pytest.mark.parametrize("gate", ["bench", "softplus"])
def test_an_output_never_depends_on_later_tokens_to_the_last_bit(gate: str) -> None:
    kwargs = make(Case("causal", gate=gate, T=200, K=128, H=4), "cuda")
    for t in (17, 64, 101, 199):
        before = kda(**kwargs)[0][:, :t].clone()
        changed = dict(kwargs)
        for name in ("q", "k", "v", "g", "beta"):
            changed[name] = kwargs[name].clone()
            changed[name][:, t:] = torch.randn_like(changed[name][:, t:]) * 3
        assert torch.equal(kda(**changed)[0][:, :t], before)


def test_captures_into_a_cuda_graph_and_replays_on_new_inputs() -> None:
    kwargs = make(Case("graph", T=256, K=128, H=4), "cuda")
    decode = make_decode(Case("graph", K=128, H=4), batch=4, device="cuda")
    packed = make(Case("graph", cu_seqlens=(0, 63, 64, 65, 200), K=128, H=4), "cuda")
    kda(**kwargs)
    kda_decode(**{**decode, "state": decode["state"].clone()})
    kda(**packed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = kda(**kwargs)
        token, _ = kda_decode(**decode)
        ragged, _ = kda(**packed)
    pool = decode["state"].clone()
    kwargs["v"].copy_(torch.randn_like(kwargs["v"]))
    packed["cu_seqlens"].copy_(torch.tensor([0, 5, 70, 71, 200]))
    graph.replay()
    torch.cuda.synchronize()
    expected, expected_state = kda(**kwargs)
    assert torch.equal(o, expected)
    assert torch.equal(state, expected_state)
    assert torch.equal(token, kda_decode(**{**decode, "state": pool})[0])
    assert torch.equal(ragged, kda(**packed)[0])


def test_a_call_never_waits_for_the_gpu() -> None:
    kwargs = make(Case("sync", cu_seqlens=(0, 63, 64, 65, 200), K=128, H=4), "cuda")
    decode = make_decode(Case("sync", K=128, H=4), batch=4, device="cuda")
    kda(**kwargs)
    kda_decode(**decode)
    with no_waiting():
        kda(**kwargs)
        kda_decode(**decode)


def test_offsets_beyond_two_to_the_31_are_right() -> None:
    tokens, heads = 180_000, 96
    assert tokens * heads * 128 > 2**31
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    kwargs = {
        "q": draw(1, tokens, heads, 128),
        "k": draw(1, tokens, heads, 128),
        "v": draw(1, tokens, heads, 128),
        "g": draw(1, tokens, heads, 128),
        "beta": draw(1, tokens, heads),
        "A_log": torch.rand(heads, device="cuda"),
        "dt_bias": torch.rand(heads * 128, device="cuda"),
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": -5.0,
        "output_final_state": True,
    }
    o, state = kda(**kwargs)
    cut = 174_784
    tail = {n: (x[:, cut:] if n in ("q", "k", "v", "g", "beta") else x) for n, x in kwargs.items()}
    head = {n: (x[:, cut - 2048 : cut] if n in ("q", "k", "v", "g", "beta") else x) for n, x in kwargs.items()}
    _, before = kda(**head)  # these gates forget within a few hundred tokens
    expected, expected_state = kda(**tail, initial_state=before)
    assert_close_rms("o past 2^31", o[:, cut:], expected, 1e-3)
    assert_close_rms("state", state, expected_state, 1e-3)
