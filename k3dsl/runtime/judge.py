"""Whether an op is right: its cases against the fp64 reference, outputs poisoned first, repeats compared bit for bit."""

from __future__ import annotations

import math
import multiprocessing
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from k3dsl.errors import ArgumentError, K3Error
from k3dsl.ir.identity import kernel_hash
from k3dsl.runtime.backends import GENERATING
from k3dsl.runtime.dispatch import choose_backend, current_target, planning, using_backend
from k3dsl.runtime.executable import fitted
from k3dsl.runtime.metrics import limit_of, relative_rms
from k3dsl.runtime.op import Case, Op, forced
from k3dsl.runtime.plan import Launch
from k3dsl.runtime.sketch import sketched
from k3dsl.targets import get_target


@dataclass(frozen=True)
class Verdict:
    """How one case went.

    errors: relative RMS error by output. problem: why it failed, None when it passed. repeats: calls that were compared.
    seconds: of a call, the mean over the repeats with compiling included.
    """

    case: str
    family: str
    errors: Mapping[str, float]
    limits: Mapping[str, float]
    repeats: int
    seconds: float
    problem: str | None = None

    @property
    def passed(self) -> bool:
        return self.problem is None

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "family": self.family,
            "errors": dict(self.errors),
            "limits": dict(self.limits),
            "repeats": self.repeats,
            "seconds": round(self.seconds, 4),
            "passed": self.passed,
            "problem": self.problem,
        }


def _share(error: float, limit: float) -> float:
    """Of its limit that an error takes; a limit of 0 admits an exact copy alone."""
    return error / limit if limit else math.inf if error else 0.0


@dataclass
class FamilyResult:
    """The cases of one family: how many, how many failed, and for each output its error closest to (or past) the limit."""

    family: str
    cases: int = 0
    failed: int = 0
    worst: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, verdict: Verdict) -> None:
        self.cases += 1
        self.failed += not verdict.passed
        for name, error in verdict.errors.items():
            limit = verdict.limits[name]
            known = self.worst.get(name)
            if known is None or _share(error, limit) > _share(*known):
                self.worst[name] = (error, limit)


def by_family(verdicts: Iterable[Verdict]) -> list[FamilyResult]:
    """One result a family, in order of appearance."""
    found: dict[str, FamilyResult] = {}
    for verdict in verdicts:
        found.setdefault(verdict.family, FamilyResult(verdict.family)).add(verdict)
    return list(found.values())


@contextmanager
def poisoned() -> Iterator[None]:
    """While active, torch.empty fills what it returns (NaN, the largest integer): an output that nobody wrote shows."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    switch: Any = torch.utils.deterministic
    fill = switch.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        switch.fill_uninitialized_memory = True
        try:
            yield
        finally:
            switch.fill_uninitialized_memory = fill
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def cases_of(
    op: Op, size: str = "small", dims: Mapping[str, int] | None = None, options: Mapping[str, Any] | None = None
) -> list[Case]:
    """The op's own cases of that size; with dims or options one case, drawn for them.

    Raises ArgumentError for an op that says nothing about its inputs.
    """
    if not dims and not options and op.cases is not None:
        return op.cases(size)
    if op.inputs is None or op.limits is None:
        raise ArgumentError(f"{op.name} has no inputs to be judged on")
    inputs = op.inputs
    chosen = op.resolve_options(options or {})
    known = op.resolve_dims({**op.cpu_dims, **(dims or {})})

    def make(device: torch.device | str, seed: int) -> dict[str, Any]:
        return inputs(known, chosen, device, seed)

    name = ",".join(f"{n}={v}" for n, v in {**(dims or {}), **(options or {})}.items()) or "default"
    return [Case(name, "given", make, op.limits(chosen))]


def judge(
    op: Op,
    cases: Iterable[Case],
    *,
    device: torch.device | str = "cpu",
    knobs: Mapping[str, Any] | None = None,
    schedules: Mapping[str, Mapping[str, Any]] | None = None,
    repeats: int = 2,
    seed: int = 0,
    backend: str | None = None,
) -> Iterator[Verdict]:
    """Judges each case in turn: on the CPU with the torch backend, on a GPU with the generated one.

    knobs, schedules: in place of the op's own choice. backend: of GPU runs; None is what K3DSL_BACKEND says.
    repeats: calls whose outputs must agree in every bit.

    Raises ArgumentError for an op without a reference; what goes wrong in a case is in its verdict.
    """
    if op.call is None or op.reference is None:
        raise ArgumentError(f"{op.name} has no reference to be judged against")
    for case in cases:
        with using_backend(backend), forced(op, knobs or {}, schedules or {}):
            verdict = _judge_case(op, case, torch.device(device), max(1, repeats), seed)
        yield verdict


def judge_in_processes(
    op: Op,
    size: str,
    jobs: int,
    *,
    device: torch.device | str = "cpu",
    knobs: Mapping[str, Any] | None = None,
    schedules: Mapping[str, Mapping[str, Any]] | None = None,
    repeats: int = 2,
    seed: int = 0,
    backend: str | None = None,
) -> Iterator[Verdict]:
    """As `judge` on the op's own cases, in `jobs` processes. In case order.

    On a GPU the processes first build what the cases launch, each kernel once: compiling dominates, and it runs on one core."""
    cases = cases_of(op, size)
    total = len(cases)
    how: dict[str, Any] = {"device": str(device), "knobs": dict(knobs or {}), "schedules": dict(schedules or {})}
    how |= {"repeats": repeats, "seed": seed, "backend": backend}
    tasks = [(op, size, n, how) for n in range(total)]
    with multiprocessing.get_context("spawn").Pool(min(jobs, max(1, total))) as pool:
        target = current_target(torch.device(device))
        if target is not None:
            ahead = [(launch, target.name) for launch in planned_launches(op, cases, how)]
            for _ in pool.imap_unordered(_build_task, ahead):
                pass
        yield from pool.imap(_judge_task, tasks, chunksize=max(1, total // (jobs * 8)))


def planned_launches(op: Op, cases: Iterable[Case], how: Mapping[str, Any]) -> list[Launch]:
    """What `judge` would launch on a GPU for the cases, each once. how: its keyword arguments.

    A case that raises when it is only planned is left to `judge`."""
    assert op.call is not None
    found: dict[tuple[str, str, str], Launch] = {}
    device = torch.device(how["device"])
    backend, target = how["backend"] or choose_backend(device), current_target(device)
    for case in cases if backend in GENERATING else ():
        with suppress(Exception), torch.inference_mode(), planning(backend, target) as calls:
            inputs = sketched(partial(case.make, "cpu", how["seed"]))
            with forced(op, how["knobs"], how["schedules"]):
                op.call(**op.fresh(inputs))
            for launch in (launch for call in calls for launch in call.executable.plan.launches):
                found.setdefault((launch.backend, kernel_hash(launch.kernel), repr(launch.schedule)), launch)
    return list(found.values())


def _build_task(task: tuple[Launch, str]) -> None:
    """Leaves the launch's code in the disk cache. What does not build is told by the verdict of a case that launches it."""
    launch, target = task
    with suppress(Exception):
        fitted(launch, get_target(target))


def _judge_task(task: tuple[Any, ...]) -> Verdict:
    op, size, number, how = task
    case = cases_of(op, size)[number]
    return next(iter(judge(op, [case], **how)))


def _judge_case(op: Op, case: Case, device: torch.device, repeats: int, seed: int) -> Verdict:
    assert op.call is not None
    assert op.reference is not None
    errors: dict[str, float] = {}
    limits = dict(case.limits)
    problems: list[str] = []
    start = time.perf_counter()
    try:
        inputs = case.make(device, seed)
        start = time.perf_counter()
        outputs: list[dict[str, torch.Tensor | None]] = []
        for _ in range(repeats):
            with poisoned():
                outputs.append(op.call(**op.fresh(inputs)))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = (time.perf_counter() - start) / repeats
        expected = op.reference(**inputs)
        for name, limit in case.limits.items():
            got = outputs[0].get(name)
            if expected.get(name) is None or got is None:
                continue
            errors[name] = relative_rms(got, expected[name])
            limit = limits[name] = limit_of(got, expected[name], errors[name], limit)
            if not errors[name] <= limit:
                broken = int((~got.isfinite()).sum())
                lost = f" ({broken} of {got.numel()} elements are not finite)" if broken else ""
                problems.append(f"{name}: error {errors[name]:.2e} is above {limit:.1e}{lost}")
        if not errors:
            problems.append(f"the op returned none of the outputs that are judged: {', '.join(case.limits)}")
        for n, again in enumerate(outputs[1:], 2):
            if differing := _different(outputs[0], again):
                problems.append(f"{differing} of call {n} is not bitwise the first call's")
    except Exception as error:  # one broken case must not hide the rest
        kind, remedy = f"{type(error).__name__}: ", None
        if isinstance(error, K3Error):
            kind, remedy = "", error.fix
        problems.append(f"{kind}{error}".splitlines()[0] + (f"; {remedy}" if remedy else ""))
        seconds = time.perf_counter() - start
    return Verdict(case.name, case.family, errors, limits, repeats, seconds, "; ".join(problems) or None)


def _different(a: Mapping[str, torch.Tensor | None], b: Mapping[str, torch.Tensor | None]) -> str | None:
    """The name of an output that is not the same in every bit."""
    for name, x in a.items():
        y = b[name]
        if x is None or y is None:
            continue
        if x.shape != y.shape or not torch.equal(_bits(x), _bits(y)):
            return name
    return None


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(torch.uint8)
