"""Reads what a kernel that TileLang made uses: from the machine code and its log, else from the CUDA source."""

from __future__ import annotations

import re

from k3dsl.backends.base import Inspection
from k3dsl.backends.machine_code import inspect_cubin
from k3dsl.backends.tilelang.nvcc import Compiled

SETMAXNREG = "setmaxnreg"  # a key of Inspection.instructions beside the families
_PRODUCER_THREADS = 128  # of the warp group that TileLang adds to start copies

_STATIC_SHARED = re.compile(r"\b(\d+) bytes smem\b")
_SETMAXNREG = re.compile(r"\bsetmaxnreg\.(?:inc|dec)\b")
# How the matrix instruction families are called in TileLang's CUDA source.
_CUDA_FAMILIES = {
    "wgmma": re.compile(r"\btl::wgmma_(?:ss|rs)\b"),
    "mma.sync": re.compile(r"\btl::(?:mma_sync|gemm_(?:ss|rs|sr|rr))\b"),
    "tcgen05": re.compile(r"\btl::tcgen05mma\w*\b"),
}
_ASYNCHRONOUS = re.compile(r"\bwgmma_gemm\b")


def inspect_compiled(compiled: Compiled, *, dynamic_shared: int, threads: int) -> Inspection:
    """What the machine code uses. shared_bytes counts the static part (barriers) too."""
    seen = inspect_cubin(
        compiled.cubin,
        compiled.ptx,
        shared_bytes=dynamic_shared + static_shared(compiled.log),
        warps=threads // 32,
        ptxas_log=compiled.log,
        cuobjdump=None,
    )
    if found := len(_SETMAXNREG.findall(compiled.ptx)):
        seen.instructions[SETMAXNREG] = found
    return seen


def inspect_source(cuda: str, *, dynamic_shared: int, threads: int) -> Inspection:
    """What the CUDA source alone tells: instruction families are counted by the calls in the text."""
    counts = {family: len(pattern.findall(cuda)) for family, pattern in _CUDA_FAMILIES.items()}
    counts[SETMAXNREG] = cuda.count("tl::warpgroup_reg_")
    return Inspection(
        shared_bytes=dynamic_shared, warps=threads // 32, instructions={name: n for name, n in counts.items() if n}
    )


def static_shared(log: str) -> int:
    """Bytes of shared memory that the machine code itself reserves, from the log of `ptxas -v`."""
    found = _STATIC_SHARED.search(log)
    return int(found.group(1)) if found else 0


def is_asynchronous(text: str) -> bool:
    """Whether the generated module issues wgmma without waiting for it in the same statement."""
    return _ASYNCHRONOUS.search(text) is not None


def register_demand(cuda: str, threads: int) -> int | None:
    """Registers that a program's warps ask for once they traded them (setmaxnreg); None where they do not.

    More than the program was launched with never comes free: the kernel hangs.
    """
    given = [int(n) for n in re.findall(r"warpgroup_reg_dealloc<(\d+)>", cuda)]
    taken = [int(n) for n in re.findall(r"warpgroup_reg_alloc<(\d+)>", cuda)]
    if not given or not taken:
        return None
    return _PRODUCER_THREADS * max(given) + (threads - _PRODUCER_THREADS) * max(taken)
