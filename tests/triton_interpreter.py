"""Runs generated Triton text in Triton's interpreter. The process must have started with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from k3dsl.backends.base import Source
from k3dsl.backends.triton.build import import_function, write_module
from k3dsl.backends.triton.lower import lower
from k3dsl.backends.triton.schedule import TritonSchedule
from k3dsl.ir.graph import Kernel
from k3dsl.targets import get_target


def interpret(
    kernel: Kernel,
    tensors: Mapping[str, torch.Tensor],
    dims: Mapping[str, int] | None = None,
    scalars: Mapping[str, float] | None = None,
    schedule: TritonSchedule | None = None,
) -> Source:
    """Lowers a kernel without inline PTX and runs every program of its grid on the CPU; returns the text that ran."""
    assert os.environ.get("TRITON_INTERPRET") == "1"
    source = lower(kernel, schedule or TritonSchedule(), get_target("sm_90a"), portable=True)
    function = import_function(source, write_module(source))
    values = {**(dims or {}), **(scalars or {})}
    arguments: list[Any] = [tensors[a.source] if a.kind == "pointer" else values[a.name] for a in source.args]
    grid = tuple(extent.evaluate(dims or {}) for extent in kernel.grid)
    if all(grid):
        function[(*grid, 1, 1)[:3]](*arguments)
    return source
