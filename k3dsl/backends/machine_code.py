"""Reads what compiled machine code uses and how it is called: from the code, its assembly and the log of ptxas."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from k3dsl.backends.base import Artifact, Inspection
from k3dsl.errors import BuildError

# Matrix instruction families, as the assembly of NVIDIA (PTX) and of AMD spells them.
_FAMILIES = {
    "wgmma": re.compile(r"\bwgmma\.mma_async\b"),
    "mma.sync": re.compile(r"\bmma\.sync\b"),
    "tcgen05": re.compile(r"\btcgen05\.mma\b"),
    "mfma": re.compile(r"\bv_s?mfmac?_"),
}
SERIALIZED = "wgmma.serialized"  # a key of Inspection.instructions beside the families

_PTX_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)", re.DOTALL)
_PTX_PARAM = re.compile(r"\.param\b[^,]*?\.[bsuf](\d+)\b[^,\[]*(?:\[(\d+)\])?")
_RESOURCES = re.compile(r"Function ([\w$]+):\s*REG:(\d+) STACK:(\d+)")
_PTXAS_USAGE = re.compile(r"(\d+) bytes stack frame.*?Used (\d+) registers", re.DOTALL)


def matrix_instructions(assembly: str) -> dict[str, int]:
    """Counts the matrix instructions of each family that occurs in PTX or AMD assembly."""
    counts = {family: len(pattern.findall(assembly)) for family, pattern in _FAMILIES.items()}
    return {family: count for family, count in counts.items() if count}


def entry_and_params(assembly: str) -> tuple[str, tuple[int, ...]]:
    """The symbol that a launch names, and the size in bytes of each parameter that a launch passes, in order.

    The assembly is PTX or AMD assembly with its metadata. Parameters that the AMD runtime fills in itself are left out.
    Raises ValueError when the text has no kernel.
    """
    if "amdhsa.kernels:" in assembly:
        return _amd_entry_and_params(assembly)
    match = _PTX_ENTRY.search(assembly)
    if match is None:
        raise ValueError("the assembly has no .entry and no amdhsa.kernels")
    sizes = []
    for bits, count in _PTX_PARAM.findall(match.group(2)):
        sizes.append(int(bits) // 8 * int(count or 1))
    return match.group(1), tuple(sizes)


def _amd_entry_and_params(assembly: str) -> tuple[str, tuple[int, ...]]:
    metadata = _amd_metadata(assembly)
    name = re.search(r"^    \.name:\s*(\S+)", metadata, re.MULTILINE)
    if name is None:
        raise ValueError("the AMD metadata names no kernel")
    # Each argument is one list item ("      - .address_space: ..."), its keys in alphabetical order.
    items = re.split(r"^      - ", metadata, flags=re.MULTILINE)[1:]
    sizes = []
    for item in items:
        size = re.search(r"\.size:\s*(\d+)", item)
        kind = re.search(r"\.value_kind:\s*(\w+)", item)
        if size and kind and not kind.group(1).startswith("hidden_"):
            sizes.append(int(size.group(1)))
    return name.group(1), tuple(sizes)


def _amd_metadata(assembly: str) -> str:
    return assembly[assembly.index("amdhsa.kernels:") :]


def inspect_cubin(
    cubin: bytes, ptx: str, *, shared_bytes: int, warps: int, ptxas_log: str | None, cuobjdump: str | None
) -> Inspection:
    """What an NVIDIA kernel uses.

    cuobjdump: path of NVIDIA's tool, which reads registers and stack out of the cubin; without it, or where it fails,
    they come from ptxas_log (the output of `ptxas -v`). The log alone says whether ptxas gave up overlapping wgmma
    instructions: then `instructions` has the count of such warnings under 'wgmma.serialized'.
    """
    registers, stack = _cubin_resources(cubin, cuobjdump)
    if registers is None and ptxas_log is not None and (usage := _PTXAS_USAGE.search(ptxas_log)):
        stack, registers = int(usage.group(1)), int(usage.group(2))
    instructions = matrix_instructions(ptx)
    if ptxas_log is not None and (serialized := ptxas_log.count("wgmma.mma_async instructions are serialized")):
        instructions[SERIALIZED] = serialized
    return Inspection(
        shared_bytes=shared_bytes, registers=registers, spill_bytes=stack, warps=warps, instructions=instructions
    )


def _cubin_resources(cubin: bytes, cuobjdump: str | None) -> tuple[int | None, int | None]:
    """Registers and bytes of stack per thread, or None for both when the tool cannot tell."""
    if cuobjdump is None:
        return None, None
    with tempfile.TemporaryDirectory(prefix="k3dsl-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        try:
            done = subprocess.run(
                [cuobjdump, "--dump-resource-usage", str(path)], capture_output=True, text=True, timeout=60, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None, None
    match = _RESOURCES.search(done.stdout)
    return (int(match.group(2)), int(match.group(3))) if match else (None, None)


def inspect_hsaco(amdgcn: str, *, shared_bytes: int, warps: int) -> Inspection:
    """What an AMD kernel uses, from the metadata in its assembly.

    registers are VGPRs, accumulation VGPRs included; spill_bytes is the private segment of one work item.
    """
    metadata = _amd_metadata(amdgcn)

    def number(key: str) -> int | None:
        match = re.search(rf"\.{key}:\s*(\d+)", metadata)
        return int(match.group(1)) if match else None

    return Inspection(
        shared_bytes=shared_bytes,
        registers=number("vgpr_count"),
        spill_bytes=number("private_segment_fixed_size"),
        warps=warps,
        instructions=matrix_instructions(amdgcn),
    )


def nvidia_tool(name: str) -> str | None:
    """The path of one of NVIDIA's binary tools (cuobjdump, nvdisasm): the CUDA toolkit's own, else Triton's copy."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [Path(home, "bin", name)] if home else []
    if found := shutil.which(name):
        candidates.append(Path(found))
    candidates.append(Path("/usr/local/cuda/bin", name))
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        candidates.append(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name)
    return next((str(path) for path in candidates if os.access(path, os.X_OK)), None)


def disassemble(artifact: Artifact, tool: str | None = None) -> str:
    """The SASS of an NVIDIA artifact. Raises BuildError where nvdisasm (`tool`, else the one found) is missing or fails."""
    name = artifact.source.name
    if artifact.format != "cubin":
        raise BuildError(f"{name}: has no machine code to disassemble, only {artifact.format}")
    tool = tool or nvidia_tool("nvdisasm")
    if tool is None:
        raise BuildError(
            f"{name}: cannot be disassembled: there is no nvdisasm", fix="install the CUDA toolkit, or Triton"
        )
    with tempfile.TemporaryDirectory(prefix="k3dsl-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(artifact.binary)
        try:
            done = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise BuildError(f"{name}: {tool} failed: {error}") from error
    return done.stdout
