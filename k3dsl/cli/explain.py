"""`k3dsl explain`: every reason why an op with these settings is refused for a target, or that it is fine."""

from __future__ import annotations

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

NAME = "explain"


def explain_command(
    op: OpName,
    dims: Dims = None,
    settings: Settings = None,
    target: TargetName = None,
    backend: GeneratingName = "triton",
    static: Static = False,
    as_json: Json = False,
) -> None:
    """Say why these settings are refused, or that they are fine. Exit status 1 when they are refused."""
    from k3dsl.ops.registry import get_op
    from k3dsl.runtime.bundle_writer import plain, summarise
    from k3dsl.runtime.explain import explain, to_json

    chosen = get_op(op)
    where = target_named(target, "sm_90a")
    point = chosen.point(parse_dims(dims), parse_settings(settings), not static, where)
    found = explain(point, generating_backend(backend), where)
    launches = summarise(found.plan, where, list(found.built))["launches"] if found.plan is not None else []
    if as_json:
        knobs = {name: plain(value) for name, value in point.knobs.items()}
        reasons = to_json(found)
        print_json(
            {
                "op": op,
                "target": where.name,
                "fine": not reasons,
                "reasons": reasons,
                "knobs": knobs,
                "launches": launches,
            }
        )
    else:
        if launches:
            print_table(f"{chosen.name} for {where.name}: what builds", RESOURCE_COLUMNS, resource_rows(launches))
        for r in found.refusals:
            about = f"{r.launch}: " if r.launch and not r.reason.message.startswith(f"{r.launch}: ") else ""
            print(f"refused ({r.reason.code}): {about}{r.reason}")
            if r.fix:
                print(f"  fix: {r.fix}")
        for launch in launches:
            if launch["note"]:
                print(f"note: {launch['label']}: {launch['note']}")
        if not found.refusals:
            print("fine: nothing refuses these settings")
    if found.refusals:
        raise typer.Exit(1)
