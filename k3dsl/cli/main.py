"""The command `k3dsl`: its commands, and how a user's mistake is reported."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from k3dsl import __version__
from k3dsl.cli import bench, cache, compile, demo, doctor, explain, generate, model, ops, pack, report, run, show, tune
from k3dsl.errors import ArgumentError, BundleError, CheckpointError, K3Error, PackError, UnknownNameError

UsageError: type[Any] = typer.BadParameter.__mro__[1]  # click's own, wherever this version of typer keeps it
USER_MISTAKES = (ArgumentError, BundleError, CheckpointError, PackError)


class K3Group(TyperGroup):
    """The command group: one line 'error: ...' (and 'fix: ...') for an error that k3dsl raises on purpose.

    Exit status 2 for a mistake in what the user wrote, 1 for everything else that fails.
    """

    traceback = False

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        extra["standalone_mode"] = False
        self.traceback = False
        shown, warnings.showwarning = warnings.showwarning, _warn
        try:
            status = super().main(args=args, prog_name=prog_name, **extra)
        except K3Error as error:
            if self.traceback:
                raise
            _report(error)
            status = 2 if isinstance(error, USER_MISTAKES) else 1
        except UsageError as error:
            print(f"error: {' '.join(error.format_message().split())}", file=sys.stderr)
            print("fix: `k3dsl --help` lists the commands, `k3dsl COMMAND --help` their options", file=sys.stderr)
            status = 2
        except (KeyboardInterrupt, typer.Abort):
            print("stopped", file=sys.stderr)
            status = 130
        finally:
            warnings.showwarning = shown
        sys.exit(status if isinstance(status, int) else 0)


def _warn(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """A warning as commands print it: without the line of k3dsl that gave it."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def _report(error: K3Error) -> None:
    """One line what, one line what to do; a name that does not exist fits on one with its near misses."""
    message = f"{error.where}: {error.message}" if error.where else error.message
    fix = error.fix
    if isinstance(error, UnknownNameError) and fix:
        message, fix = f"{message}; {fix}", None
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    if fix:
        print(f"fix: {' '.join(fix.split())}", file=sys.stderr)


app = typer.Typer(
    name="k3dsl",
    cls=K3Group,
    help="A tile language and kernel compiler for the operators of the Kimi K3 network.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="On an error, show where it came from.")] = False,
) -> None:
    """A tile language and kernel compiler for the operators of the Kimi K3 network."""
    if isinstance(context.command, K3Group):
        context.command.traceback = traceback
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


for command in (ops, show, compile, explain, run, bench, tune, report, generate, doctor, demo):
    app.command(command.NAME)(getattr(command, f"{command.NAME}_command"))
for group in (cache, pack, model):
    app.add_typer(group.app, name=group.NAME)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
