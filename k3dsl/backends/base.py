"""What every backend agrees on: the generated source, the built artifact and the reason a kernel is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from k3dsl.ir.graph import Kernel

MAX_GRID_YZ = 65535
"""Programs along a grid's second and third axis; generated code counts on it where it computes offsets in 32 bits."""


RESOURCES = frozenset({"threads", "registers", "blocks_per_sm", "shared_memory"})
"""Codes of reasons that another target, or a smaller schedule, would not have."""


@dataclass(frozen=True)
class Reason:
    """Why a kernel, schedule or target combination is refused.

    `code` is stable and machine readable, `message` is for people, `where` is the user's file:line when known.
    """

    code: str
    message: str
    where: str | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


def grid_reasons(kernel: Kernel) -> list[Reason]:
    """Why no GPU launches the kernel's grid, where that is known before its dims are. A grid of runtime dims is checked at each
    launch."""
    known = [(axis, extent.constant) for axis, extent in enumerate(kernel.grid) if axis]
    return [
        Reason("grid", f"grid axis {axis} has {size} programs, a GPU takes {MAX_GRID_YZ} along it", kernel.source)
        for axis, size in known
        if size is not None and size > MAX_GRID_YZ
    ]


SHOWN = 4
"""Reasons that a message names; `k3dsl explain` lists all."""


def all_of(reasons: Sequence[Reason]) -> str:
    """The reasons as one text, each message once and no more than a few."""
    first: dict[str, Reason] = {}
    for reason in reasons:
        first.setdefault(reason.message, reason)
    texts = [str(reason) for reason in first.values()]
    more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return "; ".join([*texts[:SHOWN], *more])


@dataclass(frozen=True)
class Arg:
    """One argument of a generated kernel, in order.

    kind: 'pointer' (a tensor's base address), 'dim' (a runtime dim), 'stride' (elements), 'scalar';
    of machine parameters alone also 'tensor_map' (a TMA descriptor of 128 bytes, passed by value).
    dtype: k3dsl dtype name of the pointee or of the scalar ('bf16', 'f32', 'i32', 'i64', ...).
    divisible_by: known divisor of the value (of the address in bytes for a pointer); 1 when nothing is known.
    source: for kind 'pointer' the tensor's name, for 'dim' the dim's name, for 'stride' "tensor:axis", for 'scalar' its name.
    """

    name: str
    kind: Literal["pointer", "dim", "stride", "scalar", "tensor_map"]
    dtype: str
    divisible_by: int = 1
    source: str = ""


@dataclass(frozen=True)
class Source:
    """Generated code of one kernel, ready for the backend's toolchain.

    name: the function's name inside `text`. options: toolchain options (for Triton: num_warps, num_stages, maxnreg,
    enable_fp_fusion). ir_hash: identity of the kernel the text was printed from.
    """

    backend: str
    name: str
    text: str
    args: tuple[Arg, ...]
    options: dict[str, Any] = field(default_factory=dict)
    ir_hash: str = ""

    @property
    def told(self) -> str:
        """The code with all that its toolchain is told, as one text: equal for what gives equal machine code for a target."""
        return f"{self.backend}\n{self.name}\n{self.args}\n{sorted(self.options.items())}\n{self.text}"


MATRIX_FAMILIES = ("wgmma", "mma.sync", "tcgen05", "mfma")


@dataclass(frozen=True)
class Inspection:
    """What the built artifact uses, as far as the toolchain tells without a GPU. None: not known.

    shared_bytes per program, registers per thread, spill_bytes per thread (stack used for spills), warps launched,
    instructions: what was found of MATRIX_FAMILIES, with counts; beside them 'wgmma.serialized' (warnings of ptxas that
    it gave up overlapping them) and 'setmaxnreg' (warps trade registers while the program runs).
    """

    shared_bytes: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    warps: int | None = None
    instructions: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Artifact:
    """A built kernel: its machine code and all that a launch needs, without any compiler.

    format: 'cubin' or 'hsaco', or 'cu' where the machine has no compiler for the CUDA source. entry: the symbol to
    launch. launch: threads per program (`threads`), dynamic shared memory (`shared_bytes`), `global_scratch_bytes` per
    program and its alignment, and `params`, the size in bytes of each machine parameter in order (arguments first, then
    the backend's hidden ones); where the machine parameters are not the arguments, also `host_call` (backends.host_call)
    or None and `needs`, what a launch needs then. assembly: PTX or AMD assembly. cuda: CUDA source, where there is one.
    """

    source: Source
    target: str
    format: str
    entry: str
    binary: bytes
    launch: dict[str, Any]
    inspection: Inspection
    assembly: str = ""
    cuda: str = ""
    toolchain: dict[str, str] = field(default_factory=dict)
