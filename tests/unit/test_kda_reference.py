"""KDA's definition and its differentiable chunk form: against the formulas written out, and against each other."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from k3dsl.ops.kda.chunked import chunked
from k3dsl.ops.kda.inputs import Case, correctness_cases, make
from k3dsl.ops.kda.reference import activate, l2norm, recurrence
from k3dsl.runtime.metrics import assert_close_rms

BOTH = pytest.mark.parametrize("compute", [recurrence, chunked], ids=["recurrence", "chunked"])


def random_inputs(
    B: int = 1, T: int = 7, H: int = 1, HV: int = 1, K: int = 4, V: int = 3, seed: int = 0
) -> dict[str, Any]:
    """Activated float64 inputs: decays between exp(-2) and 1, betas in (0, 1)."""
    r = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=r, dtype=torch.float64)

    return {
        "q": normal(B, T, H, K),
        "k": torch.nn.functional.normalize(normal(B, T, H, K), dim=-1),
        "v": normal(B, T, HV, V),
        "g": -2 * torch.rand((B, T, HV, K), generator=r, dtype=torch.float64),
        "beta": torch.rand((B, T, HV), generator=r, dtype=torch.float64),
    }


def written_out(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, state: Any) -> tuple[np.ndarray, np.ndarray]:
    """One sequence of one head, element by element: q, k, g [T, K], v [T, V], beta [T], state [K, V]."""
    tokens, width = k.shape
    s = [[float(x) for x in row] for row in state]
    o = np.zeros(v.shape)
    for t in range(tokens):
        for c in range(v.shape[1]):
            for d in range(width):
                s[d][c] = math.exp(g[t, d]) * s[d][c]
            u = v[t, c] - sum(k[t, d] * s[d][c] for d in range(width))
            for d in range(width):
                s[d][c] += beta[t] * k[t, d] * u
            o[t, c] = scale * sum(q[t, d] * s[d][c] for d in range(width))
    return o, np.array(s)


def same(actual: torch.Tensor | None, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    assert actual is not None
    assert_close_rms("result", actual, expected, tolerance)


@BOTH
def test_the_formulas_written_out_give_the_same_numbers(compute: Any) -> None:
    x = random_inputs(B=2, T=9, H=1, HV=3)
    initial = torch.randn(2, 3, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    o, final = compute(**x, scale=0.3, initial_state=initial)
    for b in range(2):
        for h in range(3):
            q, k = x["q"][b, :, 0], x["k"][b, :, 0]
            head = (a.numpy() for a in (q, k, x["v"][b, :, h], x["g"][b, :, h], x["beta"][b, :, h]))
            want_o, want_state = written_out(*head, 0.3, initial[b, h].numpy())
            np.testing.assert_allclose(o[b, :, h], want_o, rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(final[b, h], want_state, rtol=1e-12, atol=1e-14)


@BOTH
def test_one_token_from_an_empty_state_returns_beta_times_v_times_q_dot_k(compute: Any) -> None:
    x = random_inputs(T=1)
    o, final = compute(**x)
    x = {name: value[0, 0, 0] for name, value in x.items()}
    same(o[0, 0, 0], x["beta"] * (x["q"] @ x["k"]) * 4**-0.5 * x["v"])  # the scale is 1/sqrt(K), K = 4
    same(final[0, 0], x["beta"] * torch.outer(x["k"], x["v"]))


@BOTH
def test_a_key_written_with_beta_one_reads_back_its_value(compute: Any) -> None:
    x = random_inputs(T=6)
    x["q"], x["beta"] = x["k"], torch.ones_like(x["beta"])
    o, _ = compute(**x, scale=1.0)
    same(o, x["v"])


def test_bounded_gate_is_lower_bound_times_sigmoid_of_rate_times_biased_input() -> None:
    g = torch.zeros(1, 1, 2, 3)
    x = torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3), g, torch.zeros(1, 1, 2)
    rate, bias = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0, -1.0] * 2)
    decay = activate(*x, use_gate_in_kernel=True, lower_bound=-5.0, A_log=rate.log(), dt_bias=bias)[2]
    expected = [[-5 / (1 + math.exp(-r * b)) for b in (0, 1, -1)] for r in (1, 2)]
    same(decay[0, 0], torch.tensor(expected), 1e-7)
    assert decay[0, 0, 0, 0] == -2.5
    without_rate = activate(*x, use_gate_in_kernel=True, lower_bound=-5.0, dt_bias=bias)[2]
    same(without_rate[0, 0], torch.tensor([expected[0]] * 2), 1e-7)


def test_softplus_gate_is_minus_rate_times_softplus_and_has_no_bound() -> None:
    g = torch.tensor([-1000.0, 0.0, 1.0, 1000.0]).view(1, 1, 1, 4)
    x = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), g, torch.zeros(1, 1, 1)
    decay = activate(*x, use_gate_in_kernel=True, A_log=torch.tensor([3.0]).log())[2]
    same(decay.flatten(), -3 * torch.tensor([0.0, math.log(2), math.log1p(math.e), 1000.0]), 1e-7)


def test_softplus_gate_needs_a_rate() -> None:
    x = random_inputs()
    with pytest.raises(ValueError, match="A_log or lower_bound"):
        recurrence(**x, use_gate_in_kernel=True)


def test_beta_logits_give_the_sigmoid_or_twice_it() -> None:
    x = random_inputs()
    once = activate(x["q"], x["k"], x["g"], x["beta"], use_beta_sigmoid_in_kernel=True)[3]
    twice = activate(x["q"], x["k"], x["g"], x["beta"], use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)[3]
    same(once, 1 / (1 + (-x["beta"]).exp()))
    same(twice, 2 * once)


def test_l2norm_adds_its_epsilon_to_the_sum_of_squares() -> None:
    small = torch.tensor([[3e-3, 4e-3], [0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    same(l2norm(small), small / torch.tensor([[math.sqrt(26e-6)], [1e-3], [math.sqrt(25 + 1e-6)]], dtype=torch.float64))


@BOTH
@pytest.mark.parametrize("mode", ["bounded", "softplus"])
def test_activating_in_the_call_equals_activating_before_it(compute: Any, mode: str) -> None:
    x = random_inputs(T=20, H=2, HV=2)
    settings = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": -5.0 if mode == "bounded" else None,
        "A_log": torch.tensor([0.3, -0.2]),
        "dt_bias": torch.linspace(-1, 1, 8),
    }
    q, k, g, beta = activate(x["q"], x["k"], x["g"], x["beta"], **settings)
    o, final = compute(**x, **settings)
    want_o, want_final = compute(q, k, x["v"], g, beta)
    same(o, want_o)
    same(final, want_final)


@pytest.mark.parametrize("case", correctness_cases("small"), ids=lambda case: case.name)
def test_chunk_form_equals_the_recurrence_on_every_family(case: Case) -> None:
    kwargs = make(case)
    o, final = recurrence(**kwargs)
    chunk_o, chunk_final = chunked(**kwargs)
    assert chunk_o.dtype == torch.float32
    assert final is not None
    assert chunk_final is not None
    assert_close_rms("o", chunk_o, o, 2e-6)
    assert_close_rms("final_state", chunk_final, final, 2e-6)


@pytest.mark.parametrize("size", [1, 3, 16, 64])
def test_chunk_form_is_exact_at_any_chunk_size(size: int) -> None:
    x = random_inputs(B=2, T=37, H=2, HV=4)
    o, final = recurrence(**x)
    chunk_o, chunk_final = chunked(**x, chunk_size=size)
    same(chunk_o, o)
    same(chunk_final, final)


@BOTH
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_packed_sequences_equal_separate_calls(compute: Any, kind: Any) -> None:
    offsets = [0, 0, 1, 20, 20, 37, 37]
    x = random_inputs(T=37, H=1, HV=2)
    initial = torch.randn(6, 2, 4, 3, dtype=torch.float64)
    o, final = compute(**x, initial_state=initial, cu_seqlens=kind(offsets))
    for n, (start, end) in enumerate(pairwise(offsets)):
        alone = {name: value[:, start:end] for name, value in x.items()}
        want_o, want_final = compute(**alone, initial_state=initial[n : n + 1])
        same(o[:, start:end], want_o)
        same(final[n : n + 1], want_final)
        if start == end:
            assert torch.equal(final[n], initial[n])


@BOTH
def test_rows_of_no_sequence_are_zero(compute: Any) -> None:
    x = random_inputs(T=20)
    o, final = compute(**x, cu_seqlens=[0, 5, 13])
    assert o[:, 13:].eq(0).all()
    assert o[:, :13].ne(0).all()
    same(final, compute(**{name: value[:, :13] for name, value in x.items()}, cu_seqlens=[0, 5, 13])[1])


@BOTH
@pytest.mark.parametrize("offsets", [[0, 0], [0, 0, 0]])
def test_nothing_but_empty_sequences_returns_their_states(compute: Any, offsets: list[int]) -> None:
    x = random_inputs(T=0)
    initial = torch.randn(len(offsets) - 1, 1, 4, 3, dtype=torch.float64)
    o, final = compute(**x, cu_seqlens=offsets, initial_state=initial)
    assert o.shape == (1, 0, 1, 3)
    assert torch.equal(final, initial)
    assert compute(**x, cu_seqlens=offsets)[1].eq(0).all()


@BOTH
@pytest.mark.parametrize("at", [1, 15, 16, 17, 36])
def test_a_sequence_cut_in_two_equals_the_whole(compute: Any, at: int) -> None:
    x = random_inputs(B=2, T=37)
    o, final = compute(**x)
    head_o, state = compute(**{name: value[:, :at] for name, value in x.items()})
    tail_o, tail_state = compute(**{name: value[:, at:] for name, value in x.items()}, initial_state=state)
    same(torch.cat([head_o, tail_o], 1), o)
    same(tail_state, final)


@BOTH
def test_value_head_h_reads_query_head_h_over_the_group(compute: Any) -> None:
    x = random_inputs(T=20, H=2, HV=6)
    o, final = compute(**x)
    for name in ("q", "k"):
        x[name] = torch.stack([x[name][:, :, h // 3] for h in range(6)], dim=2)
    want_o, want_final = compute(**x)
    same(o, want_o)
    same(final, want_final)


@BOTH
def test_v_first_states_are_the_transposed_states(compute: Any) -> None:
    x = random_inputs(T=20)
    initial = torch.randn(1, 1, 4, 3, dtype=torch.float64)
    o, final = compute(**x, initial_state=initial)
    v_first_o, v_first = compute(**x, initial_state=initial.transpose(-1, -2).contiguous(), state_v_first=True)
    assert v_first.shape == (1, 1, 3, 4)
    assert v_first.is_contiguous()
    same(v_first_o, o)
    same(v_first.transpose(-1, -2), final)


@BOTH
def test_the_final_state_is_optional_and_the_initial_one_is_left_alone(compute: Any) -> None:
    x = random_inputs()
    initial = torch.ones(1, 1, 4, 3, dtype=torch.float64)
    assert compute(**x, initial_state=initial, output_final_state=False)[1] is None
    assert initial.eq(1).all()


@BOTH
def test_outputs_do_not_depend_on_later_inputs(compute: Any) -> None:
    x = random_inputs(T=37)
    o, _ = compute(**x)
    for at in (3, 16, 21):
        later = random_inputs(T=37, seed=at)
        changed = {name: torch.cat([value[:, :at], later[name][:, at:]], 1) for name, value in x.items()}
        assert torch.equal(compute(**changed)[0][:, :at], o[:, :at])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_gate_in_kernel": True, "lower_bound": -5.0},
        {"use_gate_in_kernel": True},
        {"cu_seqlens": [0, 0, 1, 4, 5], "state_v_first": True},
    ],
    ids=["activated", "bounded", "softplus", "packed"],
)
def test_gradients_equal_finite_differences(settings: dict[str, Any]) -> None:
    x = random_inputs(T=5, H=1, HV=2, K=2, V=2)
    heads, width, value_width = 2, 2, 2
    sequences = len(settings.get("cu_seqlens", [0, 5])) - 1
    inner = (value_width, width) if settings.get("state_v_first") else (width, value_width)
    x["initial_state"] = torch.randn(sequences, heads, *inner, dtype=torch.float64)
    if settings.get("use_gate_in_kernel"):
        x["A_log"] = torch.tensor([0.2, -0.3], dtype=torch.float64)
        x["dt_bias"] = torch.linspace(-1, 1, heads * width, dtype=torch.float64)
        settings = {**settings, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}

    def call(*tensors: torch.Tensor) -> Any:
        return chunked(**dict(zip(x, tensors, strict=True)), **settings, chunk_size=2)

    assert torch.autograd.gradcheck(call, [value.requires_grad_() for value in x.values()], fast_mode=False)


@pytest.mark.parametrize(
    "gate", ["cut-10", "cut-50", "cut-90", "cut-10-slow", "cut-softplus", "softplus-16", "saturated"]
)
def test_gradients_of_unbounded_gates_are_finite_and_right_in_float32(gate: str) -> None:
    kwargs = make(Case("gradient", gate=gate, T=40, K=64, dtype=torch.float32, state="fp32"))
    names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaves = {name: kwargs[name].detach().to(dtype).requires_grad_() for name in names}
        o, final = chunked(**{**kwargs, **leaves}, dtype=dtype)
        assert final is not None
        (o.sin().sum() + final.sin().sum()).backward()
        gradients.append({name: leaf.grad for name, leaf in leaves.items()})
    for name in names:
        # relative_rms is infinite for a NaN, and the float64 gradients are those that gradcheck confirms.
        assert_close_rms(f"gradient of {name}", gradients[0][name], gradients[1][name], 1e-4)
        assert gradients[1][name].isfinite().all()


def test_a_token_alone_has_no_gradient_for_its_gate() -> None:
    x = random_inputs(T=1)
    x["g"].requires_grad_()
    chunked(**x)[0].sum().backward()
    assert x["g"].grad is not None
    assert x["g"].grad.eq(0).all()


def test_half_precision_inputs_get_gradients_of_their_own_dtype() -> None:
    kwargs = make(Case("gradient", T=20, strided=True))
    leaves = {name: kwargs[name].detach().requires_grad_() for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
    chunked(**{**kwargs, **leaves})[0].sum().backward()
    for leaf in leaves.values():
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype
        assert leaf.grad.isfinite().all()
