"""What a sweep may take and what it came to: its limits, its trials, its finalists, the winner and how sure that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from k3dsl.autotune.finalists import FULL_REPEATS, Finalist
from k3dsl.autotune.search import Proposal, lanes_line
from k3dsl.autotune.space import Space
from k3dsl.autotune.trial import Candidate, End, Outcome
from k3dsl.errors import ArgumentError


@dataclass(frozen=True)
class Limits:
    """When a sweep ends and what a step may take.

    budget_s: of trials and finalists together, what an earlier run of the sweep spent included; a step that has begun is
    finished. max_trials: at most so many. stop_share: the sweep stops at a candidate whose floor is that share of its
    time. finalists: judged again at the end.
    """

    budget_s: float
    max_trials: int | None = None
    stop_share: float = 0.95
    finalists: int = 4
    compile_deadline_s: float = 120.0
    run_deadline_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.budget_s > 0:
            raise ArgumentError(f"a budget of {self.budget_s} s", fix="give seconds above 0")
        if not self.stop_share > 0:
            raise ArgumentError(
                f"a share of {self.stop_share} to stop at", fix="give a share of the roofline, such as 0.9"
            )


@dataclass(frozen=True)
class Trial:
    """One finished trial.

    same_as: the trial with the same generated code, whose outcome it shares. resumed: by an earlier run of the sweep.
    by: the machine and device that ran it, where that is not the only one.
    """

    proposal: Proposal
    outcome: Outcome
    at: float
    same_as: int | None = None
    resumed: bool = False
    by: str | None = None


@dataclass(frozen=True)
class Result:
    """How a sweep went.

    trials: in order. refused: illegal points that were drawn, by end; none of them is a trial. finalists: the winner
    first. turned_away: those that the full gate refused. floor_ms: see study.floor_of. stopped: why the sweep
    ended. interrupted: by Ctrl-C; what had not been judged as a finalist by then does not win. journal: where its
    records are. saved: the file that keeps the winner for later calls.
    """

    op: str
    dims: Mapping[str, int]
    options: Mapping[str, Any]
    target: str
    backends: tuple[str, ...]
    seed: int
    trials: tuple[Trial, ...]
    refused: Mapping[str, int]
    finalists: tuple[Finalist, ...]
    turned_away: tuple[tuple[Proposal, Outcome], ...]
    stopped: str
    seconds: float
    journal: Path
    floor_ms: float | None = None
    repeats: int = FULL_REPEATS
    interrupted: bool = False
    saved: Path | None = None

    @property
    def winner(self) -> Candidate | None:
        """The candidate that won; None when none passed the gate."""
        return self._candidate(self.finalists[0].proposal) if self.finalists else None

    @property
    def outcome(self) -> Outcome | None:
        """How the winner ended: its time when timed in turns with the others, the errors and gate of its last judging."""
        if not self.finalists:
            return None
        first = self.finalists[0]
        return replace(first.outcome, time_ms=first.time_ms, samples_ms=first.samples_ms)

    @property
    def best_trial(self) -> Trial | None:
        """The fastest trial that passed the quick gate: all there is to say when a sweep was interrupted."""
        timed = [t for t in self.trials if t.outcome.end is End.OK and t.outcome.time_ms is not None]
        return min(timed, key=lambda t: (t.outcome.time_ms, t.proposal.key), default=None)

    @property
    def default_ms(self) -> float | None:
        """Time of the op's default, timed with the finalists where it is one, else in its trial."""
        if (final := next((f for f in self.finalists if f.proposal.lane == "default"), None)) is not None:
            return final.time_ms
        return next((t.outcome.time_ms for t in self.trials if t.proposal.lane == "default"), None)

    @property
    def roofline_share(self) -> float | None:
        """Floor over the winner's time: 1 is as fast as memory and matrix units allow."""
        if self.floor_ms is None or not self.finalists:
            return None
        return self.floor_ms / self.finalists[0].time_ms

    def ends(self) -> dict[str, int]:
        """Trials by the reason they ended, and illegal points beside them."""
        found = Counter(t.outcome.end.value for t in self.trials) + Counter(self.refused)
        return {end.value: found[end.value] for end in End if found[end.value]}

    def lanes(self) -> str | None:
        """Whether TPE beat the random lane, in a line; None for a space that was tried whole."""
        best: dict[str, tuple[int, float | None]] = {}
        for t in self.trials:
            count, known = best.get(t.proposal.lane, (0, None))
            ok = t.outcome.time_ms if t.outcome.end is End.OK else None
            best[t.proposal.lane] = (count + 1, ok if known is None else known if ok is None else min(ok, known))
        return lanes_line(best)

    def to_json(self) -> dict[str, Any]:
        winner = self.finalists[0] if self.finalists else None
        best = self.best_trial
        return {
            "op": self.op,
            "dims": dict(self.dims),
            "options": dict(self.options),
            "target": self.target,
            "backends": list(self.backends),
            "seed": self.seed,
            "trials": len(self.trials),
            "ends": self.ends(),
            "same_code": sum(t.same_as is not None for t in self.trials),
            "resumed": sum(t.resumed for t in self.trials),
            "by": dict(Counter(t.by for t in self.trials if t.by is not None)),
            "winner": winner.to_json() if winner else None,
            "set": Space.text(winner.proposal.settings) if winner else None,
            "best_trial": {"set": best.proposal.key, "time_ms": best.outcome.time_ms} if best else None,
            "default_ms": self.default_ms,
            "floor_ms": self.floor_ms,
            "roofline_share": self.roofline_share,
            "finalists": [f.to_json() for f in self.finalists],
            "turned_away": [{"set": p.key, "end": o.end.value, "detail": o.detail} for p, o in self.turned_away],
            "lanes": self.lanes(),
            "stopped": self.stopped,
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 3),
            "journal": str(self.journal),
            "saved": None if self.saved is None else str(self.saved),
        }

    def _candidate(self, proposal: Proposal) -> Candidate:
        return Candidate(self.op, self.dims, self.options, proposal.settings, self.backends[0])


@dataclass
class State:
    """A sweep under way, as a progress display sees it. best_ms: of the trials that ended ok."""

    budget_s: float
    phase: str = "trials"
    elapsed_s: float = 0.0
    trials: list[Trial] = field(default_factory=list)
    best_ms: float | None = None
    floor_ms: float | None = None
