"""`k3dsl report`: what a sweep found, as a page with plots; or which sweeps there are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3dsl.cli.common import Json
from k3dsl.cli.output import milliseconds, print_json, print_table
from k3dsl.errors import ArgumentError

if TYPE_CHECKING:
    from k3dsl.autotune.report import Study

NAME = "report"


def report_command(
    study: Annotated[
        str | None, typer.Argument(metavar="[STUDY]", help="A journal, its folder, or an op: its latest sweep.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Where the page and its plots go.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the report of a sweep, also of one that runs or was stopped; without STUDY list the sweeps of this machine."""
    from k3dsl.autotune import report
    from k3dsl.autotune.study import root

    if study is None:
        known = report.studies()
        if as_json:
            print_json([{"folder": str(s.folder), "about": dict(s.about), "trials": len(s.trials)} for s in known])
            return
        rows = [
            [
                s.about["op"],
                _dims(s),
                s.about["target"],
                " ".join(s.about["backends"]),
                len(s.trials),
                _best(s),
                s.folder.name,
            ]
            for s in known
        ]
        columns = ("op", "dims", "target", "backends", ">trials", ">best", "study")
        print_table(f"sweeps in {root()}, the latest first", columns, rows)
        return
    path = Path(study) if Path(study).exists() else root() / study
    if not path.exists():
        named = [s for s in report.studies() if s.about["op"] == study]
        if not named:
            raise ArgumentError(
                f"there is no journal {study!r}, and no sweep of such an op", fix="`k3dsl report` lists the sweeps"
            )
        path = named[0].folder
    if output is None:
        raise ArgumentError("the report needs a folder to go to", fix="give -o FOLDER")
    page = report.write_report(path, output)
    if as_json:
        print_json({"report": str(page)})
    else:
        print(f"report: {page}")


def _dims(study: Study) -> str:
    return " ".join(f"{name}={value}" for name, value in study.about["dims"].items())


def _best(study: Study) -> str:
    best = study.best
    return milliseconds(None if best is None else best.outcome.time_ms)
