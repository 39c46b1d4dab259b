"""The end of a sweep: the best few judged again and timed in turns, and the winner among those that time cannot tell apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from k3dsl.autotune.search import Proposal
from k3dsl.autotune.space import Space
from k3dsl.autotune.trial import Candidate, End, Outcome

ROUNDS = 3
FULL_REPEATS = 30
TRIAL_REPEATS = 10
TIED_SHARE = {"cpu": 0.10, "gpu": 0.01}
"""Times this close are equal however small their spread: what differs between two runs of one kernel."""


class Runs(Protocol):
    """What gates and times candidates in a process of its own, see worker.Worker."""

    def run(
        self, candidate: Candidate, level: str, repeats: int, run_deadline_s: float, best_ms: float | None
    ) -> Outcome: ...


Step = Callable[[str, Proposal, int, Callable[[], Outcome], bool], "Outcome | None"]
"""step(stage, proposal, round, run, must): the outcome of an earlier run of this step, else that of run(), written down;
None when there is no time left for it, unless it must be."""


@dataclass(frozen=True)
class Finalist:
    """A candidate that passed the gate at level full. samples_ms: of every round. tied: with the fastest."""

    proposal: Proposal
    outcome: Outcome
    samples_ms: tuple[float, ...]
    tied: bool = False

    @property
    def time_ms(self) -> float:
        return statistics.median(self.samples_ms)

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.proposal.number,
            "settings": dict(self.proposal.settings),
            "time_ms": self.time_ms,
            "tied": self.tied,
        }


def run_finals(
    space: Space, trials: Sequence[tuple[Proposal, Outcome]], count: int, worker: Runs, step: Step, deadline_s: float
) -> tuple[list[Finalist], list[tuple[Proposal, Outcome]]]:
    """The finalists, the winner first, and the candidates that the full gate turned away.

    trials: those that ended ok, with code that differs. However short the time, the best of them is judged, and the
    default when that one fails.
    """
    passed: list[Finalist] = []
    failed: list[tuple[Proposal, Outcome]] = []
    for proposal, _ in sorted(trials, key=lambda t: (t[1].time_ms, t[0].key)):
        if len(passed) == count:
            break

        def gate(proposal: Proposal = proposal) -> Outcome:
            return worker.run(space.candidate(proposal.settings), "full", FULL_REPEATS, deadline_s, None)

        must = not passed and (not failed or proposal.lane == "default")
        outcome = step("gate", proposal, 0, gate, must)
        if outcome is None:
            continue
        if outcome.end is End.OK and outcome.time_ms is not None:
            passed.append(Finalist(proposal, outcome, outcome.samples_ms or (outcome.time_ms,)))
        else:
            failed.append((proposal, outcome))
    for number in range(1, ROUNDS + 1 if len(passed) > 1 else 1):
        shift = number % len(passed)
        found: dict[str, Outcome] = {}
        for finalist in passed[shift:] + passed[:shift]:

            def again(finalist: Finalist = finalist) -> Outcome:
                candidate = space.candidate(finalist.proposal.settings)
                return worker.run(candidate, "quick", 2, deadline_s, None)

            outcome = step("time", finalist.proposal, number, again, False)
            if outcome is None:  # a round counts when it is whole
                return ranked(space, passed), failed
            found[finalist.proposal.key] = outcome
        passed, timed = [], passed
        for finalist in timed:
            outcome = found[finalist.proposal.key]
            if outcome.end is End.OK and outcome.time_ms is not None:
                # what came before the first round was timed alone, each at its own time
                before = () if number == 1 else finalist.samples_ms
                passed.append(replace(finalist, samples_ms=before + (outcome.samples_ms or (outcome.time_ms,))))
            else:
                failed.append((finalist.proposal, outcome))
    return ranked(space, passed), failed


def ranked(space: Space, finalists: Sequence[Finalist]) -> list[Finalist]:
    """The finalists in the order in which they may win: those tied with the fastest first, in a fixed order.

    That order: fewest threads, least shared memory, smallest tiles, then the text of the settings.
    """
    if not finalists:
        return []
    least = TIED_SHARE["cpu" if space.target is None else "gpu"]
    best = min(finalists, key=lambda f: (f.time_ms, f.proposal.key))
    marked = [replace(f, tied=tied(best.samples_ms, f.samples_ms, least)) for f in finalists]

    def order(f: Finalist) -> tuple[Any, ...]:
        if not f.tied:
            return (1, f.time_ms, f.proposal.key)
        cost = space.cost(f.proposal.settings)
        return (0, cost.threads, cost.shared_bytes, cost.tile, f.proposal.key)

    return sorted(marked, key=order)


def tied(fastest: Sequence[float], other: Sequence[float], least_share: float) -> bool:
    """Whether the medians differ by less than twice the standard error of their difference, or by less than the share."""
    a, b = statistics.median(fastest), statistics.median(other)
    return b - a <= max(least_share * a, 2 * math.hypot(_error(fastest), _error(other)))


def _error(samples: Sequence[float]) -> float:
    """Standard error of the median of normal samples, from their median absolute deviation."""
    middle = statistics.median(samples)
    spread = 1.4826 * statistics.median(abs(x - middle) for x in samples)
    return 1.2533 * spread / math.sqrt(len(samples))
