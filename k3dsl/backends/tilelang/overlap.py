"""The order of a pipelined step's statements in which wgmma products run beside each other and beside what does not need them.

Products are issued as early as their operands are there, other statements fill the time, and a wait stands before the first
statement that touches what a product in flight reads or writes. The arithmetic is the same, so results are bit for bit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z_]\w*")
_PRODUCT = re.compile(r"\s*tl\.gemm\((\w+), (\w+), (\w+)")
_ASSIGNED = re.compile(r"\s*(\w+)(?:\[.*?\])? = ")
_CALL = re.compile(r"\s*tl\.(copy|fill|reduce_\w+)\((.*)\)\s*$")
_KEYWORD = re.compile(r"\w+=")
_LOOP = re.compile(r"\s*for [\w, ]+ in tl\.(?:Parallel|serial)\(")


@dataclass
class Statement:
    """One statement of the step with all below it. product: (A, B, accumulator) where it is one. writes: None where that is
    not known, so that nothing may change places with it."""

    lines: list[str]
    comment: str | None
    names: set[str]
    writes: set[str] | None
    product: tuple[str, str, str] | None = None
    after: set[int] = field(default_factory=set)

    def conflicts(self, other: Statement) -> bool:
        """True when the two may not change places."""
        if self.writes is None or other.writes is None:
            return True
        return bool(self.writes & other.names or other.writes & self.names)


def overlapped(lines: list[str]) -> list[str]:
    """A step's lines in that order, with asynchronous products; unchanged where there are fewer than two, or one is below
    another statement."""
    statements = _parsed(lines)
    nested = any("tl.gemm(" in line for s in statements if s.product is None for line in s.lines)
    if nested or sum(s.product is not None for s in statements) < 2:
        return lines
    for k, s in enumerate(statements):
        s.after = {j for j in range(k) if s.conflicts(statements[j])}
    feeds = _feeding(statements)
    margin = " " * (len(lines[0]) - len(lines[0].lstrip()))
    out: list[str] = []
    flying: list[Statement] = []
    left, done, comment = list(range(len(statements))), set[int](), None

    def wait(count: int) -> None:
        if count < len(flying):
            out.append(f"{margin}tl.wait_wgmma({count})")
            del flying[: len(flying) - count]

    while left:
        ready = [k for k in left if statements[k].after <= done]
        # first what needs no wait, products before all, what leads to a product next; else what leaves most in flight
        k = min(
            ready,
            key=lambda k: (
                -_may_fly(statements[k], flying) if _may_fly(statements[k], flying) < len(flying) else -len(flying),
                statements[k].product is None,
                k not in feeds,
                k,
            ),
        )
        s = statements[k]
        wait(_may_fly(s, flying))
        if s.comment is not None and s.comment != comment:
            out.append(margin + s.comment)
            comment = s.comment
        out += [line.replace("tl.gemm(", "tl.wgmma_gemm(", 1) for line in s.lines] if s.product else s.lines
        if s.product:
            flying.append(s)
        left.remove(k)
        done.add(k)
    wait(0)
    return out


def _may_fly(s: Statement, flying: list[Statement]) -> int:
    """How many of the products in flight may still be so when the statement starts: the last ones, for they end in order."""
    for k, other in reversed(list(enumerate(flying))):
        assert other.product is not None
        same = s.product is not None and s.product[2] == other.product[2]  # one accumulator, added to in order
        touched = {other.product[2]} if s.product is not None else set(other.product)
        if (s.names & touched and not same) or (same and any("clear_accum=True" in line for line in s.lines)):
            return len(flying) - 1 - k
    return len(flying)


def _feeding(statements: list[Statement]) -> set[int]:
    """The statements that some product needs, directly or through others."""
    needed: set[int] = set()
    stack = [k for k, s in enumerate(statements) if s.product is not None]
    while stack:
        for k in statements[stack.pop()].after - needed:
            needed.add(k)
            stack.append(k)
    return needed


def _parsed(lines: list[str]) -> list[Statement]:
    depth = len(lines[0]) - len(lines[0].lstrip())
    found: list[Statement] = []
    comment: str | None = None
    for line in lines:
        text = line.strip()
        if text.startswith("#"):
            comment = text
            continue
        if len(line) - len(line.lstrip()) > depth:
            found[-1].lines.append(line)
        else:
            found.append(Statement([line], comment, set(), None))
    for s in found:
        s.names = {name for line in s.lines for name in _NAME.findall(line)} - {"tl"}
        s.writes = _written(s.lines)
        match = _PRODUCT.match(s.lines[0])
        if match and len(s.lines) == 1:
            s.product = (match[1], match[2], match[3])
            s.names, s.writes = set(s.product), {match[3]}
    return found


def _written(lines: list[str]) -> set[str] | None:
    """What the statement's lines assign to, or None where one is of another kind."""
    out: set[str] = set()
    for line in lines:
        if _LOOP.match(line) or line.strip().startswith("if ") or _PRODUCT.match(line):
            continue
        name = _target(line)
        if name is None:
            return None
        out.add(name)
    return out


def _target(line: str) -> str | None:
    """The buffer or variable that a line writes: what it assigns to, or the right argument of a call that fills one."""
    call = _CALL.match(line)
    if call is None:
        assigned = _ASSIGNED.match(line)
        return assigned[1] if assigned else None
    places = [a for a in _arguments(call[2]) if not _KEYWORD.match(a)]
    place = 0 if call[1] == "fill" else 1
    name = _NAME.match(places[place]) if place < len(places) else None
    return name[0] if name else None


def _arguments(text: str) -> list[str]:
    """The arguments of a call, of which some have commas in brackets."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [argument.strip() for argument in found]
