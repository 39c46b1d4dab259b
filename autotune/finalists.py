"""The end of a sweep: the best few judged again and timed in turns, and the winner among those that time cannot tell apart.

Times wander with whatever else a machine does, so that two runs of one kernel differ, and on a shared CPU by a quarter.
Finalists are therefore compared round by round: what slows a whole round cancels in the ratio of two times of that round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from k3dsl.autotune.search import Proposal
from k3dsl.autotune.space import Settings, Space
from k3dsl.autotune.trial import Candidate, End, Outcome, summary_ms

ROUNDS = 5
FULL_REPEATS = 30
TRIAL_REPEATS = 10
TIED_SHARE = {"cpu": 0.30, "gpu": 0.01}
"""Times this close are equal however small their spread: what differs between two runs of one kernel."""

OUT_OF_REACH = {kind: 2 * share for kind, share in TIED_SHARE.items()}
"""A candidate whose trial took so much longer than the best that passed the full gate cannot win, and is not judged."""


class Runs(Protocol):
    """What gates and times candidates in a process of its own, see worker.Worker. Level None only times."""

    def run(
        self, candidate: Candidate, level: str | None, repeats: int, run_deadline_s: float, best_ms: float | None
    ) -> Outcome: ...


Step = Callable[[str, Proposal, int, Callable[[], Outcome], bool], "Outcome | None"]
"""step(stage, proposal, round, run, must): the outcome of an earlier run of this step, else that of run(), written down;
None when there is no time left for it, unless it must be."""


@dataclass(frozen=True)
class Finalist:
    """A candidate that passed the gate at level full.

    rounds: the samples of each round in ms; where none was finished, those that it was judged with. tied: with the fastest.
    kind: 'cpu' or 'gpu'.
    """

    proposal: Proposal
    outcome: Outcome
    rounds: tuple[tuple[float, ...], ...]
    tied: bool = False
    kind: str = "gpu"

    @property
    def samples_ms(self) -> tuple[float, ...]:
        return tuple(sample for samples in self.rounds for sample in samples)

    @property
    def time_ms(self) -> float:
        return summary_ms(self.per_round(), self.kind)

    def per_round(self) -> list[float]:
        """One time a round."""
        return [summary_ms(samples, self.kind) for samples in self.rounds]

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.proposal.number,
            "settings": dict(self.proposal.settings),
            "time_ms": self.time_ms,
            "tied": self.tied,
        }


def run_finals(
    space: Space,
    trials: Sequence[tuple[Proposal, Outcome]],
    count: int,
    worker: Runs,
    step: Step,
    deadline_s: float,
    built: Callable[[Proposal], Outcome] | None = None,
) -> tuple[list[Finalist], list[tuple[Proposal, Outcome]]]:
    """The finalists, the winner first, and the candidates that the full gate turned away.

    trials: those that ended ok, with code that differs. Finalists are at most `count` of them that may still win. However
    short the time, the best of them is judged, and the default when that one fails. built: waits until what the full gate
    of a candidate launches is built, and says how that ended.
    """
    kind = "cpu" if space.target is None else "gpu"
    times = {proposal.key: outcome.time_ms or 0.0 for proposal, outcome in trials}
    waiting = shortlist(space, trials)
    passed: list[Finalist] = []
    failed: list[tuple[Proposal, Outcome]] = []

    def may_win(proposal: Proposal) -> bool:
        best = min((times[f.proposal.key] for f in passed), default=math.inf)
        return len(passed) < count and times[proposal.key] <= (1 + OUT_OF_REACH[kind]) * best

    while waiting and not passed:  # again where all that passed have failed since
        while waiting and may_win(waiting[0]):
            proposal = waiting.pop(0)

            def gate(proposal: Proposal = proposal) -> Outcome:
                if built is not None and (outcome := built(proposal)).end is not End.OK:
                    return outcome
                return worker.run(space.candidate(proposal.settings), "full", FULL_REPEATS, deadline_s, None)

            must = not passed and (not failed or proposal.lane == "default")
            outcome = step("gate", proposal, 0, gate, must)
            if outcome is None:
                continue
            if outcome.end is End.OK and outcome.time_ms is not None:
                passed.append(Finalist(proposal, outcome, (_samples(outcome),), kind=kind))
            else:
                failed.append((proposal, outcome))
        passed, lost = _timed_in_turns(space, passed, worker, step, deadline_s)
        failed += lost
    return ranked(space, passed), failed


def _timed_in_turns(
    space: Space, passed: list[Finalist], worker: Runs, step: Step, deadline_s: float
) -> tuple[list[Finalist], list[tuple[Proposal, Outcome]]]:
    """The finalists with the times of every round that was finished, and those that failed in one."""
    failed: list[tuple[Proposal, Outcome]] = []
    for number in range(1, ROUNDS + 1 if passed else 1):
        shift = number % len(passed)
        found: dict[str, Outcome] = {}
        for finalist in passed[shift:] + passed[:shift]:

            def again(finalist: Finalist = finalist) -> Outcome:
                return worker.run(space.candidate(finalist.proposal.settings), None, TRIAL_REPEATS, deadline_s, None)

            outcome = step("time", finalist.proposal, number, again, False)
            if outcome is None:
                break
            found[finalist.proposal.key] = outcome
        whole = len(found) == len(passed)  # else it does not count, but what failed in it has failed
        passed, timed = [], passed
        for finalist in timed:
            outcome = found.get(finalist.proposal.key)
            if outcome is not None and (outcome.end is not End.OK or outcome.time_ms is None):
                failed.append((finalist.proposal, outcome))
            elif outcome is not None and whole:
                # what came before the first round was timed alone, each at its own time
                before = () if number == 1 else finalist.rounds
                passed.append(replace(finalist, rounds=(*before, _samples(outcome))))
            else:
                passed.append(finalist)
        if not (whole and passed):
            break
    return passed, failed


def _samples(outcome: Outcome) -> tuple[float, ...]:
    assert outcome.time_ms is not None
    return outcome.samples_ms or (outcome.time_ms,)


def shortlist(space: Space, trials: Sequence[tuple[Proposal, Outcome]]) -> list[Proposal]:
    """The candidates in the order in which they are finalists: the fastest, those that a trial's time cannot tell from it
    in the fixed order, the rest by time. So which of many equal ones are finalists is no matter of chance."""
    order = sorted(trials, key=lambda t: (t[1].time_ms, t[0].key))
    if not order:
        return []
    fastest, best_ms = order[0][0], order[0][1].time_ms or 0.0
    share = TIED_SHARE["cpu" if space.target is None else "gpu"]
    near = [proposal for proposal, outcome in order[1:] if (outcome.time_ms or 0.0) <= (1 + share) * best_ms]
    far = [proposal for proposal, _ in order[1 + len(near) :]]
    return [fastest, *sorted(near, key=lambda p: fixed_order(space, p.settings)), *far]


def fixed_order(space: Space, settings: Settings | Any) -> tuple[Any, ...]:
    """What decides among equal times: fewest threads, least shared memory, smallest tiles, the text of the settings."""
    cost = space.cost(settings)
    return (cost.threads, cost.shared_bytes, cost.tile, space.text(settings))


def ranked(space: Space, finalists: Sequence[Finalist]) -> list[Finalist]:
    """The finalists in the order in which they may win: those tied with the fastest first, in the fixed order.

    The fastest has the least median, over the rounds, of its time relative to the round's mean.
    """
    if not finalists:
        return []
    times = [f.per_round() for f in finalists]
    means = [statistics.geometric_mean(of_round) for of_round in zip(*times, strict=True)]
    scores = [statistics.median(t / m for t, m in zip(own, means, strict=True)) for own in times]
    best = min(range(len(finalists)), key=lambda n: (scores[n], finalists[n].proposal.key))
    marked = [(score, replace(f, tied=tied(finalists[best], f))) for score, f in zip(scores, finalists, strict=True)]

    def order(entry: tuple[float, Finalist]) -> tuple[Any, ...]:
        score, f = entry
        return (0, *fixed_order(space, f.proposal.settings)) if f.tied else (1, score, f.proposal.key)

    return [f for _, f in sorted(marked, key=order)]


def tied(fastest: Finalist, other: Finalist) -> bool:
    """Whether the other's time, relative to the fastest's of the same round, is 1 within twice its standard error, or
    within the share that two runs of one kernel differ by. With one round alone: within the error of its samples."""
    ratios = [b / a for a, b in zip(fastest.per_round(), other.per_round(), strict=True)]
    if len(ratios) > 1:
        error = standard_error(ratios)
    else:
        samples = fastest.rounds[0], other.rounds[0]
        error = math.hypot(*(standard_error(s) / statistics.median(s) for s in samples))
    return statistics.median(ratios) - 1 <= max(TIED_SHARE[fastest.kind], 2 * error)


def standard_error(samples: Sequence[float]) -> float:
    """Standard error of the median of normal samples, from their median absolute deviation."""
    middle = statistics.median(samples)
    spread = 1.4826 * statistics.median(abs(x - middle) for x in samples)
    return 1.2533 * spread / math.sqrt(len(samples))
