"""What is the same in every launch of one layout: values that follow from dims and program ids alone, and where they lead.

A step is fixed when its operands do not depend on what a launch reads from memory or is given as a scalar. Its outcome is
kept on a tape in the first launch that records one, and later launches of the same layout (dims, shapes, strides, aliasing;
see `evaluate.Evaluator`) take it from there: indices, masks, bounds that were checked, trip counts. What depends on data is
worked out and checked every time.

What small integer tensors hold, slots and tables, is often the same in the next launch too. An evaluator may therefore
take their contents as a part of the layout; what is loaded from them is then fixed as well.

Where data decide how often a loop runs, or for which programs a condition holds, the outcome is worked out first, and each
outcome has a tape of its own for what lies inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from k3dsl.backends.torch.access import Located
from k3dsl.backends.torch.plan import RegionPlan, Step
from k3dsl.ir.graph import MEMORY_OPS, Value

MAX_ITEMS = 50_000
MAX_BYTES = 16 * 2**20
"""Of one tape. A launch that would need more is never replayed."""

_LEAVES = ("program_id", "const", "dim", "iota")
_CONTROL = {"loop": 2, "when": 1}
"""How many operands of an op decide what its region runs for."""


def mark(body: RegionPlan, contents: frozenset[str] = frozenset()) -> frozenset[str]:
    """Fills in the steps' fields about what is fixed; returns the tensors whose every access is.

    contents: tensors whose contents are a part of the layout.
    """
    fixed: set[Value] = set()
    _mark(body, fixed, contents, True, True)
    needed: set[Value] = set()
    _need(body, fixed, needed)
    _keep(body, fixed, needed)
    accesses = [step for step in _steps(body) if step.op.opcode in MEMORY_OPS]
    moving = {step.op.attrs["tensor"] for step in accesses if not step.settled}
    return frozenset({step.op.attrs["tensor"] for step in accesses} - moving)


def _steps(region: RegionPlan) -> Iterator[Step]:
    for step in region.steps:
        yield step
        for inner in step.regions:
            yield from _steps(inner)


def _mark(region: RegionPlan, fixed: set[Value], contents: frozenset[str], recorded: bool, settled: bool) -> None:
    """recorded: whether the region has a tape at all. settled: whether it runs alike in every launch."""
    for step in region.steps:
        op = step.op
        if op.opcode in MEMORY_OPS:
            step.located = recorded and all(v in fixed for n, v in enumerate(op.operands) if n != _value_slot(step))
            step.settled = step.located and settled
            if step.located and op.opcode == "load" and op.attrs["tensor"] in contents:
                step.fixed, step.located = True, False
                fixed.update(op.results)
        elif op.opcode in ("loop", "when"):
            step.located = recorded and all(v in fixed for v in op.operands[: _CONTROL[op.opcode]])
            if recorded and op.opcode == "loop":
                fixed.add(step.regions[0].region.args[0])
            _mark(step.regions[0], fixed, contents, recorded, settled and step.located)
        elif step.regions:  # a combine region runs on batches of its own
            for inner in step.regions:
                _mark(inner, fixed, contents, False, False)
        elif recorded and (op.opcode in _LEAVES or (op.operands and all(v in fixed for v in op.operands))):
            step.fixed = True
            fixed.update(op.results)


def _value_slot(step: Step) -> int | None:
    return step.op.attrs.get("value_slot") if step.op.opcode != "load" else None


def _need(region: RegionPlan, fixed: set[Value], needed: set[Value]) -> None:
    """Collects the fixed values that something not fixed takes."""
    needed.update(v for v in region.region.yields if v in fixed)
    for step in region.steps:
        operands = list(step.op.operands)
        if step.fixed:
            operands = []
        elif step.located and step.op.opcode in MEMORY_OPS:
            slot = _value_slot(step)
            operands = [] if slot is None else [operands[slot]]
        elif step.op.opcode in _CONTROL:
            # where data decide, the region may have to run in full, and takes what it takes from outside
            operands = operands[_CONTROL[step.op.opcode] :] if step.located else [*operands, *step.free]
        needed.update(v for v in operands if v in fixed)
        for inner in step.regions:
            _need(inner, fixed, needed)


def _keep(region: RegionPlan, fixed: set[Value], needed: set[Value]) -> None:
    for step in region.steps:
        step.kept = step.fixed and step.op.results[0] in needed
        step.free_again = [v for v in step.free if v not in fixed or v in needed]
        step.dead_again = [v for v in step.dead if v not in fixed]
        for inner in step.regions:
            _keep(inner, fixed, needed)
    region.again = [step for step in region.steps if step.kept or not step.fixed]
    region.takes_index = bool(region.region.args) and (
        region.region.args[0] not in fixed or region.region.args[0] in needed
    )


class Budget:
    """What the tapes of one layout may still hold."""

    def __init__(self) -> None:
        self.items, self.nbytes = MAX_ITEMS, MAX_BYTES

    @property
    def left(self) -> bool:
        """Whether there is anything left."""
        return self.items > 0 and self.nbytes > 0


class Tape:
    """What the fixed steps of one run of a region gave, in the order they ran. It is recorded once, then read."""

    def __init__(self, budget: Budget) -> None:
        self.items: list[Any] = []
        self.budget = budget

    def add(self, item: Any) -> None:
        """Appends an item, as long as the budget lasts."""
        self.budget.items -= 1
        if isinstance(item, Tensor):
            self.budget.nbytes -= item.untyped_storage().nbytes()
        elif isinstance(item, Located):
            self.budget.nbytes -= item.nbytes()
        if self.budget.left:
            self.items.append(item)


class Branch:
    """The tapes of a region whose control data decide, by outcome."""

    def __init__(self, budget: Budget) -> None:
        self.tapes: dict[Any, Tape] = {}
        self.budget = budget
