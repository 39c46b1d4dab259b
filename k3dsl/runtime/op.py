"""An op: its dims, knobs and options by name, the plan they give, and how the command line runs and judges it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from k3dsl.errors import ArgumentError, LegalityError, UnknownNameError
from k3dsl.ir.symbols import INT32_MAX, Sym
from k3dsl.ir.types import DTYPES, DType
from k3dsl.runtime.plan import Plan
from k3dsl.targets import Target


@dataclass(frozen=True)
class Dim:
    """A problem dim. static: compiled in; else a runtime dim of the artifact. default: used when none is given.

    divisor: the largest power of two dividing a given value that code compiled for it may count on. by_class: calls look
    tuned settings up by its size class, see size_number, so that sequences of all lengths are few kinds of call. empty: a
    static dim may be 0.
    """

    name: str
    default: int
    doc: str
    static: bool = False
    divisor: int = 64
    by_class: bool = False
    empty: bool = False

    @property
    def least(self) -> int:
        """The smallest value: code is made for static dims of at least 1, unless 0 has a meaning of its own."""
        return 1 if self.static and self.default and not self.empty else 0


def size_number(n: int) -> int:
    """A number for the size class of n, so that few kinds of call arise: itself up to 16 and for a power of two, else one
    near the middle between two powers of two."""
    return n if n <= 16 or n & (n - 1) == 0 else (3 << (n.bit_length() - 2)) - 1


@dataclass(frozen=True)
class Knob:
    """A number or name that changes how an op runs, not what it computes. The tuner searches `choices`.

    means: for which of the op's options the knob changes anything; None: for all. For others it is not searched.
    """

    name: str
    choices: tuple[Any, ...]
    default: Any
    doc: str
    means: Callable[[Mapping[str, Any]], bool] | None = None


@dataclass(frozen=True)
class Option:
    """A variant of what an op computes: dtypes, flags, numbers. choices: () takes any number.

    constant: a number whose value changes neither the work nor which settings are right: tuned for one it is tuned for all.
    positive: a number above 0.
    """

    name: str
    choices: tuple[Any, ...]
    default: Any
    doc: str
    constant: bool = False
    positive: bool = False


@dataclass(frozen=True)
class Case:
    """One set of inputs on which an op is judged.

    make(device, seed) draws the keyword arguments of the op's `call`. limits: largest relative RMS error by output name.
    """

    name: str
    family: str
    make: Callable[[Any, int], dict[str, Any]]
    limits: Mapping[str, float]


@dataclass(frozen=True)
class Op:
    """One op of the registry.

    plan(dims, knobs, options, backend, schedules) -> Plan. dims hold an int for every static dim and an int or Sym for
    the others. schedules: {launch label: {field: value}} over the op's defaults.
    prepare_dims(dims, options) -> the dims that `plan` takes, where some follow from others.
    constraints(dims, knobs, options) -> why a point of the space is refused.
    canonical(options) -> the options with those that mean nothing beside the others set to one value: equal for equal work.
    heuristic(options, dims) -> knobs that differ from their defaults for a shape. cpu_heuristic: the same for knobs that differ
    from those where the op computes on the CPU, whose time goes by steps and programs. fit(options, dims, target) -> knobs that
    differ from the heuristic's for a target whose shared memory does not hold what those ask for.

    How an op is judged and timed: inputs(dims, options, device, seed) -> keyword arguments of `call`; cases(size) -> the
    inputs of its test suite, 'small' or 'whole'; call(**inputs) runs the op on torch tensors and returns outputs by name;
    reference(**inputs) returns them in fp64; mutates: inputs that `call` changes; limits(options) -> largest relative RMS
    error by output name; peers() -> other libraries' functions by name, called and returning like `call`;
    traffic_bytes(plan, dims) -> least bytes that each launch moves, where that is not the size of its tensors;
    flops(plan, dims) -> floating-point operations of the products that a launch must form, by label, of the launches whose
    products may take longer than their bytes;
    cpu_dims: what a CPU is asked to do where nobody says how much.
    """

    name: str
    doc: str
    dims: tuple[Dim, ...]
    knobs: tuple[Knob, ...]
    options: tuple[Option, ...]
    plan: Callable[..., Plan]
    launches: tuple[str, ...]
    inputs: Callable[..., dict[str, Any]] | None = None
    cases: Callable[[str], list[Case]] | None = None
    call: Callable[..., dict[str, Any]] | None = None
    reference: Callable[..., dict[str, Any]] | None = None
    mutates: tuple[str, ...] = ()
    peers: Callable[[], dict[str, Callable[..., dict[str, Any]]]] | None = None
    limits: Callable[[Mapping[str, Any]], dict[str, float]] | None = None
    constraints: Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], list[str]] | None = None
    traffic_bytes: Callable[[Plan, Mapping[str, int]], dict[str, int]] | None = None
    flops: Callable[[Plan, Mapping[str, int]], dict[str, int]] | None = None
    canonical: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    heuristic: Callable[[Mapping[str, Any], Mapping[str, int]], dict[str, Any]] | None = None
    cpu_heuristic: Callable[[Mapping[str, Any], Mapping[str, int]], dict[str, Any]] | None = None
    fit: Callable[[Mapping[str, Any], Mapping[str, int], Target], dict[str, Any]] | None = None
    prepare_dims: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] | None = None
    cpu_dims: Mapping[str, int] = field(default_factory=dict)
    seeds: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)

    def default_knobs(
        self,
        options: Mapping[str, Any],
        dims: Mapping[str, int],
        on_cpu: bool = False,
        target: Target | None = None,
    ) -> dict[str, Any]:
        """Knobs for a call that nobody tuned: the op's own rule over its defaults, then what `forced` says.

        on_cpu: for a call that computes on the CPU, not for a look at a GPU's plan there. target: that code is built for, if it
        is known.
        """
        rules = (self.heuristic, self.cpu_heuristic if on_cpu else None)
        knobs = {n: x for rule in rules if rule is not None for n, x in rule(options, dims).items()}
        if self.fit is not None and target is not None:
            knobs |= self.fit(options, dims, target)
        force = _forced.get().get(self.name)
        return self.resolve_knobs(knobs if force is None else {**knobs, **force.knobs})

    def point(
        self,
        dims: Mapping[str, int],
        settings: Mapping[str, Any],
        symbolic: bool = False,
        target: Target | None = None,
    ) -> Point:
        """The point of the op's space that dims and NAME=VALUE settings mean; what they leave open is the op's default there.

        symbolic: runtime dims become symbols with the facts of the values given. Raises ArgumentError, UnknownNameError.
        """
        given_knobs, given_options, schedules = self.split_settings(settings)
        options = self.resolve_options(given_options)
        prepare = self.prepare_dims or (lambda d, _: dict(d))
        known = prepare(self.resolve_dims(dims), options)
        knobs = self.resolve_knobs({**self.default_knobs(options, known, target=target), **given_knobs})
        resolved = prepare(self.resolve_dims(dims, symbolic=True), options) if symbolic else known
        return Point(self, resolved, knobs, options, schedules)

    def asked(self, dims: Mapping[str, int]) -> dict[str, int]:
        """Dims as a call looks tuned settings up by them: some by the number of their size class."""
        classed = {d.name for d in self.dims if d.by_class}
        return {n: size_number(x) if n in classed else x for n, x in dims.items()}

    def resolve_dims(self, given: Mapping[str, int], symbolic: bool = False) -> dict[str, int | Sym]:
        """Every dim by name; with `symbolic`, runtime dims become symbols that keep the given value's divisor."""
        check_names("dim", given, [d.name for d in self.dims], self.name)
        out: dict[str, int | Sym] = {}
        for d in self.dims:
            value = given.get(d.name, d.default)
            if not isinstance(value, int) or isinstance(value, bool) or not d.least <= value <= INT32_MAX:
                raise ArgumentError(
                    f"{self.name}: dim {d.name}, {d.doc}, must be an integer from {d.least} to {INT32_MAX}, got {value!r}"
                )
            out[d.name] = value if d.static or not symbolic else runtime_dim(d.name, value, d.divisor)
        return out

    def resolve_knobs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        check_names("knob", given, [k.name for k in self.knobs], self.name)
        return {k.name: _chosen(self.name, "knob", k, given.get(k.name, k.default)) for k in self.knobs}

    def resolve_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        check_names("option", given, [o.name for o in self.options], self.name)
        return {o.name: _chosen(self.name, "option", o, given.get(o.name, o.default)) for o in self.options}

    def fresh(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of `call` with copies of those that it changes."""
        return {n: x.clone() if n in self.mutates and x is not None else x for n, x in inputs.items()}

    def split_settings(
        self, settings: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]:
        """Splits NAME=VALUE settings into knobs, options and schedule fields ('scan.num_warps', 'scan.stages.chunks')."""
        knobs: dict[str, Any] = {}
        options: dict[str, Any] = {}
        schedules: dict[str, dict[str, Any]] = {}
        knob_names, option_names = [k.name for k in self.knobs], [o.name for o in self.options]
        for name, value in settings.items():
            if name in knob_names:
                knobs[name] = value
            elif name in option_names:
                options[name] = value
            elif "." in name and name.split(".")[0] in self.launches:
                launch, fieldname, *rest = name.split(".")
                target = schedules.setdefault(launch, {})
                if rest:
                    target.setdefault(fieldname, {})[".".join(rest)] = value
                else:
                    target[fieldname] = value
            else:
                known = knob_names + option_names + [f"{label}.num_warps" for label in self.launches]
                check_names("knob or option", [name], known, self.name)
        return knobs, options, schedules


@dataclass(frozen=True)
class Point:
    """An op with everything about it decided but the backend and the target."""

    op: Op
    dims: Mapping[str, Any]
    knobs: Mapping[str, Any]
    options: Mapping[str, Any]
    schedules: Mapping[str, Mapping[str, Any]]

    def reasons(self) -> list[str]:
        """Why the op's own constraints refuse this point; empty when they do not."""
        return self.op.constraints(self.dims, self.knobs, self.options) if self.op.constraints is not None else []

    def check(self) -> None:
        """Raises LegalityError with every reason when the op refuses the point."""
        if reasons := self.reasons():
            raise LegalityError(f"{self.op.name} refuses these settings: {'; '.join(reasons)}")

    def plan(self, backend: str) -> Plan:
        """The launches of the point. Raises LegalityError when the op refuses it."""
        self.check()
        return self.op.plan(self.dims, self.knobs, self.options, backend, self.schedules)


@dataclass(frozen=True)
class Forced:
    """Knobs and schedule fields that calls of an op use instead of its own choice."""

    op: Op
    knobs: Mapping[str, Any]
    schedules: Mapping[str, Mapping[str, Any]]

    @property
    def key(self) -> str:
        """Equal for equal choices: part of the key of whatever remembers compiled code."""
        return f"{sorted(self.knobs.items())} {self.schedules}"


_forced: ContextVar[Mapping[str, Forced]] = ContextVar("k3dsl_forced", default=MappingProxyType({}))
_block: ContextVar[object | None] = ContextVar("k3dsl_forced_block", default=None)


@contextmanager
def _forcing(force: Forced) -> Iterator[None]:
    token, block = _forced.set({**_forced.get(), force.op.name: force}), _block.set(object())
    try:
        yield
    finally:
        _forced.reset(token)
        _block.reset(block)


@contextmanager
def forced(op: Op, knobs: Mapping[str, Any], schedules: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """While active, the op's torch function runs with these knobs and schedule fields, whatever its rule says."""
    if not knobs and not schedules:
        yield
        return
    with _forcing(Forced(op, knobs, schedules)):
        yield


@contextmanager
def defaults_only(op: Op) -> Iterator[None]:
    """While active, the op runs with its own defaults: neither what is forced on it nor what was tuned counts."""
    with _forcing(Forced(op, {}, {})):
        yield


def forced_block() -> object | None:
    """Stands for all that is forced on ops; another object for each `forced` or `defaults_only` block, None outside."""
    return _block.get()


def forced_key(op: Op) -> str | None:
    """What is forced on the op as a hashable key; None, and quick, when nothing is."""
    active = _forced.get()
    return active[op.name].key if active and op.name in active else None


def forced_for(plan: Callable[..., Plan]) -> Forced | None:
    """What is forced on the op of this plan function, if anything."""
    return next((f for f in _forced.get().values() if f.op.plan is plan), None)


def runtime_dim(name: str, value: int, cap: int) -> Sym:
    """A runtime dim with the largest power of two up to `cap` that divides the value seen."""
    divisor = 1
    while divisor < cap and value and value % (divisor * 2) == 0:
        divisor *= 2
    return Sym(name, divisible_by=divisor, min=0)


def _chosen(op: str, what: str, entry: Knob | Option, value: Any) -> Any:
    if isinstance(value, str) and value in DTYPES and any(isinstance(c, DType) for c in entry.choices):
        value = DTYPES[value]
    if not entry.choices:
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ArgumentError(f"{op}: {what} {entry.name} cannot be {value!r}", fix="give a number, or none")
        if value is not None and (not math.isfinite(value) or (entry.positive and value <= 0)):  # type: ignore[union-attr]
            needs = "a positive number" if entry.positive else "a finite number"  # type: ignore[union-attr]
            raise ArgumentError(f"{op}: {what} {entry.name} cannot be {value!r}", fix=f"give {needs}")
        return value
    if value is None and None not in entry.choices and "none" in entry.choices:
        value = "none"  # as --set reads the word
    for choice in entry.choices:
        if choice == value:  # 1 is True, 2.0 is 2: the choice is what counts
            return choice
    raise ArgumentError(
        f"{op}: {what} {entry.name} cannot be {value!r}", fix=f"choose one of {', '.join(map(str, entry.choices))}"
    )


def check_names(what: str, given: Iterable[str], known: list[str], op: str | None = None) -> None:
    """Raises UnknownNameError for the first name that is not known, with near misses."""
    for name in given:
        if name not in known:
            parts = [n for n in known if n.startswith(f"{name}.")]  # kda of kda.forward
            near = parts or difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known) or 'none'}"
            raise UnknownNameError(f"unknown {what} {name!r}{f' of {op}' if op else ''}; {hint}")
