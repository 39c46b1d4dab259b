"""Shared memory that a Triton kernel is sure to need: what the pipeliner keeps of loads in flight, found before it runs.

A lower bound: it counts only loads that every supported version of Triton is known to pipeline, each at the least depth,
so that nothing is refused that would fit. What layouts are converted through, and scratch of reductions, comes on top.
"""

from __future__ import annotations

from k3dsl.backends.base import Reason
from k3dsl.backends.triton.schedule import TritonSchedule
from k3dsl.backends.triton.text import pow2
from k3dsl.ir.graph import Kernel, Op, Value, walk
from k3dsl.passes.affine import IndexAnalysis
from k3dsl.targets import Target

KNOWN_DIVISOR = 16
"""Triton learns of a runtime number that it is a multiple of this, or nothing; and pipelines no load below 4 bytes a copy."""
NESTED = ("loop", "when")


def reasons(kernel: Kernel, schedule: TritonSchedule, target: Target) -> list[Reason]:
    """The loop whose loads in flight alone are more than a program may have, if there is one."""
    found = []
    for loop, size in least_bytes(kernel, schedule, target):
        if size > target.shared_per_block:
            label = loop.attrs["label"]
            message = (
                f"loop {label!r} with {schedule.stages[label]} stages keeps at least {size} bytes of loads in shared memory, "
                f"and {target.name} has {target.shared_per_block} a program; fewer stages or smaller tiles"
            )
            found.append(Reason("shared_memory", message, loop.loc))
    return found


def least_bytes(kernel: Kernel, schedule: TritonSchedule, target: Target) -> list[tuple[Op, int]]:
    """Each pipelined loop with the bytes that its loads in flight take at least. Loops follow each other and share memory."""
    loops = [
        op for op in walk(kernel.body) if op.opcode == "loop" and schedule.stages.get(str(op.attrs.get("label")), 1) > 1
    ]
    if not loops:
        return []
    analysis = IndexAnalysis(kernel)
    uses = _uses(kernel)
    found = []
    for loop in loops:
        body = loop.regions[0]
        if any(op.opcode in NESTED for op in body.ops):  # Triton pipelines innermost loops
            continue
        stages = schedule.stages[loop.attrs["label"]]
        size = 0
        for op in body.ops:
            if op.opcode != "load" or not (dots := _dots(op.result, uses)) or not _copied(op, kernel, analysis):
                continue
            # a product that reads shared memory while it runs holds on to one more than the copies under way
            held = all(direct and _reads_shared(dot, schedule, target) for dot, direct in dots)
            size += (stages if held else stages - 1) * _padded(op.result) * op.result.dtype.bytes
        if size:
            found.append((loop, size))
    return found


def _uses(kernel: Kernel) -> dict[int, list[Op | None]]:
    """What reads each value; None for a region that yields it."""
    found: dict[int, list[Op | None]] = {}
    for op in walk(kernel.body):
        for value in op.operands:
            found.setdefault(id(value), []).append(op)
        for region in op.regions:
            for value in region.yields:
                found.setdefault(id(value), []).append(None)
    return found


def _dots(value: Value, uses: dict[int, list[Op | None]], direct: bool = True) -> list[tuple[Op, bool]]:
    """The products that read the value as a factor, transposed or cast or as it is, and whether without a cast.

    None when anything else reads it too.
    """
    found: list[tuple[Op, bool]] = []
    for op in uses.get(id(value), []):
        if op is None:
            return []
        if op.opcode in ("transpose", "cast"):
            behind = _dots(op.result, uses, direct and op.opcode == "transpose")
            if not behind:
                return []
            found += behind
        elif op.opcode == "dot" and any(value is factor for factor in op.operands[:2]):
            found.append((op, direct))
        else:
            return []
    return found


def _copied(op: Op, kernel: Kernel, analysis: IndexAnalysis) -> bool:
    """Whether the load is of whole rows whose starts and ends are multiples of a copy, so that it is copied asynchronously."""
    tensor = kernel.tensor(op.attrs["tensor"])
    strides = tensor.stride_exprs()
    if tensor.dtype.bits < 8 or strides[-1].constant != 1 or any(i.kind == "tile" for i in op.index):
        return False
    if any(stride.divisor() % KNOWN_DIVISOR for stride in strides[:-1]):
        return False
    last = op.index[-1]
    if last.kind == "scalar" or not last.shape or last.shape[-1] % KNOWN_DIVISOR:
        return False
    return all(
        analysis.proved_divisor(op.operands[slot]) % KNOWN_DIVISOR == 0
        for slot in (last.start, last.end)
        if slot is not None
    )


def _reads_shared(dot: Op, schedule: TritonSchedule, target: Target) -> bool:
    """Whether the product is sure to be Hopper's, which takes its factors from shared memory."""
    a, b = dot.operands[0].type, dot.operands[1].type
    return (
        target.name == "sm_90a"
        and schedule.num_warps % 4 == 0
        and a.dtype.bits == b.dtype.bits == 16
        and len(a.shape) == 2
        and a.shape[0] % (16 * schedule.num_warps) == 0
        and b.shape[1] % 16 == 0
    )


def _padded(value: Value) -> int:
    size = 1
    for n in value.shape:
        size *= pow2(n)
    return size
