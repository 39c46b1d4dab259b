"""Who reads a value: uses of every value, and where an expression that is not kept in a buffer is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from k3dsl.ir.graph import Kernel, Op, Region, Value

SHAPE_OPS = frozenset({"const", "iota", "broadcast", "reshape", "permute", "select"})
"""Ops that are only a way to index their operand."""
BUFFER_DEMANDS = frozenset({"dot_a", "dot_b"})
"""Uses that need the whole value in a buffer."""


@dataclass(frozen=True)
class Use:
    """One operand slot of an op, or (`op` a loop, `slot` the carry's number, `kind` 'yield') a yielded value."""

    op: Op
    slot: int
    region: Region
    kind: str = "operand"


@dataclass(frozen=True)
class Read:
    """One place where a value's elements are read once its inline users are folded in.

    kind: 'loop' (an elementwise loop), 'reduce', 'scan', 'inverse', 'store', 'index', 'yield', 'init', 'acc', 'cond',
    'scalar', or one of BUFFER_DEMANDS. exact: element [i, j] is read where element [i, j] of the result is made.
    transposed: of a dot operand. op: the op whose code reads it.
    """

    kind: str
    op: Op
    region: Region
    exact: bool = True
    transposed: bool = False


def is_swap(op: Op | None) -> bool:
    """True for the transpose of a matrix."""
    return op is not None and op.opcode == "permute" and tuple(op.attrs["axes"]) == (1, 0)


def unit_free(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without axes of extent 1."""
    return tuple(n for n in shape if n != 1)


def keeps_place(op: Op) -> bool:
    """True when the op reads element [i, j] of its operand for element [i, j], up to axes of extent 1 and order."""
    if op.opcode == "reshape":
        return unit_free(op.operands[0].shape) == unit_free(op.result.shape)
    if op.opcode == "select":
        return op.operands[0].shape[op.attrs["axis"]] == 1
    return op.opcode != "dequantize_mxfp4"


class Uses:
    """The uses of every value of a kernel, and the region and place of every op."""

    def __init__(self, kernel: Kernel) -> None:
        self.of: dict[int, list[Use]] = {}
        self.region_of: dict[int, Region] = {}  # by id of a value
        self.place: dict[int, int] = {}  # position of an op within its region
        self.home: dict[int, Region] = {}  # by id of an op: the region it stands in
        self.parent: dict[int, Op] = {}  # by id of a region: the op that holds it
        self.carry: dict[int, tuple[Op, int]] = {}  # by id of a region argument: its loop and number
        self._visit(kernel.body)

    def _visit(self, region: Region) -> None:
        for v in region.args:
            self.region_of[id(v)] = region
        for position, op in enumerate(region.ops):
            self.place[id(op)] = position
            self.home[id(op)] = region
            for slot, v in enumerate(op.operands):
                self.of.setdefault(id(v), []).append(Use(op, slot, region))
            for v in op.results:
                self.region_of[id(v)] = region
            if op.opcode in ("reduce", "scan"):
                continue
            for inner in op.regions:
                self.parent[id(inner)] = op
                if op.opcode == "loop":
                    for k, v in enumerate(inner.args[1:]):
                        self.carry[id(v)] = (op, k)
                self._visit(inner)
                for k, v in enumerate(inner.yields):
                    self.of.setdefault(id(v), []).append(Use(op, k, inner, "yield"))

    def uses(self, v: Value) -> list[Use]:
        return self.of.get(id(v), [])

    def in_loop(self, op: Op) -> bool:
        """True when a loop stands around the op."""
        holder = self.parent.get(id(self.home[id(op)]))
        return holder is not None and (holder.opcode == "loop" or self.in_loop(holder))

    def outermost(self, op: Op, region: Region) -> int | None:
        """The position, within `region`, of the op or of the op around it that stands there; None if it is outside."""
        while self.home[id(op)] is not region:
            holder = self.parent.get(id(self.home[id(op)]))
            if holder is None:
                return None
            op = holder
        return self.place[id(op)]


def reads(v: Value, uses: Uses, inline: set[int]) -> list[Read]:
    """Every read of the value; users in `inline` (ids of values) hand on their own reads."""
    found: list[Read] = []
    for use in uses.uses(v):
        op = use.op
        if use.kind == "yield":
            found.append(Read("yield", op, use.region))
        elif op.opcode == "loop":
            found.append(Read("init" if use.slot > 1 else "scalar", op, use.region))
        elif op.opcode == "dot":
            found.append(Read(("dot_a", "dot_b", "acc")[use.slot], op, use.region))
        elif op.opcode in ("reduce", "argmax", "argmin"):
            found.append(Read("reduce", op, use.region))
        elif op.opcode == "scan":
            found.append(Read("scan", op, use.region))
        elif op.opcode == "unit_lower_inverse":
            found.append(Read("inverse", op, use.region))
        elif op.opcode in ("store", "atomic_add"):
            found.append(Read("store" if use.slot == op.attrs["value_slot"] else "index", op, use.region))
        elif op.opcode == "when":
            found.append(Read("cond", op, use.region))
        elif op.results and id(op.result) in inline:
            exact = keeps_place(op)
            for read in reads(op.result, uses, inline):
                swapped = is_swap(op) and read.kind in ("dot_a", "dot_b")
                kind = "index" if op.opcode == "load" and read.kind == "loop" else read.kind
                found.append(replace(read, kind=kind, exact=read.exact and exact, transposed=read.transposed ^ swapped))
        elif op.opcode == "load":
            found.append(Read("index", op, use.region))
        else:
            found.append(Read("loop" if op.result.shape else "scalar", op, use.region, exact=keeps_place(op)))
    return found
