"""What commands print: the one table printer, JSON, and numbers as people read them."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from k3dsl.backends.base import MATRIX_FAMILIES
from k3dsl.backends.common import write_whole
from k3dsl.errors import ArgumentError

WIDTH = 160  # of a pipe or a file, which has no width of its own


def print_table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table on stdout. A column named with a leading '>' is aligned to the right; None shows as '-'."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    if title:
        console.print(Text(title, style="bold"))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
    console.print(table)


def print_json(data: Any) -> None:
    """JSON, alone on stdout."""
    print(json.dumps(data, indent=2, default=str))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Makes the folder. Raises ArgumentError where it, or what is done within, cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error.strerror}", fix="choose another file") from None


def writable(path: Path | None) -> Path | None:
    """The path, once it is known that a file can be written there: hours of work must not end in a place that has none. Raises
    ArgumentError."""
    if path is not None:
        if path.is_dir():
            raise ArgumentError(f"{path} is a folder", fix="name a file in it")
        with _writing(path), tempfile.TemporaryFile(dir=path.parent):
            pass
    return path


def write_json(path: Path, data: Any) -> None:
    """JSON to a file. Raises ArgumentError where the file cannot be written."""
    with _writing(path):
        write_whole(path, json.dumps(data, indent=1, default=str) + "\n")


def milliseconds(value: float | None) -> str:
    """Three digits that count: 2.61 ms, 0.0123 ms."""
    return "-" if value is None else f"{value:.3g} ms" if value < 1000 else f"{value:.0f} ms"


def scaled(value: float, billion: str = "G") -> str:
    """Four digits that count and the power of 1000 as K, M, `billion` or T; ends in a space without one."""
    for unit in ("", "K", "M", billion):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} T"


def megabytes(value: int) -> str:
    """1 MB is 10^6 bytes."""
    return f"{value / 1e6:.4g} MB"


def families(instructions: dict[str, int]) -> str:
    """Matrix instruction families with their counts: wgmma 22, mma.sync 80."""
    return ", ".join(f"{name} {n}" for name, n in instructions.items() if name in MATRIX_FAMILIES) or "none"


def resource_rows(launches: Iterable[dict[str, Any]]) -> list[list[Any]]:
    """Rows of RESOURCE_COLUMNS from a bundle's summary."""
    return [
        [
            launch["label"],
            launch["shared_bytes"],
            launch["registers"],
            launch["spill_bytes"],
            launch["warps"],
            families(launch["instructions"]),
        ]
        for launch in launches
    ]


RESOURCE_COLUMNS = (
    "kernel",
    ">shared memory (bytes)",
    ">registers",
    ">spilled (bytes)",
    ">warps",
    "matrix instructions",
)
