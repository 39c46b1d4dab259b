"""Lookups: exact, a neighbouring bucket, the GPU's family, the op's default; every hit legal here; and the lock."""

from __future__ import annotations

import json
import logging
import warnings
from dataclasses import replace

import pytest
import torch
from winner_examples import B200, H100, H200, winner

import k3dsl
from k3dsl.autotune import lookup, pack, store
from k3dsl.autotune.key import CPU, exact_dims, options_of
from k3dsl.autotune.lookup import Step, find, knobs_for
from k3dsl.errors import CacheWarning, LockedError
from k3dsl.ops.common import Caller
from k3dsl.ops.registry import get_op, op_names
from k3dsl.runtime import dispatch, executable, lock
from k3dsl.runtime.dispatch import Problem, forget
from k3dsl.runtime.executable import recording
from k3dsl.runtime.op import defaults_only, forced, size_number
from k3dsl.targets import get_target


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(store, "_warned", set())
    monkeypatch.setattr(lookup, "_reported", set())
    monkeypatch.setattr(lookup, "packs", lambda: [])
    yield
    k3dsl.lock(False)


def problem(op="matmul", wanted="auto", options=None, device="cpu", **dims):
    chosen = get_op(op)
    point = chosen.point(dims, options or {})
    known = chosen.point(dims, options or {}, symbolic=True).dims
    return Problem(chosen, point.options, exact_dims(point), known, {}, torch.device(device), wanted)


HERE = {"M": 512, "N": 256, "K": 128}


def test_the_nearest_step_hits_first():
    exact = winner({"block_m": 64}, time_ms=9.0)
    near = winner({"block_m": 32}, dims={**HERE, "M": 1024})
    family = winner({"block_m": 16, "num_warps": 4}, gpu=H100)
    for known, step, block in (
        ([family, near, exact], Step.EXACT, 64),
        ([family, near], Step.BUCKET, 32),
        ([family], Step.FAMILY, 16),
    ):
        found = find(problem(**HERE), H200, known)
        assert (found.step, found.choice.knobs["block_m"]) == (step, block)
    assert find(problem(**HERE), H200, []).step is Step.DEFAULT


def test_the_better_evidence_wins_among_equals():
    fast, proven = winner({"block_m": 64}, time_ms=1.0, gate="quick"), winner({"block_m": 32}, time_ms=2.0, gate="ship")
    assert find(problem(**HERE), H200, [fast, proven]).winner == proven


@pytest.mark.parametrize("dims", [{"M": 1025}, {"M": 128}, {"K": 64}])
def test_dims_outside_the_region_are_a_miss(dims):
    narrow = replace(winner(), region={"M": (256, 1024), "N": (256, 256), "K": (128, 128)})
    assert find(problem(**{**HERE, **dims}), H200, [narrow]).step is Step.DEFAULT


def test_a_winner_at_a_length_is_exact_for_calls_of_its_size_class():
    """Calls of kda look settings up by the size class of T, so that sequences of all lengths are few kinds of call."""
    op = get_op("kda.forward")
    here = {"op": "kda.forward", "H": 2}
    row = winner({"block_v": 32}, op="kda.forward", dims={"T": 5000, "H": 2})
    asked = replace(problem(**here, T=5000), dims=op.asked(problem(**here, T=5000).dims))
    assert asked.dims["T"] == size_number(5000) != 5000
    assert find(asked, H200, [row]).step is Step.EXACT
    assert op.asked({"T": 8192, "H": 5000}) == {"T": 8192, "H": 5000}


def test_another_architecture_and_other_options_are_a_miss():
    assert find(problem(**HERE), B200, [winner()]).step is Step.DEFAULT
    assert find(problem(options={"dtype": "f32"}, **HERE), H200, [winner()]).step is Step.DEFAULT


def test_a_winner_from_when_keys_named_their_scale_serves_every_scale():
    row = winner(op="kda.forward", dims={"T": 256, "H": 2})
    old = replace(row, key=replace(row.key, options={**row.key.options, "scale": 0.5}))
    here = problem(op="kda.forward", T=256, H=2, options={"scale": 0.25})
    assert find(here, H200, [old]).step is Step.EXACT


def test_what_does_not_hold_here_is_passed_over_and_named():
    row = winner({"block_m": 64})
    key = row.key
    for says, bad in {
        "tuned with triton 0.1": replace(row, key=replace(key, toolchain={**key.toolchain, "triton": "0.1"})),
        "kernel changed": replace(row, key=replace(key, ir={"matmul": "0" * 64})),
        "num_warps": replace(row, settings={"matmul.num_warps": 3}),
        "no_such": replace(row, settings={"no_such": 1}),
        "accumulators": replace(row, settings={"block_m": 256, "block_n": 256, "num_warps": 2}),
        "stages go by loop label": replace(row, settings={"matmul.stages": 3}),
        "cannot be used": replace(row, settings={"matmul.num_warps": {}, "matmul.num_warps.x": 1, "matmul.stages": []}),
    }.items():
        found = find(problem(**HERE), H200, [bad])
        assert found.step is Step.DEFAULT
        assert says in found.refused[0]


def test_a_backend_that_is_asked_for_is_the_only_one_that_hits():
    mixed = winner({"scan.backend": "triton"}, op="kda.forward", dims={"T": 128, "H": 2})
    here = {"op": "kda.forward", "T": 128, "H": 2}
    assert find(problem(**here), H200, [mixed]).step is Step.EXACT
    assert find(problem(wanted="triton", **here), H200, [mixed]).step is Step.EXACT
    refused = find(problem(wanted="tilelang", **here), H200, [mixed])
    assert refused.step is Step.DEFAULT
    assert "tilelang is asked for" in refused.refused[0]


def test_a_tuned_schedule_reaches_the_plan():
    found = find(problem(**HERE), H200, [winner({"matmul.num_warps": 4, "matmul.stages.k": 2})])
    assert found.choice.schedules == {"matmul": {"num_warps": 4, "stages": {"k": 2}}}
    p = problem(**HERE)
    plan = p.op.plan(p.known, found.choice.knobs, p.options, found.choice.backend, found.choice.schedules)
    assert plan.launches[0].schedule.num_warps == 4
    assert plan.launches[0].schedule.stages == {"k": 2}


SMALL = {
    "kda.forward": {"T": 64, "H": 2},
    "kda.decode": {"B": 2, "H": 2, "slots": 2},
    "kda.step": {"B": 2, "H": 2, "pool": 2},
    "kda.commit": {"B": 2, "T": 2, "E": 64, "size": 2},
    "causal_conv1d": {"T": 32, "P": 64},
    "causal_conv1d.update": {"B": 2, "P": 64, "pool": 2},
    "attention": {"T": 32, "H": 2},
    "attention.decode": {"B": 2, "S": 64, "H": 2, "HK": 1, "D": 32},
    "attnres.site": {"T": 3, "N": 2, "D": 64},
    "attnres.phase1": {"T": 3, "N": 2, "S": 2, "D": 64},
    "attnres.merge": {"T": 3, "D": 64},
    **{name: {"T": 32, "H": 2, "K": 32} for name in ("linear_attention", "delta_rule", "gated_delta_rule")},
    **{
        f"{name}.decode": {"B": 2, "H": 2, "K": 32, "slots": 2}
        for name in ("linear_attention", "delta_rule", "gated_delta_rule")
    },
    "mla.prefill": {"T": 32, "S": 32, "H": 2, "D": 32, "E": 16, "V": 32},
    "mla.decode": {"B": 2, "H": 2, "S": 64},
}


@pytest.mark.parametrize("name", op_names())
def test_what_is_tuned_at_an_ops_dims_is_what_its_torch_function_looks_up(name, monkeypatch):
    seen: list[Problem] = []
    monkeypatch.setattr(dispatch, "_provider", seen.append)
    op = get_op(name)
    dims = SMALL.get(name, {d.name: 48 for d in op.dims})
    if name == "attention":
        dims |= {"S": 32, "HK": 2}
    point = op.point(dims, {})
    op.call(**op.inputs(op.resolve_dims(dims), point.options, torch.device("cpu"), 0))
    assert options_of(op, seen[0].options) == options_of(op, point.options)
    expected = exact_dims(point)
    assert seen[0].dims.items() <= expected.items()
    assert expected.keys() - seen[0].dims.keys() <= {"slots"}


def softmax_knobs(rows: int) -> int:
    """Which `rows` knob a call of softmax runs with; a new caller each time, as in a new process."""
    caller = Caller(get_op("softmax"))
    x = torch.randn(24, 96)
    options = {"dtype": torch.float32, "out_dtype": torch.float32}
    with recording() as calls:
        out = caller({"x": x}, {"R": (24,), "N": (96, 16)}, options)["o"]
        again = caller({"x": x}, {"R": (24,), "N": (96, 16)}, options)["o"]
    torch.testing.assert_close(out, x.softmax(-1))
    assert torch.equal(out, again)
    assert calls[0].executable is calls[1].executable
    return int(calls[0].executable.plan.knobs["rows"])


def tuned_softmax(rows=4, **more):
    return winner(
        {"rows": rows},
        gpu=CPU,
        op="softmax",
        dims={"R": 24, "N": 96},
        options={"dtype": "f32", "out_dtype": "f32"},
        **more,
    )


def test_ops_pick_up_the_store_then_a_named_pack_and_nothing_when_told_off(tmp_path, monkeypatch):
    default = softmax_knobs(24)
    assert default != 4
    pack.save(pack.build([tuned_softmax(rows=2, gate="quick")]), tmp_path / "p.json")
    monkeypatch.setenv("K3DSL_PACK", str(tmp_path / "p.json"))
    assert softmax_knobs(24) == 2
    store.put(tuned_softmax())
    assert softmax_knobs(24) == 4
    monkeypatch.setenv("K3DSL_PACK", "off")
    assert softmax_knobs(24) == default


@pytest.mark.parametrize(("tokens", "chunk"), [(64, 16), (48, 16), (300, 32)])
def test_kda_takes_the_winner_of_its_size_class(tokens, chunk):
    forget()
    store.put(winner({"chunk": 16}, gpu=CPU, op="kda.forward", dims={"T": 64, "H": 2}))
    op = get_op("kda.forward")
    dims = op.resolve_dims({"T": tokens, "H": 2})
    with recording() as calls:
        op.call(**op.inputs(dims, op.resolve_options({}), torch.device("cpu"), 0))
    forget()
    assert calls[0].executable.plan.knobs["chunk"] == chunk


def test_ops_pick_up_the_packs_that_come_with_k3dsl(tmp_path, monkeypatch):
    pack.save(pack.build([tuned_softmax()]), tmp_path / "p.json")
    monkeypatch.setattr(lookup, "packs", lambda: [tmp_path / "p.json"])
    assert softmax_knobs(24) == 4


def test_what_is_forced_goes_before_what_was_tuned():
    default = softmax_knobs(24)
    store.put(tuned_softmax())
    op = get_op("softmax")
    with forced(op, {"rows": 2}, {}):
        assert softmax_knobs(24) == 2
    with defaults_only(op):
        assert softmax_knobs(24) == default


def test_a_call_seen_before_looks_nothing_up(monkeypatch):
    seen: list[Problem] = []
    monkeypatch.setattr(dispatch, "_provider", seen.append)
    softmax_knobs(24)
    assert len(seen) == 1


def test_a_lookup_is_logged_once_with_its_step(caplog):
    store.put(tuned_softmax())
    with caplog.at_level(logging.INFO, "k3dsl.autotune"):
        softmax_knobs(24)
        softmax_knobs(24)
    assert len(caplog.messages) == 1
    assert "exact hit" in caplog.messages[0]


@pytest.mark.parametrize("text", ["{", '{"format": "k3dsl-pack", "schema": 9, "rows": []}'])
def test_a_broken_pack_is_a_miss_with_one_warning(tmp_path, monkeypatch, text):
    (tmp_path / "p.json").write_text(text)
    monkeypatch.setenv("K3DSL_PACK", str(tmp_path / "p.json"))
    p = problem("softmax", "torch", R=24, N=96)
    with pytest.warns(CacheWarning, match=r"p\.json"):
        assert knobs_for(p) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert knobs_for(p) is None


def test_a_setting_that_cannot_be_read_does_not_stop_a_call(tmp_path, monkeypatch):
    monkeypatch.setenv("K3DSL_PACK", str(tmp_path))  # a folder
    with pytest.warns(CacheWarning, match="K3DSL_PACK"):
        assert softmax_knobs(24)


@pytest.mark.parametrize("error", [k3dsl.errors.ResourceError, k3dsl.errors.BuildError, k3dsl.errors.LaunchError])
def test_settings_that_do_not_build_or_load_fall_back_to_the_default(error, monkeypatch):
    op = get_op("softmax")
    chosen = op.resolve_knobs({"rows": 4})
    monkeypatch.setattr(dispatch, "_provider", lambda p: dispatch.Choice(chosen, None, "triton"))
    made = dispatch.Dispatcher.__call__

    def refusing(self, dims, knobs, options, strides, device, schedules=None, backend=None):
        if backend == "triton":
            raise error("too much shared memory, no TileLang, no nvcc")
        return made(self, dims, knobs, options, strides, device, schedules, backend)

    monkeypatch.setattr(dispatch.Dispatcher, "__call__", refusing)
    assert softmax_knobs(24) != 4


def test_what_is_corrupt_foreign_or_of_the_future_is_passed_over_and_a_call_runs_with_the_default(
    tmp_path, monkeypatch
):
    default = softmax_knobs(24)
    good = tuned_softmax()
    old = replace(good, key=replace(good.key, toolchain={**good.key.toolchain, "k3dsl": "0.0.1"}))
    elsewhere = replace(good, key=replace(good.key, gpu=H200))
    whole = json.dumps(good.to_json())
    folder = store.folder("softmax")
    folder.mkdir(parents=True)
    for name, text in {
        "old": json.dumps(old.to_json()),
        "elsewhere": json.dumps(elsewhere.to_json()),
        "cut": whole[:100],
        "future": whole.replace('"schema": 1', '"schema": 2'),
        "future-field": whole.replace('"backend":', '"speculation": 1, "backend":', 1),
    }.items():
        (folder / f"{name}.json").write_text(text)
    with pytest.warns(CacheWarning) as caught:
        assert softmax_knobs(24) == default
    assert sorted(str(w.message).split(".json")[0].rpartition("/")[2] for w in caught) == [
        "cut",
        "future",
        "future-field",
    ]
    monkeypatch.setenv("K3DSL_PACK", str(tmp_path / "p.json"))
    for rows in ([old], [elsewhere]):
        pack.save(pack.build(rows), tmp_path / "p.json")
        assert softmax_knobs(24) == default


def test_a_call_never_tunes_and_a_miss_is_said_once(caplog, monkeypatch):
    def never(*_, **__):
        raise AssertionError("a call began to tune")

    for name in (
        "k3dsl.autotune.sweep.sweep",
        "k3dsl.autotune.worker.Worker.__init__",
        "k3dsl.autotune.child.Child.__init__",
    ):
        monkeypatch.setattr(name, never)
    with caplog.at_level(logging.INFO, "k3dsl.autotune"):
        softmax_knobs(24)
        softmax_knobs(24)
    assert caplog.messages == ["softmax at R=24, N=96: the op's default, nothing tuned fits"]


# ---- the lock --------------------------------------------------------------------------------------------------------------


def test_after_lock_what_was_built_is_there_and_anything_else_is_an_error(monkeypatch):
    target = get_target("sm_90a")
    monkeypatch.setattr(executable, "_artifacts", {})
    monkeypatch.setattr(executable, "lower", lambda launch, target: launch)
    monkeypatch.setattr(executable.backends, "build", lambda source, target: "machine code")
    point = get_op("matmul").point(HERE, {}, symbolic=True)
    launch = point.plan("triton").launches[0]
    assert executable.build(launch, target) == "machine code"
    other = get_op("matmul").point(HERE, {"block_m": 64}, symbolic=True).plan("triton")
    with k3dsl.lock():
        assert executable.build(launch, target) == "machine code"
        with pytest.raises(LockedError, match=r"matmul at M=any multiple of 64.*compiling.*\n.*k3dsl\.lock\(False\)"):
            executable.Executable(other, target, "cpu")
    assert not lock.is_locked()
    assert executable.build(other.launches[0], target) == "machine code"


def test_the_lock_stays_until_it_is_taken_off():
    k3dsl.lock()
    with pytest.raises(LockedError, match=r"softmax at R=24, N=96: tuning is forbidden"):
        lock.check("tuning", "softmax", {"R": 24, "N": 96})
    k3dsl.lock(False)
    lock.check("tuning", "softmax")
