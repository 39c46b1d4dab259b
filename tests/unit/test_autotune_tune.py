"""A sweep as a whole, with fakes for what builds and runs: what is tried, judged again and left after a kill, and who wins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tuned_fakes import POINTS, Fake, swept, time_of

import k3dsl
from k3dsl.autotune import finalists
from k3dsl.autotune.finalists import ROUNDS
from k3dsl.autotune.journal import Journal
from k3dsl.autotune.trial import End
from k3dsl.errors import ArgumentError, LockedError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def all_in_reach(monkeypatch):
    """The fakes' points differ by more than what a finalist may take longer than the best."""
    monkeypatch.setitem(finalists.OUT_OF_REACH, "gpu", 1.0)


def test_the_fastest_point_wins_and_is_judged_at_level_full(all_in_reach):
    fake = Fake()
    result = swept(fake)
    assert result.winner is not None
    assert result.winner.settings == {"block_v": 128, "decode.num_warps": 16}
    assert result.ends() == {"ok": POINTS}
    assert result.outcome.gate == "full"
    assert result.outcome.time_ms == pytest.approx(1 + 8 / 128 + 1 / 16)
    assert {(level, repeats) for _, level, repeats, _ in fake.ran} == {("quick", 10), ("full", 30), (None, 10)}
    assert result.stopped == "every legal point was tried"


def test_finalists_are_timed_in_turns(all_in_reach):
    fake = Fake()
    swept(fake, finalists=3)
    last = [key for key, level, *_ in fake.ran if level is None]
    rounds = [last[n : n + 3] for n in range(0, len(last), 3)]
    assert len(rounds) == ROUNDS
    assert all(set(r) == set(rounds[0]) for r in rounds)
    assert len({r[0] for r in rounds}) == 3  # each goes first


def test_a_trial_is_told_the_best_so_far():
    fake = Fake()
    swept(fake)
    trials = [(key, best) for key, level, _, best in fake.ran if level == "quick"]
    assert trials[0][1] is None
    seen: list[float] = []
    for key, best in trials:
        assert best == (min(seen) if seen else None)
        settings = dict(part.split("=") for part in key.split(" ") if "=" in part)
        seen.append(time_of({name: int(value) for name, value in settings.items()}))


@pytest.mark.parametrize("end", [End.WRONG, End.NONDETERMINISTIC, End.FAULTED, End.RUN_TIMEOUT, End.COMPILE_TIMEOUT])
def test_a_point_that_does_not_end_well_is_counted_and_never_wins(end):
    result = swept(Fake({128: end}))
    assert result.ends() == {end.value: 5, "ok": 20}
    assert result.winner.settings["block_v"] == 64


def test_what_the_full_gate_turns_away_is_named_and_the_next_best_wins():
    result = swept(Fake({(128, "full"): End.NONDETERMINISTIC}))
    assert result.winner.settings == {"block_v": 64, "decode.num_warps": 16}
    assert {o.end for _, o in result.turned_away} == {End.NONDETERMINISTIC}
    assert {row["end"] for row in result.to_json()["turned_away"]} == {"nondeterministic"}


def test_nothing_wins_when_nothing_passes():
    result = swept(Fake(dict.fromkeys((8, 16, 32, 64, 128), End.WRONG)))
    assert result.winner is None
    assert result.outcome is None
    assert result.best_trial is None
    assert result.to_json()["winner"] is None


@pytest.mark.parametrize("what", ["sources", "binaries"])
def test_equal_code_is_run_once(what):
    fake = Fake(**{what: lambda settings: f"block {settings['block_v']}"})
    result = swept(fake)
    assert len([1 for _, level, *_ in fake.ran if level == "quick"]) == 5
    assert result.to_json()["same_code"] == 20
    assert result.ends() == {"ok": POINTS}
    leaders = {t.proposal.number: t for t in result.trials if t.same_as is None}
    for t in result.trials:
        if t.same_as is not None:
            assert t.outcome.time_ms == leaders[t.same_as].outcome.time_ms
            assert f"trial {t.same_as}" in t.outcome.detail


def test_equal_code_that_fails_fails_everywhere():
    fake = Fake({128: End.WRONG}, sources=lambda settings: f"block {settings['block_v']}")
    result = swept(fake)
    assert result.ends() == {"wrong": 5, "ok": 20}
    assert len([1 for key, *_ in fake.ran if "block_v=128" in key]) == 1


def test_a_sweep_stops_near_the_roofline():
    result = swept(Fake(), floor_ms=1.5)  # 95 % of it is reached by every point under 1.58 ms
    assert len(result.trials) < POINTS
    assert "of the roofline" in result.stopped
    assert result.roofline_share >= 0.95
    assert len(swept(Fake(), floor_ms=1.5, stop_share=0.5, resume=False).trials) <= len(result.trials)


def test_a_sweep_ends_when_its_budget_is_spent():
    result = swept(Fake(delay=0.05), budget_s=0.4)
    assert len(result.trials) < 15
    assert "budget" in result.stopped
    assert result.winner is not None


def test_out_of_budget_only_the_best_and_then_the_default_are_judged_again():
    fake = Fake({(128, "full"): End.WRONG}, delay=0.1)
    result = swept(fake, budget_s=0.05)
    judged = [key for key, level, *_ in fake.ran if level == "full"]
    assert len(judged) <= 2
    assert result.winner is not None


def test_trials_can_be_limited_by_number():
    result = swept(Fake(), max_trials=11)
    assert len(result.trials) == 11
    assert result.stopped == "11 trials are done"


# ---- going on ----------------------------------------------------------------------------------------------------------


def test_a_finished_sweep_is_not_run_again_unless_fresh():
    first = swept(Fake())
    again = Fake()
    second = swept(again)
    assert (again.ran, again.built) == ([], [])
    assert second.winner == first.winner
    assert all(t.resumed for t in second.trials)
    fresh = Fake()
    assert swept(fresh, resume=False).winner == first.winner
    assert len(fresh.built) == POINTS


def test_another_seed_is_another_sweep():
    assert swept(Fake()).journal != swept(Fake(), seed=1).journal


def test_a_torn_last_line_is_written_anew():
    first = swept(Fake())
    lines = first.journal.read_bytes().splitlines(keepends=True)
    first.journal.write_bytes(b"".join(lines[:10]) + lines[10][:30])
    again = Fake()
    assert swept(again).winner == first.winner
    assert len(again.built) == POINTS - 10
    for line in first.journal.read_text().splitlines():
        json.loads(line)


def test_lines_that_are_no_records_are_left_out():
    first = swept(Fake())
    lines = first.journal.read_text().splitlines(keepends=True)
    foreign = json.dumps({**json.loads(lines[3]), "schema": 99}) + "\n"
    first.journal.write_text("".join([*lines[:3], foreign, "not json\n", "[" * 100_000 + "\n", *lines[4:]]))
    with Journal(first.journal) as journal:
        assert journal.skipped == 3
        assert len(journal.records) == len(lines) - 1


def test_one_sweep_at_a_time_has_a_journal(tmp_path):
    with Journal(tmp_path / "j"), pytest.raises(ArgumentError, match="another sweep"):
        Journal(tmp_path / "j")


CHILD = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from k3dsl.autotune import finalists
from tuned_fakes import Fake, swept
finalists.OUT_OF_REACH["gpu"] = 1.0
runs = int(sys.argv[2])
kill = lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == runs else None
print(swept(Fake(log=Path(sys.argv[1]), on_run=kill)).to_json()["set"])
"""


def test_a_killed_sweep_repeats_no_finished_trial_and_has_the_same_winner(tmp_path):
    log, script = tmp_path / "log", CHILD.format(folder=str(Path(__file__).parents[1]))
    env = {**os.environ, "K3DSL_CACHE_DIR": str(tmp_path / "killed")}
    for runs in (12, 20):  # each dies at its so manieth run: in the trials, then in the finals
        command = [sys.executable, "-c", script, str(log), str(runs)]
        assert subprocess.run(command, env=env, capture_output=True).returncode < 0
    last = subprocess.run([*command[:-1], "0"], env=env, capture_output=True, text=True, check=True)
    (journal,) = (tmp_path / "killed").rglob("journal.jsonl")
    steps = [(r["stage"], r["key"], r["round"]) for r in map(json.loads, journal.read_text().splitlines())]
    assert len(steps) == len(set(steps)) == POINTS + 4 + 4 * ROUNDS  # trials, finalists at the gate and in every round
    assert len(log.read_text().splitlines()) == len(steps)  # a run that was cut short had written nothing
    assert last.stdout.strip() == swept(Fake()).to_json()["set"]


def test_two_sweeps_at_once_keep_out_of_each_others_way():
    inner = []

    def meanwhile(number):
        if number != 5:
            return
        with pytest.raises(ArgumentError, match="another sweep"):
            swept(Fake())
        inner.append(swept(Fake(), seed=1))

    outer = swept(Fake(on_run=meanwhile))
    assert outer.winner == inner[0].winner
    for result in (outer, inner[0]):
        with Journal(result.journal) as journal:
            assert journal.skipped == 0
            assert sum(r.stage == "trial" for r in journal.records) == POINTS


# ---- ending early ------------------------------------------------------------------------------------------------------


def test_an_interrupt_ends_the_sweep_with_the_best_so_far_and_it_goes_on_later():
    def interrupt(number):
        if number == 12:
            raise KeyboardInterrupt

    result = swept(Fake(on_run=interrupt))
    assert result.interrupted
    assert result.winner is None  # nothing was judged as a finalist
    assert len(result.trials) == 11
    assert result.best_trial.outcome.time_ms == min(t.outcome.time_ms for t in result.trials)
    again = Fake()
    assert swept(again).winner.settings == {"block_v": 128, "decode.num_warps": 16}
    assert len(again.built) == POINTS - 11


def test_an_interrupt_in_the_middle_of_writing_loses_nothing(monkeypatch):
    real, calls = os.fsync, []

    def interrupted(file):
        real(file)
        calls.append(file)
        if len(calls) == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    result = swept(Fake())
    assert result.interrupted
    assert len(result.trials) == 7 == len(result.journal.read_text().splitlines())
    monkeypatch.setattr(os, "fsync", real)
    again = Fake()
    assert len(swept(again).trials) == POINTS
    assert len(again.built) == POINTS - 7


def test_nothing_is_tuned_after_the_lock():
    with k3dsl.lock(), pytest.raises(LockedError, match=r"kda\.decode at B=4, H=8.*tuning is forbidden"):
        swept(Fake())
