"""What one candidate of a sweep is and how it ended. Every part of the tuner speaks in these."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from k3dsl.backends.base import RESOURCES, Reason


class End(str, Enum):
    """How a trial ended. Only `ok` has a time that may win."""

    ILLEGAL = "illegal"
    OVER_RESOURCE = "over_resource"
    LOWER_FAILED = "lower_failed"
    COMPILE_FAILED = "compile_failed"
    COMPILE_TIMEOUT = "compile_timeout"
    WRONG = "wrong"
    NONFINITE = "nonfinite"
    NONDETERMINISTIC = "nondeterministic"
    FAULTED = "faulted"
    RUN_TIMEOUT = "run_timeout"
    SLOW = "slow"
    OK = "ok"


def end_of_reasons(reasons: Sequence[Reason]) -> End:
    """How a refused point counts: by what the target has too little of, or as illegal."""
    return End.OVER_RESOURCE if all(r.code in RESOURCES for r in reasons) else End.ILLEGAL


def backends_of(settings: Mapping[str, Any], labels: Iterable[str], default: str) -> set[str]:
    """The backends that launches of these labels go through with a candidate's settings."""
    return {str(settings.get(f"{label}.backend", default)) for label in labels}


def written(settings: Mapping[str, Any]) -> list[str]:
    """Settings as `--set` takes them: NAME=VALUE."""
    return [
        f"{name}={str(value).lower() if value is None or isinstance(value, bool) else value}"
        for name, value in settings.items()
    ]


@dataclass(frozen=True)
class Candidate:
    """A point to try, in plain data that travels between processes.

    op: name in the registry. dims: integers. options: what is computed, as `--set` text would give it. settings: knobs and
    schedule fields by name ('chunk', 'scan.num_warps', 'scan.stages.chunks', 'scan.backend'). backend: of the launches that
    settings say nothing about.
    """

    op: str
    dims: Mapping[str, int]
    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    backend: str


@dataclass(frozen=True)
class Outcome:
    """How a candidate ended: why, in words a person can act on; the median time in ms and its samples; errors by output.

    sources, binaries: digests of generated code by launch, by which equal candidates are known. gate: the level it passed.
    """

    end: End
    detail: str = ""
    time_ms: float | None = None
    samples_ms: tuple[float, ...] = ()
    errors: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    binaries: Mapping[str, str] = field(default_factory=dict)
    gate: str | None = None
    seconds: float = 0.0

    def codes(self) -> list[str]:
        """What equal candidates share: their sources, then their binaries."""
        both = (("source", self.sources), ("binary", self.binaries))
        return [f"{kind} {sorted(digests.items())}" for kind, digests in both if digests]

    def to_json(self) -> dict[str, Any]:
        return {
            "end": self.end.value,
            "detail": self.detail,
            "time_ms": self.time_ms,
            "samples_ms": list(self.samples_ms),
            "errors": dict(self.errors),
            "sources": dict(self.sources),
            "binaries": dict(self.binaries),
            "gate": self.gate,
            "seconds": round(self.seconds, 3),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Outcome:
        return Outcome(**{**data, "end": End(data["end"]), "samples_ms": tuple(data.get("samples_ms", ()))})


@dataclass(frozen=True)
class Task:
    """What a worker is to do: a candidate, the gate level it must pass, and what the worker must know.

    key: the point as `--set` text. device: where it ran, once that is known.
    """

    key: str
    candidate: Candidate
    level: str | None
    repeats: int
    run_deadline_s: float
    best_ms: float | None = None
    device: str | None = None

    def arguments(self) -> tuple[Candidate, str | None, int, float, float | None]:
        """Of a worker's `run`."""
        return self.candidate, self.level, self.repeats, self.run_deadline_s, self.best_ms


def summary_ms(samples: Sequence[float], kind: str) -> float:
    """One time for several samples: on a GPU their median; on a CPU the least, which the load of others cannot lower."""
    return min(samples) if kind == "cpu" else statistics.median(samples)
