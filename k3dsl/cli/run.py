"""`k3dsl run`: an op's results against its fp64 reference."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from k3dsl.cli.common import (
    BackendName,
    Dims,
    Json,
    OpName,
    OutputFile,
    Seed,
    Settings,
    device_for,
    parse_dims,
    parse_settings,
)
from k3dsl.cli.output import print_json, print_table, write_json

NAME = "run"


def run_command(
    op: OpName,
    dims: Dims = None,
    settings: Settings = None,
    backend: BackendName = None,
    cases: Annotated[
        str, typer.Option("--cases", help="small: for a CPU, under a minute; whole: for a GPU.")
    ] = "small",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Calls that must agree in every bit.")] = 2,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes; compiling runs on one core each.")] = 1,
    seed: Seed = 0,
    output: OutputFile = None,
    as_json: Json = False,
) -> None:
    """Check an op against its fp64 reference: the op's own cases, or with --dims or an option set, one case for those.

    Outputs are filled with NaN before each call where torch allocates them. Exit status 1 when a case fails.
    Ctrl-C ends it early, with what is known by then.
    """
    from k3dsl.ops.registry import get_op
    from k3dsl.runtime.dispatch import choose_backend, using_backend
    from k3dsl.runtime.judge import by_family, cases_of, judge, judge_in_processes
    from k3dsl.runtime.op import check_names

    chosen = get_op(op)
    check_names("set of cases", [cases], ["small", "whole"])
    knobs, options, schedules = chosen.split_settings(parse_settings(settings))
    chosen.resolve_knobs(knobs)
    given = parse_dims(dims)
    chosen.resolve_dims(given)
    chosen.resolve_options(options)
    device = device_for(backend)
    found = cases_of(chosen, cases, given, options)
    how: dict[str, Any] = {
        "device": device,
        "knobs": knobs,
        "schedules": schedules,
        "repeats": repeats,
        "seed": seed,
        "backend": backend,
    }
    own = jobs > 1 and not given and not options
    judged = judge_in_processes(chosen, cases, jobs, **how) if own else judge(chosen, found, **how)
    verdicts: list[Any] = []
    try:
        for verdict in _progress(judged, len(found)):
            verdicts.append(verdict)
    except KeyboardInterrupt:  # what is known by then is told
        print(f"interrupted after {len(verdicts)} of {len(found)} cases", file=sys.stderr)
    failed = [v for v in verdicts if not v.passed]
    with using_backend(backend):
        used = choose_backend(device)
    where = "cpu, torch backend" if device.type == "cpu" else f"{_gpu_name(device)}, {used} backend"
    report = {
        "op": chosen.name,
        "device": where,
        "cases": [v.to_json() for v in verdicts],
        "passed": len(verdicts) - len(failed),
        "failed": len(failed),
        "not_run": len(found) - len(verdicts),
    }
    if output is not None:
        write_json(output, report)
    if as_json:
        print_json(report)
    else:
        rows: list[list[Any]] = []
        for result in by_family(verdicts):
            head: list[Any] = [result.family, result.cases, result.failed]
            for name, (error, limit) in result.worst.items():
                rows.append([*head, name, f"{error:.1e}", f"{limit:.1e}", "pass" if error <= limit else "FAIL"])
                head = ["", "", ""]
            if not result.worst:
                rows.append([*head, None, None, None, "FAIL"])
        columns = ("family", ">cases", ">failed", "output", ">worst error", ">limit", "")
        print_table(f"{chosen.name} against fp64 on {where}", columns, rows)
        for v in failed:
            print(f"FAILED {v.case}: {v.problem}")
        print(f"{report['passed']} of {len(verdicts)} cases pass; {repeats} calls each, compared bit for bit")
    if failed:
        raise typer.Exit(1)
    if report["not_run"]:
        raise typer.Exit(130)


def _progress(verdicts: Iterator[Any], total: int) -> Iterator[Any]:
    """Counts on stderr while a person watches."""
    if not sys.stderr.isatty():
        yield from verdicts
        return
    for n, verdict in enumerate(verdicts, 1):
        print(f"\r{n} of {total} ", end="", file=sys.stderr, flush=True)
        yield verdict
    print("\r" + " " * 20 + "\r", end="", file=sys.stderr, flush=True)


def _gpu_name(device: Any) -> str:
    import torch

    return f"{torch.cuda.get_device_name(device)}"
