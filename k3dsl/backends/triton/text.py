"""Small rules of Python expressions as text: when parentheses are needed, and extents that are powers of two."""

from __future__ import annotations


def pow2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def closed(text: str) -> bool:
    """True when one pair of parentheses encloses all of the text."""
    if not (text.startswith("(") and text.endswith(")")):
        return False
    depth = 0
    for k, ch in enumerate(text):
        depth += (ch == "(") - (ch == ")")
        if depth == 0 and k < len(text) - 1:
            return False
    return True


def atom(text: str) -> str:
    """The text so that any operator or attribute may follow."""
    return text if text.isidentifier() or text.isdigit() or closed(text) else f"({text})"


def opened(text: str) -> str:
    """The text without parentheses around all of it."""
    return text[1:-1] if closed(text) else text


def grouped(text: str) -> str:
    """A sum in parentheses, so that it may be a factor; other text as it is."""
    return f"({text})" if " + " in text and not closed(text) else text
