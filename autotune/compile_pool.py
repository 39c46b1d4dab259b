"""Builds candidates in processes that touch no GPU, each against its own deadline."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from k3dsl.autotune.child import START_DEADLINE_S, Child, DiedError
from k3dsl.autotune.gate import QUICK_BUILT_CASES, find_op, gate_cases
from k3dsl.autotune.trial import Candidate, End, Outcome, end_of_reasons
from k3dsl.errors import (
    ArgumentError,
    BuildError,
    EvaluationError,
    K3Error,
    LaunchError,
    LegalityError,
    ParseError,
    ResourceError,
    TraceError,
    VerifyError,
)
from k3dsl.runtime.op import Op
from k3dsl.runtime.plan import Launch

_ENDS: tuple[tuple[type[K3Error], End], ...] = (
    (LegalityError, End.ILLEGAL),
    (ArgumentError, End.ILLEGAL),
    (ResourceError, End.OVER_RESOURCE),
    (TraceError, End.LOWER_FAILED),
    (VerifyError, End.LOWER_FAILED),
    (ParseError, End.LOWER_FAILED),
    (BuildError, End.COMPILE_FAILED),
    (EvaluationError, End.WRONG),
    (LaunchError, End.FAULTED),
)
REFUSALS = (LegalityError, ResourceError, ArgumentError)
"""How settings refuse a case, which the gate then skips."""
LISTEN_S = 0.2
"""How often a batch looks whether it was stopped, and whether a process is free."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}


def end_of(error: BaseException, otherwise: End) -> End:
    """How a candidate ended that raised this error; `otherwise` for one that k3dsl did not raise on purpose."""
    return next((end for kind, end in _ENDS if isinstance(error, kind)), otherwise)


def words(error: BaseException) -> str:
    """The error in one line."""
    kind = "" if isinstance(error, K3Error) else f"{type(error).__name__}: "
    lines = f"{kind}{error}".strip().splitlines()
    return lines[0][:500] if lines else type(error).__name__


class CompilePool:
    """Processes that lower and build every launch of a candidate, and what the gate will run it on.

    jobs: how many. target: name of the architecture to build for; only candidates of backend 'torch' need none. Use it
    as a context manager, or `close` it.
    """

    def __init__(self, jobs: int, target: str | None = None) -> None:
        if jobs < 1:
            raise ArgumentError(f"a compile pool needs at least one job, got {jobs}")
        self.jobs = jobs
        self.target = target
        self._idle: list[Child] = []
        self._batches: list[Batch] = []
        self._busy = 0
        self._lock = threading.Lock()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process."""
        while self._batches:
            self._batches.pop().kill()
        while self._idle:
            self._idle.pop().kill()

    def build(
        self,
        candidates: Sequence[Candidate] | Mapping[int, Candidate],
        deadline_s: float,
        report: Callable[[int, Outcome], None] | None = None,
        built: Collection[str] = (),
    ) -> dict[int, Outcome]:
        """How building each candidate ended, by its index (or key). See `start`; report: called with each outcome as it
        comes. An interrupt ends the processes at work and is passed on."""
        known = dict(candidates) if isinstance(candidates, Mapping) else dict(enumerate(candidates))
        batch = Batch(self, known, deadline_s, built, None, report)
        batch.drive()
        return {index: batch.found[index] for index in known}

    def start(
        self,
        candidates: Sequence[Candidate],
        deadline_s: float,
        *,
        built: Collection[str] = (),
        level: str | None = None,
        own: bool = True,
    ) -> Batch:
        """Begins to build candidates, and goes on while the caller does something else.

        Of candidates whose sources are equal one is built, and the outcome is everyone's. deadline_s: of one candidate, and
        of one part of a gate's cases, from when a process takes it on. built: sources (see Outcome.codes) of earlier
        candidates, which are not built again: such a candidate ends ok, without binaries. level: also builds what the cases
        of that level of the gate launch, so that whoever runs them finds it in the caches of the toolchains. own: False
        builds that alone.
        """
        batch = Batch(self, dict(enumerate(candidates)), deadline_s, built, level, None, own)
        self._batches = [*(b for b in self._batches if b.running), batch]
        batch.begin()
        return batch

    def take(self, batch: Batch) -> Child | None:
        """A process that has nothing to do, for a batch; None when all are at work or an earlier batch waits for one."""
        with self._lock:
            earlier = itertools.takewhile(lambda b: b is not batch, self._batches)
            if self._busy >= self.jobs or any(b.waits for b in earlier):
                return None
            child = self._idle.pop() if self._idle else Child(f"{__name__}:serve", (self.target,), NO_GPU)
            self._busy += 1
            return child

    def put_back(self, child: Child, reusable: bool) -> None:
        """Takes a process back; one that may not go on is ended."""
        with self._lock:
            self._busy -= 1
            if reusable:
                self._idle.append(child)
        if not reusable:
            child.kill()


class Batch:
    """Candidates that are being built together. See CompilePool.start."""

    def __init__(
        self,
        pool: CompilePool,
        candidates: Mapping[int, Candidate],
        deadline_s: float,
        built: Collection[str],
        level: str | None,
        report: Callable[[int, Outcome], None] | None,
        own: bool = True,
    ) -> None:
        self.pool, self.candidates, self.deadline_s = pool, candidates, deadline_s
        self.level, self.report = level, report
        self.built = frozenset(built)
        self.found: dict[int, Outcome] = {}
        self._own: dict[int, Outcome] = {}
        self._parts: dict[int, int] = {}
        self._builders: dict[str, int] = {}
        self._twins: dict[int, list[int]] = {}
        self._waiting: list[Work] = []
        self._told = threading.Condition()
        self._stopped = self._killed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        for index, candidate in candidates.items():
            if candidate.backend == "torch":
                outcome = build_candidate(candidate, None)
                assert outcome is not None
                self._end(index, outcome)
            elif pool.target is None:
                why = f"backend {candidate.backend} needs a GPU target, and none is named"
                self._end(index, Outcome(End.ILLEGAL, why))
            elif own:
                self._waiting.append(Work(candidate, index))
            else:
                self._own_done(index, Outcome(End.OK))

    # ---- the caller's side -------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def waits(self) -> bool:
        """Whether there is work that no process has taken on, and one is to."""
        return self.running and bool(self._waiting) and not self._stopped

    def begin(self) -> None:
        """Builds in a thread."""
        self._thread = threading.Thread(target=self._drive_quietly, name="k3dsl builds", daemon=True)
        self._thread.start()

    def outcome(self, index: int) -> Outcome:
        """How building a candidate ended; waits for it."""
        with self._told:
            while index not in self.found and self._error is None and not self._stopped:
                self._told.wait(0.5)  # in pieces, so that Ctrl-C is heard
            if index in self.found:
                return self.found[index]
            raise self._error or LaunchError("building was stopped")

    def stop(self) -> None:
        """Begins nothing more. What is being built is built to its end, so that the processes can go on with other work."""
        with self._told:
            self._stopped = True
            self._told.notify_all()

    def kill(self) -> None:
        """Ends the processes at work."""
        self._killed = True
        self.stop()
        if self._thread is not None:
            self._thread.join()

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def _drive_quietly(self) -> None:
        try:
            self.drive()
        except BaseException as error:
            with self._told:
                self._error = error
                self._told.notify_all()

    def drive(self) -> None:
        """Builds everything. An error or an interrupt ends the processes at work and is passed on."""
        busy: dict[Connection, _Task] = {}
        try:
            while busy or (self._waiting and not self._stopped):
                if self._killed:
                    return
                while self._waiting and not self._stopped and (child := self.pool.take(self)) is not None:
                    # the first candidate whole before the next, so that it can run early
                    work = min(self._waiting, key=lambda w: w.index)
                    self._waiting.remove(work)
                    busy[child.connection] = _Task(child, work, self.deadline_s)
                until = min((task.until for task in busy.values()), default=float("inf"))
                ready = wait(list(busy), min(LISTEN_S, max(0.0, until - time.monotonic())))
                for connection, task in list(busy.items()):
                    outcome = task.outcome(connection in ready, self._wanted)
                    if outcome is None and not task.reusable:
                        continue
                    del busy[connection]
                    self.pool.put_back(task.child, task.reusable)
                    if outcome is None:
                        continue
                    if task.work.part is None:
                        self._own_done(task.work.index, outcome)
                    else:
                        self._part_done(task.work.index, outcome)
        finally:
            for task in busy.values():
                self.pool.put_back(task.child, False)

    def _wanted(self, index: int, lowered: Outcome) -> bool:
        """Whether to build a candidate with these sources."""
        (code,) = lowered.codes()
        if code in self.built:
            self._end(index, lowered)
            return False
        builder = self._builders.setdefault(code, index)
        if builder == index:
            return True
        if builder in self.found:
            self._end(index, replace(self.found[builder], seconds=0.0))
        else:
            self._twins.setdefault(builder, []).append(index)
        return False

    def _own_done(self, index: int, outcome: Outcome) -> None:
        """The candidate's own launches are built: what the gate runs it on is next."""
        parts = self._case_parts(self.candidates[index]) if outcome.end is End.OK and self.level is not None else []
        if not parts:
            self._end(index, outcome)
            return
        self._own[index], self._parts[index] = outcome, len(parts)
        self._waiting += [Work(self.candidates[index], index, part) for part in parts]

    def _case_parts(self, candidate: Candidate) -> list[Part]:
        """The cases of the gate, apart from the candidate's own dims, in runs of neighbours, which share code."""
        assert self.level is not None
        numbers = [
            n for n, case in enumerate(gate_cases(find_op(candidate.op), candidate, self.level)) if not case.must
        ]
        count = min(len(numbers), max(QUICK_BUILT_CASES + 1, self.pool.jobs // 2))
        cuts = [len(numbers) * n // count for n in range(count + 1)] if count else []
        return [Part(self.level, tuple(numbers[a:b])) for a, b in itertools.pairwise(cuts)]

    def _part_done(self, index: int, outcome: Outcome) -> None:
        own = self._own[index]
        seconds = own.seconds + outcome.seconds
        self._parts[index] -= 1
        if outcome.end is not End.OK and own.end is End.OK:
            own = replace(outcome, sources=own.sources, binaries=own.binaries)
        self._own[index] = replace(own, seconds=seconds)
        if not self._parts[index]:
            self._end(index, self._own[index])

    def _end(self, index: int, outcome: Outcome) -> None:
        with self._told:
            self.found[index] = outcome
            self._told.notify_all()
        if self.report is not None:
            self.report(index, outcome)
        for twin in self._twins.pop(index, ()):
            detail = outcome.detail or "the same sources as another of the batch"
            self._end(twin, replace(outcome, detail=detail, seconds=0.0))


@dataclass(frozen=True)
class Part:
    """Some cases of a level of the gate, by number."""

    level: str
    cases: tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """What a process is asked: to build a candidate (part None), or what some cases of the gate launch."""

    candidate: Candidate
    index: int
    part: Part | None = None


class _Task:
    """One candidate at one process: starting, then building until its deadline."""

    def __init__(self, child: Child, work: Work, deadline_s: float) -> None:
        self.child = child
        self.work = work
        self.deadline_s = deadline_s
        self.step = "starting"
        self.sources: Mapping[str, str] = {}
        self.reusable = False
        self.start = time.monotonic()
        self.until = self.start + START_DEADLINE_S
        self.child.forget_log()
        try:
            self.child.send(None)  # answered with 'ready', which a process that starts gives late
        except DiedError:
            self.until = self.start  # seen at once

    def outcome(self, ready: bool, wanted: Callable[[int, Outcome], bool]) -> Outcome | None:
        """How it ended; None while it goes on, or when its sources are not wanted: then the process is free.

        wanted: asked with its index and sources whether it is to be built.
        """
        try:
            if not ready:
                if time.monotonic() < self.until:
                    return None
                if self.child.process.poll() is not None:
                    self.child.receive(0)
                what = f"no answer within {self.deadline_s:g} s, {self.step}"
                return Outcome(End.COMPILE_TIMEOUT, what, sources=self.sources, seconds=time.monotonic() - self.start)
            kind, value = self.child.receive(0)
            if kind == "ready":
                self.start = time.monotonic()
                self.until = self.start + self.deadline_s
                self.child.send((self.work.candidate, self.work.part))
            elif kind == "step":
                self.step = value
            elif kind == "lowered":
                self.sources = value
                lowered = Outcome(End.OK, sources=value, seconds=time.monotonic() - self.start)
                self.reusable = not wanted(self.work.index, lowered)
                self.child.send(not self.reusable)
            else:
                self.reusable = True
                return value
            return None
        except TimeoutError:
            return None
        except DiedError as death:
            self.reusable = False
            what = f"{self.step}: {death}"
            return Outcome(End.COMPILE_FAILED, what, sources=self.sources, seconds=time.monotonic() - self.start)


def serve(connection: Connection, target: str | None) -> None:
    """Runs in a process of the pool: builds one candidate after another; None asks whether it is ready."""
    import k3dsl.runtime.executable  # noqa: F401  the imports take seconds, and belong to no candidate

    def tell(step: str) -> None:
        connection.send(("step", step))

    while True:
        asked = connection.recv()
        if asked is None:
            connection.send(("ready", None))
            continue
        candidate, part = asked
        if part is not None:
            connection.send(("done", build_cases(candidate, target, part, tell)))
            continue

        def wanted(sources: Mapping[str, str]) -> bool:
            connection.send(("lowered", dict(sources)))
            return bool(connection.recv())

        outcome = build_candidate(candidate, target, tell, wanted)
        if outcome is not None:
            connection.send(("done", outcome))


def build_candidate(
    candidate: Candidate,
    target: str | None,
    step: Callable[[str], None] | None = None,
    wanted: Callable[[Mapping[str, str]], bool] | None = None,
) -> Outcome | None:
    """Lowers every launch, then builds them, in this process; how that ended. step: told what comes next.

    wanted: asked with the digests of the sources whether they are to be built; None is returned when they are not.
    Backend 'torch' builds nothing: the digests are those of the IR.
    """
    from k3dsl.ir.identity import kernel_hash
    from k3dsl.ir.verifier import verify
    from k3dsl.runtime import executable
    from k3dsl.runtime.explain import legality
    from k3dsl.targets import get_target

    tell = step or (lambda _: None)
    start = time.perf_counter()
    sources: dict[str, str] = {}
    binaries: dict[str, str] = {}

    def ended(end: End, detail: str = "") -> Outcome:
        return Outcome(end, detail, sources=sources, binaries=binaries, seconds=time.perf_counter() - start)

    where, otherwise = "", End.LOWER_FAILED
    try:
        tell("tracing")
        op = find_op(candidate.op)
        settings = {**candidate.options, **candidate.settings}
        op.point(candidate.dims, settings).check()  # a symbol says less than the number
        launches = _own_launches(op, candidate, settings, target)
        for launch in launches:
            where = f"launch {launch.label}: "
            if launch.backend == "torch":
                sources[launch.label] = binaries[launch.label] = kernel_hash(launch.kernel)
                continue
            assert target is not None
            tell(f"lowering launch {launch.label}")
            if reasons := legality(launch, get_target(target)):
                return ended(end_of_reasons(reasons), f"{where}{'; '.join(map(str, reasons))}")
            verify(launch.kernel)
            sources[launch.label] = source_digest(launch, executable.lower(launch, get_target(target)))
        where = ""
        if target is not None and wanted is not None and not wanted(sources):
            return None
        otherwise = End.COMPILE_FAILED
        for launch in launches:
            if launch.backend == "torch" or target is None:
                continue
            where = f"launch {launch.label}: "
            tell(f"building launch {launch.label}")
            _, artifact = executable.fitted(launch, get_target(target))
            binaries[launch.label] = _digest(artifact.binary, _host_side(launch))
    except Exception as error:  # toolchains raise what they like; one candidate must not end the pool
        return ended(end_of(error, otherwise), f"{where}{words(error)}")
    return ended(End.OK)


def _own_launches(op: Op, candidate: Candidate, settings: Mapping[str, Any], target: str | None) -> list[Launch]:
    """What a call at the candidate's own dims launches on a GPU. Of an op that plans nothing when it is called with shapes
    alone, and on the CPU, what its plan has for dims like these."""
    if candidate.backend != "torch" and op.inputs is not None and op.call is not None:
        dims, options = op.resolve_dims(candidate.dims), op.resolve_options(candidate.options)
        if found := _planned(op, candidate, partial(op.inputs, dims, options, "cpu", 0), target):
            return found
    return list(op.point(candidate.dims, settings, symbolic=True).plan(candidate.backend).launches)


def _planned(op: Op, candidate: Candidate, draw: Callable[[], Mapping[str, Any]], target: str | None) -> list[Launch]:
    """What a call on such inputs launches on a GPU with the candidate's settings; no two of one label."""
    from k3dsl.autotune.drawn import planned_calls
    from k3dsl.targets import get_target

    where = None if target is None else get_target(target)
    calls = planned_calls(op, draw, candidate.backend, candidate.settings, where)
    several = len(calls) > 1
    return [
        replace(launch, label=f"{n + 1}.{launch.label}") if several else launch
        for n, call in enumerate(calls)
        for launch in call.executable.plan.launches
    ]


def build_cases(candidate: Candidate, target: str | None, part: Part, step: Callable[[str], None]) -> Outcome:
    """Builds what cases of the gate launch with a candidate's settings, in this process and without a GPU.

    A case that these settings refuse is left to whoever runs it. Ends otherwise than ok when a launch does not build.
    """
    from k3dsl.runtime import executable
    from k3dsl.targets import get_target

    assert target is not None
    start, where = time.perf_counter(), ""

    def ended(end: End, detail: str = "") -> Outcome:
        return Outcome(end, detail, seconds=time.perf_counter() - start)

    op = find_op(candidate.op)
    try:
        cases = gate_cases(op, candidate, part.level)
        for number in part.cases:
            case = cases[number].case
            where = f"case {case.name}: "
            step(f"{where}planning")
            launches: list[Launch] = []
            with suppress(*REFUSALS):
                launches = _planned(op, candidate, partial(case.make, "cpu", 0), target)
            for launch in launches:
                step(f"{where}building launch {launch.label}")
                with suppress(*REFUSALS):
                    executable.fitted(launch, get_target(target))
    except Exception as error:
        return ended(end_of(error, End.COMPILE_FAILED), f"{where}{words(error)}")
    return ended(End.OK)


def source_digest(launch: Any, source: Any) -> str:
    """sha256 (hex) of a launch's generated code with all that its toolchain and the host are told.

    smaller: what is built where the first schedule does not fit decides too.
    """
    return _digest(source.told.encode(), f"{_host_side(launch)}\n{launch.smaller!r}")


def _host_side(launch: Any) -> str:
    """What a launch is beside its code: two of equal code with other grids or buffers are not the same."""
    tensors = [
        (t.name, str(t.dtype), [str(n) for n in t.shape], launch.buffer_of(t.name)) for t in launch.kernel.tensors
    ]
    return f"{[str(n) for n in launch.kernel.grid]}\n{tensors}\n{sorted(launch.scalars.items())}"


def _digest(content: bytes, more: str) -> str:
    return hashlib.sha256(content + b"\0" + more.encode()).hexdigest()
