"""An op: its dims, knobs and options by name, the plan they give, and how the command line runs and judges it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from k3dsl.errors import ArgumentError, UnknownNameError
from k3dsl.ir.symbols import Sym
from k3dsl.ir.types import DTYPES, DType
from k3dsl.runtime.plan import Plan


@dataclass(frozen=True)
class Dim:
    """A problem dim. static: compiled in; else a runtime dim of the artifact. default: used when none is given."""

    name: str
    default: int
    doc: str
    static: bool = False


@dataclass(frozen=True)
class Knob:
    """A number or name that changes how an op runs, not what it computes. The tuner searches `choices`."""

    name: str
    choices: tuple[Any, ...]
    default: Any
    doc: str


@dataclass(frozen=True)
class Option:
    """A variant of what an op computes: dtypes, flags, numbers. choices: () takes any number."""

    name: str
    choices: tuple[Any, ...]
    default: Any
    doc: str


@dataclass(frozen=True)
class Op:
    """One op of the registry.

    plan(dims, knobs, options, backend, schedules) -> Plan. dims hold an int for every static dim and an int or Sym for
    the others. schedules: {launch label: {field: value}} over the op's defaults.
    inputs(dims, options, device, seed) -> keyword tensors of `call`; call(**inputs) runs the op on torch tensors and
    returns named outputs; reference(**inputs) gives them in fp64; peers() gives other libraries' functions by name.
    limits(options) -> largest relative RMS error by output name. heuristic(options, dims) -> knobs that differ from their
    defaults for a shape.
    """

    name: str
    doc: str
    dims: tuple[Dim, ...]
    knobs: tuple[Knob, ...]
    options: tuple[Option, ...]
    plan: Callable[..., Plan]
    launches: tuple[str, ...]
    inputs: Callable[..., dict[str, Any]] | None = None
    call: Callable[..., dict[str, Any]] | None = None
    reference: Callable[..., dict[str, Any]] | None = None
    peers: Callable[[], dict[str, Callable[..., Any]]] | None = None
    limits: Callable[[Mapping[str, Any]], dict[str, float]] | None = None
    constraints: Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], list[str]] | None = None
    traffic_bytes: Callable[[Mapping[str, int], Mapping[str, Any], Mapping[str, Any]], dict[str, int]] | None = None
    heuristic: Callable[[Mapping[str, Any], Mapping[str, int]], dict[str, Any]] | None = None
    seeds: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)

    def default_knobs(self, options: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
        """Knobs for a call that nobody tuned: the op's own rule over its defaults."""
        return self.resolve_knobs(self.heuristic(options, dims) if self.heuristic is not None else {})

    def resolve_dims(self, given: Mapping[str, int], symbolic: bool = False) -> dict[str, int | Sym]:
        """Every dim by name; with `symbolic`, runtime dims become symbols that keep the given value's divisor (up to 64)."""
        check_names("dim", given, [d.name for d in self.dims], self.name)
        out: dict[str, int | Sym] = {}
        for d in self.dims:
            value = given.get(d.name, d.default)
            if not isinstance(value, int) or value < 0:
                raise ArgumentError(f"{self.name}: dim {d.name} must be an integer of at least 0, got {value!r}")
            out[d.name] = value if d.static or not symbolic else runtime_dim(d.name, value)
        return out

    def resolve_knobs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        check_names("knob", given, [k.name for k in self.knobs], self.name)
        return {k.name: _chosen(self.name, "knob", k, given.get(k.name, k.default)) for k in self.knobs}

    def resolve_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        check_names("option", given, [o.name for o in self.options], self.name)
        return {o.name: _chosen(self.name, "option", o, given.get(o.name, o.default)) for o in self.options}

    def split_settings(self, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]:
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


def runtime_dim(name: str, value: int, cap: int = 64) -> Sym:
    """A runtime dim with the largest power of two up to `cap` that divides the value seen."""
    divisor = 1
    while divisor < cap and value and value % (divisor * 2) == 0:
        divisor *= 2
    return Sym(name, divisible_by=divisor, min=0)


def _chosen(op: str, what: str, entry: Knob | Option, value: Any) -> Any:
    if isinstance(value, str) and value in DTYPES and any(isinstance(c, DType) for c in entry.choices):
        value = DTYPES[value]
    if entry.choices and value not in entry.choices:
        raise ArgumentError(
            f"{op}: {what} {entry.name} cannot be {value!r}", fix=f"choose one of {', '.join(map(str, entry.choices))}"
        )
    return value


def check_names(what: str, given: Iterable[str], known: list[str], op: str | None = None) -> None:
    """Raises UnknownNameError for the first name that is not known, with near misses."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known) or 'none'}"
            raise UnknownNameError(f"unknown {what} {name!r}{f' of {op}' if op else ''}; {hint}")
