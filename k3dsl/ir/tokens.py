"""Lines and tokens of printed IR, for the parser."""

from __future__ import annotations

import re
from dataclasses import dataclass

from k3dsl.errors import ParseError

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<value>%[A-Za-z_0-9]+)
    | (?P<number>-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|-inf)
    | (?P<word>[A-Za-z_]\w*)
    | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<mark>\.\.|[=,:()\[\]])
    )""",
    re.VERBOSE,
)
_COMMENT = re.compile(r'^((?:[^"#]|"(?:[^"\\]|\\.)*")*?)\s*(?:#\s*(.*))?$')


@dataclass(frozen=True)
class Line:
    """One line that is not blank: its number from 1, its indentation, and the location its comment states."""

    number: int
    indent: int
    text: str
    loc: str | None


def split_lines(text: str) -> list[Line]:
    """The lines of a text without blank ones; `# file:line` at the end of one is its location."""
    lines: list[Line] = []
    for number, raw in enumerate(text.splitlines(), 1):
        match = _COMMENT.match(raw)
        body, loc = (match.group(1), match.group(2)) if match else (raw, None)
        if body.strip():
            lines.append(Line(number, len(body) - len(body.lstrip()), body.strip(), loc or None))
    return lines


def unexpected(line: Line, expected: str, found: str | None) -> ParseError:
    """The error for a line that reads otherwise than expected."""
    return ParseError(f"expected {expected}, found {found or 'the end of the line'}", where=f"line {line.number}")


class Cursor:
    """The tokens of one line."""

    def __init__(self, line: Line, text: str) -> None:
        self.line = line
        self.tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if not match or match.lastgroup is None:
                if not text[at:].strip():
                    break
                raise unexpected(line, "a value, name, number or mark", text[at:].strip())
            self.tokens.append((match.lastgroup, match.group(match.lastgroup)))
            at = match.end()
        self.at = 0

    @property
    def kind(self) -> str | None:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else None

    @property
    def text(self) -> str | None:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else None

    def take(self, kind: str, expected: str) -> str:
        if self.kind != kind:
            raise unexpected(self.line, expected, self.text)
        self.at += 1
        return self.tokens[self.at - 1][1]

    def accept(self, text: str) -> bool:
        if self.text == text and self.kind in ("mark", "word"):
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise unexpected(self.line, repr(text), self.text)

    def finish(self) -> None:
        if self.text is not None:
            raise unexpected(self.line, "the end of the line", self.text)
