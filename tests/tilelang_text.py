"""Generated TileLang of small kernels, and its CUDA source, for tests of either."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from k3dsl.backends.base import Source
from k3dsl.backends.common import write_module
from k3dsl.backends.tilelang import build
from k3dsl.backends.tilelang.lower import lower
from k3dsl.backends.tilelang.placement import Placement
from k3dsl.backends.tilelang.prepare import prepared
from k3dsl.backends.tilelang.schedule import TileLangSchedule
from k3dsl.ir import graph
from k3dsl.ir.graph import Value, walk
from k3dsl.language import Kernel
from k3dsl.passes.simplify import simplify
from k3dsl.targets import get_target


def traced(k: Kernel, dims: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None) -> graph.Kernel:
    return simplify(k.trace(dims or {}, {}, tensors))


def printed(
    k: Kernel,
    dims: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    *,
    target: str = "sm_90a",
    **schedule: Any,
) -> Source:
    source = lower(traced(k, dims, tensors), TileLangSchedule(**schedule), get_target(target))
    ast.parse(source.text)
    return source


def cuda(source: Source, target: str = "sm_90a") -> str:
    """TileLang's CUDA source, with its check for data races on. Raises BuildError."""
    configs = {**build.PASS_CONFIGS, **source.options["pass_configs"]}
    return build.lower(source, target, write_module(source), configs).cuda


def placed(
    k: Kernel, dims: Mapping[str, Any] | None = None, *, target: str = "sm_90a", **schedule: Any
) -> tuple[Placement, dict[str, list[Value]]]:
    """The placement, and the tiles of the kernel by opcode of what makes them ('carry' for those of a loop's body)."""
    kernel = prepared(traced(k, dims))
    tiles: dict[str, list[Value]] = {}
    for op in walk(kernel.body):
        for v in op.results:
            if v.shape:
                tiles.setdefault(op.opcode, []).append(v)
        if op.opcode == "loop":
            tiles.setdefault("carry", []).extend(v for v in op.regions[0].args if v.shape)
    return Placement(kernel, TileLangSchedule(**schedule), get_target(target)), tiles
