"""`k3dsl compile`: builds an op for a GPU, which need not be here, and writes a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from k3dsl.cli.common import (
    Dims,
    GeneratingName,
    Json,
    OpName,
    Settings,
    Static,
    TargetName,
    generating_backend,
    parse_dims,
    parse_settings,
    target_named,
)
from k3dsl.cli.output import RESOURCE_COLUMNS, print_json, print_table, resource_rows

NAME = "compile"


def compile_command(
    op: OpName,
    target: TargetName = None,
    backend: GeneratingName = "triton",
    dims: Dims = None,
    settings: Settings = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The bundle's folder. Default: ./OP-TARGET.")
    ] = None,
    static: Static = False,
    as_json: Json = False,
) -> None:
    """Compile an op for a target and write a bundle, which `k3dsl.load` runs without any compiler."""
    from k3dsl.ops.registry import get_op
    from k3dsl.runtime.bundle import save

    chosen = get_op(op)
    where = target_named(target)
    point = chosen.point(parse_dims(dims), parse_settings(settings), not static, where)
    plan = point.plan(generating_backend(backend))
    folder = output or Path(f"{chosen.name}-{where.name}")
    summary = save(plan, where, folder)
    if as_json:
        print_json(summary)
        return
    print_table(f"{chosen.name} for {where.name}", RESOURCE_COLUMNS, resource_rows(summary["launches"]))
    for launch in summary["launches"]:
        if launch["note"]:
            print(f"note: {launch['label']}: {launch['note']}")
        if launch["needs"]:
            print(f"note: {launch['label']}: to run, the bundle needs {launch['needs']}")
    print(f"wrote {folder}; on such a GPU: k3dsl.load({str(folder)!r})(**tensors)")
