"""What the Triton backend cannot lower, as reasons; the same list serves the tuner, `k3dsl explain` and the tests."""

from __future__ import annotations

from k3dsl.backends.base import Reason
from k3dsl.backends.triton.access import AccessPrinter, pow2
from k3dsl.backends.triton.schedule import TritonSchedule
from k3dsl.ir.graph import Kernel, walk
from k3dsl.targets import Target

MAX_TILE = 1 << 20
MIN_DOT_K = {64: 4, 32: 8, 16: 16, 8: 32}


def check(kernel: Kernel, schedule: TritonSchedule, target: Target) -> list[Reason]:
    """Reasons why this kernel, schedule and target do not go together; empty when they do."""
    reasons: list[Reason] = []
    labels = {op.attrs["label"] for op in walk(kernel.body) if op.opcode == "loop" and op.attrs.get("label")}
    for label in schedule.stages:
        if label not in labels:
            known = ", ".join(sorted(labels)) or "none"
            reasons.append(Reason("unknown_label", f"stages name the loop {label!r}; labels of {kernel.name}: {known}"))
    names = {t.name for t in kernel.tensors}
    for name in schedule.descriptors:
        if name not in names:
            reasons.append(Reason("unknown_tensor", f"descriptors name {name!r}, which {kernel.name} does not take"))
    if schedule.num_warps * target.warp_size > target.max_threads_per_block:
        limit = target.max_threads_per_block
        reasons.append(
            Reason("threads", f"{schedule.num_warps} warps of {target.warp_size} exceed {limit} threads a program")
        )
    for op in walk(kernel.body):
        for v in op.results:
            size = 1
            for n in v.shape:
                size *= pow2(n)
            if size > MAX_TILE:
                reasons.append(Reason("tile_size", f"tile {v.type} has over {MAX_TILE} elements after padding", op.loc))
        if op.opcode == "dot":
            a = op.operands[0].type
            least = MIN_DOT_K[a.dtype.bits]
            if pow2(a.shape[-1]) < least:
                reasons.append(
                    Reason("dot_k", f"a {a.dtype} dot needs an inner extent of at least {least}, got {a.shape[-1]}", op.loc)
                )
        if op.index and op.attrs["tensor"] in schedule.descriptors:
            if target.vendor == "amd":
                reasons.append(Reason("descriptor", "tensor descriptors are used on NVIDIA targets only", op.loc))
            access = AccessPrinter(op, kernel.tensor(op.attrs["tensor"]), kernel)
            why = access.descriptor_reason()
            if why is not None:
                reasons.append(Reason("descriptor", f"{access.tensor.name}: {why}", op.loc))
        if op.opcode == "reshape":
            before, after = op.operands[0].shape, op.result.shape
            x, y = [n for n in before if n != 1], [n for n in after if n != 1]
            if x != y and any(pow2(n) != n for n in x + y):
                reasons.append(
                    Reason("reshape", f"cannot regroup {list(before)} to {list(after)}: not powers of two", op.loc)
                )
    return reasons
