"""What the Triton backend cannot lower, as reasons; the same list serves the tuner, `k3dsl explain` and the tests."""

from __future__ import annotations

from k3dsl.backends.base import Reason, grid_reasons
from k3dsl.backends.triton import shared
from k3dsl.backends.triton.access import AccessPrinter
from k3dsl.backends.triton.printer import RESERVED
from k3dsl.backends.triton.schedule import TritonSchedule
from k3dsl.backends.triton.text import pow2
from k3dsl.ir.graph import Kernel, walk
from k3dsl.ir.types import bf16, f8e4m3, f16, f32, f64, i32, i64
from k3dsl.targets import Target

MAX_TILE = 1 << 20
MIN_DOT_K = {64: 16, 32: 16, 16: 16, 8: 32}
"""Least inner extent of a dot by bits of its operands, in every version of Triton that is supported."""
_ATOMIC = (f16, bf16, f32, f64, i32, i64)
_COMBINE = (
    "a {} with its own combine over {} elements: tiles are padded to a power of two, and no neutral element is known; use an "
    "extent that is a power of two"
)


def check(kernel: Kernel, schedule: TritonSchedule, target: Target) -> list[Reason]:
    """Reasons why this kernel, schedule and target do not go together; empty when they do."""
    reasons = grid_reasons(kernel)
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
    reasons += _names(kernel)
    reasons += shared.reasons(kernel, schedule, target)
    if target.vendor == "nvidia" and isinstance(target.arch, int) and target.arch < 89:
        used = {t.dtype for t in kernel.tensors} | {v.dtype for op in walk(kernel.body) for v in op.results}
        if f8e4m3 in used:
            reasons.append(Reason("dtype", f"{target.name} has no f8e4m3", kernel.source))
    for op in walk(kernel.body):
        for v in op.results:
            size = 1
            for n in v.shape:
                size *= pow2(n)
            if size > MAX_TILE:
                reasons.append(Reason("tile_size", f"tile {v.type} has over {MAX_TILE} elements after padding", op.loc))
        if op.opcode == "unit_lower_inverse" and op.attrs["method"] == "doubling" and 2 < op.result.shape[-1] < 16:
            message = f"doubling of {op.result.shape[-1]} rows needs products of fewer than 16; use substitution"
            reasons.append(Reason("dot_k", message, op.loc))
        if op.opcode == "dot":
            a = op.operands[0].type
            least = MIN_DOT_K[a.dtype.bits]
            if pow2(a.shape[-1]) < least:
                reasons.append(
                    Reason(
                        "dot_k", f"a {a.dtype} dot needs an inner extent of at least {least}, got {a.shape[-1]}", op.loc
                    )
                )
            if a.dtype == f32 and target.vendor == "amd" and op.attrs["precision"] == "tf32x3":
                reasons.append(Reason("precision", "AMD targets have no tf32x3 products; use ieee or tf32", op.loc))
        if op.opcode in ("reduce", "scan") and op.regions:
            n = op.operands[0].shape[op.attrs["axis"]]
            if pow2(n) != n and (op.opcode == "reduce" or op.attrs.get("reverse")):
                reasons.append(Reason("combine", _COMBINE.format(op.opcode, n), op.loc))
        if op.opcode == "atomic_add" and kernel.tensor(op.attrs["tensor"]).dtype not in _ATOMIC:
            dtype = kernel.tensor(op.attrs["tensor"]).dtype
            reasons.append(Reason("atomic_dtype", f"Triton has no atomic add of {dtype}", op.loc))
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


def _names(kernel: Kernel) -> list[Reason]:
    """Parameters keep their names in generated code, so these must be free there, and differ from each other."""
    names = [t.name for t in kernel.tensors] + [s.name for s in kernel.dims] + [s.name for s in kernel.scalars]
    reasons = []
    for name in dict.fromkeys([kernel.name, *names]):
        if name in RESERVED or not name.isidentifier():
            reasons.append(
                Reason("name", f"the name {name!r} means something else in generated Triton; rename it", kernel.source)
            )
        elif names.count(name) > 1:
            reasons.append(Reason("name", f"{name!r} is the name of two parameters or dims; rename one", kernel.source))
    return reasons
