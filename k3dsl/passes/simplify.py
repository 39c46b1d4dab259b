"""Folds integer scalars, merges equal ops, drops what nothing uses. Every backend runs it first."""

from __future__ import annotations

from typing import Any

from k3dsl.ir.copying import copy_kernel
from k3dsl.ir.graph import Kernel, Op, Region, Value, is_pure
from k3dsl.ir.scalars import never_runs, uniform_constant
from k3dsl.passes.folding import fold

_Key = tuple[Any, ...]


def simplify(kernel: Kernel) -> Kernel:
    """An equal kernel with fewer ops. The given one stays as it is.

    Locations and the user's names are kept; loads are never merged or moved, and no rounding is dropped.
    """
    out = copy_kernel(kernel)
    _rewrite(out.body, _Replaced(), [])
    _drop_unused(out.body, set())
    return out


class _Replaced:
    """Which value stands for which. Holds the old ones too, so that no new value can get the id of a dead one."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[Value, Value]] = {}

    def get(self, value: Value) -> Value:
        pair = self._pairs.get(id(value))
        return value if pair is None else pair[1]

    def put(self, old: Value, new: Value) -> None:
        new.name = new.name or old.name
        self._pairs[id(old)] = (old, new)


def _rewrite(region: Region, replaced: _Replaced, scopes: list[dict[_Key, Value]]) -> None:
    """Simplifies a region in program order. `scopes` holds the ops that dominate it, outermost first."""
    seen: dict[_Key, Value] = {}
    scopes = [*scopes, seen]
    pending, done = list(reversed(region.ops)), []
    while pending:
        op = pending.pop()
        op.operands = [replaced.get(v) for v in op.operands]
        inlined = _inline(op, replaced)
        if inlined is not None:
            pending.extend(reversed(inlined))
            continue
        for inner in op.regions:
            # a combine stands alone: backends compile it as a function, which cannot use values from around it
            _rewrite(inner, replaced, [] if op.opcode in ("reduce", "scan") else scopes)
        old = op.results
        new = fold(op) if len(old) == 1 and not op.regions else None
        while isinstance(new, Op):
            op = new
            new = fold(op)
        if new is None and (key := _key(op)) is not None:
            new = next((scope[key] for scope in scopes if key in scope), None)
            if new is None:
                seen[key] = op.result
        if new is None:
            done.append(op)
            new = op.result if len(old) == 1 else None
        if new is not None and new is not old[0]:
            replaced.put(old[0], new)
    region.ops = done
    region.yields = [replaced.get(v) for v in region.yields]


def _inline(op: Op, replaced: _Replaced) -> list[Op] | None:
    """The ops that take the place of a `when` that always runs, or of a `when` or loop that never does."""
    if op.opcode == "when" and uniform_constant(op.operands[0]):
        return op.regions[0].ops
    if never_runs(op):
        for result, carry in zip(op.results, op.operands[2:], strict=True):
            replaced.put(result, carry)
        return []
    return None


def _key(op: Op) -> _Key | None:
    """Equal for ops that must give equal results; None for one that must stay as it is."""
    if len(op.results) != 1 or op.regions or not is_pure(op):
        return None
    attrs = tuple((name, repr(op.attrs[name])) for name in sorted(op.attrs))
    return (op.opcode, tuple(id(v) for v in op.operands), attrs, op.result.type)


def _drop_unused(region: Region, used: set[int]) -> None:
    """Removes ops without side effects whose results nothing uses. `used` collects the ids of values in use."""
    used.update(id(v) for v in region.yields)
    kept: list[Op] = []
    for op in reversed(region.ops):
        if not _writes(op) and not any(id(v) in used for v in op.results):
            continue
        for inner in op.regions:
            _drop_unused(inner, used)
        used.update(id(v) for v in op.operands)
        kept.append(op)
    region.ops = kept[::-1]


def _writes(op: Op) -> bool:
    """True when the op can change memory; a `when` around nothing cannot."""
    return op.opcode in ("store", "atomic_add") or any(_writes(o) for region in op.regions for o in region.ops)
