"""What a worker does with one candidate: judges it on its op's inputs, then times it. Runs in the worker's process only."""

from __future__ import annotations

import functools
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from k3dsl.autotune.compile_pool import REFUSALS, end_of, words
from k3dsl.autotune.drawn import Drawn
from k3dsl.autotune.gate import LEVELS, GateCase, find_op, gate_cases
from k3dsl.autotune.guards import FILLS, Guards, load, stir
from k3dsl.autotune.trial import Candidate, End, Outcome, summary_ms
from k3dsl.backends.base import Artifact
from k3dsl.errors import ArgumentError
from k3dsl.runtime import executable
from k3dsl.runtime.dispatch import using_backend
from k3dsl.runtime.judge import poisoned
from k3dsl.runtime.metrics import limit_of, relative_rms
from k3dsl.runtime.op import Case, check_names, defaults_only, forced
from k3dsl.runtime.plan import Launch
from k3dsl.runtime.timing import measure
from k3dsl.targets import Target

SLOW_FACTOR = 3.0
ROUNDS = 3
FIRST_CALLS = 10
MAX_SETS = 8
REFERENCES_KEPT_BYTES = 4 << 30

Tell = Callable[[str, str], None]
"""Told (what comes next, its kind): 'prepare' (drawing inputs, the reference), 'build' or 'run'."""


@dataclass(frozen=True)
class Request:
    """What is asked about a candidate.

    level: 'quick', 'full' or 'ship'; None only times what passed a gate before. repeats: calls of each case that must agree
    in every bit. best_ms: the best time so far; a candidate whose first calls take SLOW_FACTOR times as long is not timed
    further. rep_ms: how long to time.
    """

    level: str | None = "quick"
    repeats: int = 10
    best_ms: float | None = None
    rep_ms: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if self.level is not None:
            check_names("gate level", [self.level], list(LEVELS))
        if self.repeats < 2:
            raise ArgumentError(f"repeats must be at least 2, got {self.repeats}")


def serve(connection: Connection, device: str) -> None:
    """Runs in the worker's process: one candidate after another until the connection ends or the device is broken."""
    where = torch.device(device)
    try:
        if where.type == "cuda":
            torch.cuda.set_device(where)
            torch.zeros(1, device=where)
            torch.cuda.synchronize(where)
        with poisoned():  # imports on first use what takes seconds, which no candidate should pay for
            torch.empty(1, device=where)
    except Exception as error:
        connection.send(("failed", words(error)))
        return
    connection.send(("ready", None))
    references, drawn = References(), Drawn()
    while True:
        candidate, request = connection.recv()
        tell = lambda text, kind: connection.send(("step", (text, kind)))  # noqa: E731
        outcome = run(candidate, request, where, references, drawn, tell)
        broken = _broken(where)
        if broken is not None and outcome.end is not End.FAULTED:
            outcome = Outcome(End.FAULTED, f"the device is unusable after it: {broken}", seconds=outcome.seconds)
        connection.send(("done", (outcome, broken is not None)))
        if broken is not None:
            return


def _broken(device: torch.device) -> str | None:
    """The error that sticks to this process's device context, if one does."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
    except Exception as error:
        return words(error)
    return None


class _EndedError(Exception):
    def __init__(self, end: End, detail: str) -> None:
        self.end = end
        super().__init__(detail)


class References:
    """fp64 results of cases, kept in host memory between candidates (one that writes astray on a GPU cannot reach them)."""

    def __init__(self) -> None:
        self._known: OrderedDict[Any, dict[str, torch.Tensor]] = OrderedDict()

    def get(self, key: Any, compute: Callable[[], Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        if key not in self._known:
            self._known[key] = {n: x.to("cpu", copy=True) for n, x in compute().items() if x is not None}
            while len(self._known) > 1 and sum(map(_bytes, self._known.values())) > REFERENCES_KEPT_BYTES:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


def run(
    candidate: Candidate, request: Request, device: torch.device, references: References, drawn: Drawn, tell: Tell
) -> Outcome:
    """Gate, then time. Never raises: what a candidate raises is how it ended."""
    state = _Run(candidate, request, device, references, drawn, tell)
    start = time.perf_counter()
    try:
        state.judge_and_time()
        end, detail = End.OK, state.summary()
    except _EndedError as ended:
        end, detail = ended.end, str(ended)
    except torch.OutOfMemoryError as error:
        end, detail = End.OVER_RESOURCE, f"{state.step}: {words(error)}"
    except Exception as error:
        end, detail = end_of(error, End.FAULTED), f"{state.step}: {words(error)}"
    return Outcome(
        end,
        detail,
        time_ms=summary_ms(state.samples, device.type) if end is End.OK else None,
        samples_ms=tuple(state.samples),
        errors={name: error for name, (error, _) in state.errors.items()},
        gate=state.passed,
        seconds=time.perf_counter() - start,
    )


@dataclass
class _Run:
    candidate: Candidate
    request: Request
    device: torch.device
    references: References
    drawn: Drawn
    tell: Tell
    step: str = "starting"
    passed: str | None = None
    judged: int = 0
    skipped: list[str] = field(default_factory=list)
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    samples: list[float] = field(default_factory=list)

    def next(self, step: str, kind: str) -> None:
        self.step = step
        self.tell(step, kind)

    def summary(self) -> str:
        skipped = f"; not with these settings: {', '.join(self.skipped)}" if self.skipped else ""
        if self.request.level is None:
            return "timed alone; it passed a gate before"
        return f"{self.judged} cases pass {self.request.repeats} times each{skipped}"

    def judge_and_time(self) -> None:
        c = self.candidate
        self.op = op = find_op(c.op)
        knobs, stray, schedules = op.split_settings(c.settings)
        if stray:
            raise ArgumentError(f"{', '.join(stray)}: options of {op.name}, given as settings")
        op.point(c.dims, {**c.options, **c.settings}).check()
        if (c.backend == "torch") != (self.device.type == "cpu"):
            raise ArgumentError(f"backend {c.backend} does not run on {self.device}")
        chosen = forced(op, knobs, schedules) if knobs or schedules else defaults_only(op)
        with torch.inference_mode(), using_backend(c.backend), chosen, _announced(self):
            level = self.request.level
            for gate_case in gate_cases(op, c, level) if level is not None else ():
                try:
                    self._judge(gate_case)
                    self.judged += 1
                except REFUSALS:
                    if gate_case.must:
                        raise
                    self.skipped.append(gate_case.case.name)
            self.passed = self.request.level
            self._time()

    def _judge(self, gate_case: GateCase) -> None:
        op, case, device = self.op, gate_case.case, self.device
        assert op.call is not None
        assert op.reference is not None
        where = f"case {case.name}"
        self.next(f"{where}: drawing inputs", "prepare")
        if gate_case.must:
            inputs = self._own_inputs()
        else:
            inputs = case.make(device, self.request.seed)
        expected = None
        if gate_case.key is not None:
            self.next(f"{where}: computing its reference", "prepare")
            compute = op.reference
            key = (gate_case.key, self.request.seed)
            expected = self.references.get(key, lambda: compute(**op.fresh(inputs)))
        own = {n: x for n, x in inputs.items() if n in op.mutates}
        kept = Guards()  # of what no call may change: made once
        shared = {n: x for n, x in inputs.items() if n not in own}
        if _roomy(inputs, device):
            shared = kept.inputs(shared, ())
        first: dict[str, torch.Tensor] = {}
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = []
        for n in range(self.request.repeats):
            self.next(f"{where}: call {n + 1} of {self.request.repeats}", "run")
            guards = Guards(None if n % 2 == 0 else FILLS[n // 2 % len(FILLS)])
            if guards.fill is not None:
                stir(shapes, guards.fill, device)
            with ExitStack() as around:
                if n % 2 == 0:
                    around.enter_context(poisoned())
                calls = around.enter_context(executable.recording())
                around.enter_context(executable.allocating(guards.allocate))
                arguments = {**shared, **guards.inputs(own, op.mutates)}
                if n % 3 == 2:
                    load(device)
                outputs = {name: x for name, x in op.call(**arguments).items() if x is not None}
            _synchronize(device)
            if (problem := guards.problem() or kept.problem()) is not None:
                raise _EndedError(End.WRONG, f"{where}: call {n + 1}: {problem}")
            if n == 0:
                self._check(case, outputs, expected)
                made = [t for call in calls for t in call.tensors.values()]
                shapes = [(tuple(t.shape), t.dtype) for t in (*made, *outputs.values())]
                first = {name: x.clone() for name, x in outputs.items()}
            else:
                for name, x in first.items():
                    if not _same(x, outputs[name]):
                        message = f"{where}: {name} of call {n + 1} is not bitwise the first call's"
                        raise _EndedError(End.NONDETERMINISTIC, message)

    def _check(
        self, case: Case, outputs: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor] | None
    ) -> None:
        compared = 0
        for name, limit in case.limits.items():
            got = outputs.get(name)
            want = None if expected is None else expected.get(name)
            if got is None or (want is None and expected is not None):
                continue
            compared += 1
            where = f"case {case.name}: {name}"
            if want is None:
                if lost := int(got.isnan().sum()):
                    raise _EndedError(End.NONFINITE, f"{where}: {lost} of {got.numel()} elements are NaN or unwritten")
                continue
            if got.shape != want.shape:
                raise _EndedError(End.WRONG, f"{where}: shape {list(got.shape)} instead of {list(want.shape)}")
            want = want.to(self.device)
            error = relative_rms(got, want)
            limit = limit_of(got, want, error, limit)
            known = self.errors.get(name)
            if known is None or error * known[1] > known[0] * limit:
                self.errors[name] = (error, limit)
            if error <= limit:
                continue
            message = f"{where}: error {error:.2e} is above {limit:.1e}"
            if lost := int((~got.isfinite() & want.isfinite()).sum()):
                message += f" ({lost} of {got.numel()} elements are not finite: overflowed, or left unwritten)"
                raise _EndedError(End.NONFINITE, message)
            raise _EndedError(End.WRONG, message)
        if not compared:
            raise _EndedError(End.WRONG, f"case {case.name}: no output that could be compared")

    def _own_inputs(self) -> dict[str, Any]:
        op, c = self.op, self.candidate
        dims, options = op.resolve_dims(c.dims), op.resolve_options(c.options)
        return self.drawn.get(op, dims, options, self.device, self.request.seed)

    def _time(self) -> None:
        op, device, request = self.op, self.device, self.request
        assert op.call is not None
        self.next("timing: drawing inputs", "prepare")
        drawn = self._own_inputs()
        sets = [op.fresh(drawn)]
        for _ in range(
            _sets(drawn, device) - 1
        ):  # other addresses: what the last call left in the L2 cache is of no use
            sets.append({n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in drawn.items()})
        self.next("timing: first calls", "run")
        op.call(**sets[0])
        _synchronize(device)
        turn = itertools.cycle(_replayed(op.call, sets, device))

        def call() -> None:
            next(turn)()

        limit = float("inf") if request.best_ms is None else SLOW_FACTOR * request.best_ms
        first = _first_ms(call, device, limit)
        if request.best_ms is not None and first > limit:
            self.samples = [first]
            message = (
                f"its first calls take {first:.4g} ms, over {SLOW_FACTOR:g} times the best, {request.best_ms:.4g} ms"
            )
            raise _EndedError(End.SLOW, message)
        for n in range(ROUNDS if first < request.rep_ms else 1):
            self.next(f"timing: round {n + 1}", "run")
            timing = measure(call, device, warmup_ms=10, rep_ms=max(1, request.rep_ms // ROUNDS))
            self.samples.append(timing.median_ms if timing.least_ms is None else timing.least_ms)


@contextmanager
def _announced(state: _Run) -> Iterator[None]:
    """While active, every build is told as a step, so that a slow toolchain and a kernel that hangs are told apart."""
    fitted = executable.fitted

    def telling(launch: Launch, target: Target) -> tuple[Launch, Artifact]:
        before = state.step
        state.next(f"{before}: building launch {launch.label}", "build")
        try:
            return fitted(launch, target)
        finally:
            state.next(before, "run")

    executable.fitted = telling
    try:
        yield
    finally:
        executable.fitted = fitted


def _replayed(
    function: Callable[..., Any], sets: list[dict[str, Any]], device: torch.device
) -> list[Callable[[], Any]]:
    """A call on each set: on a GPU the replay of its graph, so that what is timed is not the host; else, or where it
    cannot be captured, the call itself."""
    direct: list[Callable[[], Any]] = [functools.partial(function, **arguments) for arguments in sets]
    if device.type != "cuda":
        return direct
    replays: list[Callable[[], Any]] = []
    try:
        pool = torch.cuda.graph_pool_handle()  # one at a time is replayed, so all may use the same memory
        for call in direct:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                call()
            replays.append(graph.replay)
    except Exception:  # an op that asks the host in between
        torch.cuda.synchronize(device)
        return direct
    return replays


def _first_ms(call: Callable[[], None], device: torch.device, enough_ms: float) -> float:
    """The time of a call from as few as tell something; on a CPU the least of up to FIRST_CALLS, until one is quick enough:
    a call that was interrupted says nothing."""
    if device.type == "cuda":
        return measure(call, device, warmup_ms=1, rep_ms=1).median_ms
    least = float("inf")
    for n in range(FIRST_CALLS):
        start = time.perf_counter()
        call()
        least = min(least, (time.perf_counter() - start) * 1e3)
        if n and least <= enough_ms:
            break
    return least


def _sets(inputs: Mapping[str, Any], device: torch.device) -> int:
    """How many sets of inputs to rotate: on a GPU enough to fill its L2 cache twice, within a quarter of free memory."""
    if device.type != "cuda":
        return 1
    size = max(1, _bytes(inputs))
    wanted = 1 + 2 * torch.cuda.get_device_properties(device).L2_cache_size // size
    return max(1, min(MAX_SETS, max(2, wanted), torch.cuda.mem_get_info(device)[0] // 4 // size))


def _roomy(inputs: Mapping[str, Any], device: torch.device) -> bool:
    """Whether the device has room for the inputs twice more; a candidate must not fail for what the gate takes."""
    return device.type != "cuda" or torch.cuda.mem_get_info(device)[0] > 2 * _bytes(inputs)


def _bytes(tensors: Mapping[str, Any]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors.values() if isinstance(x, torch.Tensor))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    def bits(x: torch.Tensor) -> torch.Tensor:
        return x.detach().contiguous().reshape(-1).view(torch.uint8)

    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
