"""The journal of a sweep: a file of JSON lines, one a finished trial, from which a killed sweep goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3dsl.autotune.trial import Outcome
from k3dsl.errors import ArgumentError

try:
    import fcntl
except ImportError:  # no such locks here: two sweeps of one study at once are the user's to avoid
    fcntl = None  # type: ignore[assignment]

SCHEMA = 1


@dataclass(frozen=True)
class Record:
    """One finished step of a sweep.

    stage: 'trial', 'gate' (a finalist at level full) or 'time' (a finalist timed again). round: of the last kind.
    lane: what proposed the point. key: the point as `--set` text. same_as: the number of the trial whose generated code
    was the same, so that this one was not run. at: seconds that the sweep had worked by then. by: the machine and device
    that ran it, where that is not the only one. shared: taken from a shared study, and run by somebody else.
    """

    stage: str
    number: int
    lane: str
    key: str
    settings: Mapping[str, Any]
    outcome: Outcome
    at: float
    round: int = 0
    same_as: int | None = None
    by: str | None = None
    shared: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "stage": self.stage,
            "number": self.number,
            "round": self.round,
            "lane": self.lane,
            "key": self.key,
            "settings": dict(self.settings),
            "same_as": self.same_as,
            "by": self.by,
            "shared": self.shared,
            "at": round(self.at, 3),
            "outcome": self.outcome.to_json(),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Record:
        """The record in parsed JSON. Raises ValueError, KeyError or TypeError for anything else."""
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}")
        fields = {name: value for name, value in data.items() if name not in ("schema", "outcome")}
        return Record(**fields, outcome=Outcome.from_json(data["outcome"]))


def read(path: Path) -> list[Record]:
    """The records in a file that a sweep may be writing meanwhile. Raises ArgumentError when it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}", fix="name the journal of a sweep") from None
    return parse(data)[0]


def parse(data: bytes) -> tuple[list[Record], int]:
    """The records in whole lines, and how many lines are none."""
    records: list[Record] = []
    skipped = 0
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        try:
            records.append(Record.from_json(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            skipped += 1
    return records, skipped


class Journal:
    """Appends records to a file that no other sweep appends to meanwhile. Use it as a context manager, or `close` it.

    fresh: what the file holds is set aside (with the suffix .old). records: of earlier runs, in order. skipped: lines
    that are no records; a last line that was cut off in the writing does not count.
    Raises ArgumentError when another sweep has the file, or it cannot be written.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path = path
        self.records: list[Record] = []
        self.skipped = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ArgumentError(f"{path} cannot be written: {error.strerror}", fix="set K3DSL_CACHE_DIR") from None
        try:
            if fcntl is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if fresh and path.stat().st_size:
                path.with_name(path.name + ".old").write_bytes(path.read_bytes())
                os.ftruncate(self._file, 0)
            self._read()
        except BlockingIOError:
            os.close(self._file)
            fix = "wait for it to end, or tune with another seed"
            raise ArgumentError(f"another sweep is writing {path}", fix=fix) from None
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def append(self, record: Record) -> None:
        """Writes the record whole: when this returns, it is on the disk."""
        line = json.dumps(record.to_json(), allow_nan=True) + "\n"
        data = line.encode()
        if os.write(self._file, data) != len(data):
            raise OSError(f"{self.path}: the disk is full")
        os.fsync(self._file)
        self.records.append(record)
        self._known[record.stage, record.key, record.round] = record

    def find(self, stage: str, key: str, round: int = 0) -> Record | None:
        """The record of this step, if it was finished."""
        return self._known.get((stage, key, round))

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):  # cut off in the writing: what follows must not grow onto it
            os.ftruncate(self._file, whole)
        self.records, self.skipped = parse(data)
        self._known = {(r.stage, r.key, r.round): r for r in self.records}
