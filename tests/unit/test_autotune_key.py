"""The key of a tuned setting: what it is made of, and why two of them differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
from winner_examples import H100, H200, winner

from k3dsl.autotune.key import Key, bucket_of, explain_miss, options_of, toolchain_of
from k3dsl.errors import ArgumentError
from k3dsl.ops.kda.space import FORWARD
from k3dsl.ops.registry import get_op, op_names
from k3dsl.targets import get_target


def test_a_bucket_is_the_least_power_of_two_that_is_not_below():
    assert [bucket_of(n) for n in (0, 1, 2, 3, 4, 5, 8192, 8193)] == [0, 1, 2, 4, 4, 8, 8192, 16384]


def test_every_field_is_in_the_json_and_changes_the_digest():
    key = winner().key
    other = {
        "op": "softmax", "ir": {"matmul": "0" * 64}, "numerics": {}, "options": {}, "dims": {}, "bucket": "", "facts": {},
        "gpu": H100, "toolchain": {}, "measure": {}, "gate": "ship",
    }  # fmt: skip
    assert set(key.to_json()) == {*other, "schema"}
    for name, value in other.items():
        assert replace(key, **{name: value}).digest != key.digest, name


def test_a_key_survives_json_and_has_the_same_digest_in_any_order():
    key = winner().key
    data = dict(reversed(key.to_json().items()))
    assert Key.from_json(data) == key
    assert Key.from_json(data).digest == key.digest


def test_code_evidence_and_numerics_do_not_make_another_problem():
    key = winner().key
    assert replace(key, ir={}, numerics={}, gate="ship", measure={}).problem == key.problem
    assert replace(key, gpu=H100).problem != key.problem


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 2}, "schema 2"),
        ({"dims": {"M": -1}}, "a dim"),
        ({"dims": {"M": True}}, "a dim"),
        ({"gate": "none"}, "gate level"),
        ({"gpu": {}}, "gpu lacks"),
        ({"ir": []}, "field ir"),
        ({"more": 1}, "unknown key fields more"),
    ],
)
def test_what_is_no_key_is_refused_with_the_reason(change, says):
    with pytest.raises(ValueError, match=says):
        Key.from_json({**winner().key.to_json(), **change})


def test_a_miss_is_explained_field_by_field_against_the_nearest_entry():
    wanted = winner().key
    near = replace(wanted, toolchain={**wanted.toolchain, "triton": "0.1"})
    far = replace(near, gpu=H100, dims={**wanted.dims, "M": 64})
    assert explain_miss(wanted, [far, near]) == [
        f"toolchain.triton: wanted {wanted.toolchain['triton']}, the nearest entry has 0.1"
    ]
    assert explain_miss(wanted, [far, wanted]) == []
    assert explain_miss(wanted, []) == ["op: nothing is kept for matmul"]


def test_options_that_mean_nothing_do_not_count():
    a = FORWARD.resolve_options({"gate": "none", "A_log": True, "lower_bound": -5, "cu_dtype": "i32"})
    b = FORWARD.resolve_options({"gate": "none", "A_log": False, "lower_bound": None, "cu_dtype": None})
    assert options_of(FORWARD, a) == options_of(FORWARD, b)
    five = FORWARD.resolve_options({"lower_bound": -5})
    assert options_of(FORWARD, five)["lower_bound"] == -5.0
    assert options_of(FORWARD, FORWARD.resolve_options({"lower_bound": -4}))["lower_bound"] == -4.0


def test_the_toolchain_names_what_makes_the_machine_code():
    assert set(toolchain_of(["torch"], None)) == {"k3dsl", "torch"}
    assert {"k3dsl", "triton", "ptxas"} == set(toolchain_of(["triton"], get_target("sm_90a")))


def test_numerics_and_facts_come_from_the_plan():
    key = winner({"matmul.fp_fusion": False}, dims={"M": 48, "N": 256, "K": 128}).key
    assert key.numerics["fp_fusion"] == {"matmul": False}
    assert key.facts["M"] == 16
    assert key.gpu == H200


def test_a_gate_level_that_does_not_exist_is_an_error():
    with pytest.raises(ArgumentError, match="gate level"):
        winner(gate="some")


@pytest.mark.parametrize("name", op_names())
def test_settings_of_one_scale_or_epsilon_are_those_of_every_other(name):
    """A model names its own, often the very number that None stands for."""
    op = get_op(name)
    usual = op.resolve_options({})
    for option in op.options:
        if option.name in ("scale", "eps", "norm_eps", "beta", "linear_beta"):
            assert option.constant, option.name
            assert options_of(op, {**usual, option.name: 0.07}) == options_of(op, usual)
