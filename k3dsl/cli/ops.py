"""`k3dsl ops`: which operators there are, and what can be set about each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3dsl.cli.common import Json
from k3dsl.cli.output import print_json, print_table

if TYPE_CHECKING:
    from k3dsl.runtime.op import Op

NAME = "ops"


def ops_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show this op's dims, knobs and options.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the operators, or one with its dims, knobs and options."""
    from k3dsl.ops.registry import get_op, op_names

    if name is None:
        found = [get_op(n) for n in op_names()]
        if as_json:
            print_json([{"name": op.name, "doc": op.doc, "launches": list(op.launches)} for op in found])
            return
        print_table(
            None, ("op", "kernels", "what it computes"), [[op.name, ", ".join(op.launches), op.doc] for op in found]
        )
        print("`k3dsl ops NAME` lists the dims, knobs and options of one.")
        return
    op = get_op(name)
    if as_json:
        print_json(describe(op))
        return
    print(f"{op.name}: {op.doc}")
    print(f"kernels, in order: {', '.join(op.launches)}\n")
    print_table(
        "dims (--dims NAME=NUMBER)",
        ("dim", ">default", "compiled in", "what"),
        [[d.name, d.default, "yes" if d.static else "with --static", d.doc] for d in op.dims],
    )
    for title, entries in (("knobs", op.knobs), ("options", op.options)):
        print_table(
            f"{title} (--set NAME=VALUE)",
            (title[:-1], "default", "choices", "what"),
            [[e.name, _text(e.default), ", ".join(map(_text, e.choices)) or "any number", e.doc] for e in entries],
        )
    labels = " or ".join(f"{label}.num_warps" for label in op.launches)
    print(f"Schedule fields are set by kernel: --set {labels}; also stages.LABEL, maxnreg, fp_fusion, descriptors.")
    print(
        "With --backend tilelang: threads, stages.LABEL, warp_specialize, policy.DOT and the like; one kernel alone goes"
    )
    print(f"through another backend with --set {op.launches[0]}.backend=tilelang.")


def describe(op: Op) -> dict[str, Any]:
    """The op as JSON."""
    return {
        "name": op.name,
        "doc": op.doc,
        "launches": list(op.launches),
        "dims": [{"name": d.name, "default": d.default, "static": d.static, "doc": d.doc} for d in op.dims],
        **{
            title: [
                {"name": e.name, "default": _plain(e.default), "choices": list(map(_plain, e.choices)), "doc": e.doc}
                for e in entries
            ]
            for title, entries in (("knobs", op.knobs), ("options", op.options))
        },
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _text(value: Any) -> str:
    return (
        {True: "true", False: "false", None: "none"}[value] if value is None or isinstance(value, bool) else str(value)
    )
