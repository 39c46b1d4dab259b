"""Who wins: times compared round by round, ties decided by a fixed order, and the same winner however a machine is loaded."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
from tuned_fakes import DIMS, SM90

from k3dsl.autotune.finalists import Finalist, ranked, run_finals, shortlist, tied
from k3dsl.autotune.result import Limits
from k3dsl.autotune.search import Proposal
from k3dsl.autotune.space import Space
from k3dsl.autotune.sweep import sweep
from k3dsl.autotune.trial import End, Outcome
from k3dsl.autotune.worker import Crew
from k3dsl.errors import ArgumentError
from k3dsl.ops.registry import get_op


def on_gpu() -> Space:
    return Space(get_op("kda.decode"), DIMS, {}, SM90, ("triton",))


def on_cpu() -> Space:
    return Space(get_op("matmul"), {"M": 16, "N": 16, "K": 64}, {}, None, ("torch",))


def proposal(settings) -> Proposal:
    return Proposal(0, "grid", settings, Space.text(settings))


def finalist(settings, *rounds: float, kind="gpu") -> Finalist:
    return Finalist(proposal(settings), Outcome(End.OK), tuple((ms,) for ms in rounds), kind=kind)


def test_among_equal_times_the_fewest_threads_win():
    many = finalist({"block_v": 32, "decode.num_warps": 8}, 1.000, 1.001, 0.999)
    few = finalist({"block_v": 32, "decode.num_warps": 1}, 1.002, 1.003, 1.001)
    slow = finalist({"block_v": 8, "decode.num_warps": 1}, 1.5, 1.5, 1.5)
    found = ranked(on_gpu(), [slow, many, few])
    assert [f.proposal for f in found] == [few.proposal, many.proposal, slow.proposal]
    assert [f.tied for f in found] == [True, True, False]


def test_what_slows_a_whole_round_cancels():
    a = finalist({"block_v": 32}, 1.0, 3.0, 1.0, 2.0, 1.0)
    b = finalist({"block_v": 64}, 1.1, 3.3, 1.1, 2.2, 1.1)  # medians 1.0 and 1.1, spreads of a whole
    assert not tied(a, b)
    assert [f.tied for f in ranked(on_gpu(), [b, a])] == [True, False]


def test_ratios_within_their_own_spread_are_equal():
    steady = finalist({"block_v": 32}, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert tied(steady, finalist({"block_v": 64}, 0.8, 1.2, 1.05, 1.1, 0.9))
    assert not tied(steady, finalist({"block_v": 64}, 1.05, 1.05, 1.05, 1.05, 1.05))


def test_on_a_cpu_the_least_of_a_round_counts_and_a_third_more_is_a_tie():
    one = Finalist(proposal({"block_k": 16}), Outcome(End.OK), ((9.0, 1.0, 5.0), (1.0, 7.0, 2.0)), kind="cpu")
    assert one.per_round() == [1.0, 1.0]
    assert one.time_ms == 1.0
    assert tied(one, finalist({"block_k": 32}, 1.29, 1.29, kind="cpu"))
    assert not tied(one, finalist({"block_k": 32}, 1.4, 1.4, kind="cpu"))


def test_what_a_trial_cannot_tell_apart_becomes_a_finalist_in_the_fixed_order():
    times = {128: 1.2, 64: 1.0, 32: 1.25, 16: 4.0}
    trials = [
        (proposal({"block_k": k, "num_warps": 4}), Outcome(End.OK, time_ms=ms, samples_ms=(ms,)))
        for k, ms in times.items()
    ]
    blocks = [p.settings["block_k"] for p in shortlist(on_cpu(), trials)]
    assert blocks == [64, 32, 128, 16]  # the fastest, then the near ones from small tiles to large, then by time


class Scripted:
    """A worker whose outcomes are given: what the gate says of each candidate, then what each timing says."""

    def __init__(self, later: dict[int, Outcome]) -> None:
        self.later = later

    def run(self, candidate, level, repeats, run_deadline_s, best_ms) -> Outcome:
        block = candidate.settings["block_v"]
        return Outcome(End.OK, time_ms=1.0 + block / 1000) if level is not None else self.later[block]


FAULT = Outcome(End.FAULTED, "an illegal address")
TIMED = Outcome(End.OK, time_ms=1.0)


def finals(later: dict[int, Outcome], most_steps: int = 100) -> tuple[list[int], list[int]]:
    """The block_v of those that passed and of those that failed, of two candidates. most_steps: until the time is up."""
    space, steps = on_gpu(), []

    def step(stage, proposal, round, run, must):
        steps.append(stage)
        return None if len(steps) > most_steps and not must else run()

    trials = [(proposal({"block_v": n}), Outcome(End.OK, time_ms=1 + n / 1000)) for n in (8, 16)]
    passed, failed = run_finals(space, trials, 2, Scripted(later), step, 1.0)
    return [f.proposal.settings["block_v"] for f in passed], [p.settings["block_v"] for p, _ in failed]


def test_a_round_in_which_all_finalists_fail_is_the_last():
    assert finals({8: FAULT, 16: FAULT}) == ([], [8, 16])
    assert finals({8: TIMED, 16: FAULT}) == ([8], [16])


def test_what_failed_in_a_round_that_the_time_cut_short_has_failed():
    # two gates, then the first timing of round 1, which begins with the second
    assert finals({8: TIMED, 16: FAULT}, most_steps=3) == ([8], [16])
    assert finals({8: TIMED, 16: TIMED}, most_steps=3) == ([8, 16], [])


def test_what_took_too_long_to_win_is_no_finalist():
    """Of blocks 8, 16, 32, 64 the best fails the full gate; 32 takes 1 % longer than 16, and 64 4 %."""
    judged = []

    class Worker(Scripted):
        def run(self, candidate, level, *rest) -> Outcome:
            block = candidate.settings["block_v"]
            if level is not None:
                judged.append(block)
            return FAULT if block == 8 else super().run(candidate, level, *rest)

    times = {8: 0.5, 16: 1.0, 32: 1.01, 64: 1.04}
    trials = [(proposal({"block_v": n}), Outcome(End.OK, time_ms=ms)) for n, ms in times.items()]
    worker = Worker({16: TIMED, 32: TIMED})
    passed, failed = run_finals(on_gpu(), trials, 4, worker, lambda stage, p, n, run, must: run(), 1.0)
    assert judged == [8, 16, 32]
    assert {f.proposal.settings["block_v"] for f in passed} == {16, 32}
    assert [p.settings["block_v"] for p, _ in failed] == [8]
    # where those that passed fail when they are timed in turns, the next ones get theirs
    judged.clear()
    worker = Worker({16: FAULT, 32: FAULT, 64: TIMED})
    passed, failed = run_finals(on_gpu(), trials, 4, worker, lambda stage, p, n, run, must: run(), 1.0)
    assert judged == [8, 16, 32, 64]
    assert [f.proposal.settings["block_v"] for f in passed] == [64]
    assert [p.settings["block_v"] for p, _ in failed] == [8, 16, 32]


def test_a_single_finalist_is_run_as_often_as_one_of_several():
    """A fault that shows in one run of several is seen."""
    trials = [(proposal({"block_v": 8}), Outcome(End.OK, time_ms=1.0))]
    assert run_finals(on_gpu(), trials, 4, Scripted({8: FAULT}), lambda stage, p, n, run, must: run(), 1.0)[0] == []


def test_load_on_the_machine_does_not_choose_the_winner():
    """Simulated: a third of the points are equal within a few percent, the others 4 and 16 times slower; every sample is
    lengthened by a load that drifts from one run of a candidate to the next, and half of all samples are interrupted."""
    space, winners = on_cpu(), set()
    cost = {k: (1.0, 4.0, 16.0)[n] for n, k in enumerate((128, 32, 16))}
    points = [{"block_k": k, "group": g, "num_warps": 4} for k in cost for g in (1, 2, 4)]
    for seed in range(200):
        rng = random.Random(seed)

        def samples(settings, rng=rng):
            true = cost[settings["block_k"]] * (1 + 0.02 * settings["group"])
            drift = rng.uniform(1.0, 1.12)
            return tuple(true * drift * (rng.uniform(1.5, 8) if rng.random() < 0.5 else 1) for _ in range(3 * 8))

        trials = [(proposal(p), Outcome(End.OK, time_ms=min(s), samples_ms=s)) for p in points for s in [samples(p)]]
        chosen = shortlist(space, trials)[:4]
        rounds = {p.key: tuple(samples(p.settings) for _ in range(5)) for p in chosen}
        found = ranked(space, [Finalist(p, Outcome(End.OK), rounds[p.key], kind="cpu") for p in chosen])
        winners.add(found[0].proposal.key)
    assert winners == {"--set block_k=128 --set group=1 --set num_warps=4"}


def test_two_sweeps_with_one_seed_choose_the_same_winner_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path))
    op = get_op("matmul")
    among = {"block_k": (32, 128), "group": (1, 2)}  # 4 times the steps, which no load turns; and equal work
    only = {"block_m": (16,), "block_n": (16,), "num_warps": (4,), "stages": (3,), **among}
    knobs = tuple(replace(k, choices=only[k.name], default=only[k.name][0]) for k in op.knobs)
    narrow = replace(op, knobs=knobs, heuristic=None, seeds=())

    with Crew(["cpu"]) as crew:
        how = {"target": None, "backends": ("torch",), "seed": 3, "worker": lambda: nullcontext(crew)}
        dims = {"M": 16, "N": 16, "K": 2048}
        first, second = (
            sweep(narrow, dims, {}, Limits(3600, finalists=3), resume=resume, **how) for resume in (True, False)
        )
    assert first.winner is not None
    assert first.winner == second.winner
    assert first.winner.settings["block_k"] == 128
    assert len(first.trials) == len(second.trials) == 4
    assert not any(t.resumed for t in second.trials)


@pytest.mark.parametrize("limits", [{"budget_s": 0}, {"budget_s": -1}, {"budget_s": 10, "stop_share": 0}])
def test_a_budget_must_be_time_and_a_share_a_share(limits):
    with pytest.raises(ArgumentError, match=r"budget|share"):
        Limits(**limits)
