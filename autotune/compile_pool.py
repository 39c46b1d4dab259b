"""Builds candidates in processes that touch no GPU, each against its own deadline."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from k3dsl.autotune.child import START_DEADLINE_S, Child, DiedError
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
    """Processes that lower and build every launch of a candidate.

    jobs: how many. target: name of the architecture to build for; only candidates of backend 'torch' need none. Use it
    as a context manager, or `close` it.
    """

    def __init__(self, jobs: int, target: str | None = None) -> None:
        if jobs < 1:
            raise ArgumentError(f"a compile pool needs at least one job, got {jobs}")
        self.jobs = jobs
        self.target = target
        self._idle: list[Child] = []

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process."""
        while self._idle:
            self._idle.pop().kill()

    def build(
        self,
        candidates: Sequence[Candidate] | Mapping[int, Candidate],
        deadline_s: float,
        report: Callable[[int, Outcome], None] | None = None,
        built: Collection[str] = (),
    ) -> dict[int, Outcome]:
        """How building each candidate ended, by its index (or key).

        Of candidates whose sources are equal one is built, and the outcome is everyone's. deadline_s: of one candidate,
        from when a process takes it on. report: called with each outcome as it comes. built: sources (see Outcome.codes)
        of earlier candidates, which are not built again: such a candidate ends ok, without binaries.
        An interrupt ends the processes at work and is passed on.
        """
        known = dict(candidates) if isinstance(candidates, Mapping) else dict(enumerate(candidates))
        found: dict[int, Outcome] = {}
        builders: dict[str, int] = {}
        twins: dict[int, list[int]] = {}

        def done(index: int, outcome: Outcome) -> None:
            found[index] = outcome
            if report is not None:
                report(index, outcome)
            for twin in twins.pop(index, ()):
                detail = outcome.detail or "the same sources as another of the batch"
                done(twin, replace(outcome, detail=detail, seconds=0.0))

        def wanted(index: int, lowered: Outcome) -> bool:
            """Whether to build a candidate with these sources."""
            (code,) = lowered.codes()
            if code in built:
                done(index, lowered)
                return False
            builder = builders.setdefault(code, index)
            if builder == index:
                return True
            if builder in found:
                done(index, replace(found[builder], seconds=0.0))
            else:
                twins.setdefault(builder, []).append(index)
            return False

        waiting = []
        for index, candidate in known.items():
            if candidate.backend == "torch":
                outcome = build_candidate(candidate, None)
                assert outcome is not None
                done(index, outcome)
            elif self.target is None:
                done(index, Outcome(End.ILLEGAL, f"backend {candidate.backend} needs a GPU target, and none is named"))
            else:
                waiting.append(index)
        waiting.reverse()
        busy: dict[Connection, _Task] = {}
        try:
            while waiting or busy:
                while waiting and len(busy) < self.jobs:
                    child = self._idle.pop() if self._idle else Child(f"{__name__}:serve", (self.target,), NO_GPU)
                    index = waiting.pop()
                    busy[child.connection] = _Task(child, index, known[index], deadline_s)
                timeout = max(0.0, min(task.until for task in busy.values()) - time.monotonic())
                ready = wait(list(busy), timeout)
                for connection, task in list(busy.items()):
                    outcome = task.outcome(connection in ready, wanted)
                    if outcome is None and not task.reusable:
                        continue
                    del busy[connection]
                    if task.reusable:
                        self._idle.append(task.child)
                    else:
                        task.child.kill()
                    if outcome is not None:
                        done(task.index, outcome)
        finally:
            for task in busy.values():
                task.child.kill()
        return {index: found[index] for index in known}


class _Task:
    """One candidate at one process: starting, then building until its deadline."""

    def __init__(self, child: Child, index: int, candidate: Candidate, deadline_s: float) -> None:
        self.child = child
        self.index = index
        self.candidate = candidate
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
                self.child.send(self.candidate)
            elif kind == "step":
                self.step = value
            elif kind == "lowered":
                self.sources = value
                lowered = Outcome(End.OK, sources=value, seconds=time.monotonic() - self.start)
                self.reusable = not wanted(self.index, lowered)
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

    while True:
        candidate = connection.recv()
        if candidate is None:
            connection.send(("ready", None))
            continue

        def wanted(sources: Mapping[str, str]) -> bool:
            connection.send(("lowered", dict(sources)))
            return bool(connection.recv())

        outcome = build_candidate(candidate, target, lambda step: connection.send(("step", step)), wanted)
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
    from k3dsl.autotune.gate import find_op
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
        point = op.point(candidate.dims, settings, symbolic=True)
        launches = point.plan(candidate.backend).launches
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


def source_digest(launch: Any, source: Any) -> str:
    """sha256 (hex) of a launch's generated code with all that its toolchain and the host are told.

    smaller: what is built where the first schedule does not fit decides too.
    """
    told = f"{source.backend}\n{source.name}\n{source.args}\n{sorted(source.options.items())}\n{source.text}"
    return _digest(told.encode(), f"{_host_side(launch)}\n{launch.smaller!r}")


def _host_side(launch: Any) -> str:
    """What a launch is beside its code: two of equal code with other grids or buffers are not the same."""
    tensors = [
        (t.name, str(t.dtype), [str(n) for n in t.shape], launch.buffer_of(t.name)) for t in launch.kernel.tensors
    ]
    return f"{[str(n) for n in launch.kernel.grid]}\n{tensors}\n{sorted(launch.scalars.items())}"


def _digest(content: bytes, more: str) -> str:
    return hashlib.sha256(content + b"\0" + more.encode()).hexdigest()
