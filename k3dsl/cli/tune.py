"""`k3dsl tune`: finds the settings that run an op fastest at given dims, and keeps them for later calls."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3dsl.cli.common import Json, OutputFile, Settings, parse_dims, parse_settings
from k3dsl.cli.output import milliseconds, print_json, print_table, writable, write_json
from k3dsl.errors import ArgumentError

if TYPE_CHECKING:
    from k3dsl.autotune import Problem, Result
    from k3dsl.autotune.result import State

NAME = "tune"


def tune_command(
    ops: Annotated[list[str], typer.Argument(metavar="OP...", help="The ops, as `k3dsl ops` lists them.")],
    target: Annotated[
        str, typer.Option("--target", help="cpu (the torch backend), this machine's GPU by name, or auto.")
    ] = "auto",
    dims: Annotated[
        list[str] | None,
        typer.Option(
            "--dims",
            metavar="[OP:]T=8192,H=96",
            help="Problem dims, of every op or of the one that is named. Repeatable: one sweep for each.",
        ),
    ] = None,
    settings: Settings = None,
    budget: Annotated[float, typer.Option("--budget", min=1, help="Seconds for each op and dims.")] = 120.0,
    total_budget: Annotated[
        float | None, typer.Option("--total-budget", min=1, help="Seconds for all together, shared out as they go.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the search.")] = 0,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend", help="torch, triton or tilelang. Repeatable: launches may differ. Default: all here."
        ),
    ] = None,
    devices: Annotated[
        str | None, typer.Option("--devices", metavar="0,1", help="GPUs that work on it. Default: all of one kind.")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes that run candidates on a CPU.")] = 1,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            metavar="URL",
            help="A study that several machines share: sqlite:///FILE, postgresql://..., or a file on a shared disk.",
        ),
    ] = None,
    stop_at: Annotated[
        float, typer.Option("--stop-at", min=0.01, max=1.0, help="Stop at this share of the roofline (on a GPU).")
    ] = 0.95,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Go on where the same sweep stopped, or begin anew.")
    ] = True,
    max_trials: Annotated[int | None, typer.Option("--trials", min=1, help="At most so many trials.")] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FOLDER", help="Also write a report of each sweep, with plots.")
    ] = None,
    output: OutputFile = None,
    as_json: Json = False,
) -> None:
    """Tune ops: try legal settings, drop what is wrong or not reproducible, time the rest, keep the fastest.

    An option set with --set decides what is computed; a knob or schedule field set with it is not searched. Ctrl-C ends a
    sweep with the best so far; the same command goes on from there. Exit status 1 when nothing passed for one of the ops.
    """
    from k3dsl.autotune.tuning import problem, target_here, tune_each

    if report is not None:
        from k3dsl.autotune.report import check_plots

        check_plots()
        writable(report / "report.md")
    small = target_here(target) is None
    given = parse_settings(settings)
    problems = [problem(name, shape, given, small=small) for name in ops for shape in _shapes(name, dims or [], ops)]
    found: list[dict[str, Any]] = []
    stopped = False
    with _ended_by_sigterm():
        for result in tune_each(
            problems, target=target, backends=backend, budget_s=budget, total_budget_s=total_budget,
            max_trials=max_trials, stop_share=stop_at, seed=seed, resume=resume, devices=_numbers(devices),
            workers=workers, storage=storage, watch=None if as_json or not sys.stderr.isatty() else _progress,
        ):  # fmt: skip
            facts = result.to_json()
            if report is not None and result.trials:
                facts["report"] = str(_report(result, report, alone=len(problems) == 1))
            found.append(facts)
            if not as_json:
                _show(result, facts)
            stopped = stopped or result.interrupted
    if output is not None:
        write_json(output, found)
    if as_json:
        print_json(found)
    if stopped:
        print("stopped; the same command goes on where this one was", file=sys.stderr)
        raise typer.Exit(130)
    if any(facts["winner"] is None for facts in found):
        raise typer.Exit(1)


def _shapes(op: str, texts: list[str], ops: list[str]) -> list[dict[str, int]]:
    """The dims of --dims that are meant for an op; those that name none are meant for each."""
    found = []
    for text in texts:
        name, separator, rest = text.rpartition(":")
        if separator and name not in ops:
            raise ArgumentError(f"--dims {text} names {name}, which is not tuned here", fix=f"one of {', '.join(ops)}")
        if not separator or name == op:
            found.append(parse_dims([rest]))
    return found or [{}]


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """While active, SIGTERM ends a sweep as Ctrl-C does: it is what a job scheduler sends first."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text.replace(" ", "")):
        raise ArgumentError(f"--devices takes numbers of GPUs, got {text!r}", fix="write --devices 0,1")
    return [int(n) for n in text.split(",")]


def _report(result: Result, folder: Path, alone: bool) -> Path:
    """The report of a sweep: in the folder, or with several sweeps in one of its own below it."""
    from k3dsl.autotune.report import write_report

    return write_report(result.journal, folder if alone else folder / result.journal.parent.name)


def _show(result: Result, facts: Mapping[str, Any]) -> None:
    at = " ".join(f"{name}={value}" for name, value in result.dims.items())
    words = {"illegal": "illegal (not tried)", "over_resource": "too large (not tried)"}
    tried = {t.outcome.end.value for t in result.trials}
    rows = [[name if name in tried else words.get(name, name), count] for name, count in result.ends().items()]
    print_table(f"{result.op} {at} on {result.target}: {len(result.trials)} trials", ("end", ">trials"), rows)
    print(f"stopped: {result.stopped}; {result.seconds:.1f} s, {facts['resumed']} trials from an earlier run")
    if len(facts["by"]) > 1:
        print(f"run by: {', '.join(f'{name} ({count})' for name, count in sorted(facts['by'].items()))}")
    if facts["same_code"]:
        same = facts["same_code"]
        many = "1 trial gave" if same == 1 else f"{same} trials gave"
        print(f"{many} code that another had given: not run again")
    if lanes := result.lanes():
        print(lanes)
    for proposal, outcome in result.turned_away:
        print(f"turned away at the end ({outcome.end.value}): {proposal.key}: {outcome.detail}")
    if result.interrupted:
        best = result.best_trial
        if best is not None:
            print(f"best so far, not judged as a finalist and not kept: {milliseconds(best.outcome.time_ms)}")
            print(f"  {best.proposal.key}")
    elif result.winner is None:
        print("nothing passed; the op's default stays")
        why = dict.fromkeys(f"{t.outcome.end.value}: {t.outcome.detail}" for t in result.trials if t.outcome.detail)
        for line in list(why)[:3]:
            print(f"  {line}")
    else:
        share = result.roofline_share
        roofline = f", {share:.0%} of the roofline" if share is not None else ""
        default = result.default_ms
        times = f", {default / result.finalists[0].time_ms:.2f} x the default's speed" if default is not None else ""
        ties = sum(f.tied for f in result.finalists) - 1
        tie = f"; {ties} other finalists are as fast" if ties else ""
        print(f"winner: {milliseconds(result.finalists[0].time_ms)}{times}{roofline}{tie}")
        print(f"  {facts['set']}")
        print(f"kept in {facts['saved']}")
    if "report" in facts:
        print(f"report: {facts['report']}")


@contextmanager
def _progress(problem: Problem, budget: float) -> Iterator[Callable[[State], None]]:
    """A line on stderr while a person watches: trials by end, the best so far, the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[line]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(problem.op.name, total=budget, line="starting")

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
