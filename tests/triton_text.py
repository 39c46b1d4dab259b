"""Generated Triton of small kernels, for tests of its text."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from k3dsl.backends.base import Source
from k3dsl.backends.triton.lower import lower
from k3dsl.backends.triton.schedule import TritonSchedule
from k3dsl.language import Kernel
from k3dsl.passes.simplify import simplify
from k3dsl.targets import get_target


def printed(
    k: Kernel,
    dims: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    *,
    target: str = "sm_90a",
    portable: bool = False,
    **schedule: Any,
) -> Source:
    ir = simplify(k.trace(dims or {}, {}, tensors))
    source = lower(ir, TritonSchedule(**schedule), get_target(target), portable=portable)
    ast.parse(source.text)
    return source


def lines(source: Source) -> list[str]:
    """The function's body without origin comments."""
    body = source.text[source.text.index(f"def {source.name}(") :].splitlines()
    return [line for line in body if not line.strip().startswith("#")]


def line_with(source: Source, what: str) -> str:
    """The one line that has the text."""
    (found,) = (line.strip() for line in lines(source) if what in line)
    return found
