"""The loop of a sweep: propose, build, gate and time, write down; then the finalists. Resumable, and bounded by a budget."""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from k3dsl.autotune import study
from k3dsl.autotune.finalists import TRIAL_REPEATS, Finalist, Runs, run_finals, shortlist
from k3dsl.autotune.journal import Journal, Record, read
from k3dsl.autotune.result import Limits, Result, State, Trial
from k3dsl.autotune.search import Proposal, Search, make_search
from k3dsl.autotune.space import Space
from k3dsl.autotune.trial import Candidate, End, Outcome, Task
from k3dsl.backends.common import write_whole
from k3dsl.runtime import lock
from k3dsl.runtime.op import Op
from k3dsl.targets import Target

if TYPE_CHECKING:
    from k3dsl.autotune.board import Board

WIDTH = 8
"""Points proposed and built at a time: the same on every machine, so that a sweep can be repeated on another."""
TRIALS_SHARE = 0.8
"""Of the budget; the rest is the finalists'."""
LISTEN_S = 1.0
"""How often a sweep that waits for others asks how they are doing."""


class Building(Protocol):
    """Candidates that are being built, see compile_pool.Batch."""

    def outcome(self, index: int) -> Outcome: ...

    def stop(self) -> None: ...


class Builds(Protocol):
    """What builds candidates, see compile_pool.CompilePool."""

    def start(
        self, candidates: Sequence[Candidate], deadline_s: float, *, built: Collection[str], level: str, own: bool
    ) -> Building: ...


class Tries(Runs, Protocol):
    """What gates and times candidates, see worker.Crew."""

    def run_each(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Outcome]]: ...


def sweep(
    op: Op,
    dims: Mapping[str, int],
    options: Mapping[str, Any],
    limits: Limits,
    *,
    target: Target | None,
    backends: Sequence[str],
    seed: int = 0,
    resume: bool = True,
    fixed: Mapping[str, Any] | None = None,
    devices: Sequence[str] = (),
    floor_ms: float | None = None,
    storage: str | None = None,
    pool: Callable[[], AbstractContextManager[Builds]] | None = None,
    worker: Callable[[], AbstractContextManager[Tries]] | None = None,
    watch: Callable[[State], None] | None = None,
    identity: Mapping[str, Any] | None = None,
) -> Result:
    """Searches the op's space for the fastest settings that pass the gate.

    target: None for the torch backend on the CPU. resume: goes on from the journal of the same sweep, if there is one.
    fixed: knobs and schedule fields that are not searched. devices: that run candidates, alike; the first times the
    finalists. floor_ms: see study.floor_of. storage: where the study is shared with other machines, see board.Board. pool,
    worker: make what builds and what runs candidates. watch: called after every step. identity: what else two sweeps must
    share for one to go on from the other. Ctrl-C ends it early, with what was found by then.

    Raises LockedError after k3dsl.lock(); ArgumentError for names and values that mean nothing, and when the same sweep is
    running already; LegalityError when the default point cannot be traced.
    """
    lock.check("tuning", op.name, dims)
    devices = tuple(devices) or ("cpu" if target is None else "cuda:0",)
    space = Space(op, dims, options, target, backends, fixed)
    facts = study.about(space, seed, {**(identity or {}), "device": devices[0].split(":")[0]})
    folder = study.folder_for(facts)
    with Journal(folder / study.JOURNAL, fresh=not resume) as journal, contextlib.ExitStack() as stack:
        board = None
        if storage is not None:
            board = stack.enter_context(contextlib.closing(_board(storage, facts, str(folder))))
        mixed = seed if board is None else seed + zlib.crc32(board.taker.encode())
        loop = _Sweep(space, make_search(space, mixed, folder), journal, limits, floor_ms, board, watch)
        if pool is None or worker is None:
            default_pool, default_worker = machinery(target, devices)
            pool, worker = pool or default_pool, worker or default_worker
        best: list[Finalist] = []
        turned_away: list[tuple[Proposal, Outcome]] = []
        try:
            loop.pool, loop.worker = stack.enter_context(pool()), stack.enter_context(worker())
            stopped, interrupted = loop.try_points(), False
            loop.finish(best, turned_away)
        except KeyboardInterrupt:
            stopped, interrupted = "interrupted", True
            loop.recover()
        result = Result(
            op.name, space.dims, space.options, str(target or "cpu"), space.backends, seed, tuple(loop.state.trials),
            dict(loop.search.refused), tuple(best), tuple(turned_away), stopped, loop.clock(), journal.path, floor_ms,
            interrupted=interrupted,
        )  # fmt: skip
        if board is not None and best:
            board.announce({"set": best[0].proposal.key, "time_ms": best[0].time_ms, "trials": len(result.trials)})
        write_whole(folder / study.RESULT, json.dumps(result.to_json(), indent=1, default=str) + "\n")
    return result


def _board(url: str, facts: Mapping[str, Any], folder: str) -> Board:
    import platform

    from k3dsl.autotune.board import Board

    taker = f"{platform.node()} {zlib.crc32(folder.encode()):08x}"  # the journal's: the same after a restart
    return Board(url, study.name_of(facts), facts, taker)


def usable_cores() -> int:
    """Of this machine, those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machinery(target: Target | None, devices: Sequence[str]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Makes what builds candidates for the target, and what runs them on the devices; as context managers."""
    from k3dsl.autotune.compile_pool import CompilePool
    from k3dsl.autotune.worker import Crew

    jobs = max(1, min(6 * WIDTH, usable_cores() - 1))  # two batches, each candidate with two cases of the gate
    return (lambda: CompilePool(jobs, target.name if target else None)), (lambda: Crew(devices))


@dataclass
class _Batch:
    """Points that are tried together. mine: those that this sweep runs, which are being built."""

    proposals: Sequence[Proposal]
    mine: Sequence[Proposal] = ()
    building: Building | None = None

    def stop(self) -> None:
        """Builds no more of it."""
        if self.building is not None:
            self.building.stop()


class _Sweep:
    """The state of the loop. Every step that an earlier run finished is taken from the journal."""

    pool: Builds
    worker: Tries

    def __init__(
        self,
        space: Space,
        search: Search,
        journal: Journal,
        limits: Limits,
        floor_ms: float | None,
        board: Board | None,
        watch: Callable[[State], None] | None,
    ) -> None:
        self.space, self.search, self.journal, self.limits, self.board = space, search, journal, limits, board
        self.state = State(limits.budget_s, floor_ms=floor_ms)
        self.watch = watch or (lambda _: None)
        self.before = max((r.at for r in journal.records), default=0.0)
        self.start = time.monotonic()
        self.codes: dict[str, Trial] = {}
        self.stopped: str | None = None
        if board is not None:
            self._tell_board(board)

    def clock(self) -> float:
        """Seconds that the sweep has worked, earlier runs included."""
        return self.before + time.monotonic() - self.start

    # ---- trials ----------------------------------------------------------------------------------------------------

    def try_points(self) -> str:
        """Runs trials; returns why it stopped."""
        most = self.limits.max_trials
        ahead: _Batch | None = None

        def left(begun: int = 0) -> int:
            return WIDTH if most is None else min(WIDTH, most - len(self.state.trials) - begun)

        while self.stopped is None:
            self._listen()
            if left() <= 0:
                return f"{most} trials are done"
            batch, ahead = ahead or self._begin(left()), None
            if batch is not None:
                try:
                    # the next is built while this one runs; but no claim on another machine's study waits for its turn
                    if self.board is None and not self._out_of_time():
                        ahead = self._begin(left(len(batch.proposals)))
                    self._run_batch(batch)
                finally:
                    batch.stop()
                    if self.stopped is not None and ahead is not None:
                        ahead.stop()
            elif not self.search.left():
                return "every legal point was tried"
            elif self._out_of_time():
                self.stopped = self._budget_text()
            else:  # others still run points, of which one may win
                time.sleep(LISTEN_S)
        return self.stopped

    def _begin(self, count: int) -> _Batch | None:
        """Proposes points, and begins to build those that are not known; None where there are none."""
        proposals = (self.search.ask(count) or self._given_up(count)) if count > 0 else []
        if not proposals:
            return None
        new = [p for p in proposals if self.journal.find("trial", p.key) is None]
        if not new or (self.state.trials and (self._out_of_time() or self.stopped is not None)):
            return _Batch(proposals)
        mine = [p for p in new if self._take(p)]
        candidates = [self.space.candidate(p.settings) for p in mine]
        deadline = self.limits.compile_deadline_s
        building = self.pool.start(candidates, deadline, built=self.codes.keys(), level="quick", own=True)
        return _Batch(proposals, mine, building)

    def _run_batch(self, batch: _Batch) -> None:
        """Runs what is not known of a batch. The search is told in the order of the batch, whoever was first."""
        done: dict[str, Trial] = {}
        new: list[Proposal] = []
        for proposal in batch.proposals:
            known = self.journal.find("trial", proposal.key)
            if known is not None and not new:
                self._keep(Trial(proposal, known.outcome, known.at, known.same_as, True, known.by))
            elif known is not None:
                done[proposal.key] = Trial(proposal, known.outcome, known.at, known.same_as, True, known.by)
            else:
                new.append(proposal)
        if self._near_floor() or not new:
            return
        if self.state.trials and self._out_of_time():
            self.stopped = self._budget_text()
            return
        try:
            if batch.building is not None:
                self._run_built(batch.mine, batch.building, done)
        finally:
            for proposal in batch.proposals:
                if proposal.key in done:
                    self._keep(done[proposal.key])
        self._near_floor()

    def _run_built(self, mine: Sequence[Proposal], building: Building, done: dict[str, Trial]) -> None:
        """Runs what is built and is like nothing that was run before; the next is built meanwhile."""
        builds: dict[str, Outcome] = {}
        proposals = {proposal.key: proposal for proposal in mine}
        leaders: dict[str, str] = {}
        twins: dict[str, list[str]] = defaultdict(list)

        def ended(key: str, outcome: Outcome, same_as: int | None = None, by: str | None = None) -> None:
            build, proposal = builds[key], proposals[key]
            outcome = replace(outcome, sources=build.sources, binaries=build.binaries)
            at = self._write("trial", proposal, outcome, same_as=same_as, by=by)
            done[key] = Trial(proposal, outcome, at, same_as, by=by)
            if self.board is not None:
                self.board.post(key, outcome, by)
            self._better(outcome)
            for twin in twins.pop(key, ()):
                repeated(twin, outcome, proposal.number)
            self._show()

        def repeated(key: str, outcome: Outcome, number: int) -> None:
            ended(key, replace(outcome, detail=f"the same code as trial {number}", seconds=0.0), number)

        def tasks() -> Iterator[Task]:
            for number, key in enumerate(proposals):
                if self._no_more(done):
                    return
                build = builds[key] = building.outcome(number)
                if self._no_more(done):  # waiting takes time too
                    return
                if build.end is not End.OK:
                    ended(key, build)
                    continue
                twin = next((self.codes[code] for code in build.codes() if code in self.codes), None)
                leader = next((leaders[code] for code in build.codes() if code in leaders), None)
                if twin is not None:
                    repeated(key, twin.outcome, twin.proposal.number)
                elif leader is not None and leader in done:
                    repeated(key, done[leader].outcome, proposals[leader].number)
                elif leader is not None:
                    twins[leader].append(key)
                else:
                    leaders.update(dict.fromkeys(build.codes(), key))
                    candidate = self.space.candidate(proposals[key].settings)
                    yield Task(key, candidate, "quick", TRIAL_REPEATS, self.limits.run_deadline_s, self.state.best_ms)

        for task, outcome in self.worker.run_each(tasks()):
            ended(task.key, outcome, by=task.device)

    def _no_more(self, done: Mapping[str, Trial]) -> bool:
        """Whether the sweep stops within a batch, of which these have ended; the default's trial it always makes."""
        if not (self.state.trials or done):
            return False
        if not self._near_floor() and self._out_of_time():
            self.stopped = self._budget_text()
        return self.stopped is not None

    def _near_floor(self) -> bool:
        """Whether the best is so near to the floor that the sweep stops."""
        floor, best, share = self.state.floor_ms, self.state.best_ms, self.limits.stop_share
        if floor is not None and best is not None and floor >= share * best:
            self.stopped = f"the best is within {share:.0%} of the roofline"
        return self.stopped is not None

    def _out_of_time(self) -> bool:
        return self.clock() >= TRIALS_SHARE * self.limits.budget_s

    def _budget_text(self) -> str:
        return f"the budget of {self.limits.budget_s:g} s is spent"

    def _keep(self, trial: Trial) -> None:
        """Counts a trial, and tells the search."""
        self._add(trial)
        self.search.tell(trial.proposal, trial.outcome)
        self._show()

    def _add(self, trial: Trial) -> None:
        """Counts a trial that the search knows of."""
        self.state.trials.append(trial)
        if trial.same_as is None:
            for code in trial.outcome.codes():
                self.codes.setdefault(code, trial)
        self._better(trial.outcome)

    def _better(self, outcome: Outcome) -> None:
        if outcome.end is End.OK and outcome.time_ms is not None:
            best = self.state.best_ms
            self.state.best_ms = outcome.time_ms if best is None else min(best, outcome.time_ms)

    def recover(self) -> None:
        """After an interrupt: counts what was written down when it came, and not yet counted."""
        counted = {trial.proposal.key for trial in self.state.trials}
        for r in read(self.journal.path):
            if r.stage != "trial" or r.key in counted:
                continue
            self._add(Trial(Proposal(r.number, r.lane, r.settings, r.key), r.outcome, r.at, r.same_as, by=r.by))
            if self.board is not None:
                self.board.post(r.key, r.outcome, r.by)

    # ---- finalists -------------------------------------------------------------------------------------------------

    def finish(self, best: list[Finalist], turned_away: list[tuple[Proposal, Outcome]]) -> None:
        """Judges and times the best few again, the trials of other machines among them; the winner comes first."""
        self.state.phase = "finalists"
        own = [(t.proposal, t.outcome) for t in self.state.trials if t.same_as is None and t.outcome.end is End.OK]

        def step(stage: str, proposal: Proposal, round: int, run: Callable[[], Outcome], must: bool) -> Outcome | None:
            known = self.journal.find(stage, proposal.key, round)
            if known is not None:
                return known.outcome
            if not must and self.clock() >= self.limits.budget_s:
                return None
            outcome = run()
            self._write(stage, proposal, outcome, round=round)
            self._show()
            return outcome

        first = [
            p
            for p in shortlist(self.space, own)[: self.limits.finalists]
            if self.journal.find("gate", p.key, 0) is None
        ]
        building = self.pool.start(
            [self.space.candidate(p.settings) for p in first],
            self.limits.compile_deadline_s, built=(), level="full", own=False,
        )  # fmt: skip
        numbers = {p.key: n for n, p in enumerate(first)}

        def built(proposal: Proposal) -> Outcome:
            return building.outcome(numbers[proposal.key]) if proposal.key in numbers else Outcome(End.OK)

        try:
            passed, failed = run_finals(
                self.space, own, self.limits.finalists, self.worker, step, self.limits.run_deadline_s, built
            )
        finally:
            building.stop()
        best += passed
        turned_away += failed

    # ---- other machines ----------------------------------------------------------------------------------------------

    def _take(self, proposal: Proposal) -> bool:
        """Whether the point is this sweep's to run."""
        if self.board is None:
            return True
        choices = self.space.choices(proposal.settings)
        if self.board.claim(proposal.key, proposal.lane, proposal.settings, choices):
            self.search.take_back(proposal)
            return True
        self.search.leave(proposal)
        return False

    def _given_up(self, count: int) -> list[Proposal]:
        """Points that were left to others, who have given them back."""
        left = self.search.left()
        running = self.board.pending() if self.board is not None and left else ()
        return [p for p in left if p.key not in running][:count]

    def _listen(self) -> None:
        """Takes over what others found out; it is written down as if it had been run here."""
        for posted in self.board.news() if self.board is not None else ():
            proposal = self.search.learn(posted.lane, posted.settings, posted.outcome)
            if proposal is None:
                continue
            twin = next((self.codes[code] for code in posted.outcome.codes() if code in self.codes), None)
            same_as = twin.proposal.number if twin is not None else None
            at = self._write("trial", proposal, posted.outcome, same_as=same_as, by=posted.by, shared=True)
            self._add(Trial(proposal, posted.outcome, at, same_as, by=posted.by))

    def _tell_board(self, board: Board) -> None:
        """At the start: what the journal has and the study has not is posted, and all that either has is learned."""
        for record in [r for r in self.journal.records if r.stage == "trial"]:
            choices = self.space.choices(record.settings)
            if not record.shared and board.claim(record.key, record.lane, record.settings, choices):
                board.post(record.key, record.outcome, record.by)
            proposal = self.search.learn(record.lane, record.settings, record.outcome)
            if proposal is not None:
                self._add(Trial(proposal, record.outcome, record.at, record.same_as, True, record.by))

    # ---- what is written and shown -----------------------------------------------------------------------------------

    def _show(self) -> None:
        self.state.elapsed_s = self.clock()
        self.watch(self.state)

    def _write(self, stage: str, proposal: Proposal, outcome: Outcome, **more: Any) -> float:
        at = self.clock()
        self.journal.append(
            Record(stage, proposal.number, proposal.lane, proposal.key, proposal.settings, outcome, at, **more)
        )
        return at
