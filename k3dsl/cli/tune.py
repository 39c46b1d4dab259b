"""`k3dsl tune`: finds the settings that run an op fastest at given dims, and keeps them for later calls."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3dsl.cli.common import Json, OutputFile, Settings, parse_dims, parse_settings
from k3dsl.cli.output import milliseconds, print_json, print_table, write_json
from k3dsl.errors import ArgumentError

if TYPE_CHECKING:
    from k3dsl.autotune.tune import Result, State
    from k3dsl.targets import Target

NAME = "tune"


def tune_command(
    ops: Annotated[list[str], typer.Argument(metavar="OP...", help="The ops, as `k3dsl ops` lists them.")],
    target: Annotated[
        str, typer.Option("--target", help="cpu (the torch backend), this machine's GPU by name, or auto.")
    ] = "auto",
    dims: Annotated[
        list[str] | None,
        typer.Option("--dims", metavar="T=8192,H=96", help="Problem dims. Repeatable: one sweep for each."),
    ] = None,
    settings: Settings = None,
    budget: Annotated[float, typer.Option("--budget", min=1, help="Seconds for each op and dims.")] = 120.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the search.")] = 0,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend", help="torch, triton or tilelang. Repeatable: launches may differ. Default: all here."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Go on where the same sweep stopped, or begin anew.")
    ] = True,
    max_trials: Annotated[int | None, typer.Option("--trials", min=1, help="At most so many trials.")] = None,
    output: OutputFile = None,
    as_json: Json = False,
) -> None:
    """Tune ops: try legal settings, drop what is wrong or not reproducible, time the rest, keep the fastest.

    An option set with --set decides what is computed; a knob or schedule field set with it is not searched. Exit status
    1 when nothing passed for one of the ops.
    """
    from k3dsl.autotune.tune import floor_of, tune
    from k3dsl.ops.registry import get_op

    chosen = [get_op(name) for name in ops]
    where = _target(target)
    backends = _backends(backend, where)
    device = "cpu" if where is None else "cuda:0"
    shapes = [parse_dims([text]) for text in dims] if dims else [{}]
    given = parse_settings(settings)
    plans = []
    for op in chosen:
        _, options, _ = op.split_settings(given)
        resolved = op.resolve_options(options)
        fixed = {name: value for name, value in given.items() if name not in options}
        for shape in shapes:
            all_dims = op.resolve_dims({**(op.cpu_dims if where is None else {}), **shape})
            sizes = {name: size for name, size in all_dims.items() if isinstance(size, int)}
            plans.append((op, sizes, resolved, fixed))
    rate, identity = _device_facts(device)
    reports: list[dict[str, Any]] = []
    for op, sizes, resolved, fixed in plans:
        floor = None if rate is None else floor_of(op, sizes, resolved, backends[0], rate)
        try:
            with _progress(op.name, budget, not as_json) as watch:
                result = tune(
                    op, sizes, resolved, target=where, backends=backends, budget_s=budget, seed=seed, resume=resume,
                    fixed=fixed, device=device, max_trials=max_trials, floor_ms=floor, watch=watch, identity=identity,
                )  # fmt: skip
        except KeyboardInterrupt:
            print("stopped; the same command goes on where this one was", file=sys.stderr)
            raise typer.Exit(130) from None
        report = result.to_json() | {"saved": _save(result, device)}
        reports.append(report)
        if not as_json:
            _show(result, report)
    if output is not None:
        write_json(output, reports)
    if as_json:
        print_json(reports)
    if any(report["winner"] is None for report in reports):
        raise typer.Exit(1)


def _target(name: str) -> Target | None:
    """None for the CPU. A GPU must be the one that is here: candidates are timed on it."""
    from k3dsl.targets import detect, get_target

    if name == "cpu":
        return None
    here = detect()
    if name == "auto":
        return here
    wanted = get_target(name)
    if here is None or here.name != wanted.name:
        found = "there is none that torch can use" if here is None else f"this machine has {here.name}"
        raise ArgumentError(f"tuning for {wanted.name} runs candidates on such a GPU, and {found}", fix="--target cpu")
    return wanted


def _backends(names: list[str] | None, target: Target | None) -> tuple[str, ...]:
    if names:
        return tuple(dict.fromkeys(names))
    if target is None:
        return ("torch",)
    return ("triton", "tilelang") if importlib.util.find_spec("tilelang") is not None else ("triton",)


def _device_facts(device: str) -> tuple[float | None, Mapping[str, Any]]:
    """The device's copy rate in 10^9 bytes/s (None on the CPU), and what tells it from others."""
    from k3dsl.autotune.key import describe_gpu
    from k3dsl.runtime.timing import copy_gbps

    return None if device == "cpu" else copy_gbps(device), {"gpu": describe_gpu(device)}


def _save(result: Result, device: str) -> str | None:
    """Keeps the winner where later calls look for it; returns the file."""
    from k3dsl.autotune.key import describe_gpu
    from k3dsl.autotune.store import put, winner_from

    candidate, outcome = result.winner, result.outcome
    if candidate is None or outcome is None:
        return None
    measure = {"timer": "eager", "cold_l2": device != "cpu"}
    winner = winner_from(candidate, outcome, describe_gpu(device), measure, result.repeats, result.roofline_share)
    return str(put(winner))


def _show(result: Result, report: Mapping[str, Any]) -> None:
    at = " ".join(f"{name}={value}" for name, value in result.dims.items())
    words = {"illegal": "illegal (not tried)", "over_resource": "too large (not tried)"}
    tried = {t.outcome.end.value for t in result.trials}
    rows = [[name if name in tried else words.get(name, name), count] for name, count in result.ends().items()]
    print_table(f"{result.op} {at} on {result.target}: {len(result.trials)} trials", ("end", ">trials"), rows)
    print(f"stopped: {result.stopped}; {result.seconds:.1f} s, {report['resumed']} trials from an earlier run")
    if report["same_code"]:
        print(f"{report['same_code']} trials gave code that another had given, and were not run")
    if lanes := result.lanes():
        print(lanes)
    for proposal, outcome in result.turned_away:
        print(f"turned away at the end ({outcome.end.value}): {proposal.key}: {outcome.detail}")
    if result.winner is None:
        print("nothing passed; the op's default stays")
        return
    share = result.roofline_share
    roofline = f", {share:.0%} of what memory traffic allows" if share is not None else ""
    default = result.default_ms
    times = f", {default / result.finalists[0].time_ms:.2f} x the default's speed" if default is not None else ""
    ties = sum(f.tied for f in result.finalists) - 1
    tie = f"; {ties} other finalists are as fast" if ties else ""
    print(f"winner: {milliseconds(result.finalists[0].time_ms)}{times}{roofline}{tie}")
    print(f"  {report['set']}")
    print(f"kept in {report['saved']}")


@contextmanager
def _progress(name: str, budget: float, wanted: bool) -> Iterator[Callable[[State], None] | None]:
    """A line on stderr while a person watches: trials by end, the best so far, the time left."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[line]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=budget, line="starting")

        def watch(state: State) -> None:
            ends: dict[str, int] = {}
            for trial in state.trials:
                ends[trial.outcome.end.value] = ends.get(trial.outcome.end.value, 0) + 1
            parts = [state.phase, ", ".join(f"{end} {count}" for end, count in ends.items())]
            if state.best_ms is not None:
                share = f" ({state.floor_ms / state.best_ms:.0%} of roofline)" if state.floor_ms is not None else ""
                parts.append(f"best {milliseconds(state.best_ms)}{share}")
            parts.append(f"{max(0.0, budget - state.elapsed_s):.0f} s left")
            progress.update(task, completed=min(budget, state.elapsed_s), line=" | ".join(parts))

        yield watch
