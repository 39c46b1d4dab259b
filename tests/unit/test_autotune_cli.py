"""The tuner as its users meet it: `k3dsl tune` and `k3dsl.autotune.tune`, on the CPU, with several workers, ops and budgets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from tuned_fakes import Fake

import k3dsl
from k3dsl.autotune import Result, problem, sweep, tune, tune_each, tuning
from k3dsl.errors import ArgumentError, LockedError, UnknownNameError
from k3dsl.ops.registry import get_op
from k3dsl.targets import Ceilings, get_target

SMALL = ["rmsnorm", "--target", "cpu", "--dims", "R=16,D=256", "--set", "num_warps=4", "--budget", "600"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path / "cache"))


def command(*args: str, status: int = 0) -> subprocess.CompletedProcess:
    found = subprocess.run([sys.executable, "-m", "k3dsl.cli.main", "tune", *args], capture_output=True, text=True)
    assert found.returncode == status, found.stderr
    return found


def test_the_command_tunes_without_a_gpu_keeps_the_winner_and_goes_on():
    at = (*SMALL, "--trials", "2")
    (report,) = json.loads(command(*at, "--json").stdout)
    assert report["ends"] == {"ok": 2}
    assert report["set"].startswith("--set num_warps=4 --set rows=")
    assert Path(report["saved"]).exists()
    shown = command(*at).stdout
    assert report["set"] in shown
    assert "2 trials from an earlier run" in shown


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("rmsnorm", "--target", "gfx942"), "--target cpu"),
        (("rmsnorm", "--target", "cpu", "--devices", "0"), "no device numbers"),
        (("rmsnorm", "--target", "cpu", "--devices", "a"), "write --devices 0,1"),
        (("rmsnrm", "--target", "cpu"), "did you mean rmsnorm"),
        (("rmsnorm", "--target", "cpu", "--dims", "softmax:R=4"), "softmax, which is not tuned here"),
        (("rmsnorm", "--target", "cpu", "--backend", "triton"), "torch runs on the cpu"),
        (("rmsnorm", "--target", "cpu", "--set", "rows=3"), "choose one of"),
    ],
)
def test_a_mistake_is_named_before_anything_runs(args, says):
    from typer.testing import CliRunner

    from k3dsl.cli.main import app

    done = CliRunner().invoke(app, ["tune", *args])
    assert done.exit_code == 2
    assert says in done.output + (done.stderr if done.stderr_bytes else "")


def test_dims_are_for_every_op_or_for_the_one_that_is_named(monkeypatch):
    from typer.testing import CliRunner

    from k3dsl.cli.main import app

    seen = []
    monkeypatch.setattr(tuning, "tune_each", lambda problems, **how: seen.append((problems, how)) or ())
    words = ["tune", "rmsnorm", "softmax", "--target", "cpu", "--dims", "R=8", "--dims", "softmax:R=4,N=32"]
    done = CliRunner().invoke(app, [*words, "--total-budget", "60", "--workers", "2", "--storage", "sqlite:///x"])
    assert done.exit_code == 0, done.output
    ((problems, how),) = seen
    assert [(p.op.name, p.dims["R"]) for p in problems] == [("rmsnorm", 8), ("softmax", 8), ("softmax", 4)]
    assert problems[2].dims["N"] == 32
    assert (how["total_budget_s"], how["workers"], how["storage"]) == (60, 2, "sqlite:///x")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_the_journal_and_says_the_best_so_far(number):
    cache = Path(os.environ["K3DSL_CACHE_DIR"])
    words = [sys.executable, "-m", "k3dsl.cli.main", "tune", *SMALL, "--budget", "3600"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tuner:
        while not any(p.read_bytes().count(b"\n") >= 2 for p in cache.glob("tune/*/journal.jsonl")):
            assert tuner.poll() is None
            time.sleep(0.02)
        tuner.send_signal(number)
        shown, errors = tuner.communicate()
    assert tuner.returncode == 130, errors
    assert "best so far" in shown
    assert "Traceback" not in errors
    assert "the same command goes on" in errors
    (journal,) = cache.glob("tune/*/journal.jsonl")
    trials = [json.loads(line) for line in journal.read_text().splitlines()]
    best = min((t["outcome"]["time_ms"], t["key"]) for t in trials if t["outcome"]["end"] == "ok")
    assert best[1] in shown
    assert not list(cache.glob("winners/*/*"))  # nothing was judged as a finalist


def test_two_workers_share_a_sweep_and_run_nothing_twice():
    result = tune("rmsnorm", {"R": 16, "D": 256}, {"num_warps": 4}, target="cpu", workers=2, budget_s=3600)
    records = [json.loads(line) for line in result.journal.read_text().splitlines()]
    steps = Counter((r["stage"], r["key"], r["round"]) for r in records)
    assert set(steps.values()) == {1}
    assert result.ends() == {"ok": 5}  # rows 1, 2, 4, 8, 16
    assert result.winner is not None
    assert [t.proposal.number for t in result.trials] == list(range(5))


# ---- from Python ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def faked(monkeypatch):
    """Sweeps with a fake pool and worker, as if on an H200; what each was given."""
    given = []
    real = sweep.sweep

    def run(op, dims, options, limits, **how):
        given.append((op.name, dict(dims), limits.budget_s, how["devices"]))
        fake = Fake()
        how |= {"pool": lambda: fake, "worker": lambda: fake}
        return real(op, dims, options, limits, **how)

    monkeypatch.setattr(sweep, "sweep", run)
    monkeypatch.setattr(tuning, "target_here", lambda name: get_target("sm_90a"))
    monkeypatch.setattr(tuning, "devices_here", lambda *_: ("cuda:0",))
    monkeypatch.setattr(
        tuning, "_device_facts", lambda *_: (Ceilings(4000.0, 700.0, "by hand"), {"gpu": {"name": "NVIDIA H200"}})
    )
    return given


def decode(batch: int):
    return problem("kda.decode", {"B": batch, "H": 8})


def test_the_python_door_gives_a_result(faked):
    result = tune("kda.decode", {"B": 4, "H": 8}, backends=["triton"], keep=False, watch=lambda *_: nullcontext())
    assert isinstance(result, Result)
    assert result.winner.settings == {"block_v": 128, "decode.num_warps": 16}
    assert result.floor_ms > 0
    assert result.saved is None


def test_a_total_budget_is_shared_out_and_what_one_leaves_goes_to_the_others(faked, monkeypatch):
    """The first gets what processes take to start, 30 s on a machine with GPUs, and a third of the rest."""
    clock = iter([0.0, 0.0, 10.0, 50.0])  # the start, then before each: the first takes 10 s of its 50, the second 40
    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    done = list(tune_each([decode(2), decode(4), decode(8)], backends=["triton"], total_budget_s=90, keep=False))
    assert len(done) == 3
    assert [budget for _, _, budget, _ in faked] == [50, 40, 40]


@pytest.mark.parametrize(("left", "problems"), [(29, 10), (31, 10), (90, 3), (100, 4), (20, 1)])
def test_the_first_share_leaves_the_others_theirs(left, problems):
    first = tuning._share(left, problems, 30.0)
    assert left / problems <= first <= min(left, 30 + left / problems)
    assert problems == 1 or (left - first) / (problems - 1) >= 0.6 * left / problems


def test_several_ops_end_after_one_that_was_interrupted(faked, monkeypatch):
    monkeypatch.setattr(Fake, "start", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    done = list(tune_each([decode(2), decode(4)], backends=["triton"], keep=False))
    assert [r.interrupted for r in done] == [True]


def test_nothing_is_tuned_after_the_lock():
    with k3dsl.lock(), pytest.raises(LockedError, match="tuning is forbidden"):
        tune("rmsnorm", target="cpu")


def test_names_are_checked_before_anything_is_tuned():
    with pytest.raises(UnknownNameError, match="did you mean"):
        problem("rmsnorm", {"RR": 1})
    with pytest.raises(ArgumentError, match="workers"):
        tune("rmsnorm", target="cpu", workers=0)
    with pytest.raises(ArgumentError, match="budget"):
        tune("rmsnorm", target="cpu", budget_s=0)


def test_a_setting_is_an_option_or_fixed():
    found = problem(get_op("rmsnorm"), {"R": 4}, {"dtype": "f32", "rows": 2})
    assert str(found.options["dtype"]) == "f32"
    assert found.fixed == {"rows": 2}


def test_devices_are_those_of_the_first_ones_kind(monkeypatch):
    import torch

    names = ["NVIDIA H200", "NVIDIA H200", "NVIDIA T4"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda n: names[n])
    here = get_target("sm_90a")
    assert tuning.devices_here(here, None) == ("cuda:0", "cuda:1")
    assert tuning.devices_here(here, [1]) == ("cuda:1",)
    for numbers, says in (([3], "no GPU 3"), ([0, 2], "GPU 2 is NVIDIA T4"), ([], "no device")):
        with pytest.raises(ArgumentError, match=says):
            tuning.devices_here(here, numbers)
    with pytest.raises(ArgumentError, match="disturb"):
        tuning.devices_here(here, None, workers=2)
    assert tuning.devices_here(None, None, 3) == ("cpu", "cpu", "cpu")
