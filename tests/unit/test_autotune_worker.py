"""Whatever a candidate does, the tuner's process lives on, the end is named, and the next candidate runs as if alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k3dsl.autotune.child import Child, DiedError
from k3dsl.autotune.compile_pool import CompilePool, source_digest
from k3dsl.autotune.gate import gate_cases
from k3dsl.autotune.trial import Candidate, End
from k3dsl.autotune.worker import Worker
from k3dsl.errors import ArgumentError, LaunchError
from k3dsl.ir.identity import kernel_hash
from k3dsl.ops import softmax as softmax_op
from k3dsl.ops.registry import get_op
from k3dsl.runtime import executable
from k3dsl.runtime.dispatch import planning
from k3dsl.runtime.op import defaults_only
from k3dsl.targets import get_target

DIMS = {"R": 8, "N": 16}
OP = "tuned_examples:BAD"


def bad(how: str, **options: str) -> Candidate:
    return Candidate(OP, DIMS, options, {"how": how}, "torch")


def softmax(backend: str = "triton", **settings: object) -> Candidate:
    return Candidate("softmax", {"R": 64, "N": 512}, {}, settings, backend)


def compiling(how: str) -> Candidate:
    return Candidate(OP, {"R": 64, "N": 512}, {"compiling": how}, {}, "triton")


def marked(mark: str) -> list[int]:
    """Processes that have this text on their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "cmdline").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile
            continue
    return found


def gone(pid: int, within_s: float = 120.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def worker():
    with Worker("cpu") as found:
        yield found


@pytest.fixture(scope="module")
def pool():
    with CompilePool(2, "sm_90a") as found:
        yield found


def test_a_right_candidate_is_judged_and_timed(worker):
    outcome = worker.run(bad("right"), repeats=3, rep_ms=5)
    assert outcome.end is End.OK, outcome.detail
    assert outcome.time_ms == min(outcome.samples_ms) > 0  # what other load on the machine cannot lower
    assert outcome.errors == {"o": 0.0}
    assert outcome.gate == "quick"


@pytest.mark.parametrize(
    ("how", "end", "words"),
    [
        ("wrong", End.WRONG, ("case ragged", "o: error 1.00e-03 is above 1.0e-05")),
        ("racing", End.NONDETERMINISTIC, ("case ragged", "o of call 2")),
        ("leaking", End.NONDETERMINISTIC, ("case ragged", "o of call 2")),
        ("partial", End.NONFINITE, ("case ragged", "o: error inf", "8 of 24 elements are not finite")),
        ("past the end", End.WRONG, ("case ragged: call 1", "outside of o", "8 bytes past its end, the first 12 off")),
        (
            "before the start",
            End.WRONG,
            ("case ragged: call 1", "outside of o", "8 bytes before its start, the first 8"),
        ),
        ("beside the input", End.WRONG, ("case ragged: call 1", "outside of its input x", "4 bytes past its end")),
        ("into the input", End.WRONG, ("case ragged: call 1", "it changed its input x")),
        ("hang", End.RUN_TIMEOUT, ("case ragged: call 1 of 3", "no end after 1 s")),
        ("fault", End.FAULTED, ("case ragged: call 1 of 3", "SIGSEGV")),
        ("exit", End.FAULTED, ("case ragged: call 1 of 3", "exit status 3")),
        ("raise", End.FAULTED, ("RuntimeError: no such kernel image",)),
        ("refused", End.ILLEGAL, ("nobody wants it",)),
    ],
)
def test_what_a_candidate_does_wrong_is_named_and_the_next_one_runs(worker, how, end, words):
    outcome = worker.run(bad(how), repeats=3, run_deadline_s=1 if how == "hang" else 60, rep_ms=5)
    assert outcome.end is end, outcome.detail
    for text in words:
        assert text in outcome.detail
    assert outcome.time_ms is None
    assert outcome.gate is None
    assert worker.run(bad("right"), repeats=3, rep_ms=5).end is End.OK


def test_a_candidate_far_behind_is_dropped_after_its_first_calls(worker):
    outcome = worker.run(bad("slow"), repeats=2, best_ms=1.0)
    assert outcome.end is End.SLOW
    assert outcome.time_ms is None
    assert len(outcome.samples_ms) == 1
    assert outcome.gate == "quick"
    assert worker.run(bad("slow"), repeats=2, best_ms=49.0, rep_ms=5).end is End.OK


def test_a_budget_bounds_all_steps_together(worker):
    # 4 cases of 100 000 calls of 50 ms: hours, which no step's own deadline would end
    outcome = worker.run(bad("slow"), repeats=100_000, budget_s=1.5)
    assert outcome.end is End.RUN_TIMEOUT
    assert "budget" in outcome.detail
    assert worker.run(bad("right"), repeats=2, rep_ms=1).end is End.OK


def test_what_a_candidate_started_ends_with_it(monkeypatch):
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("K3DSL_TEST_MARK", mark)
    with Worker("cpu") as worker:
        before = worker.pid
        assert worker.run(bad("spawn"), run_deadline_s=2).end is End.RUN_TIMEOUT
        assert all(gone(pid) for pid in marked(mark))
        assert gone(before)
        after = worker.pid
    assert gone(after)


def test_the_ops_of_the_registry_run_with_the_forced_settings(worker):
    outcome = worker.run(softmax("torch", passes=2, block=256), level="full", repeats=2, rep_ms=5)
    assert outcome.end is End.OK, outcome.detail
    assert 0 < outcome.errors["o"] < 4e-3
    assert worker.run(softmax("torch", passes=1, block=256), repeats=2).end is End.ILLEGAL
    assert worker.run(softmax("torch", bloc=256), repeats=2).end is End.ILLEGAL
    assert "unknown op" in worker.run(Candidate("softmx", {}, {}, {}, "torch"), repeats=2).detail


def test_a_level_that_does_not_exist_is_refused(worker):
    with pytest.raises(ArgumentError, match="gate level"):
        worker.run(bad("right"), level="shp")


def test_a_device_that_is_not_there_is_said_so():
    with Worker("cuda:99") as nowhere, pytest.raises(LaunchError, match="cuda:99 cannot be used"):
        nowhere.run(bad("right"))


def interrupted(mark: str, action: str) -> str:
    return f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from k3dsl.autotune.trial import Candidate
from k3dsl.autotune.worker import Worker
worker = Worker("cpu")
worker.run(Candidate({OP!r}, {DIMS!r}, {{}}, {{"how": "right"}}, "torch"), repeats=2, rep_ms=1)
print(worker.pid, flush=True)
{action}
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_tuner_is_interrupted_or_killed(number):
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    hang = f'worker.run(Candidate({OP!r}, {DIMS!r}, {{}}, {{"how": "spawn"}}, "torch"))'
    environment = {**os.environ, "K3DSL_TEST_MARK": mark}
    command = [sys.executable, "-c", interrupted(mark, hang)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as tuner:
        assert tuner.stdout is not None
        pid = int(tuner.stdout.readline())
        end = time.monotonic() + 120
        while not marked(mark) and time.monotonic() < end:
            time.sleep(0.05)
        grandchildren = marked(mark)
        assert grandchildren
        tuner.send_signal(number)
        tuner.wait(timeout=120)
    assert gone(pid)
    assert all(gone(grandchild) for grandchild in grandchildren)


def test_a_worker_that_nobody_closes_ends_with_the_program():
    done = subprocess.run([sys.executable, "-c", interrupted("", "")], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert gone(int(done.stdout))


def test_building_says_how_each_candidate_ended_and_the_pool_lives_on(pool):
    candidates = [
        softmax(),
        compiling("fault"),
        compiling("raise"),
        softmax(passes=1, block=256),
        softmax("torch"),
        softmax(**{"softmax.num_warps": 8}),
        softmax(**{"softmax.num_wraps": 8}),
    ]
    seen: list[int] = []
    found = pool.build(candidates, deadline_s=120, report=lambda index, _: seen.append(index))
    assert list(found) == sorted(seen) == list(range(len(candidates)))
    ends = [found[n].end for n in found]
    assert ends == [
        End.OK,
        End.COMPILE_FAILED,
        End.LOWER_FAILED,
        End.ILLEGAL,
        End.OK,
        End.OK,
        End.ILLEGAL,
    ], [outcome.detail for outcome in found.values()]
    assert "SIGSEGV" in found[1].detail
    assert "KeyError: 'a bug of the plan'" in found[2].detail
    for n in (0, 5):
        assert list(found[n].sources) == list(found[n].binaries) == ["softmax"]
        assert len(found[n].sources["softmax"]) == 64
    assert found[0].sources != found[5].sources
    plan = get_op("softmax").point({"R": 64, "N": 512}, {}, symbolic=True).plan("torch")
    assert found[4].sources == {"softmax": kernel_hash(plan.launches[0].kernel)}
    again = pool.build({7: softmax(), 9: softmax()}, deadline_s=120)
    assert {n: outcome.binaries for n, outcome in again.items()} == {7: found[0].binaries, 9: found[0].binaries}


def test_equal_sources_are_built_once(tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("K3DSL_TEST_LOG", str(log))
    one, other, third = (replace(compiling("counted"), settings={"softmax.num_warps": n}) for n in (4, 2, 1))
    with CompilePool(2, "sm_90a") as own:
        found = own.build([one, other, one, one], deadline_s=250)
        assert sorted(log.read_text().split()) == ["2", "4"]
        assert [found[n].end for n in found] == [End.OK] * 4, found
        assert found[0].sources == found[2].sources == found[3].sources != found[1].sources
        assert found[0].binaries == found[2].binaries == found[3].binaries != {}
        later = own.build([one, third], deadline_s=250, built=set(found[0].codes()))
    assert sorted(log.read_text().split()) == ["1", "2", "4"]
    assert (later[0].end, later[0].sources, later[0].binaries) == (End.OK, found[0].sources, {})
    assert later[1].binaries


def test_equal_sources_that_do_not_build_fail_together():
    with CompilePool(2, "sm_90a") as own:
        found = own.build([compiling("late fault"), compiling("late fault")], deadline_s=250)
    assert [outcome.end for outcome in found.values()] == [End.COMPILE_FAILED] * 2
    assert found[0].sources == found[1].sources != {}


def test_equal_code_with_another_grid_is_another_candidate():
    launch = get_op("softmax").point({"R": 64, "N": 512}, {}, symbolic=True).plan("triton").launches[0]
    wide = replace(launch, kernel=replace(launch.kernel, grid=(launch.kernel.grid[0] * 2,)))
    source = executable.lower(launch, get_target("sm_90a"))
    assert source_digest(launch, source) == source_digest(launch, source)
    assert source_digest(launch, source) != source_digest(wide, source)
    assert source_digest(launch, source) != source_digest(replace(launch, smaller=(launch.schedule,)), source)


def test_a_build_that_hangs_is_ended_at_its_deadline_and_others_are_not(pool):
    found = pool.build([compiling("hang"), softmax("torch")], deadline_s=2)
    assert [outcome.end for outcome in found.values()] == [End.COMPILE_TIMEOUT, End.OK]
    assert "2 s" in found[0].detail
    assert found[0].seconds >= 2


def test_too_much_shared_memory_is_told_apart(pool):
    settings = {"block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "matmul.stages.k": 8}
    dims = {"M": 1024, "N": 1024, "K": 1024}
    (outcome,) = pool.build([Candidate("matmul", dims, {}, settings, "triton")], deadline_s=120).values()
    assert outcome.end is End.OVER_RESOURCE, outcome.detail
    assert "shared memory" in outcome.detail


def test_an_interrupted_build_leaves_no_process(pool):
    before = set(marked("compile_pool:serve"))

    def interrupt():
        while not set(marked("compile_pool:serve")) - before:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    started = threading.Thread(target=interrupt)
    with CompilePool(1, "sm_90a") as own:
        started.start()
        with pytest.raises(KeyboardInterrupt):
            own.build([compiling("hang")], deadline_s=250)
    started.join()
    assert all(gone(pid) for pid in set(marked("compile_pool:serve")) - before)


def test_the_last_words_of_a_process_are_kept():
    child = Child("no_such_module:serve")
    with pytest.raises(DiedError, match=r"exit status 1.*No module named 'no_such_module'"):
        child.receive(250)
    child.kill()


def test_what_the_gate_launches_is_built_ahead(tmp_path, monkeypatch):
    """With a cache of its own: whoever plans the gate's cases and builds them afterwards adds no file to it."""
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path))
    candidate = softmax()
    with CompilePool(2, "sm_90a") as own:
        outcome = own.start([candidate], 250, level="quick").outcome(0)
        assert outcome.end is End.OK, outcome.detail
        assert own.start([candidate], 250, level="full", own=False).outcome(0).end is End.OK

    def files():
        return sorted(str(p) for p in tmp_path.rglob("*") if p.is_file() and "tmp" not in p.name)

    before, op, count = files(), get_op("softmax"), 0
    for case in gate_cases(op, candidate, "full"):
        with planning("triton") as calls, defaults_only(op):
            op.call(**case.case.make("cpu", 0))
        for called in calls:
            for launch in called.executable.plan.launches:
                executable.fitted(launch, get_target("sm_90a"))
                count += 1
    assert count >= 2
    assert files() == before


def test_a_case_that_does_not_build_ends_its_candidate(pool):
    """Its own dims build; the ragged dims of the gate do not."""
    candidate = Candidate(OP, {"R": 64, "N": 512}, {}, {"how": "unbuildable"}, "triton")
    assert pool.start([candidate], 250).outcome(0).end is End.OK
    outcome = pool.start([candidate], 250, level="quick").outcome(0)
    assert outcome.end is End.COMPILE_FAILED
    assert outcome.detail == "case ragged: no layout was found"
    assert outcome.sources


def test_a_batch_that_is_stopped_leaves_no_process_at_work():
    with CompilePool(1, "sm_90a") as own:
        batch = own.start([compiling("hang")], 250)
        while not marked("compile_pool:serve"):
            time.sleep(0.05)
        batch.stop()
        with pytest.raises(LaunchError, match="stopped"):
            batch.outcome(0)
        batch.kill()
        assert own.start([softmax()], 250).outcome(0).end is End.OK


def test_planning_runs_nothing_and_names_the_plans_of_the_backend_that_is_asked():
    x = torch.ones(3, 40)
    with planning("triton") as calls:
        softmax_op(x)
    with planning("tilelang") as others:
        softmax_op(x)
    assert [launch.backend for c in (*calls, *others) for launch in c.executable.plan.launches] == [
        "triton",
        "tilelang",
    ]
    assert torch.allclose(softmax_op(x), torch.full((3, 40), 1 / 40))
