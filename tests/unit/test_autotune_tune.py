"""A sweep as a whole: what is built, run and judged again, who wins, and what is left after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3dsl.autotune.finalists import Finalist, ranked, tied
from k3dsl.autotune.journal import Journal
from k3dsl.autotune.search import Proposal
from k3dsl.autotune.space import Space
from k3dsl.autotune.trial import End, Outcome
from k3dsl.autotune.tune import tune
from k3dsl.errors import ArgumentError
from k3dsl.ops.registry import get_op
from k3dsl.targets import get_target

SM90 = get_target("sm_90a")
DIMS = {"B": 4, "H": 8}


class Fake:
    """A pool and a worker in one. Times fall with block_v and warps; ends: what a point comes to, by block_v."""

    def __init__(self, ends=None, sources=None, log: Path | None = None, delay: float = 0.0):
        self.ends, self.sources, self.log, self.delay = ends or {}, sources, log, delay
        self.built: list[str] = []
        self.ran: list[tuple[str, str, int, float | None]] = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def build(self, candidates, deadline_s):
        self.built += [Space.text(c.settings) for c in candidates]
        return {n: self._built(c) for n, c in enumerate(candidates)}

    def _built(self, candidate):
        if self.ends.get(candidate.settings["block_v"]) is End.COMPILE_TIMEOUT:
            return Outcome(End.COMPILE_TIMEOUT, "too long")
        text = self.sources(candidate.settings) if self.sources else Space.text(candidate.settings)
        return Outcome(End.OK, sources={"decode": text}, binaries={"decode": text})

    def run(self, candidate, level, repeats, run_deadline_s, best_ms):
        key = Space.text(candidate.settings)
        self.ran.append((key, level, repeats, best_ms))
        time.sleep(self.delay)
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{level} {key}\n")
        end = self.ends.get(
            (candidate.settings["block_v"], level), self.ends.get(candidate.settings["block_v"], End.OK)
        )
        if end is not End.OK:
            return Outcome(end, "said by the fake")
        ms = 1 + 8 / candidate.settings["block_v"] + 1 / candidate.settings.get("decode.num_warps", 1)
        return Outcome(End.OK, time_ms=ms, samples_ms=(ms,) * 5, gate=level)


def sweep(fake: Fake, **extra):
    how = {
        "target": SM90,
        "backends": ("triton",),
        "budget_s": 60,
        "pool": lambda: fake,
        "worker": lambda: fake,
        **extra,
    }
    return tune(get_op("kda.decode"), DIMS, {}, **how)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path / "cache"))


def test_the_fastest_point_wins_and_is_judged_at_level_full():
    fake = Fake()
    result = sweep(fake)
    assert result.winner is not None
    assert result.winner.settings == {"block_v": 128, "decode.num_warps": 16}
    assert result.ends() == {"ok": 25}
    assert result.outcome.gate == "full"
    assert result.outcome.time_ms == pytest.approx(1 + 8 / 128 + 1 / 16)
    assert {(level, repeats) for _, level, repeats, _ in fake.ran} == {("quick", 10), ("full", 30), ("quick", 2)}
    assert result.stopped == "every legal point was tried"


def test_finalists_are_timed_in_turns():
    fake = Fake()
    sweep(fake, finalists=3)
    last = [key for key, level, repeats, _ in fake.ran if (level, repeats) == ("quick", 2)]
    assert len(last) == 9
    rounds = [last[0:3], last[3:6], last[6:9]]
    assert all(set(r) == set(rounds[0]) for r in rounds)
    assert len({r[0] for r in rounds}) == 3  # each goes first once


def test_a_trial_is_told_the_best_so_far():
    fake = Fake()
    sweep(fake)
    told = [best for _, level, repeats, best in fake.ran if repeats == 10]
    assert told[0] is None
    assert told[1:] == sorted(told[1:], reverse=True)


@pytest.mark.parametrize("end", [End.WRONG, End.NONDETERMINISTIC, End.FAULTED, End.RUN_TIMEOUT, End.COMPILE_TIMEOUT])
def test_a_point_that_does_not_end_well_is_counted_and_never_wins(end):
    result = sweep(Fake({128: end}))
    assert result.ends() == {end.value: 5, "ok": 20}
    assert result.winner.settings["block_v"] == 64


def test_what_the_full_gate_turns_away_is_named_and_the_next_best_wins():
    result = sweep(Fake({(128, "full"): End.NONDETERMINISTIC}))
    assert result.winner.settings == {"block_v": 64, "decode.num_warps": 16}
    assert {o.end for _, o in result.turned_away} == {End.NONDETERMINISTIC}


def test_nothing_wins_when_nothing_passes():
    result = sweep(Fake(dict.fromkeys((8, 16, 32, 64, 128), End.WRONG)))
    assert result.winner is None
    assert result.outcome is None
    assert result.to_json()["winner"] is None


def test_equal_code_is_run_once():
    fake = Fake(sources=lambda settings: f"block {settings['block_v']}")
    result = sweep(fake)
    assert len([1 for *_, repeats, _ in fake.ran if repeats == 10]) == 5
    assert result.to_json()["same_code"] == 20
    assert result.ends() == {"ok": 25}


def test_a_sweep_stops_near_the_roofline():
    result = sweep(Fake(), floor_ms=1.5)  # 95 % of it is reached by every point under 1.58 ms
    assert len(result.trials) < 25
    assert "memory traffic" in result.stopped
    assert result.roofline_share >= 0.95


def test_a_sweep_ends_when_its_budget_is_spent():
    result = sweep(Fake(delay=0.05), budget_s=0.4)
    assert len(result.trials) < 15
    assert "budget" in result.stopped
    assert result.winner is not None


def test_out_of_budget_only_the_best_and_then_the_default_are_judged_again():
    fake = Fake({(128, "full"): End.WRONG}, delay=0.1)
    result = sweep(fake, budget_s=0.05)
    judged = [key for key, level, *_ in fake.ran if level == "full"]
    assert len(judged) <= 2
    assert result.winner is not None


def test_a_finished_sweep_is_not_run_again_unless_fresh():
    first = sweep(Fake())
    again = Fake()
    second = sweep(again)
    assert (again.ran, again.built) == ([], [])
    assert second.winner == first.winner
    assert all(t.resumed for t in second.trials)
    fresh = Fake()
    assert sweep(fresh, resume=False).winner == first.winner
    assert len(fresh.built) == 25


def test_another_seed_is_another_sweep():
    assert sweep(Fake()).journal != sweep(Fake(), seed=1).journal


def test_a_torn_last_line_is_written_anew():
    first = sweep(Fake())
    lines = first.journal.read_bytes().splitlines(keepends=True)
    first.journal.write_bytes(b"".join(lines[:10]) + lines[10][:30])
    again = Fake()
    assert sweep(again).winner == first.winner
    assert len(again.built) == 25 - 10
    for line in first.journal.read_text().splitlines():
        json.loads(line)


def test_lines_that_are_no_records_are_left_out(tmp_path):
    first = sweep(Fake())
    lines = first.journal.read_text().splitlines(keepends=True)
    foreign = json.dumps({**json.loads(lines[3]), "schema": 99}) + "\n"
    first.journal.write_text("".join([*lines[:3], foreign, "not json\n", *lines[4:]]))
    with Journal(first.journal) as journal:
        assert journal.skipped == 2
        assert len(journal.records) == len(lines) - 1


def test_one_sweep_at_a_time_has_a_journal(tmp_path):
    with Journal(tmp_path / "j"), pytest.raises(ArgumentError, match="another sweep"):
        Journal(tmp_path / "j")


CHILD = """
import sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from test_autotune_tune import Fake, sweep
result = sweep(Fake(log=Path(sys.argv[1]), delay=0.05))
print(result.to_json()["set"])
"""


def test_a_killed_sweep_repeats_no_finished_trial_and_has_the_same_winner(tmp_path):
    log, script = tmp_path / "log", CHILD.format(folder=str(Path(__file__).parent))
    env = {**os.environ, "K3DSL_CACHE_DIR": str(tmp_path / "killed")}
    command = [sys.executable, "-c", script, str(log)]
    kills = 0
    for wanted in (4, 12, 27):  # in the middle of trials, then of finalists
        child = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while time.monotonic() < until and child.poll() is None:
            if log.exists() and len(log.read_text().splitlines()) >= wanted:
                child.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.005)
        child.wait()
    last = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert kills == 3
    (journal,) = (tmp_path / "killed").rglob("journal.jsonl")
    steps = [(r["stage"], r["key"], r["round"]) for r in map(json.loads, journal.read_text().splitlines())]
    assert len(steps) == len(set(steps))
    # 25 trials, 4 finalists at the gate and three times after it; a step that a kill cut short may be begun twice
    assert len(steps) == 25 + 4 + 12
    assert len(steps) <= len(log.read_text().splitlines()) <= len(steps) + kills
    assert last.stdout.strip() == sweep(Fake()).to_json()["set"]


def finalist(settings, *samples):
    return Finalist(Proposal(0, "grid", settings, Space.text(settings)), Outcome(End.OK), samples)


def test_among_equal_times_the_fewest_threads_win():
    space = Space(get_op("kda.decode"), DIMS, {}, SM90, ("triton",))
    many = finalist({"block_v": 32, "decode.num_warps": 8}, 1.000, 1.001, 0.999)
    few = finalist({"block_v": 32, "decode.num_warps": 1}, 1.002, 1.003, 1.001)
    slow = finalist({"block_v": 8, "decode.num_warps": 1}, 1.5, 1.5, 1.5)
    found = ranked(space, [slow, many, few])
    assert [f.proposal for f in found] == [few.proposal, many.proposal, slow.proposal]
    assert [f.tied for f in found] == [True, True, False]


def test_times_within_their_own_spread_are_equal():
    noisy = [1.0, 1.2, 0.8, 1.1, 0.9]
    assert tied(noisy, [x + 0.05 for x in noisy], 0.0)
    assert not tied([1.0] * 5, [1.05] * 5, 0.01)


def test_two_sweeps_with_one_seed_choose_the_same_winner_on_the_cpu():
    def winner(resume):
        op = get_op("rmsnorm")
        dims = {"R": 32, "D": 256}
        how = {"target": None, "backends": ("torch",), "budget_s": 60, "seed": 3, "fixed": {"num_warps": 4}}
        return tune(op, dims, {}, resume=resume, **how)

    first, second = winner(True), winner(False)
    assert first.winner is not None
    assert first.winner == second.winner
    assert not any(t.resumed for t in second.trials)


def test_a_budget_must_be_time():
    with pytest.raises(ArgumentError, match="budget"):
        sweep(Fake(), budget_s=0)


def command(*args: str, status: int = 0) -> subprocess.CompletedProcess:
    found = subprocess.run([sys.executable, "-m", "k3dsl.cli.main", "tune", *args], capture_output=True, text=True)
    assert found.returncode == status, found.stderr
    return found


def test_the_command_tunes_without_a_gpu_and_keeps_the_winner():
    at = (
        "rmsnorm",
        "--target",
        "cpu",
        "--dims",
        "R=16,D=256",
        "--set",
        "num_warps=4",
        "--budget",
        "20",
        "--trials",
        "2",
    )
    (report,) = json.loads(command(*at, "--json").stdout)
    assert report["ends"] == {"ok": 2}
    assert report["set"].startswith("--set num_warps=4 --set rows=")
    assert Path(report["saved"]).exists()
    shown = command(*at).stdout
    assert report["set"] in shown
    assert "2 trials from an earlier run" in shown


def test_the_command_refuses_a_gpu_that_is_not_here():
    assert "--target cpu" in command("rmsnorm", "--target", "gfx942", status=2).stderr
