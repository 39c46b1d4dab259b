"""The buffers that a printed kernel declares, and the least shared memory that they need at one time."""

from __future__ import annotations

import re
from dataclasses import dataclass

from k3dsl.backends.tilelang.placement import Placement
from k3dsl.backends.tilelang.printer import Printer
from k3dsl.ir.graph import Kernel
from k3dsl.ir.types import DType, i32


@dataclass(frozen=True)
class Buffer:
    """One allocation. kind: 'fragment' or 'shared'. sizes: its extents, padding included. where: the user's file:line.
    copies: how many a pipeline keeps."""

    kind: str
    name: str
    sizes: tuple[int, ...]
    dtype: DType
    where: str | None
    copies: int = 1

    @property
    def elements(self) -> int:
        n = 1
        for size in self.sizes:
            n *= size
        return n

    @property
    def bytes(self) -> int:
        """All copies together."""
        return self.elements * self.dtype.bytes * self.copies


class Recorder(Printer):
    """Prints a kernel and remembers what it allocates."""

    def __init__(self, kernel: Kernel, placement: Placement) -> None:
        super().__init__(kernel, placement)
        self.made: list[Buffer] = []
        self.loc: str | None = kernel.source

    def line(self, text: str, loc: str | None = None) -> None:
        self.loc = loc or self.loc
        super().line(text, loc)

    def allocate(self, kind: str, wish: str, shape: tuple[int, ...], dtype: DType) -> str:
        name = super().allocate(kind, wish, shape, dtype)
        self.made.append(Buffer(kind, name, self.storage(shape), i32 if dtype.is_bool else dtype, self.loc))
        return name

    def buffers(self) -> list[Buffer]:
        """What was allocated so far, with the copies of the tiles that pipelines read ahead."""
        copies: dict[str, int] = {}
        for loop in self.placement.pipelines():
            for load in self.placement.hoisted[id(loop)]:
                name = self.shared.get(id(load.result))
                if name is not None:
                    copies[name] = self.placement.stages(loop)
        return [Buffer(b.kind, b.name, b.sizes, b.dtype, b.where, copies.get(b.name, 1)) for b in self.made]


def shared_in_use(text: str, buffers: list[Buffer]) -> list[Buffer]:
    """The shared tiles of the place in the text where they are the most bytes.

    TileLang lets tiles share memory that are not in use together. A tile is in use from the first to the last line that
    names it, to the end of each loop that it is carried through, and throughout the loop whose pipeline fills it.
    """
    lines = [line for line in text.splitlines() if " = tl.alloc_" not in line]
    loops = _loops(lines)
    tiles = [b for b in buffers if b.kind == "shared"]
    spans = {b.name: _span(b, lines, loops) for b in tiles}
    best: list[Buffer] = []
    for at in {span[0] for span in spans.values()}:
        live = [b for b in tiles if spans[b.name][0] <= at <= spans[b.name][1]]
        if sum(b.bytes for b in live) > sum(b.bytes for b in best):
            best = live
    return best


def _loops(lines: list[str]) -> list[tuple[int, int, bool]]:
    """(first line, last line, pipelined) of each serial loop."""
    found = []
    for k, line in enumerate(lines):
        if re.match(r"\s*for .* in tl\.(serial|Pipelined)\(", line):
            depth = len(line) - len(line.lstrip())
            end = k
            while end + 1 < len(lines) and (len(lines[end + 1]) - len(lines[end + 1].lstrip()) > depth):
                end += 1
            found.append((k, end, "tl.Pipelined(" in line))
    return found


def _span(buffer: Buffer, lines: list[str], loops: list[tuple[int, int, bool]]) -> tuple[int, int]:
    name = re.compile(rf"\b{re.escape(buffer.name)}\b")
    at = [k for k, line in enumerate(lines) if name.search(line)]
    if not at:
        return 0, -1
    first, last = at[0], at[-1]
    for start, end, ahead in loops:
        filled = ahead and buffer.copies > 1 and start <= first <= end
        if filled or (first < start <= last <= end):
            first, last = min(first, start), max(last, end)
    return first, last
