"""A sweep: which settings run an op fastest at given dims, found within a budget, resumable, and never wrong."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from k3dsl import settings as environment
from k3dsl.autotune.finalists import FULL_REPEATS, TRIAL_REPEATS, Finalist, Runs, run_finals
from k3dsl.autotune.journal import Journal, Record
from k3dsl.autotune.search import Proposal, Search, lanes_line, make_search
from k3dsl.autotune.space import Space
from k3dsl.autotune.trial import Candidate, End, Outcome
from k3dsl.errors import ArgumentError, LegalityError
from k3dsl.ir.identity import kernel_hash
from k3dsl.runtime.op import Op
from k3dsl.runtime.timing import plan_traffic
from k3dsl.targets import Target

WIDTH = 8
"""Points proposed and built at a time: the same on every machine, so that a sweep can be repeated on another."""
TRIALS_SHARE = 0.8
"""Of the budget; the rest is the finalists'."""


class Builds(Protocol):
    """What builds candidates, see compile_pool.CompilePool."""

    def build(self, candidates: Sequence[Candidate], deadline_s: float) -> dict[int, Outcome]: ...


@dataclass(frozen=True)
class Trial:
    """One finished trial. same_as: the trial with the same generated code, whose outcome it shares."""

    proposal: Proposal
    outcome: Outcome
    at: float
    same_as: int | None = None
    resumed: bool = False


@dataclass(frozen=True)
class Result:
    """How a sweep went.

    trials: in order. refused: illegal points that were drawn, by end; none of them is a trial. finalists: the winner
    first. turned_away: those that the full gate refused. floor_ms: what the op's memory traffic takes. stopped: why the
    sweep ended. journal: where its records are.
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

    @property
    def winner(self) -> Candidate | None:
        """The candidate that won; None when none passed the gate."""
        if not self.finalists:
            return None
        settings = self.finalists[0].proposal.settings
        return Candidate(self.op, self.dims, self.options, settings, self.backends[0])

    @property
    def outcome(self) -> Outcome | None:
        """How the winner ended: its time when timed in turns with the others, the errors and gate of its last judging."""
        if not self.finalists:
            return None
        first = self.finalists[0]
        return replace(first.outcome, time_ms=first.time_ms, samples_ms=first.samples_ms)

    @property
    def default_ms(self) -> float | None:
        """Time of the op's default, timed with the finalists where it is one, else in its trial."""
        if (final := next((f for f in self.finalists if f.proposal.lane == "default"), None)) is not None:
            return final.time_ms
        return next((t.outcome.time_ms for t in self.trials if t.proposal.lane == "default"), None)

    @property
    def roofline_share(self) -> float | None:
        """Floor over the winner's time: 1 is as fast as the memory allows."""
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
            "winner": winner.to_json() if winner else None,
            "set": Space.text(winner.proposal.settings) if winner else None,
            "default_ms": self.default_ms,
            "floor_ms": self.floor_ms,
            "roofline_share": self.roofline_share,
            "finalists": [f.to_json() for f in self.finalists],
            "lanes": self.lanes(),
            "stopped": self.stopped,
            "seconds": round(self.seconds, 3),
            "journal": str(self.journal),
        }


@dataclass
class State:
    """A sweep under way, as a progress display sees it. best_ms: of the trials that ended ok."""

    budget_s: float
    phase: str = "trials"
    elapsed_s: float = 0.0
    trials: list[Trial] = field(default_factory=list)
    best_ms: float | None = None
    floor_ms: float | None = None


def floor_of(op: Op, dims: Mapping[str, int], options: Mapping[str, Any], backend: str, copy_gbps: float) -> float:
    """Milliseconds that the op's least memory traffic takes at that rate (10^9 bytes/s), with its default settings."""
    point = op.point(dims, options)
    known = {name: int(n) for name, n in point.dims.items() if isinstance(n, int)}
    return sum((op.traffic_bytes or plan_traffic)(point.plan(backend), known).values()) / copy_gbps / 1e6


def tune(
    op: Op,
    dims: Mapping[str, int],
    options: Mapping[str, Any],
    *,
    target: Target | None,
    backends: Sequence[str],
    budget_s: float,
    seed: int = 0,
    resume: bool = True,
    fixed: Mapping[str, Any] | None = None,
    device: str | None = None,
    max_trials: int | None = None,
    finalists: int = 4,
    floor_ms: float | None = None,
    stop_share: float = 0.95,
    compile_deadline_s: float = 120.0,
    run_deadline_s: float = 30.0,
    pool: Callable[[], AbstractContextManager[Builds]] | None = None,
    worker: Callable[[], AbstractContextManager[Runs]] | None = None,
    watch: Callable[[State], None] | None = None,
    identity: Mapping[str, Any] | None = None,
) -> Result:
    """Searches the op's space for the fastest settings that pass the gate.

    target: None for the torch backend on the CPU. budget_s: of trials and finalists together, what an earlier run of the
    sweep spent included; a step that has begun is finished. resume: goes on from the journal of the same sweep, if
    there is one. fixed: knobs and schedule fields that are not searched. floor_ms: see floor_of; the sweep stops at a
    candidate within `stop_share` of it. pool, worker: make what builds and what runs candidates. watch: called after
    every step. identity: what else two sweeps must share for one to go on from the other.

    Raises ArgumentError for names and values that mean nothing, and when the same sweep is running already;
    LegalityError when the default point cannot be traced.
    """
    if budget_s <= 0:
        raise ArgumentError(f"a budget of {budget_s} s", fix="give seconds above 0")
    space = Space(op, dims, options, target, backends, fixed)
    device = device or ("cpu" if target is None else "cuda:0")
    folder = study_folder(space, seed, {**(identity or {}), "device": device.split(":")[0]})
    with Journal(folder / "journal.jsonl", fresh=not resume) as journal:
        search = make_search(space, seed, folder)
        with contextlib.ExitStack() as stack:
            if pool is None or worker is None:
                default_pool, default_worker = _machinery(target, device)
                pool, worker = pool or default_pool, worker or default_worker
            sweep = _Sweep(space, search, journal, State(budget_s, floor_ms=floor_ms), watch)
            sweep.pool, sweep.worker = stack.enter_context(pool()), stack.enter_context(worker())
            sweep.compile_deadline_s, sweep.run_deadline_s = compile_deadline_s, run_deadline_s
            stopped = sweep.try_points(max_trials, stop_share)
            best, turned_away = sweep.finish(finalists)
        trials = tuple(sweep.state.trials)
        seconds = sweep.clock()
    return Result(
        op.name, space.dims, space.options, str(target or "cpu"), space.backends, seed, trials, dict(search.refused),
        tuple(best), tuple(turned_away), stopped, seconds, journal.path, floor_ms,
    )  # fmt: skip


def study_folder(space: Space, seed: int, identity: Mapping[str, Any]) -> Path:
    """Where a sweep keeps its files, by all that decides how it goes. The folder has a readable study.json."""
    try:
        kernels = [kernel_hash(launch.kernel) for launch in space.launches(space.default())]
    except LegalityError as error:
        raise LegalityError(f"{space.op.name} cannot be tuned here: {error.message}") from None
    about = {
        "op": space.op.name,
        "dims": space.dims,
        "options": space.options,
        "target": str(space.target or "cpu"),
        "backends": space.backends,
        "fixed": space.fixed,
        "seed": seed,
        "kernels": kernels,
        "versions": {name: _version(name) for name in ("k3dsl", "optuna", "torch", *space.backends)},
        **identity,
    }
    text = json.dumps(about, indent=1, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    folder = Path(environment.get("K3DSL_CACHE_DIR")) / "tune" / f"{space.op.name.replace(':', '-')}-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "study.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"{folder} cannot be written: {error.strerror}", fix="set K3DSL_CACHE_DIR") from None
    return folder


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _machinery(target: Target | None, device: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    from k3dsl.autotune.compile_pool import CompilePool
    from k3dsl.autotune.worker import Worker

    jobs = max(1, min(WIDTH, (os.cpu_count() or 2) - 1))
    return (lambda: CompilePool(jobs, target.name if target else None)), (lambda: Worker(device))


class _Sweep:
    """The loop of a sweep. Every step that an earlier run finished is taken from the journal."""

    pool: Builds
    worker: Runs
    compile_deadline_s: float
    run_deadline_s: float

    def __init__(
        self, space: Space, search: Search, journal: Journal, state: State, watch: Callable[[State], None] | None
    ) -> None:
        self.space, self.search, self.journal, self.state = space, search, journal, state
        self.watch = watch or (lambda _: None)
        self.before = max((r.at for r in journal.records), default=0.0)
        self.start = time.monotonic()
        self.codes: dict[str, Trial] = {}

    def clock(self) -> float:
        """Seconds that the sweep has worked, earlier runs included."""
        return self.before + time.monotonic() - self.start

    def try_points(self, max_trials: int | None, stop_share: float) -> str:
        """Runs trials; returns why it stopped."""
        state, limit = self.state, TRIALS_SHARE * self.state.budget_s
        while True:
            left = WIDTH if max_trials is None else min(WIDTH, max_trials - len(state.trials))
            if left <= 0:
                return f"{max_trials} trials are done"
            batch = self.search.ask(left)
            if not batch:
                return "every legal point was tried"
            new = [p for p in batch if self.journal.find("trial", p.key) is None]
            out_of_time = bool(new) and self.clock() >= limit
            built: dict[str, Outcome] = {}
            if new and not out_of_time:
                made = self.pool.build([self.space.candidate(p.settings) for p in new], self.compile_deadline_s)
                built = {p.key: made[n] for n, p in enumerate(new)}
            for proposal in batch:
                known = self.journal.find("trial", proposal.key)
                if known is None and (out_of_time or (state.trials and self.clock() >= limit)):
                    return f"the budget of {state.budget_s:g} s is spent"
                trial = self._known(proposal, known) if known is not None else self._run(proposal, built[proposal.key])
                self._keep(trial)
                if (
                    state.floor_ms is not None
                    and state.best_ms is not None
                    and state.floor_ms >= stop_share * state.best_ms
                ):
                    return f"the best is within {stop_share:.0%} of what memory traffic allows"

    def finish(self, count: int) -> tuple[list[Finalist], list[tuple[Proposal, Outcome]]]:
        """Judges and times the best few again; the winner comes first."""
        self.state.phase = "finalists"
        own = [(t.proposal, t.outcome) for t in self.state.trials if t.same_as is None and t.outcome.end is End.OK]

        def step(stage: str, proposal: Proposal, round: int, run: Callable[[], Outcome], must: bool) -> Outcome | None:
            known = self.journal.find(stage, proposal.key, round)
            if known is not None:
                return known.outcome
            if not must and self.clock() >= self.state.budget_s:
                return None
            outcome = run()
            self._write(stage, proposal, outcome, round=round)
            self._show()
            return outcome

        return run_finals(self.space, own, count, self.worker, step, self.run_deadline_s)

    def _known(self, proposal: Proposal, record: Record) -> Trial:
        return Trial(proposal, record.outcome, record.at, record.same_as, resumed=True)

    def _run(self, proposal: Proposal, built: Outcome) -> Trial:
        """Runs a built candidate, unless it could not be built or its code was tried before."""
        outcome, same_as = built, None
        if built.end is End.OK:
            twin = next((self.codes[c] for c in _codes(built) if c in self.codes), None)
            if twin is not None:
                same_as = twin.proposal.number
                outcome = replace(twin.outcome, detail=f"the same code as trial {same_as}", seconds=0.0)
            else:
                candidate = self.space.candidate(proposal.settings)
                outcome = self.worker.run(candidate, "quick", TRIAL_REPEATS, self.run_deadline_s, self.state.best_ms)
            outcome = replace(outcome, sources=built.sources, binaries=built.binaries)
        at = self._write("trial", proposal, outcome, same_as=same_as)
        return Trial(proposal, outcome, at, same_as)

    def _keep(self, trial: Trial) -> None:
        state, outcome = self.state, trial.outcome
        state.trials.append(trial)
        if trial.same_as is None:
            for code in _codes(outcome):
                self.codes.setdefault(code, trial)
        if outcome.end is End.OK and outcome.time_ms is not None:
            state.best_ms = outcome.time_ms if state.best_ms is None else min(state.best_ms, outcome.time_ms)
        self.search.tell(trial.proposal, outcome)
        self._show()

    def _show(self) -> None:
        self.state.elapsed_s = self.clock()
        self.watch(self.state)

    def _write(
        self, stage: str, proposal: Proposal, outcome: Outcome, *, round: int = 0, same_as: int | None = None
    ) -> float:
        at = self.clock()
        record = Record(
            stage, proposal.number, proposal.lane, proposal.key, proposal.settings, outcome, at, round, same_as
        )
        self.journal.append(record)
        return at


def _codes(outcome: Outcome) -> list[str]:
    """What equal candidates share: their sources, then their binaries."""
    both = (("source", outcome.sources), ("binary", outcome.binaries))
    return [f"{kind} {sorted(digests.items())}" for kind, digests in both if digests]
