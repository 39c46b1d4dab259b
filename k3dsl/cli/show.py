"""`k3dsl show`: what an op becomes at each stage, from IR to machine code."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from k3dsl.cli.common import (
    Dims,
    OpName,
    Settings,
    Static,
    TargetName,
    generating_backend,
    parse_dims,
    parse_settings,
    target_named,
)
from k3dsl.errors import ArgumentError, BuildError, LegalityError, ResourceError

if TYPE_CHECKING:
    from k3dsl.runtime.plan import Launch
    from k3dsl.targets import Target

NAME = "show"
STAGES = ("ir", "triton", "tilelang", "placement", "cuda", "ptx", "sass", "amdgcn")
OWN = {"triton": "triton", "tilelang": "tilelang", "placement": "tilelang", "cuda": "tilelang"}  # whose stage it is


def show_command(
    op: OpName,
    stage: Annotated[str, typer.Option("--stage", help=f"One of {', '.join(STAGES)}.")] = "ir",
    kernel: Annotated[str | None, typer.Option("--kernel", help="Only this kernel of the op.")] = None,
    dims: Dims = None,
    settings: Settings = None,
    target: TargetName = None,
    backend: Annotated[
        str | None, typer.Option("--backend", help="triton or tilelang. Default: whose stage it is, else triton.")
    ] = None,
    static: Static = False,
) -> None:
    """Print an op's kernels as IR, generated Triton or TileLang, CUDA, or assembly."""
    from k3dsl.ops.registry import get_op
    from k3dsl.runtime.op import check_names

    chosen = get_op(op)
    check_names("stage", [stage], list(STAGES))
    if kernel is not None:
        check_names("kernel", [kernel], list(chosen.launches), chosen.name)
    where = target_named(target, "sm_90a")
    backend = generating_backend(backend or OWN.get(stage, "triton"))
    if OWN.get(stage, backend) != backend:
        raise ArgumentError(
            f"code of backend {backend} has no stage {stage}", fix=f"--backend {OWN[stage]}, or another --stage"
        )
    plan = chosen.point(parse_dims(dims), parse_settings(settings), not static, where).plan(backend)
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
    """One kernel at a stage, with the schedule that it is compiled with: the first that the target's shared memory holds. Text
    of one that none makes fit is that of its own schedule.

    Raises ArgumentError for a stage that the target does not have, ResourceError where machine code does not fit.
    """
    from k3dsl.ir.printer import print_kernel
    from k3dsl.runtime import executable

    if stage == "ir":
        return print_kernel(launch.kernel)
    if OWN.get(stage, launch.backend) != launch.backend:
        raise ArgumentError(
            f"kernel {launch.label} goes through {launch.backend}, which has no stage {stage}",
            fix="choose with --kernel",
        )
    if stage in ("triton", "tilelang", "placement") and launch.smaller:
        with suppress(BuildError, LegalityError, ResourceError):
            launch, _ = executable.fitted(launch, target)
    if stage in ("triton", "tilelang"):
        return executable.lower(launch, target).text
    if stage == "placement":
        from k3dsl.backends.tilelang.explain import explain

        return explain(launch.kernel, launch.schedule, target)
    if stage == "cuda":
        return executable.fitted(launch, target)[1].cuda
    if (stage == "amdgcn") != (target.vendor == "amd"):
        own = "amdgcn" if target.vendor == "amd" else "ptx or sass"
        raise ArgumentError(f"code for {target} has no stage {stage}", fix=f"--stage {own}, or another --target")
    artifact = executable.fitted(launch, target)[1]
    if artifact.format == "cu":
        raise ArgumentError(f"kernel {launch.label} was not compiled: it needs {artifact.launch['needs']}")
    if stage != "sass":
        return artifact.assembly
    if launch.backend == "triton":
        from k3dsl.backends.triton.inspect import disassemble as disassemble_triton

        return disassemble_triton(artifact)
    from k3dsl.backends.machine_code import disassemble

    return disassemble(artifact)
