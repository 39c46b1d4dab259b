"""The judge sees what is wrong with an op, and the timer counts what a launch must move."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from k3dsl.cli.main import app
from k3dsl.errors import ArgumentError, EvaluationError
from k3dsl.ops.common import seen_pairs
from k3dsl.ops.registry import get_op
from k3dsl.runtime import judge, timing
from k3dsl.runtime.dispatch import planning
from k3dsl.runtime.executable import recording
from k3dsl.runtime.op import forced_key
from k3dsl.targets import Ceilings, get_target

SMALL = {"B": 3, "H": 2, "K": 64, "V": 64, "slots": 4}


def judged(**changes):
    """kda.decode on one small case, with fields of the op changed."""
    op = get_op("kda.decode")
    case = judge.cases_of(op, dims=SMALL)[0]
    broken = type(op)(**{**vars(op), **changes})
    (verdict,) = judge.judge(broken, [case])
    return verdict


def test_what_nobody_wrote_is_seen():
    def lazy(q, v, state, **_):
        return {"o": torch.empty_like(v), "state": state}

    verdict = judged(call=lazy)
    assert "of 384 elements are not finite" in verdict.problem


def test_a_single_output_is_not_refused_for_its_own_rounding():
    op = get_op("matmul")
    (case,) = judge.cases_of(op, "small", {"M": 1, "N": 1, "K": 64})
    verdicts = [next(iter(judge.judge(op, [case], repeats=1, seed=seed))) for seed in range(40)]
    assert all(v.passed for v in verdicts)
    assert max(v.limits["o"] for v in verdicts) > case.limits["o"]


def test_an_op_that_returns_none_of_its_outputs_has_not_passed():
    verdict = judged(call=lambda **_: {})
    assert "the op returned none of the outputs that are judged: o" in verdict.problem
    assert not verdict.passed


def test_between_two_verdicts_nothing_is_forced():
    op = get_op("softmax")
    case = judge.cases_of(op, "small", {"R": 8, "N": 64})[0]
    verdicts = judge.judge(op, [case, case], knobs={"rows": 2})
    other = judge.judge(op, [case, case], knobs={"rows": 1})
    for _ in range(2):
        assert next(verdicts).passed
        assert next(other).passed
        assert forced_key(op) is None


def test_results_that_change_from_call_to_call_are_seen():
    real, count = get_op("kda.decode").call, []

    def restless(**kwargs):
        out = real(**kwargs)
        count.append(0)
        out["state"].view(torch.int32)[0, 0, 0, 0] += len(count)  # the last bits
        return out

    verdict = judged(call=restless)
    assert verdict.problem == "state of call 2 is not bitwise the first call's"


def test_an_error_is_the_verdict_of_its_case():
    def broken(**_):
        raise EvaluationError("two writers")

    assert judged(call=broken).problem == "two writers"
    assert judged(call=lambda **_: 1 / 0).problem == "ZeroDivisionError: division by zero"


def test_a_case_is_judged_on_what_was_drawn_not_on_what_a_call_left():
    """The state is updated in place: each call must start from the drawn one, and the reference too."""
    assert judged().passed


def test_a_limit_of_zero_admits_copies_alone():
    family = judge.FamilyResult("copies")
    for error in (0.0, 1e-3, 0.0):
        family.add(judge.Verdict("case", "copies", {"pool": error}, {"pool": 0.0}, repeats=1, seconds=0.0))
    assert family.worst == {"pool": (1e-3, 0.0)}
    assert family.cases == 3


def test_poison_goes_as_it_came():
    with judge.poisoned():
        assert torch.empty(3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_kernel_must_move_each_of_its_tensors_once():
    """The issue's own count for bf16 and K = V = 128, per token and head: q, k, g 768 and beta 2 in; w, kg, qg 768, x and
    aqk 4 C, decay 512 / C out."""
    op = get_op("kda.forward")
    point = op.point({"B": 2, "T": 256, "H": 3}, {"factors": "bf16"})
    plan = point.plan("triton")
    moved = timing.plan_traffic(plan, {})
    tokens, chunk = 2 * 256 * 3, point.knobs["chunk"]
    factors = 768 * tokens + 4 * chunk * tokens + 512 * tokens // chunk
    parameters = 3 * 4 + 3 * 128 * 4
    assert moved["prep"] == 770 * tokens + factors + parameters
    states = 2 * 3 * 128 * 128 * 4
    assert moved["scan"] == factors + 2 * 256 * tokens + states


def test_decode_moves_only_the_slots_in_use():
    op = get_op("kda.decode")
    plan = op.point({"B": 2, "H": 1, "slots": 1000}, {}, symbolic=True).plan("triton")
    state = 128 * 128 * 4
    assert 2 * 2 * state < op.traffic_bytes(plan, {"B": 2, "slots": 1000})["decode"] < 2 * 2 * state + 4000


def test_each_launch_of_a_call_is_timed_alone_against_its_floor():
    op = get_op("kda.forward")
    kwargs = op.inputs(op.resolve_dims({"T": 64, "H": 1, "K": 64, "V": 64}), op.resolve_options({}), "cpu", 0)
    with recording() as calls:
        op.call(**kwargs)
    (call,) = calls
    launches = timing.launch_times(op, call, Ceilings(100.0, None, "by hand"), rep_ms=1)
    assert [t.label for t in launches] == [launch.label for launch in call.executable.plan.launches]
    prep = launches[0]
    read = sum(kwargs[n].numel() * kwargs[n].element_size() for n in ("q", "k", "g", "beta", "A_log", "dt_bias"))
    written = sum(
        x.numel() * x.element_size() for n, x in call.tensors.items() if n in {"w", "kg", "qg", "x", "aqk", "decay"}
    )
    assert prep.bytes == read + written
    assert prep.floor_ms == pytest.approx(prep.bytes / 100e9 * 1e3)
    assert prep.share == pytest.approx(prep.floor_ms / prep.timing.median_ms)


@pytest.mark.parametrize(
    ("name", "settings", "dims", "label", "products"),
    [
        ("matmul", {}, {"M": 3, "N": 5, "K": 7}, "matmul", 3 * 5 * 7),
        ("attention", {}, {"B": 2, "T": 3, "S": 5, "H": 4}, "attention", 2 * 4 * (3 + 4 + 5) * 256),
        ("attention", {"causal": False}, {"B": 1, "T": 3, "S": 5, "H": 1}, "attention", 3 * 5 * 256),
        ("mla.prefill", {}, {"T": 4, "H": 2}, "mla_prefill", 2 * (1 + 2 + 3 + 4) * 320),
        ("mla.prefill", {"varlen": True}, {"T": 4, "H": 2, "N": 2}, "mla_prefill", 2 * 2 * (1 + 2) * 320),
        ("mla.decode", {}, {"B": 3, "T": 2, "H": 4, "S": 128}, "mla_decode", 3 * 2 * 4 * 128 * (576 + 512)),
        ("moe.experts", {}, {"T": 8}, "gate_up", 8 * 16 * 2 * 3584 * 3072),
        ("moe.experts", {"ranks": 8}, {"T": 8}, "down", 16 * 3584 * 3072),
        ("moe.router", {}, {"T": 8}, "logits", 8 * 7168 * 896),
    ],
)
def test_flops_are_those_that_the_mathematics_asks_for(
    name: str, settings: dict[str, Any], dims: dict[str, int], label: str, products: int
) -> None:
    op = get_op(name)
    plan = op.point(op.resolve_dims(dims), settings).plan("triton")
    sizes = {n: v for n, v in op.resolve_dims(dims).items() if isinstance(v, int)}
    assert op.flops is not None
    assert op.flops(plan, sizes)[label] == 2 * products
    assert set(op.flops(plan, sizes)) <= {launch.label for launch in plan.launches}


def test_pairs_that_a_causal_mask_leaves():
    assert seen_pairs(3, 5, causal=True) == 3 + 4 + 5
    assert seen_pairs(5, 3, causal=True) == 1 + 2 + 3  # the first two see none
    assert seen_pairs(3, 5, causal=False) == 15


def test_the_floor_is_the_longer_of_bytes_and_products():
    rates = Ceilings(1000.0, 100.0, "by hand")
    assert timing.Work(2 * 10**9, 10**11).floor_ms(rates) == 2.0
    assert timing.Work(2 * 10**9, 5 * 10**11).floor_ms(rates) == 5.0
    assert timing.Work(2 * 10**9, 5 * 10**11).floor_ms(Ceilings(1000.0, None, "by hand")) == 2.0


def test_peers_are_timed_on_the_same_tensors_and_may_fail():
    op = get_op("attention")
    peers = {**op.peers(), "broken": lambda **_: 1 / 0}
    broken = type(op)(**{**vars(op), "peers": lambda: peers})
    result = timing.bench(broken, dims={"T": 32, "H": 1, "D": 32}, device="cpu", rep_ms=1)
    theirs, failed = result.peers
    assert result.ratio(theirs) == result.timing.median_ms / theirs.timing.median_ms
    assert theirs.difference["o"] < 5e-3
    assert (failed.timing, failed.problem) == (None, "ZeroDivisionError: division by zero")
    assert result.ratio(failed) is None


def test_fla_gets_the_arguments_it_takes(monkeypatch):
    """Its functions have these parameters (fla 0.6); both are called with what `kda` and `kda_decode` are called with."""
    common = {"q", "k", "v", "g", "beta", "A_log", "dt_bias", "scale", "initial_state", "output_final_state", "cu_seqlens",
              "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
              "lower_bound", "state_v_first"}  # fmt: skip
    seen = {}

    def fake(name, *more):
        def function(**kwargs):
            assert set(kwargs) <= common | set(more)
            seen[name] = kwargs
            return "o", "state"

        return function

    outer, inner = ModuleType("fla.ops.kda"), ModuleType("fla.ops.kda.fused_recurrent")
    outer.chunk_kda = fake("chunk_kda", "safe_gate")
    outer.fused_recurrent_kda = fake("fused_recurrent_kda")
    inner.fused_recurrent_kda_fwd = fake("fused_recurrent_kda_fwd", "inplace_final_state", "ssm_state_indices")
    for module in (ModuleType("fla"), ModuleType("fla.ops"), outer, inner):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, dims in (("kda.forward", {"T": 8, "H": 1}), ("kda.decode", {"B": 2, "H": 1})):
        op = get_op(name)
        kwargs = op.inputs(op.resolve_dims(dims), op.resolve_options({}), "cpu", 0)
        for peer in op.peers().values():
            assert peer(**kwargs)["o"] == "o"
    assert seen["chunk_kda"]["safe_gate"] is True
    assert seen["fused_recurrent_kda_fwd"]["ssm_state_indices"].shape == (2,)
    assert seen["fused_recurrent_kda"]["initial_state"].shape[0] == 2


def test_a_peer_of_an_op_in_place_is_compared_on_the_state_that_ours_started_from():
    """Timing ours first must not move the pool under the peers."""
    op = get_op("kda.decode")
    alike = type(op)(**{**vars(op), "peers": lambda: {"itself": op.call}})
    result = timing.bench(alike, dims={"B": 2, "H": 1, "slots": 3}, rep_ms=1)
    assert result.peers[0].difference == {"o": 0.0, "state": 0.0}


def test_what_cases_launch_on_a_gpu_is_listed_once_each_without_one():
    op = get_op("softmax")
    how = {"knobs": {}, "schedules": {}, "backend": "triton", "device": "cpu", "seed": 0}
    cases = judge.cases_of(op, "small", {"R": 8, "N": 64})
    found = judge.planned_launches(op, [*cases, *cases], how)
    assert [launch.label for launch in found] == ["softmax"]
    other = judge.planned_launches(op, cases, {**how, "knobs": {"num_warps": 2}})
    assert other[0].schedule != found[0].schedule

    def broken(device, seed):
        raise RuntimeError("no inputs")

    assert judge.planned_launches(op, [judge.Case("broken", "given", broken, {})], how) == []
    assert judge.planned_launches(op, cases, {**how, "backend": "torch"}) == []  # which builds nothing


def test_what_is_planned_for_a_target_has_the_defaults_of_that_target():
    op = get_op("mla.decode")
    inputs = op.inputs(op.resolve_dims({"B": 1, "H": 64, "S": 128}), op.resolve_options({}), "cpu", 0)
    for name, rows in (("sm_90a", 64), ("sm_120a", 16), ("sm_90a", 64)):
        with planning("triton", get_target(name)) as calls:
            op.call(**inputs)
        assert calls[0].executable.plan.knobs["block_h"] == rows, name


def test_what_is_planned_is_not_what_runs():
    op = get_op("softmax")
    x = torch.randn(8, 64)
    with planning("triton") as calls:
        op.call(x=x)
    assert len(calls) == 1
    torch.testing.assert_close(op.call(x=x)["o"], x.softmax(-1))
    with pytest.raises(ArgumentError, match="calls through the torch backend build nothing"), planning("torch"):
        pass


def test_an_interrupted_run_tells_what_it_knows(tmp_path, monkeypatch):
    def some(*_, **__):
        yield judge.Verdict("first", "mild", {"y": 1e-6}, {"y": 1e-3}, 2, 0.1)
        raise KeyboardInterrupt

    monkeypatch.setattr(judge, "judge", some)
    report = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["run", "kda.decode", "--output", str(report)])
    assert result.exit_code == 130
    found = json.loads(report.read_text())
    assert (found["passed"], found["failed"], [c["case"] for c in found["cases"]]) == (1, 0, ["first"])
    assert found["not_run"] == len(judge.cases_of(get_op("kda.decode"), "small")) - 1
    assert "interrupted after 1 of" in result.output
