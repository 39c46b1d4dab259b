"""The code in README.md and k3dsl/LANGUAGE.md runs, and prints what the text block below it shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str, int]]:
    """(language, text, line number of its first line) of every fenced block."""
    content = page.read_text(encoding="utf-8")
    return [(m[1], m[2], content.count("\n", 0, m.start(2))) for m in BLOCK.finditer(content)]


@pytest.mark.parametrize("name", ["README.md", "k3dsl/LANGUAGE.md"])
def test_the_python_of_a_page_runs_from_top_to_bottom(name):
    namespace: dict = {"__name__": "guide"}
    printed = ""
    for language, text, line in blocks(ROOT / name):
        if language == "python":
            assert printed == "", f"{name}: what the block before line {line} printed is not shown below it"
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * line + text, name, "exec"), namespace)
            printed = out.getvalue()
        elif language == "text":
            assert text == printed
            printed = ""
    assert printed == ""
