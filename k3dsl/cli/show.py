"""`k3dsl show`: what an op becomes at each stage, from IR to machine code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from k3dsl.cli.common import Dims, OpName, Settings, Static, TargetName, parse_dims, parse_settings, target_named
from k3dsl.errors import ArgumentError

if TYPE_CHECKING:
    from k3dsl.runtime.plan import Launch
    from k3dsl.targets import Target

NAME = "show"
STAGES = ("ir", "triton", "ptx", "sass", "amdgcn")


def show_command(
    op: OpName,
    stage: Annotated[str, typer.Option("--stage", help=f"One of {', '.join(STAGES)}.")] = "ir",
    kernel: Annotated[str | None, typer.Option("--kernel", help="Only this kernel of the op.")] = None,
    dims: Dims = None,
    settings: Settings = None,
    target: TargetName = None,
    static: Static = False,
) -> None:
    """Print an op's kernels as IR, generated Triton, or assembly."""
    from k3dsl.ops.registry import get_op
    from k3dsl.runtime.op import check_names

    chosen = get_op(op)
    check_names("stage", [stage], list(STAGES))
    if kernel is not None:
        check_names("kernel", [kernel], list(chosen.launches), chosen.name)
    where = target_named(target, "sm_90a")
    plan = chosen.point(parse_dims(dims), parse_settings(settings), symbolic=not static).plan("triton")
    shown = [launch for launch in plan.launches if kernel in (None, launch.label)]
    if not shown:
        used = ", ".join(launch.label for launch in plan.launches)
        raise ArgumentError(f"{chosen.name} does not use kernel {kernel} with these settings", fix=f"it uses {used}")
    texts = [(launch.label, text_of(launch, stage, where)) for launch in shown]
    for number, (label, text) in enumerate(texts):
        if len(texts) > 1:
            print(("\n" if number else "") + f"# kernel {label} of {chosen.name}")
        print(text.rstrip("\n"))


def text_of(launch: Launch, stage: str, target: Target) -> str:
    """One kernel at a stage. Raises ArgumentError for a stage that the target does not have."""
    from k3dsl.ir.printer import print_kernel
    from k3dsl.runtime import executable

    if stage == "ir":
        return print_kernel(launch.kernel)
    if stage == "triton":
        return executable.lower(launch, target).text
    if (stage == "amdgcn") != (target.vendor == "amd"):
        own = "amdgcn" if target.vendor == "amd" else "ptx or sass"
        raise ArgumentError(f"code for {target} has no stage {stage}", fix=f"--stage {own}, or another --target")
    artifact = executable.build(launch, target)
    if stage != "sass":
        return artifact.assembly
    from k3dsl.backends.triton.inspect import disassemble

    return disassemble(artifact)
