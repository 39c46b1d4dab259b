"""A process that runs candidates for a tuner, which itself never does: watched, killed as a group, and replaced."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from k3dsl.autotune.child import START_DEADLINE_S, Child, DiedError
from k3dsl.autotune.trial import Candidate, End, Outcome, Task
from k3dsl.errors import ArgumentError, LaunchError

if TYPE_CHECKING:
    from k3dsl.autotune.candidate_run import Request


class OneAtATime:
    """Runs tasks in turn, for what has only `run`."""

    def run(
        self, candidate: Candidate, level: str | None, repeats: int, run_deadline_s: float, best_ms: float | None
    ) -> Outcome:
        raise NotImplementedError

    def run_each(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Outcome]]:
        """Every task with how it ended, as it ends. The next one is taken when there is somebody to run it."""
        for task in tasks:
            yield task, self.run(*task.arguments())


class Worker(OneAtATime):
    """One process on one device ('cpu', 'cuda:0'). Use it as a context manager, or `close` it.

    A candidate that hangs or breaks the process ends with it: the next one finds a new process.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._ready = False
        self._job: _Job | None = None
        self._child: Child | None = self._spawn()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Of the process now; None when closed."""
        return self._child.process.pid if self._child is not None else None

    def close(self) -> None:
        """Ends the process and all that it started."""
        child, self._child, self._job = self._child, None, None
        if child is not None:
            child.kill()

    def run(
        self,
        candidate: Candidate,
        level: str | None = "quick",
        repeats: int = 10,
        run_deadline_s: float = 30.0,
        best_ms: float | None = None,
        *,
        build_deadline_s: float = 300.0,
        budget_s: float | None = None,
        rep_ms: int = 200,
        seed: int = 0,
    ) -> Outcome:
        """Judges a candidate, then times it at its own dims; says how it ended.

        level, repeats, best_ms, rep_ms, seed: see `candidate_run.Request`. run_deadline_s: of each call of a case and each
        round of timing. build_deadline_s: of each build of a launch (the pool leaves most in the toolchains' caches), and
        of each reference. budget_s: of everything together. Raises LaunchError when the device cannot be used at all,
        ArgumentError for a level or number of repeats that do not exist. An interrupt ends the process and is passed on.
        """
        from k3dsl.autotune.candidate_run import Request

        request = Request(level, repeats, best_ms, rep_ms, seed)
        try:
            self.begin(candidate, request, run_deadline_s, build_deadline_s, budget_s)
            while True:
                connection, until = self.waiting()
                outcome = self.poll(connection.poll(max(0.0, until - time.monotonic())))
                if outcome is not None:
                    return outcome
        except BaseException:
            self.close()
            raise

    # ---- for whoever watches several --------------------------------------------------------------------------------

    def begin(
        self,
        candidate: Candidate,
        request: Request,
        run_deadline_s: float,
        build_deadline_s: float = 300.0,
        budget_s: float | None = None,
    ) -> None:
        """Hands a candidate to the process, which has nothing else to do. Raises LaunchError."""
        child = self._started()
        self._job = _Job(child, run_deadline_s, build_deadline_s, budget_s)
        try:
            child.send((candidate, request))
        except DiedError:
            self._job.until = 0.0  # seen at the first poll

    def waiting(self) -> tuple[Connection, float]:
        """Where its next word comes from, and until when (in time.monotonic) it is waited for."""
        assert self._job is not None
        return self._job.child.connection, self._job.until

    def poll(self, ready: bool) -> Outcome | None:
        """How the candidate ended; None while it runs. ready: whether the connection has something."""
        job = self._job
        assert job is not None
        outcome, reusable = job.advance(ready)
        if outcome is None:
            return None
        self._job = None
        if not reusable:
            self._replace()
        return replace(outcome, seconds=time.monotonic() - job.start)

    def _spawn(self) -> Child:
        self._ready = False
        return Child("k3dsl.autotune.candidate_run:serve", (self.device,))

    def _started(self) -> Child:
        """The process, once it has imported what it needs and opened its device: no candidate pays for that."""
        if self._child is None or (self._ready and self._child.process.poll() is not None):
            self.close()
            self._child = self._spawn()
        child = self._child
        if not self._ready:
            try:
                kind, detail = child.receive(START_DEADLINE_S)
            except TimeoutError:
                raise LaunchError(f"a worker on {self.device} did not start within {START_DEADLINE_S:g} s") from None
            except DiedError as death:
                raise LaunchError(f"a worker on {self.device} {death}") from None
            if kind != "ready":
                raise LaunchError(f"{self.device} cannot be used: {detail}", fix="`k3dsl doctor` says what is here")
            self._ready = True
        child.forget_log()
        return child

    def _replace(self) -> None:
        """Ends the process and starts another, which imports what it needs while the tuner thinks."""
        self.close()
        self._child = self._spawn()


@dataclass
class _Job:
    """One candidate at one process: what it does now, and until when that may take."""

    child: Child
    run_deadline_s: float
    build_deadline_s: float
    budget_s: float | None
    step: str = "starting"

    def __post_init__(self) -> None:
        self.start = time.monotonic()
        self.end = None if self.budget_s is None else self.start + self.budget_s
        self._allow(self.build_deadline_s)

    def _allow(self, seconds: float, building: bool = False) -> None:
        self.allowed, self.building = seconds, building
        until = time.monotonic() + seconds
        self.until = until if self.end is None else min(until, self.end)

    def advance(self, ready: bool) -> tuple[Outcome | None, bool]:
        """How it ended, or None; and whether the process may go on."""
        try:
            if not ready and time.monotonic() < self.until:
                return None, True
            what, value = self.child.receive(0)
            if what == "step":
                self.step, kind = value
                self._allow(self.run_deadline_s if kind == "run" else self.build_deadline_s, kind == "build")
                return None, True
            outcome, broken = value
            return outcome, not broken
        except TimeoutError:
            if self.end is not None and time.monotonic() >= self.end:
                return Outcome(End.RUN_TIMEOUT, f"{self.step}: its budget is spent"), False
            end = End.COMPILE_TIMEOUT if self.building else End.RUN_TIMEOUT
            return Outcome(end, f"{self.step}: no end after {self.allowed:g} s"), False
        except DiedError as death:
            return Outcome(End.COMPILE_FAILED if self.building else End.FAULTED, f"{self.step}: {death}"), False


class Crew(OneAtATime):
    """Workers on several devices of one machine. What must be compared is run by the first of them alone."""

    def __init__(self, devices: Sequence[str]) -> None:
        if not devices:
            raise ArgumentError("a crew needs at least one device")
        self.workers = [Worker(device) for device in devices]

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process."""
        for worker in self.workers:
            worker.close()

    def run(
        self, candidate: Candidate, level: str | None, repeats: int, run_deadline_s: float, best_ms: float | None
    ) -> Outcome:
        """Runs on the first device, see Worker.run."""
        return self.workers[0].run(candidate, level, repeats, run_deadline_s, best_ms)

    def run_each(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Outcome]]:
        """As `OneAtATime.run_each`, on all devices at once; an interrupt ends the processes and is passed on."""
        from k3dsl.autotune.candidate_run import Request

        if len(self.workers) == 1:
            yield from super().run_each(tasks)
            return
        coming = iter(tasks)
        idle = list(self.workers)
        busy: list[tuple[Worker, Task]] = []
        try:
            while True:
                while idle and (task := next(coming, None)) is not None:
                    worker = idle.pop(0)
                    request = Request(task.level, task.repeats, task.best_ms)
                    worker.begin(task.candidate, request, task.run_deadline_s)
                    busy.append((worker, replace(task, device=worker.device)))
                if not busy:
                    return
                places: dict[Any, float] = dict(worker.waiting() for worker, _ in busy)
                ready = wait(list(places), max(0.0, min(places.values()) - time.monotonic()))
                for worker, task in list(busy):
                    outcome = worker.poll(worker.waiting()[0] in ready)
                    if outcome is not None:
                        busy.remove((worker, task))
                        idle.append(worker)
                        yield task, outcome
        except BaseException:  # also when the one who asked wants no more
            for worker, _ in busy:
                worker.close()
            raise
