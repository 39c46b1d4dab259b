"""`k3dsl cache`: the winners that this machine keeps, and why a lookup did not find one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3dsl.cli.common import Dims, Json, OpName, Settings, parse_dims, parse_settings
from k3dsl.cli.output import milliseconds, print_json, print_table
from k3dsl.errors import K3Error, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from k3dsl.autotune.store import Winner

NAME = "cache"
app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
MaybeOp = Annotated[str | None, typer.Argument(metavar="[OP]", help="Only this op's winners.")]
COLUMNS = ("op", "dims", "options", "GPU", "backend", "settings", ">time", ">share of roofline", "gate", ">repeats")


@app.callback()
def start(context: typer.Context) -> None:
    """Winners kept on this machine: list, clear, or why one was not found."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("list")
def list_command(op: MaybeOp = None, as_json: Json = False) -> None:
    """List the winners that can be read, best evidence first."""
    from k3dsl.autotune import store

    found = store.entries(_checked(op))
    if as_json:
        print_json([winner.to_json() for winner in found])
        return
    print_table(str(store.folder(op)), COLUMNS, rows_of(found))


@app.command("clear")
def clear_command(op: MaybeOp = None) -> None:
    """Delete the winners of an op, or all of them."""
    from k3dsl.autotune import store

    gone = store.clear(_checked(op))
    print(f"{gone} file{'' if gone == 1 else 's'} deleted from {store.folder(op)}")


@app.command("why")
def why_command(
    op: OpName,
    dims: Dims = None,
    settings: Settings = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="A product such as H200, or cpu. Default: what this machine has.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a lookup finds, and if it is not exact, how the nearest entry differs, field by field."""
    import torch

    from k3dsl.autotune import lookup
    from k3dsl.autotune.key import exact_dims
    from k3dsl.ops.registry import get_op
    from k3dsl.runtime.dispatch import Problem

    chosen = get_op(op)
    _, options, _ = chosen.split_settings(parse_settings(settings))
    point = chosen.point(parse_dims(dims), options)
    symbolic = chosen.point(parse_dims(dims), options, symbolic=True)
    where = _gpu(gpu)
    cpu = where["sm"] == "cpu"
    problem = Problem(
        chosen,
        point.options,
        chosen.asked(exact_dims(point)),
        symbolic.dims,
        {},
        torch.device("cpu" if cpu else "cuda"),
        "torch" if cpu else "auto",
    )
    known = lookup.winners(op)
    found = lookup.find(problem, where, known)
    step = found.step.name.lower()
    lines = [] if found.step is lookup.Step.EXACT else _why(problem, where, known)
    if as_json:
        winner = found.winner.to_json() if found.winner else None
        print_json({"step": step, "winner": winner, "refused": list(found.refused), "differs": lines})
        return
    print(f"{op} at {' '.join(f'{n}={v}' for n, v in problem.dims.items())} on {where['name']}: {step}")
    if found.winner is not None:
        print_table("it runs with", COLUMNS, rows_of([found.winner]))
    for reason in found.refused:
        print(f"passed over: {reason}")
    for line in lines:
        print(line)


def _why(problem: Any, gpu: dict[str, Any], known: list[Winner]) -> list[str]:
    """How the nearest entry differs from what this problem would be kept under, had the entry's settings won."""
    from k3dsl.autotune.key import explain_miss, key_of, options_of
    from k3dsl.autotune.trial import Candidate

    options = options_of(problem.op, problem.options)
    found: list[list[str]] = []
    for entry in known:
        wanted = Candidate(problem.op.name, problem.dims, options, entry.settings, entry.backend)
        try:
            key = key_of(wanted, gpu, entry.key.measure, entry.key.gate)
        except K3Error as error:
            found.append([f"settings: {error.message}"])
            continue
        found.append(explain_miss(key, [entry.key]))
    return min(found, key=len, default=[f"op: nothing is kept for {problem.op.name}"])


def _gpu(name: str | None) -> dict[str, Any]:
    import torch

    from k3dsl.autotune.key import CPU, describe_gpu
    from k3dsl.targets import all_devices, device_facts, get_target

    if name is None:
        return describe_gpu("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return dict(CPU)
    facts = device_facts(name)
    if facts is None:
        raise UnknownNameError(f"unknown GPU {name!r}", fix=f"one of cpu, {', '.join(d.name for d in all_devices())}")
    target = get_target(facts.target)
    return {
        "name": facts.reported[0],
        "sm": target.name,
        "sm_count": facts.sm_count,
        "shared_optin": target.shared_per_block,
    }


def rows_of(winners: Iterable[Winner]) -> list[list[Any]]:
    """Table rows of winners, for COLUMNS; of the options those that are not the op's default."""
    from k3dsl.autotune.trial import written

    return [
        [
            w.key.op,
            " ".join(f"{name}={value}" for name, value in w.key.dims.items()),
            " ".join(written(w.unusual)) or None,
            w.key.gpu["name"],
            " + ".join(w.backends),
            " ".join(written(w.settings)) or "the defaults",
            milliseconds(w.time_ms),
            None if w.roofline_share is None else f"{w.roofline_share:.0%}",
            w.key.gate,
            w.evidence["repeats"],
        ]
        for w in winners
    ]


def _checked(op: str | None) -> str | None:
    from k3dsl.ops.registry import get_op

    return None if op is None else get_op(op).name
