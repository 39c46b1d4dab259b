"""A process that runs candidates for a tuner, which itself never does: watched, killed as a group, and replaced."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from k3dsl.autotune.child import START_DEADLINE_S, Child, DiedError
from k3dsl.autotune.trial import Candidate, End, Outcome
from k3dsl.errors import LaunchError

if TYPE_CHECKING:
    from k3dsl.autotune.candidate_run import Request


class Worker:
    """One process on one device ('cpu', 'cuda:0'). Use it as a context manager, or `close` it.

    A candidate that hangs or breaks the process ends with it: the next one finds a new process.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._ready = False
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
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def run(
        self,
        candidate: Candidate,
        level: str = "quick",
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
            child = self._started()
            start = time.monotonic()
            budget = None if budget_s is None else start + budget_s
            outcome = self._watched(child, candidate, request, run_deadline_s, build_deadline_s, budget)
        except BaseException:
            self.close()
            raise
        return replace(outcome, seconds=time.monotonic() - start)

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

    def _watched(
        self,
        child: Child,
        candidate: Candidate,
        request: Request,
        run_deadline_s: float,
        build_deadline_s: float,
        budget: float | None,
    ) -> Outcome:
        step, kind = "starting", "prepare"
        try:
            child.send((candidate, request))
            while True:
                allowed = run_deadline_s if kind == "run" else build_deadline_s
                rest = allowed if budget is None else min(allowed, budget - time.monotonic())
                what, value = child.receive(rest)
                if what == "step":
                    step, kind = value
                    continue
                outcome, broken = value
                if broken:
                    self._replace()
                return outcome
        except TimeoutError:
            self._replace()
            if budget is not None and time.monotonic() >= budget:
                return Outcome(End.RUN_TIMEOUT, f"{step}: its budget is spent")
            end = End.COMPILE_TIMEOUT if kind == "build" else End.RUN_TIMEOUT
            return Outcome(end, f"{step}: no end after {allowed:g} s")
        except DiedError as death:
            self._replace()
            return Outcome(End.COMPILE_FAILED if kind == "build" else End.FAULTED, f"{step}: {death}")

    def _replace(self) -> None:
        """Ends the process and starts another, which imports what it needs while the tuner thinks."""
        self.close()
        self._child = self._spawn()
