"""Reads what a built Triton kernel uses, with the tools that Triton brings along."""

from __future__ import annotations

from k3dsl.backends import machine_code
from k3dsl.backends.base import Artifact
from k3dsl.errors import BuildError


def disassemble(artifact: Artifact) -> str:
    """The SASS of an NVIDIA artifact. Raises BuildError where Triton's copy of nvdisasm is missing or fails."""
    from triton import knobs

    try:
        tool = knobs.nvidia.nvdisasm.path
    except RuntimeError as error:
        raise BuildError(f"{artifact.source.name}: cannot be disassembled: {error}") from error
    return machine_code.disassemble(artifact, tool)
