"""What a sweep chooses from: an op's knobs and, for each launch, a backend and that backend's schedule; and what is illegal."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3dsl.autotune.trial import Candidate, written
from k3dsl.backends.base import Reason
from k3dsl.errors import ArgumentError, K3Error, KernelCodeError, LegalityError, TraceError, VerifyError
from k3dsl.ir.graph import Kernel, walk
from k3dsl.ir.types import TileType
from k3dsl.runtime import backends as registry
from k3dsl.runtime import explain
from k3dsl.runtime.bundle_writer import plain
from k3dsl.runtime.op import Knob, Op, check_names
from k3dsl.runtime.plan import Launch, Plan
from k3dsl.targets import Target

WARPS = (1, 2, 4, 8, 16)
THREADS = (128, 256)
STAGES = (1, 2, 3, 4)
REGISTERS = (None, 96, 112, 128, 168)
"""Caps of a thread's registers, for a launch that the op itself caps: elsewhere what a cap saves is spilled."""
ENUMERATED = 200
"""Legal points up to which a space is tried whole."""
COUNTED = 300
"""Points up to which it is found out how many are legal; a larger space is searched."""

Settings = dict[str, Any]


@dataclass(frozen=True)
class Parameter:
    """One thing to choose, by its name in `--set`. choices: plain values. default: what the op would take."""

    name: str
    choices: tuple[Any, ...]
    default: Any


Choose = Callable[[Parameter], Any]


@dataclass(frozen=True)
class Cost:
    """What a point occupies, by which ties are broken; less is better. Counts over the launches of the op.

    threads: of one program of each launch. shared_bytes: of the tiles that its loops load, times the depth of their
    pipelines: an estimate for comparing. tile: elements of the largest tile of each launch.
    """

    threads: int
    shared_bytes: int
    tile: int


class Space:
    """The points of an op at given dims and options, for a target and the backends allowed on it.

    A point is a flat mapping in the names of `--set`: every knob, `LAUNCH.backend` where it is not the first of
    `backends`, and the schedule fields that differ from what the op takes for these knobs. fixed: knobs and schedule
    fields that are given and not searched. target: None for the torch backend.
    """

    def __init__(
        self,
        op: Op,
        dims: Mapping[str, int],
        options: Mapping[str, Any],
        target: Target | None,
        backends: Sequence[str],
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        check_names("backend", backends, list(registry.BACKENDS))
        if not backends or ("torch" in backends and len(backends) > 1):
            raise ArgumentError(
                f"a sweep over {' and '.join(backends) or 'no backend'}", fix="name torch alone, or triton and tilelang"
            )
        if (target is None) != (backends[0] == "torch"):
            raise ArgumentError(
                f"backend {backends[0]} does not run on target {target or 'cpu'}",
                fix="torch runs on the cpu, triton and tilelang on a GPU",
            )
        self.op, self.target, self.backends = op, target, tuple(backends)
        self.dims = dict(dims)
        self.options = {n: plain(v) for n, v in op.resolve_options(options).items()}
        self.fixed = {n: plain(v) for n, v in (fixed or {}).items()}
        knobs, others, _ = op.split_settings(self.fixed)
        if others:
            raise ArgumentError(f"{', '.join(others)} is an option of {op.name}, not a setting to fix")
        op.resolve_knobs(knobs)
        self.point = op.point(self.dims, self.options, target=target)
        self.known_dims = self.point.dims
        self._plans: dict[tuple[Any, ...], dict[str, Plan] | Reason] = {}
        self._reasons: dict[str, tuple[Reason, ...]] = {}
        self._legal: list[Settings] | None = None

    # ---- points --------------------------------------------------------------------------------------------------

    def knobs(self) -> list[Parameter]:
        """The op's knobs."""
        chosen = self.op.default_knobs(self.point.options, self.known_dims, target=self.target)
        found = []
        for knob in self.op.knobs:
            choices = tuple(plain(c) for c in knob.choices)
            if knob.name in self.fixed:
                choices = (self.fixed[knob.name],)
            elif not self._means(knob):
                choices = (plain(chosen[knob.name]),)
            default = plain(chosen[knob.name])
            found.append(Parameter(knob.name, choices, default if default in choices else choices[0]))
        return found

    def sample(self, choose: Choose) -> Settings:
        """A point, every parameter chosen by `choose`: knobs first, then what depends on them."""
        settings = {p.name: choose(p) for p in self.knobs()}
        plans = self._traced(settings)
        if isinstance(plans, Reason):  # refused whatever its schedule
            return settings
        for label in (launch.label for launch in plans[self.backends[0]].launches):
            backend = self.backends[0]
            if len(self.backends) > 1:
                name = f"{label}.backend"
                choices = (self.fixed[name],) if name in self.fixed else self.backends
                backend = choose(Parameter(name, choices, choices[0]))
                if backend != self.backends[0]:
                    settings[name] = backend
            launch = next(x for x in plans[backend].launches if x.label == label)
            for p in self._schedule(launch, backend, settings):
                value = choose(p)
                if value != p.default or p.name in self.fixed:
                    settings[p.name] = value
        return settings

    def choices(self, settings: Mapping[str, Any]) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """Every choice that leads `sample` to the point, with what it was chosen from."""
        made: dict[str, tuple[Any, tuple[Any, ...]]] = {}

        def choose(p: Parameter) -> Any:
            wanted = settings.get(p.name, p.default)
            value = wanted if wanted in p.choices else p.choices[0]
            made[p.name] = (value, p.choices)
            return value

        self.sample(choose)
        return made

    def parameters(self, settings: Mapping[str, Any]) -> Settings:
        """As `choices`, the values alone: the point with what it leaves to the op written out."""
        return {name: value for name, (value, _) in self.choices(settings).items()}

    def default(self) -> Settings:
        """What the op takes when nobody tuned it."""
        return {p.name: p.default for p in self.knobs()} | {n: v for n, v in self.fixed.items() if "." in n}

    def seeds(self) -> list[Settings]:
        """The op's own good guesses, without the default: its seeds and its rule on every other backend."""
        default = self.default()
        idle = {knob.name: default[knob.name] for knob in self.op.knobs if not self._means(knob)}
        found = [
            default | {n: plain(v) for n, v in seed.items() if n not in self.fixed and not self._first_anyway(n, v)}
            for seed in self.op.seeds
            if all(n not in idle or v == idle[n] for n, v in seed.items())
            and all(self._may_run(n, v) for n, v in seed.items() if n.endswith(".backend"))
        ]
        plans = self._traced(default)
        if not isinstance(plans, Reason):
            labels = [launch.label for launch in plans[self.backends[0]].launches]
            for backend in self.backends[1:]:
                moved = {f"{label}.backend": backend for label in labels if f"{label}.backend" not in self.fixed}
                found.append(default | moved)
        unique = {self.text(point): point for point in found if self.text(point) != self.text(default)}
        return list(unique.values())

    def _means(self, knob: Knob) -> bool:
        """True for a knob that changes anything with these options."""
        return knob.means is None or knob.means(self.point.options)

    def _may_run(self, name: str, backend: str) -> bool:
        """True when a launch may be put on the backend; name: 'scan.backend'."""
        return backend in self.backends and self.fixed.get(name, backend) == backend

    def _first_anyway(self, name: str, value: Any) -> bool:
        """True for a setting that puts a launch on the first of the backends, where points do not name it."""
        return name.endswith(".backend") and value == self.backends[0]

    def draw(self, rng: random.Random) -> Settings:
        """A point at random, legal or not."""
        return self.sample(lambda p: rng.choice(p.choices))

    def size(self, most: int | None = None) -> int:
        """Points that the op's own constraints leave, with schedules counted as the default's loops shape them.

        most: counts no further than past so many; some spaces take a minute to count.
        """
        each, points = self._schedules(), 0
        for knobs in self._knob_points():
            if not self._constraints(knobs):
                points += each
                if most is not None and points > most:
                    break
        return points

    def _schedules(self) -> int:
        """How many schedules the default's launches have, all together."""
        plans, each = self._traced(self.default()), 1
        if isinstance(plans, Reason):
            return each
        for number in range(len(plans[self.backends[0]].launches)):
            ways = 0
            for backend in self.backends:
                count = 1
                for p in self._schedule(plans[backend].launches[number], backend, self.default()):
                    count *= len(p.choices)
                ways += count
            each *= ways
        return each

    def enumerate(self) -> Iterator[Settings]:
        """Every legal point, in the order of the choices."""
        for knobs in self._knob_points():
            if self._constraints(knobs) or isinstance(self._traced(knobs), Reason):
                continue
            for point in self._under(knobs):
                if not self.reasons(point):
                    yield point

    def small(self) -> list[Settings] | None:
        """Every legal point of a space that is small enough to be tried whole; None for a larger one."""
        if self._legal is None and self.size(COUNTED) <= COUNTED:
            self._legal = list(itertools.islice(self.enumerate(), ENUMERATED + 1))
        return self._legal if self._legal is not None and len(self._legal) <= ENUMERATED else None

    def candidate(self, settings: Mapping[str, Any]) -> Candidate:
        """The point as plain data for other processes."""
        return Candidate(self.op.name, self.dims, self.options, dict(settings), self.backends[0])

    @staticmethod
    def text(settings: Mapping[str, Any]) -> str:
        """The point as `--set` takes it, sorted by name: equal for equal points."""
        return " ".join(f"--set {text}" for text in written(dict(sorted(settings.items()))))

    # ---- what is illegal -----------------------------------------------------------------------------------------

    def reasons(self, settings: Mapping[str, Any]) -> tuple[Reason, ...]:
        """Why the point cannot be tried: the op's constraints, its kernels, each launch's backend. Remembered."""
        key = self.text(settings)
        if key not in self._reasons:
            self._reasons[key] = tuple(self._find_reasons(settings))
        return self._reasons[key]

    def cost(self, settings: Mapping[str, Any]) -> Cost:
        """What a legal point occupies, see Cost."""
        threads = shared = tile = 0
        for launch in self.launches(settings):
            fields = launch.schedule.to_json() if launch.schedule is not None else {}
            threads += fields.get("threads") or 32 * fields.get("num_warps", 0)
            held, largest = _tiles(launch.kernel, fields.get("stages", {}))
            shared, tile = shared + held, tile + largest
        return Cost(threads, shared, tile)

    def launches(self, settings: Mapping[str, Any]) -> list[Launch]:
        """The launches of a point. Raises LegalityError for one whose kernels cannot be traced."""
        plans = self._traced(settings)
        if isinstance(plans, Reason):
            raise LegalityError(plans.message)
        _, _, schedules = self.op.split_settings(settings)
        found = []
        for number, first in enumerate(plans[self.backends[0]].launches):
            given = dict(schedules.get(first.label, {}))
            backend = given.pop("backend", self.backends[0])
            if backend not in plans:
                raise LegalityError(f"{first.label}: backend {backend} is not one of {', '.join(plans)}")
            launch = plans[backend].launches[number]
            found.append(_with(launch, given) if given and launch.schedule is not None else launch)
        return found

    def _find_reasons(self, settings: Mapping[str, Any]) -> list[Reason]:
        try:
            if texts := self._constraints(settings):
                return [Reason("constraint", text) for text in texts]
            plans = self._traced(settings)
            if isinstance(plans, Reason):
                return [plans]
            launches = self.launches(settings)
        except (ArgumentError, LegalityError) as error:
            return [Reason("legality", error.message)]
        found: list[Reason] = []
        if self.target is not None:
            # only what the op itself proposes may shrink to fit: elsewhere the shallower point is tried under its own name
            shrinks = self.text(settings) in {self.text(p) for p in (self.default(), *self.seeds())}
            for launch in launches:
                found += explain.legality(launch if shrinks else replace(launch, smaller=()), self.target)
        return found

    def _constraints(self, settings: Mapping[str, Any]) -> list[str]:
        given, _, _ = self.op.split_settings(settings)
        return replace(self.point, knobs=self.op.resolve_knobs({**self.point.knobs, **given})).reasons()

    def _traced(self, settings: Mapping[str, Any]) -> dict[str, Plan] | Reason:
        """The plan for these knobs on each backend with the op's own schedules, or why there is none."""
        knobs = {p.name: settings.get(p.name, p.default) for p in self.knobs()}
        key = tuple(knobs.values())
        if key not in self._plans:
            try:
                if texts := self._constraints(knobs):
                    self._plans[key] = Reason("constraint", "; ".join(texts))
                else:
                    point = self.op.point(self.dims, {**self.options, **knobs}, symbolic=True)
                    # not point.plan: a constraint may speak of the value of a dim that is symbolic here
                    self._plans[key] = {
                        b: self.op.plan(point.dims, point.knobs, point.options, b, {}) for b in self.backends
                    }
            except KernelCodeError:  # no point of the space, but a fault of the kernel
                raise
            except (TraceError, VerifyError, LegalityError, ArgumentError) as error:
                self._plans[key] = Reason("trace", error.message, error.where)
        return self._plans[key]

    # ---- schedules -----------------------------------------------------------------------------------------------

    def _schedule(self, launch: Launch, backend: str, settings: Mapping[str, Any]) -> list[Parameter]:
        """The parameters of a launch on a backend. What a knob of the op decides already is left out."""
        if launch.schedule is None:
            return []
        fields = launch.schedule.to_json()
        loops = list(fields["stages"])
        warps, depth = settings.get("num_warps"), settings.get("stages")
        found: list[tuple[str, tuple[Any, ...], Any]] = []
        if backend == "triton" and fields["num_warps"] != warps:
            found.append(("num_warps", self._accepted(backend, "num_warps", WARPS), fields["num_warps"]))
        if backend == "triton" and fields["maxnreg"] is not None:
            found.append(("maxnreg", REGISTERS, fields["maxnreg"]))
        if backend == "tilelang" and (warps is None or fields["threads"] != max(128, 32 * warps)):
            choices = dict.fromkeys((*self._accepted(backend, "threads", THREADS), fields["threads"]))
            found.append(("threads", tuple(choices), fields["threads"]))
        for loop in loops:
            if fields["stages"][loop] != depth:
                found.append((f"stages.{loop}", STAGES, fields["stages"][loop]))
        if backend == "tilelang" and loops:
            found.append(("warp_specialize", (True, False), fields["warp_specialize"]))
            if any(op.opcode == "dot" for op in walk(launch.kernel.body)):
                found.append(("overlap", (False, True), fields["overlap"]))
        named = [(f"{launch.label}.{name}", choices, default) for name, choices, default in found]
        return [
            Parameter(name, (self.fixed[name],) if name in self.fixed else choices, default)
            for name, choices, default in named
        ]

    def _accepted(self, backend: str, name: str, choices: tuple[int, ...]) -> tuple[int, ...]:
        """The choices that the backend's schedule and the target's programs can have at all."""
        assert self.target is not None
        unit = self.target.warp_size if name == "num_warps" else 1
        found = []
        for n in choices:
            try:
                registry.schedule_from_json(backend, {name: n})
            except K3Error:
                continue
            if n * unit <= self.target.max_threads_per_block:
                found.append(n)
        return tuple(found)

    def _knob_points(self) -> Iterator[Settings]:
        knobs = self.knobs()
        for values in itertools.product(*(p.choices for p in knobs)):
            yield {p.name: value for p, value in zip(knobs, values, strict=True)}

    def _under(self, knobs: Mapping[str, Any]) -> Iterator[Settings]:
        """Every point with these knobs: `sample` again and again, with the last choice that has one left moved on."""
        path: list[int] = []
        while True:
            widths: list[int] = []

            def choose(p: Parameter, widths: list[int] = widths) -> Any:
                if p.name in knobs:
                    return knobs[p.name]
                widths.append(len(p.choices))
                if len(path) < len(widths):
                    path.append(0)
                return p.choices[path[len(widths) - 1]]

            yield self.sample(choose)
            while path and path[-1] + 1 >= widths[len(path) - 1]:
                path.pop()
            if not path:
                return
            path[-1] += 1


def _with(launch: Launch, given: Mapping[str, Any]) -> Launch:
    """The launch with these schedule fields over its own, in its fallbacks too unless the depths are given."""

    def changed(schedule: Any) -> Any:
        fields = schedule.to_json()
        merged = {n: {**fields.get(n, {}), **v} if isinstance(v, Mapping) else v for n, v in given.items()}
        return registry.schedule_from_json(launch.backend, {**fields, **merged})

    smaller = () if "stages" in given else tuple(changed(s) for s in launch.smaller)
    return replace(launch, schedule=changed(launch.schedule), smaller=smaller)


def _tiles(kernel: Kernel, stages: Mapping[str, int]) -> tuple[int, int]:
    """(bytes of loaded tiles times the depth of the loop that loads them, elements of the largest tile)."""
    held = largest = 0
    depths: dict[int, int] = {}
    for op in walk(kernel.body):
        depth = depths.get(id(op), 1)
        if op.opcode == "loop":
            depth = stages.get(str(op.attrs.get("label")), 1)
        for region in op.regions:
            depths.update((id(inner), depth) for inner in region.ops)
        for result in op.results:
            if isinstance(result.type, TileType):
                largest = max(largest, result.type.size)
                if op.opcode == "load" and result.type.shape:
                    held += depth * result.type.size * result.type.dtype.bytes
    return held, largest
