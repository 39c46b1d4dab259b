"""Winners on this machine: what one is, and one JSON file each under K3DSL_CACHE_DIR, written whole or not at all."""

from __future__ import annotations

import json
import logging
import math
import platform
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3dsl import settings
from k3dsl.autotune.key import GATES, Key, bucket_of, digest_of, key_of, options_of
from k3dsl.autotune.trial import Candidate, End, Outcome, backends_of
from k3dsl.backends.common import write_whole
from k3dsl.errors import ArgumentError, CacheWarning, UnknownNameError
from k3dsl.runtime.bundle_writer import plain

if TYPE_CHECKING:
    from k3dsl.runtime.op import Op

FIELDS = ("key", "settings", "backend", "region", "evidence", "time_ms", "roofline_share", "recorded")
log = logging.getLogger("k3dsl.autotune")


@dataclass(frozen=True)
class Winner:
    """Settings that won a sweep, what they hold for and what is known of them. All values are plain JSON.

    settings: as in a Candidate. backend: of the launches that settings say nothing about. region: [least, most] of each
    dim for which the settings may be taken. evidence: `errors` (relative RMS by output) and `repeats` (calls that agreed
    in every bit). roofline_share: attainable time over measured time, or None. recorded: driver, clocks, host, when;
    kept for people, never compared.
    """

    key: Key
    settings: Mapping[str, Any]
    backend: str
    region: Mapping[str, tuple[int, int]]
    evidence: Mapping[str, Any]
    time_ms: float
    roofline_share: float | None = None
    recorded: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Equal for equal keys and settings: what a file is called by."""
        return f"{self.key.digest[:24]}-{digest_of([self.backend, self.settings])[:8]}"

    @property
    def backends(self) -> list[str]:
        """The backends that its launches go through."""
        return sorted(backends_of(self.settings, self.key.ir, self.backend) or {self.backend})

    @property
    def unusual(self) -> dict[str, Any]:
        """The options that are not the op's defaults; all of them for an op that is not in the registry."""
        from k3dsl.ops.registry import get_op

        try:
            op = get_op(self.key.op)
        except UnknownNameError:
            return dict(self.key.options)
        usual = options_of(op, op.resolve_options({}))
        return {n: x for n, x in self.key.options.items() if n not in usual or x != usual[n]}

    @property
    def rank(self) -> tuple[Any, ...]:
        """Sorts better evidence first: gate level, repeats, then time; the rest makes the order total."""
        return (-GATES.index(self.key.gate), -int(self.evidence.get("repeats", 0)), self.time_ms, self.name)

    def candidate(self) -> Candidate:
        """The point of the space that won."""
        return Candidate(self.key.op, self.key.dims, self.key.options, self.settings, self.backend)

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key.to_json(),
            "settings": dict(self.settings),
            "backend": self.backend,
            "region": {name: list(ends) for name, ends in self.region.items()},
            "evidence": dict(self.evidence),
            "time_ms": self.time_ms,
            "roofline_share": self.roofline_share,
            "recorded": dict(self.recorded),
        }

    @staticmethod
    def from_json(data: Any) -> Winner:
        """The winner in parsed JSON. Raises ValueError, which says what is wrong, for anything else."""
        if not isinstance(data, dict):
            raise ValueError("a winner is no object")
        if missing := [name for name in FIELDS if name not in data]:
            raise ValueError(f"fields are missing: {', '.join(missing)}")
        if unknown := sorted(set(data) - set(FIELDS)):
            raise ValueError(f"unknown fields: {', '.join(unknown)}")
        if not all(isinstance(data[n], dict) for n in ("settings", "region", "evidence", "recorded")):
            raise ValueError("settings, region, evidence or recorded is no object")
        if not isinstance(data["backend"], str):
            raise ValueError("backend is no text")
        if not _is_number(data["time_ms"]) or data["time_ms"] <= 0:
            raise ValueError("time_ms is no time")
        if data["roofline_share"] is not None and not _is_number(data["roofline_share"]):
            raise ValueError("roofline_share is no number")
        if type(data["evidence"].get("repeats")) is not int or not isinstance(data["evidence"].get("errors"), dict):
            raise ValueError("the evidence has no repeats or no errors")
        if not all(_is_number(e) for e in data["evidence"]["errors"].values()):
            raise ValueError("an error is no number")
        for name, ends in data["region"].items():
            if not isinstance(ends, list) or len(ends) != 2 or not all(type(n) is int for n in ends):
                raise ValueError(f"the region of {name} is no pair of integers")
        key = Key.from_json(data["key"])
        if set(data["region"]) != set(key.dims):
            raise ValueError("the region does not name the key's dims")
        return Winner(**{**data, "key": key, "region": {n: (lo, hi) for n, (lo, hi) in data["region"].items()}})


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def region_of(op: Op, dims: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Static dims as they are; a runtime dim from the bucket below its own to the bucket above."""
    static = {d.name for d in op.dims if d.static}
    return {
        name: (value, value) if name in static else (bucket_of(value) // 4 + 1 if value else 0, 2 * bucket_of(value))
        for name, value in dims.items()
    }


def winner_from(
    candidate: Candidate,
    outcome: Outcome,
    gpu: Mapping[str, Any],
    measure: Mapping[str, Any],
    repeats: int,
    roofline_share: float | None = None,
    recorded: Mapping[str, Any] | None = None,
) -> Winner:
    """The winner that a sweep's outcome makes of a candidate.

    repeats: calls that agreed in every bit. recorded: driver, clocks and the like; host and time are added.

    Raises ArgumentError for an outcome that may not win.
    """
    from k3dsl.ops.registry import get_op

    if outcome.end is not End.OK or outcome.time_ms is None or outcome.gate is None:
        raise ArgumentError(f"a trial that ended {outcome.end.value} without time or gate cannot win")
    key = key_of(candidate, gpu, measure, outcome.gate)
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Winner(
        key=key,
        settings={name: plain(value) for name, value in sorted(candidate.settings.items())},
        backend=candidate.backend,
        region=region_of(get_op(candidate.op), key.dims),
        evidence={"errors": dict(sorted(outcome.errors.items())), "repeats": repeats},
        time_ms=outcome.time_ms,
        roofline_share=roofline_share,
        recorded={"host": platform.node(), "when": when, **(recorded or {})},
    )


# ---- files -----------------------------------------------------------------------------------------------------------------

_read: dict[Path, tuple[tuple[int, int], Winner | None]] = {}
_warned: set[str] = set()


def folder(op: str | None = None) -> Path:
    """Where winners are kept, of one op or of all."""
    root = Path(settings.get("K3DSL_CACHE_DIR")) / "winners"
    return root if op is None else root / op


def put(winner: Winner) -> Path:
    """Writes the winner to its file; an equal key with equal settings is replaced. Raises ArgumentError."""
    path = folder(winner.key.op) / f"{winner.name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(winner.to_json(), indent=1, sort_keys=True, allow_nan=False) + "\n")
    except OSError as error:
        raise ArgumentError(
            f"{path} cannot be written: {error.strerror}", fix="set K3DSL_CACHE_DIR to a folder that can be written"
        ) from None
    return path


def entries(op: str | None = None) -> list[Winner]:
    """Every winner that can be read, best evidence first within an op. What cannot be read is left out, with a warning."""
    found = [winner for path in _files(op) if (winner := _load(path)) is not None]
    return sorted(found, key=lambda w: (w.key.op, w.rank))


def clear(op: str | None = None) -> int:
    """Deletes the winners of an op, or all of them; returns how many files went."""
    gone = 0
    for path in list(_files(op)):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ArgumentError(f"{path} cannot be deleted: {error.strerror}", fix="see who owns the folder") from None
        gone += 1
    return gone


def _files(op: str | None) -> Iterator[Path]:
    root = folder(op)
    return iter(sorted(root.glob("*.json" if op is not None else "*/*.json")))


def _load(path: Path) -> Winner | None:
    """The winner in a file, remembered until the file changes."""
    try:
        stat = path.stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
        if path in _read and _read[path][0] == stamp:
            return _read[path][1]
        winner = Winner.from_json(json.loads(path.read_text(encoding="utf-8")))
        if winner.key.op != path.parent.name:
            raise ValueError(f"a winner of {winner.key.op} in the folder of {path.parent.name}")
    except FileNotFoundError:  # another process cleared it
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        warn_once(f"{path} is no winner that can be used ({error}); it is ignored", str(path))
        return None
    _read[path] = (stamp, winner)
    return winner


def warn_once(text: str, about: str) -> None:
    """One warning a process about each file or folder."""
    if about not in _warned:
        _warned.add(about)
        warnings.warn(text, CacheWarning, stacklevel=2)
