"""What is worked out about a kernel before it runs: when each value is last used, and how much memory a program needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from k3dsl.ir.graph import Op, Region, Value

_INDEX_BYTES = 8


@dataclass
class Step:
    """An op of a region. `dead`: values that are not used after it. `free`: values that its regions take from outside.

    compute: a pure op on its operands; call: on an environment. The rest is filled in by k3dsl.backends.torch.fixed. fixed:
    its result is the same in every launch of a layout; kept: and something not fixed takes it. located: the same for where a
    memory op leads, how often a loop runs, for which programs a condition holds; settled: and it comes to pass in every
    launch. dead_again, free_again: dead and free in a launch that skips what is fixed.
    """

    op: Op
    regions: list[RegionPlan]
    free: list[Value]
    dead: list[Value]
    compute: Callable[..., Any] | None = None
    call: Callable[[dict[Value, Any]], None] | None = None
    fixed: bool = False
    kept: bool = False
    located: bool = False
    settled: bool = False
    dead_again: list[Value] = field(default_factory=list)
    free_again: list[Value] = field(default_factory=list)


@dataclass
class RegionPlan:
    """A region, op by op. `own_yields`: the yielded values that were made inside.

    again: the steps of a launch that skips what is fixed. takes_index: whether its first argument is used in such a launch.
    """

    region: Region
    steps: list[Step]
    own_yields: list[Value]
    again: list[Step] = field(default_factory=list)
    takes_index: bool = True


def plan(region: Region) -> RegionPlan:
    """Finds the last use of every value that the region makes; values from outside belong to the region that made them."""
    own: set[Value] = set(region.args)
    for op in region.ops:
        own.update(op.results)
    last: dict[Value, int] = dict.fromkeys(region.args, -1)
    steps: list[Step] = []
    for k, op in enumerate(region.ops):
        inner = [plan(r) for r in op.regions]
        free = sorted(_free(op), key=id)
        steps.append(Step(op, inner, free, []))
        for v in [*op.operands, *free]:
            if v in own:
                last[v] = k
        for v in op.results:
            last[v] = k
    yields = [v for v in dict.fromkeys(region.yields) if v in own]
    for v in yields:
        last.pop(v, None)
    for v, k in last.items():
        if k >= 0:
            steps[k].dead.append(v)
    return RegionPlan(region, steps, yields)


def _free(op: Op) -> set[Value]:
    """Values used inside the op's regions and made outside of them."""
    used: set[Value] = set()
    for region in op.regions:
        made: set[Value] = set(region.args)
        inside: set[Value] = set(region.yields)
        for inner in region.ops:
            inside.update(inner.operands)
            inside.update(_free(inner))
            made.update(inner.results)
        used |= inside - made
    return used


def bytes_per_program(body: RegionPlan, float_bytes: int | None) -> int:
    """An estimate of what one program holds at most: its live tiles, and the temporaries of one operation."""

    def size(v: Value) -> int:
        held = max(v.dtype.bytes, 4 if v.dtype.bits == 8 and v.dtype.is_float else 1)
        return v.type.size * (float_bytes if float_bytes is not None and v.dtype.is_float else held)

    largest = 1

    def peak(region: RegionPlan) -> int:
        nonlocal largest
        live = most = sum(size(v) for v in region.region.args)
        for step in region.steps:
            live += sum(size(v) for v in step.op.results)
            largest = max([largest, *(v.type.size for v in (*step.op.results, *step.op.operands))])
            most = max(most, live + max((peak(r) for r in step.regions), default=0))
            live -= sum(size(v) for v in step.dead)
        return most

    total = peak(body)
    return total + 3 * _INDEX_BYTES * largest
