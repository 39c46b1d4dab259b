"""The KDA input families have the properties that their names promise, and the error metric counts what it should."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from k3dsl.errors import ArgumentError
from k3dsl.ops.kda import inputs
from k3dsl.ops.kda.check import check_decode, check_forward
from k3dsl.ops.kda.inputs import FAMILIES, Case, correctness_cases, families, make, make_decode
from k3dsl.ops.kda.reference import activate, recurrence
from k3dsl.runtime.metrics import assert_close_rms, limit_of, max_abs, relative_rms

SIZES = pytest.mark.parametrize("size", ["small", "whole"])


def decay(gate: str, **changes: Any) -> torch.Tensor:
    """The activated log decays [B, T, HV, K] of a gate family, in nats."""
    return activated(Case("gate", gate=gate, **changes))[2]


def activated(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    kwargs = make(case)
    names = set(inspect.signature(activate).parameters) & set(kwargs)
    return activate(**{name: kwargs[name] for name in names})


def test_a_seed_gives_the_same_numbers_again_and_another_seed_others() -> None:
    first, again, other = (make(Case("x", state="fp32"), seed=seed) for seed in (3, 3, 4))
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, again[name])
            assert not torch.equal(value, other[name])


@SIZES
def test_every_name_is_used_once(size: Any) -> None:
    names = [case.name for case in correctness_cases(size)]
    assert len(set(names)) == len(names)


def test_the_small_list_is_small_and_the_whole_list_a_few_hundred() -> None:
    assert 50 <= len(correctness_cases("small")) <= 100
    assert 300 <= len(correctness_cases("whole")) <= 450
    assert all(case.tokens * case.H <= 1000 for case in correctness_cases("small"))


@SIZES
def test_the_lists_cover_the_lengths_and_the_families(size: Any) -> None:
    cases = correctness_cases(size)
    assert {case.T for case in cases} >= {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 1000}
    assert {case.cu_seqlens for case in cases} >= {(0, 15), (0, 63, 64, 65, 200), (0, 0, 5, 5, 70, 71, 71)}
    for field in ("gate", "keys", "beta", "values"):
        expected = {getattr(case, field) for case in families()}
        assert {getattr(case, field) for case in cases} >= expected
    assert {case.K for case in cases} == {64, 128}
    assert {case.H for case in cases} >= ({1, 3} if size == "small" else {1, 3, 12, 96})
    assert {case.dtype for case in cases} == {torch.bfloat16, torch.float16, torch.float32}
    assert {case.state for case in cases} == {"none", "fp32", "bf16", "arange"}
    assert {case.state_v_first for case in cases} == {case.strided for case in cases} == {False, True}
    assert {case.gate_mode for case in cases if case.cu_seqlens} == {
        "activated",
        "bounded",
        "softplus",
    } or size == "small"
    assert any(case.HV > case.H for case in cases)


def test_every_table_entry_is_used_by_a_family() -> None:
    used = [case for group in FAMILIES.values() for case in group] + correctness_cases("whole")
    for field, table in (
        ("gate", inputs.GATES),
        ("keys", inputs.KEYS),
        ("beta", inputs.BETAS),
        ("values", inputs.VALUES),
    ):
        assert {getattr(case, field) for case in used} == set(table)
    assert set(FAMILIES) == {"mild", "checkpoint", "extreme", "ragged"}


@SIZES
def test_every_case_passes_the_operators_checks(size: Any) -> None:
    names = set(inspect.signature(check_forward).parameters)
    for case in correctness_cases(size):
        if case.tokens * case.H > 400:
            continue  # the same families at a smaller shape are in the list too
        kwargs = make(case)
        shapes = check_forward(**{name: value for name, value in kwargs.items() if name in names})
        assert shapes == (case.B, case.tokens, case.H, case.HV or case.H, case.K, case.V or case.K, case.sequences)


@pytest.mark.parametrize(
    ("gate", "low", "high"),
    [
        ("bench", -5, 0),
        ("midpoint", -2.5, -2.5),
        ("saturated", -5, -4.999),
        ("saturated-steep", -5, -4.999),
        ("constant-5", -5, -5),
        ("constant-3", -3, -3),
        ("softplus-5.6", -5.61, -5.59),
        ("none", 0, 0),
        ("log-sigmoid", -20, 0),
    ],
)
def test_gates_stay_in_their_range(gate: str, low: float, high: float) -> None:
    g = decay(gate)
    assert low <= g.min()
    assert g.max() <= high


@pytest.mark.parametrize("gate", [name for name, gate in inputs.GATES.items() if gate.slow])
def test_slow_gates_decay_by_about_a_hundredth_of_a_nat_or_less(gate: str) -> None:
    g = decay(gate, T=1000)
    assert -0.025 < g.mean() <= 0
    assert -0.015 < g.median() <= 0


def test_one_open_channel_is_among_closed_ones() -> None:
    g = decay("one-open", H=2)
    assert (g > -1e-9).sum(-1).eq(1).all()
    assert (g < -4.999).sum(-1).eq(63).all()


@pytest.mark.parametrize(("gate", "share"), [("cut-10", 0.1), ("cut-50", 0.5), ("cut-90", 0.9), ("cut-softplus", 0.3)])
def test_cut_gates_mix_minus_1000_with_exactly_zero(gate: str, share: float) -> None:
    g = decay(gate, T=300)
    assert g.eq(-1000).double().mean().item() == pytest.approx(share, abs=0.02)
    assert (g.eq(-1000) | g.eq(0)).all()


@pytest.mark.parametrize("gate", ["checkpoint", "checkpoint-softplus"])
def test_checkpoint_like_heads_have_rates_up_to_200_and_open_and_closed_channels_in_one_tile(gate: str) -> None:
    case = Case("x", gate=gate, T=1000, H=96)
    rates = make(replace(case, T=1))["A_log"].exp()
    assert 1 <= rates.min() < 2
    assert 150 < rates.max() <= 200
    tile = decay(gate, T=32, H=96)
    assert (tile > -1e-3).double().mean() > 0.1
    assert (tile < -4).double().mean() > 0.05
    channels = decay(gate, T=1000, H=96).sum(1)
    assert channels.max() > -1  # a channel that remembers the first of 1000 tokens
    assert channels.min() < -4000


def test_unbounded_families_leave_the_range_of_a_clamped_exponent() -> None:
    assert decay("softplus-16").min() < -16
    assert decay("checkpoint-softplus", H=96).min() < -126 * math.log(2)
    assert decay("constant-5.9", T=16).sum(1).max() < -126 * math.log(2)  # in base 2 over 16 tokens


def test_key_families_are_as_alike_as_they_say() -> None:
    def cosines(keys: str) -> torch.Tensor:
        k = activated(Case("x", keys=keys, T=200))[1][0, :, 0]
        return (k @ k.T)[~torch.eye(200, dtype=torch.bool)]

    assert cosines("normal").abs().mean() < 0.15
    assert 0.7 < cosines("positive").mean() < 0.8
    assert 0.75 < cosines("near-identical").mean() < 0.99
    assert cosines("identical").min() > 1 - 1e-5


@pytest.mark.parametrize(
    ("beta", "low", "high"),
    [
        ("near-0", 0, 2e-3),
        ("near-1", 0.99, 1),
        ("double", 0, 2),
        ("random", 0, 1),
        ("given", 0, 1),
        ("given-0-1", 0, 1),
    ],
)
def test_betas_stay_in_their_range(beta: str, low: float, high: float) -> None:
    b = activated(Case("x", beta=beta, T=1000))[3]
    assert low <= b.min()
    assert b.max() <= high
    assert beta != "double" or b.max() > 1.9


def test_values_and_states_leave_the_range_of_float16() -> None:
    assert make(Case("x", values="large"))["v"].abs().max() > 65504
    assert make(Case("x", values="tiny"))["v"].abs().max() < 2**-20
    state = make(Case("x", state="arange"))["initial_state"]
    assert state.max() > 65504
    assert state.flatten().unique().numel() == state.numel()


def test_strided_tensors_have_nan_gaps_and_the_same_numbers() -> None:
    plain, strided = (make(Case("x", state="fp32", strided=flag)) for flag in (False, True))
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        assert torch.equal(plain[name], strided[name])
        assert not strided[name].is_contiguous()
        rows = strided[name]
        behind = rows.as_strided((1,), (1,), rows.storage_offset() + rows.shape[-1])
        assert behind.isnan().all()


@pytest.mark.parametrize(
    ("case", "limits"),
    [
        (Case("x"), (5e-3, 5e-3)),
        (Case("x", dtype=torch.float16), (5e-3, 5e-3)),
        (Case("x", gate="slow"), (5e-3, 5e-3)),
        (Case("x", keys="positive"), (5e-3, 5e-3)),
        (Case("x", gate="slow", keys="positive"), (1.3e-2, 1.3e-2)),
        (Case("x", gate="slow-softplus", keys="near-identical"), (1.3e-2, 1.3e-2)),
        (Case("x", gate="slow", keys="identical"), (2.5e-2, 4.5e-2)),
        (Case("x", keys="identical"), (2.5e-2, 4.5e-2)),
        (Case("x", keys="identical", dtype=torch.float32), (1e-5, 1e-5)),
    ],
)
def test_limits(case: Case, limits: tuple[float, float]) -> None:
    assert (case.limit_o, case.limit_state) == limits


@SIZES
def test_only_two_kinds_of_case_may_err_by_more_than_5e_3(size: Any) -> None:
    loose = [case for case in correctness_cases(size) if case.limit_o > 5e-3]
    assert loose
    assert all(case.keys != "normal" for case in loose)


def test_decode_inputs_pass_the_checks_and_continue_from_their_own_slots() -> None:
    kwargs = make_decode(Case("x", H=2, HV=4, state_v_first=True, V=32), batch=5, padding=2)
    names = set(inspect.signature(check_decode).parameters)
    shapes = check_decode(**{name: value for name, value in kwargs.items() if name in names})
    assert shapes == (5, 2, 4, 64, 32, 8)
    indices = kwargs["state_indices"].tolist()
    assert indices[-2:] == [-1, -1]
    assert len(set(indices[:3])) == 3
    assert min(indices[:3]) >= 0
    pool, chosen = kwargs.pop("state"), kwargs.pop("state_indices")[:3].long()
    for name in ("q", "k", "v", "g", "beta"):
        kwargs[name] = kwargs[name][:3]
    o, final = recurrence(**kwargs, initial_state=pool[chosen])
    assert final is not None
    assert o.shape == (3, 1, 4, 32)
    assert final.shape == (3, 4, 32, 64)


def test_relative_rms_is_the_rms_of_the_error_over_that_of_the_reference() -> None:
    assert relative_rms(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(1 / 5)
    assert max_abs(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == 1


def test_relative_rms_of_a_zero_reference_is_absolute() -> None:
    assert relative_rms(torch.tensor([3.0, 4.0]), torch.zeros(2)) == pytest.approx(math.sqrt(12.5))
    assert relative_rms(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_rms(torch.zeros(0), torch.zeros(0)) == max_abs(torch.zeros(0), torch.zeros(0)) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_result_is_infinitely_wrong_unless_the_reference_says_so(bad: float) -> None:
    broken, fine = torch.tensor([1.0, bad]), torch.tensor([1.0, 2.0])
    assert relative_rms(broken, fine) == max_abs(broken, fine) == math.inf
    assert relative_rms(broken, broken) == 0
    assert relative_rms(fine, broken) == math.inf


def test_relative_rms_neither_overflows_nor_underflows() -> None:
    for size in (1e200, 1e-200):
        x = torch.tensor([3.0, 4.0], dtype=torch.float64) * size
        assert relative_rms(x * 1.5, x) == pytest.approx(0.5)


@pytest.mark.parametrize(("got", "passes"), [(1.0, True), (1.0078125, True), (0.9921875, False), (math.inf, False)])
def test_one_element_may_be_as_far_off_as_its_dtype_rounds_and_no_farther(got: float, passes: bool) -> None:
    wanted = torch.tensor([1.00390625], dtype=torch.float64)  # half way between 1 and 1.0078125, which bf16 has
    actual = torch.tensor([got], dtype=torch.bfloat16)
    error = relative_rms(actual, wanted)
    assert error > 3e-3
    assert (error <= limit_of(actual, wanted, error, 3e-3)) == passes
    assert limit_of(actual, wanted, error, 0.0) == 0.0
    many = torch.linspace(1.0, 2.0, 1000, dtype=torch.float64)
    assert limit_of(many.bfloat16() * 1.01, many, 1e-2, 3e-3) == 3e-3


def test_metric_refuses_different_shapes() -> None:
    with pytest.raises(ArgumentError, match="shape"):
        relative_rms(torch.zeros(2), torch.zeros(2, 1))


def test_assert_close_rms_names_the_tensor_and_the_worst_element() -> None:
    expected = torch.ones(2, 3)
    actual = expected.clone()
    actual[1, 2] = math.nan
    assert assert_close_rms("o", expected, expected, 0.0) == 0
    with pytest.raises(
        AssertionError, match=r"o: .* worst at \[1, 2\]: nan instead of 1; 1 of 6 elements are not finite"
    ):
        assert_close_rms("o", actual, expected, 5e-3)
