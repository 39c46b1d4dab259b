"""`k3dsl pack`: tuned settings as a file that ships: build, show, merge, diff, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from k3dsl.cli.cache import COLUMNS, rows_of
from k3dsl.cli.common import Json
from k3dsl.cli.output import print_json, print_table

NAME = "pack"
app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
File = Annotated[Path, typer.Argument(metavar="FILE", help="A pack.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="The pack to write.")]


@app.callback()
def start(context: typer.Context) -> None:
    """Tuned settings as a file that ships: build, show, merge, compare, verify."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("build")
def build_command(
    output: Output,
    op: Annotated[list[str] | None, typer.Option("--op", help="Only this op's winners. Repeatable.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="Only winners of this GPU, such as H200 or cpu.")] = None,
    gate: Annotated[str, typer.Option("--gate", help="Least gate level: quick, full or ship.")] = "quick",
) -> None:
    """Write the best winner of each problem that this machine keeps."""
    from k3dsl.autotune import pack, store
    from k3dsl.autotune.key import GATES
    from k3dsl.errors import ArgumentError
    from k3dsl.ops.registry import op_names
    from k3dsl.runtime.op import check_names
    from k3dsl.targets import all_devices, device_facts

    check_names("op", op or [], op_names())
    check_names("gate level", [gate], list(GATES))
    facts = device_facts(gpu) if gpu else None
    names = {gpu, *(facts.reported if facts else ())}
    kept = store.entries()
    if gpu is not None and facts is None:
        check_names("GPU", [gpu], sorted({*(d.name for d in all_devices()), *(w.key.gpu["name"] for w in kept), "cpu"}))
    chosen = [
        winner
        for winner in kept
        if (not op or winner.key.op in op)
        and (gpu is None or winner.key.gpu["name"] in names)
        and GATES.index(winner.key.gate) >= GATES.index(gate)
    ]
    if not chosen:
        raise ArgumentError(
            f"no winner in {store.folder()} fits", fix="`k3dsl cache list` shows them, `k3dsl tune` makes them"
        )
    built = pack.build(chosen)
    pack.save(built, output)
    print(f"{output}: {len(built.rows)} rows")


@app.command("show")
def show_command(file: File, as_json: Json = False) -> None:
    """Show the rows."""
    from k3dsl.autotune import pack

    found = pack.load(file)
    if as_json:
        print_json([row.to_json() for row in found.rows])
        return
    print_table(str(file), COLUMNS, rows_of(found.rows))


@app.command("merge")
def merge_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE FILE...", help="Packs.")], output: Output
) -> None:
    """Write one pack of several: for each problem the row with the better evidence. Says what became of each."""
    from k3dsl.autotune import pack

    merged, lines = pack.merge(pack.load(file) for file in files)
    pack.save(merged, output)
    for line in lines:
        print(line)
    print(f"{output}: {len(merged.rows)} rows")


@app.command("diff")
def diff_command(old: File, new: File) -> None:
    """Show what changed from one pack to the other. Exit status 1 when something did."""
    from k3dsl.autotune import pack

    lines = pack.diff(pack.load(old), pack.load(new))
    for line in lines:
        print(line)
    if lines:
        raise typer.Exit(1)
    print("no difference")


@app.command("verify")
def verify_command(
    file: File,
    here: Annotated[bool, typer.Option("--here", help="Also compare with the toolchain that is installed.")] = False,
    as_json: Json = False,
) -> None:
    """Check that every row is still legal for its target with the present code. Exit status 1 when one is not."""
    from k3dsl.autotune import pack

    found = pack.load(file)
    problems = pack.verify(found, here)
    if as_json:
        print_json({"rows": len(found.rows), "problems": problems})
    else:
        for line in problems:
            print(line)
        print(f"{len(found.rows)} rows, {len(problems)} problems")
    if problems:
        raise typer.Exit(1)
