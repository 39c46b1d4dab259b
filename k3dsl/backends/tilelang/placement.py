"""Where every tile value lives: folded into the loops that read it, in registers (a fragment), in shared memory, or both.

Fragments may be indexed only by the variables of the loop over them; whatever is shifted, gathered, selected, scanned,
regrouped or the right operand of a product lives in shared memory, which any index may read.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3dsl.backends.tilelang.access import Access
from k3dsl.backends.tilelang.dots import DotPlan, operand, plan_dots
from k3dsl.backends.tilelang.pipelines import depths
from k3dsl.backends.tilelang.schedule import TileLangSchedule
from k3dsl.backends.tilelang.text import pow2
from k3dsl.backends.tilelang.uses import BUFFER_DEMANDS, SHAPE_OPS, Read, Uses, reads, unit_free
from k3dsl.ir.graph import Kernel, Op, Region, Value, walk
from k3dsl.ir.opset import BINARY, UNARY_FLOAT
from k3dsl.ir.scalars import uniform_constant
from k3dsl.passes.affine import IndexAnalysis
from k3dsl.targets import Target

PRODUCER_THREADS = 128
REGISTERS = {128: (24, 240), 256: (24, 240), 384: (24, 160)}
"""What a thread that copies gets and one that computes, by the threads that compute; TileLang's own for up to 256."""
SUMS = ("reduce", "scan", "argmax", "argmin")
CHEAP = 2
"""Folding a value into several loops repeats its work; this many simple operations are cheaper than a buffer."""


@dataclass(frozen=True)
class Home:
    """kind: 'inline', 'fragment', 'shared', 'both', or 'scalar' (of no tile). why: the reason, for people."""

    kind: str
    why: str = ""

    @property
    def fragment(self) -> bool:
        return self.kind in ("fragment", "both")

    @property
    def shared(self) -> bool:
        return self.kind in ("shared", "both")


class Placement:
    """The decisions for one kernel under one schedule and target.

    home: by id of a value. dots: by id of a product's op. pad: storage extent of tile axes whose length TileLang cannot
    reduce. hoisted: by id of a pipelined loop's op, the loads that its pipeline runs ahead. owner: by id of a value, the
    value whose buffer it is computed in.
    """

    def __init__(self, kernel: Kernel, schedule: TileLangSchedule, target: Target) -> None:
        self.kernel, self.schedule, self.target = kernel, schedule, target
        self.uses = Uses(kernel)
        self.analysis = IndexAnalysis(kernel)
        self.home: dict[int, Home] = {}
        self.inline: set[int] = set()
        self.dots: dict[int, DotPlan] = plan_dots(kernel, schedule, target)
        self.pad = _padding(kernel, schedule)
        self.depth, self.split = depths(kernel, schedule, target, self.analysis)
        self.hoisted: dict[int, list[Op]] = {}
        self.owner: dict[int, Value] = {}
        self._anchored: dict[int, bool] = {}
        self._region(kernel.body)
        for v in kernel.scalar_values:
            self.home[id(v)] = Home("scalar")
        self._share_buffers(kernel.body)

    # ---- questions ---------------------------------------------------------------------------------------------------

    def of(self, v: Value) -> Home:
        return self.home[id(v)]

    def reads(self, v: Value) -> list[Read]:
        return reads(v, self.uses, self.inline)

    def extent(self, n: int) -> int:
        """The storage extent of a tile axis of length n."""
        return self.pad.get(n, n)

    def stages(self, loop: Op) -> int:
        """Pipeline depth of a loop."""
        return self.depth[id(loop)]

    def pipelines(self) -> list[Op]:
        """The loops with a pipeline that has something to copy."""
        return [op for op in walk(self.kernel.body) if op.opcode == "loop" and self.hoisted.get(id(op))]

    def specialised(self) -> bool:
        """True when TileLang gives the kernel a warp group of its own for copies."""
        arch = self.target.arch
        if not self.schedule.warp_specialize or not isinstance(arch, int) or arch < 90:
            return False
        loads = [load for loop in self.pipelines() for load in self.hoisted[id(loop)]]
        return any(Access(o, self.kernel, self.analysis).uses_tma(self.target) for o in loads)

    def registers(self) -> tuple[int, int] | None:
        """Registers of a thread that copies and of one that computes, where those are divided and known."""
        schedule = self.schedule
        if not self.specialised():
            return None
        if schedule.producer_registers is not None and schedule.consumer_registers is not None:
            return schedule.producer_registers, schedule.consumer_registers
        return REGISTERS.get(schedule.threads)

    def anchored(self, v: Value) -> bool:
        """True when the value is laid out like a matrix product's accumulator."""
        known = self._anchored.get(id(v))
        if known is not None:
            return known
        self._anchored[id(v)] = False  # while a carry asks for itself
        found = False
        op = v.op
        if op is None:
            carry = self.uses.carry.get(id(v))
            if carry is not None:
                loop, k = carry
                found = self.anchored(loop.regions[0].yields[k]) or self.anchored(loop.operands[2 + k])
        elif op.opcode == "dot":
            found = self.dots[id(op)].matrix
        elif op.opcode == "loop":
            k = next(k for k, r in enumerate(op.results) if r is v)
            found = self.anchored(op.regions[0].args[1 + k])
        elif op.opcode not in ("load", "reduce", "scan", "select", "reshape", "unit_lower_inverse", "argmax", "argmin"):
            found = any(self.anchored(o) for o in op.operands if o.shape == v.shape or op.opcode == "permute")
        self._anchored[id(v)] = found
        return found

    # ---- decisions ---------------------------------------------------------------------------------------------------

    def _region(self, region: Region) -> None:
        for op in reversed(region.ops):
            if op.opcode not in ("reduce", "scan"):
                for inner in op.regions:
                    self._region(inner)
                    for v in inner.args:
                        self._set(v, self._carry(v) if v.shape else Home("scalar"))
            for v in op.results:
                self._set(v, self._place(op, v, region) if v.shape else self._scalar(op))
            if op.opcode == "loop" and self.stages(op) > 1:
                self.hoisted[id(op)] = [o for o in op.regions[0].ops if self._runs_ahead(o, op.regions[0])]

    def _set(self, v: Value, home: Home) -> None:
        self.home[id(v)] = home
        if home.kind == "inline":
            self.inline.add(id(v))

    def _scalar(self, op: Op) -> Home:
        if op.opcode in ("reduce", "argmax", "argmin"):
            one = op.opcode == "reduce" and op.attrs.get("kind") not in (None, "prod")
            return Home("both" if one else "shared", "one number for the whole program")
        return Home("scalar")

    def _carry(self, v: Value) -> Home:
        shared = self._wants_shared(v, self.reads(v))
        return Home("both", f"carried, and {shared}") if shared else Home("fragment", "carried by a loop")

    def _place(self, op: Op, v: Value, region: Region) -> Home:
        found = self.reads(v)
        demands = [r for r in found if r.kind in BUFFER_DEMANDS]
        if op.opcode == "load":
            return self._load(op, v, region, found)
        if op.opcode == "loop":
            return self._result(v, found, "carried by a loop")
        if op.opcode == "dot":
            return self._result(v, found, "accumulator of a product")
        if op.opcode in ("reduce", "argmax", "argmin"):
            return self._reduced(op, v, found)
        if op.opcode in ("scan", "unit_lower_inverse"):
            return Home("shared", f"{op.opcode} exchanges elements between threads")
        if demands:
            if all(r.transposed for r in demands) and op.opcode == "permute" and _swap_only(op, demands, found):
                return Home("inline", "a transposed operand")
            if op.opcode == "permute" and tuple(op.attrs["axes"]) == (1, 0):
                return Home("inline", "a transposed operand")
            shared = self._wants_shared(v, found)
            if not shared:
                for r in demands:
                    self.dots[id(r.op)].a_fragment = True
                return Home("fragment", "left operand, in the accumulator's layout")
            return Home("shared", shared)
        return self._elementwise(op, v, region, found)

    def _result(self, v: Value, found: list[Read], why: str) -> Home:
        shared = self._wants_shared(v, found)
        return Home("both", f"{why}, and {shared}") if shared else Home("fragment", why)

    def _wants_shared(self, v: Value, found: list[Read]) -> str:
        """Why the value must (also) be in shared memory, or ''."""
        for r in found:
            if r.kind == "dot_b":
                return "right operand of a product"
            if r.kind == "dot_a":
                plan = self.dots[id(r.op)]
                if not plan.matrix:
                    return "operand of multiply-adds"
                if r.transposed:
                    return "left operand, transposed"
                if not self._fits_registers(v):
                    return "left operand of a product"
            elif not r.exact:
                return "read at other places than it is made"
        return ""

    def _fits_registers(self, v: Value) -> bool:
        """True when v can be a left operand without going through shared memory: made in the accumulator's layout, 16
        bits wide, and each row within one warp."""
        if v.dtype.bits != 16 or not self.anchored(v) or v.op is None or v.op.opcode in SHAPE_OPS:
            return False
        rows = {p.op.result.shape[0] for p in self.dots.values() if p.matrix}
        return all(p.policy == "row" and p.warps[1] == 1 for p in self.dots.values() if p.matrix) and len(rows) == 1

    def _load(self, op: Op, v: Value, region: Region, found: list[Read]) -> Home:
        access = Access(op, self.kernel, self.analysis)
        patched = self.split is not None and region is self.split.regions[0]
        ahead = self._pipelined(region) and access.copy_reason(self.target, clipping=True, patched=patched) is None
        if any(r.kind in BUFFER_DEMANDS for r in found):
            return Home("shared", "operand of a product")
        written = access.tensor.role != "in"
        if ahead and found and not written:
            return Home("shared", "read ahead by the pipeline")
        inner = any(r.region is not region for r in found)
        if len(found) <= 1 and not inner and not written:
            return Home("inline", "read once")
        flat = len(unit_free(v.shape)) < 2
        if flat or any(not r.exact for r in found):
            return Home(
                "shared", "a vector read by several loops" if flat else "read at other places than it is loaded"
            )
        return Home("fragment", "read by several loops")

    def _reduced(self, op: Op, v: Value, found: list[Read]) -> Home:
        if op.opcode != "reduce" or op.attrs.get("kind") in (None, "prod"):
            return Home("shared", "reduced one element after the other")
        source = op.operands[0]
        last = max((k for k, n in enumerate(source.shape) if n != 1), default=0)
        if len(unit_free(v.shape)) < 2 and op.attrs["axis"] != last and len(unit_free(source.shape)) > 1:
            return Home("shared", "one number a column, which every row reads")
        if self._between_layouts(v, found):
            return Home("shared", "one number a row, for tiles laid out in another way")
        return self._result(v, found, "reduced")

    def _elementwise(self, op: Op, v: Value, region: Region, found: list[Read]) -> Home:
        inner = any(r.region is not region for r in found)
        if op.opcode in SHAPE_OPS:
            return Home("inline", "a way to index its operand")
        if uniform_constant(v) is not None:
            return Home("inline", "a constant")
        if len(found) <= 1 and not inner:
            return Home("inline", "read once")
        if self._cost(v) <= CHEAP:
            return Home("inline", "cheaper to compute again than to keep")
        if all(not r.exact for r in found):
            return Home("shared", "read at other places than it is made")
        flat = len(unit_free(v.shape)) < 2
        if flat and not self._row_made(v):
            return Home("shared", "a vector that any thread may read")
        if flat and self._between_layouts(v, found):
            return Home("shared", "one number a row, for tiles laid out in another way")
        return self._result(v, found, "computed once for several loops")

    def _row_made(self, v: Value) -> bool:
        """True when a vector has one number a row of some tile, so that its layout follows that tile's."""
        op = v.op
        if op is None:
            carry = self.uses.carry.get(id(v))
            return carry is not None
        if op.opcode in ("reduce", "argmax", "argmin", "loop"):
            return True
        return any(self._row_made(o) for o in op.operands if o.shape)

    def _between_layouts(self, v: Value, found: list[Read]) -> bool:
        """True for one number a row that is also read as one a column, or that goes from a tile in an accumulator's layout to
        one in another, or the other way: a fragment of it would have to be in both."""
        if self._is_line(v):
            return True
        made = self._rows_anchored(v, set())
        tiles = [t for t in map(_looped_over, found) if t is not None and len(unit_free(t.shape)) > 1]
        return bool(made) and any(self.anchored(t) not in made for t in tiles)

    def _is_line(self, v: Value) -> bool:
        """True when some tile has the elements of a vector along its last axis."""
        for use in self.uses.uses(v):
            op = use.op
            if use.kind != "operand" or op.opcode in ("loop", "dot") or len(op.results) != 1 or op.opcode in SUMS:
                continue
            flat = len(unit_free(op.result.shape)) < 2
            if flat and op.result.shape and self.home[id(op.result)].kind == "inline":
                if self._is_line(op.result):
                    return True
            elif not flat and v.shape and v.shape[-1] != 1 and op.opcode != "reshape":
                return True
        return False

    def _rows_anchored(self, v: Value, seen: set[int]) -> set[bool]:
        """Whether the tiles that a vector has one number a row of are in an accumulator's layout: one answer a tile."""
        if id(v) in seen:
            return set()
        seen.add(id(v))
        if v.op is None:
            loop, k = self.uses.carry[id(v)]
            sources = [loop.operands[2 + k], loop.regions[0].yields[k]]
        elif v.op.opcode == "loop":
            k = next(k for k, r in enumerate(v.op.results) if r is v)
            sources = [v.op.operands[2 + k], v.op.regions[0].yields[k]]
        else:
            sources = [o for o in v.op.operands if o.shape]
        if v.op is not None and v.op.opcode in ("reduce", "argmax", "argmin"):
            return {self.anchored(o) for o in sources}
        return {found for o in sources for found in self._rows_anchored(o, seen)}

    def _cost(self, v: Value) -> int:
        """Simple operations to compute one element again."""
        op = v.op
        if op is None or not v.shape:
            return 0
        if id(v) in self.home and self.home[id(v)].kind != "inline":
            return 0
        if op.opcode == "load":
            return 0 if self._load_is_kept(op, v) else 8
        if op.opcode in ("dot", "reduce", "scan", "loop", "argmax", "argmin", "unit_lower_inverse"):
            return 0
        if op.opcode in SHAPE_OPS:
            own = 0
        elif op.opcode in UNARY_FLOAT or op.opcode == "dequantize_mxfp4":
            own = 8
        elif op.opcode == "cast":
            own = 0 if v.dtype.bits >= op.operands[0].dtype.bits else 1
        else:
            own = 2 if op.opcode in ("div", "floordiv", "mod") or (op.opcode in BINARY and not v.dtype.is_float) else 1
        return own + sum(self._cost(o) for o in op.operands)

    def _load_is_kept(self, op: Op, v: Value) -> bool:
        region = self.uses.home[id(op)]
        before = set(self.inline)
        kept = self._load(op, v, region, reads(v, self.uses, before)).kind != "inline"
        return kept or len(self.uses.uses(v)) > 1

    # ---- pipelines ---------------------------------------------------------------------------------------------------

    def _pipelined(self, region: Region) -> bool:
        op = self.uses.parent.get(id(region))
        return op is not None and op.opcode == "loop" and self.stages(op) > 1

    def _runs_ahead(self, op: Op, body: Region) -> bool:
        """True for a load into shared memory whose address is known when the step begins."""
        if op.opcode != "load" or self.home[id(op.result)].kind != "shared":
            return False
        if self.kernel.tensor(op.attrs["tensor"]).role != "in":
            return False
        return all(self._known_at_start(v, body) for v in op.operands)

    def runs_ahead(self, op: Op) -> bool:
        """True for a load that a pipeline runs ahead."""
        return any(op is o for loads in self.hoisted.values() for o in loads)

    def patched(self, op: Op) -> bool:
        """True for a load that runs ahead and may read past its span's end, which is to be made good."""
        if not self.runs_ahead(op) or self.split is None or self.uses.home[id(op)] is not self.split.regions[0]:
            return False
        access = Access(op, self.kernel, self.analysis)
        copied = access.copy_reason(self.target, clipping=True, patched=True) is None
        return copied and access.copy_reason(self.target, clipping=True) is not None

    def patched_in_place(self, op: Op) -> bool:
        """True when a patched load's tile itself must hold the right numbers: a product reads it."""
        return self.patched(op) and any(r.kind in BUFFER_DEMANDS for r in self.reads(op.result))

    def overlaps(self, loop: Op) -> bool:
        """True when a step's products are issued before they are waited for: all are wgmma, on registers and on tiles that
        the step does not write, and the tiles that the pipeline refills are given back at the step's end."""
        plans = [self.dots[id(op)] for op in walk(loop.regions[0]) if op.opcode == "dot"]
        if not self.schedule.overlap or loop is not self.split or any(p.form != "wgmma" for p in plans):
            return False
        shared = [v for p in plans for v in ([p.b] if p.a_fragment else [p.a, p.b])]
        inside = [v.op for v in shared if self.uses.region_of[id(v)] is loop.regions[0]]
        return all(op is not None and self.runs_ahead(op) for op in inside)

    def reads_may_be_under_way(self, loop: Op) -> bool:
        """True when threads' own reads of the tiles that a warp group of its own refills may be unfinished at a step's end.

        Giving a tile back does not wait for them, and the refill is not ordered after them: those with conflicts, or behind
        such, would see the next step's numbers. wgmma is waited for, and so is what a wgmma of the step takes from registers.
        """
        if loop is not self.split:
            return False
        body = loop.regions[0]
        for load in self.hoisted.get(id(loop), []):
            for read in self.reads(load.result):
                plan = self.dots.get(id(read.op))
                by_wgmma = read.kind in BUFFER_DEMANDS and plan is not None and plan.form == "wgmma"
                if not by_wgmma and not (read.region is body and self._feeds_wgmma(read.op, body, set())):
                    return True
        return False

    def _feeds_wgmma(self, op: Op, body: Region, seen: set[int]) -> bool:
        """True when a wgmma of the loop's body takes, directly or through other ops of the body, what op computes."""
        if id(op) in seen or self.uses.home[id(op)] is not body:
            return False
        seen.add(id(op))
        plan = self.dots.get(id(op))
        if plan is not None and plan.form == "wgmma":
            return True
        users = [u.op for v in op.results for u in self.uses.uses(v) if u.kind == "operand" and u.region is body]
        return any(self._feeds_wgmma(user, body, seen) for user in users)

    def _known_at_start(self, v: Value, body: Region) -> bool:
        if self.uses.region_of.get(id(v)) is not body:
            return True
        if any(v is a for a in body.args):
            return v is body.args[0]
        op = v.op
        assert op is not None
        if v.shape or op.regions or op.opcode in ("reduce", "argmax", "argmin"):
            return self.home[id(v)].kind == "inline" and op.opcode != "load" and self._operands_known(op, body)
        if op.opcode == "load" and self.kernel.tensor(op.attrs["tensor"]).role != "in":
            return False
        return self._operands_known(op, body)

    def _operands_known(self, op: Op, body: Region) -> bool:
        return all(self._known_at_start(o, body) for o in op.operands)

    # ---- buffers in common -------------------------------------------------------------------------------------------

    def buffer(self, v: Value) -> Value:
        """The value whose buffer holds v."""
        while id(v) in self.owner:
            v = self.owner[id(v)]
        return v

    def _share_buffers(self, region: Region) -> None:
        """Products accumulate where their accumulator already is, if nothing reads the old value later."""
        for op in region.ops:
            if op.opcode == "dot" and len(op.operands) == 3:
                acc = op.operands[2]
                only = self.uses.uses(acc)
                chained = len(only) == 1 and acc.op is not None and acc.op.opcode == "dot"
                if chained and acc.op is not None and self.uses.home[id(acc.op)] is region:
                    self.owner[id(op.result)] = acc
            if op.opcode in ("reduce", "scan"):
                continue
            for inner in op.regions:
                self._share_buffers(inner)
            if op.opcode == "loop":
                self._share_carries(op)

    def _share_carries(self, loop: Op) -> None:
        body = loop.regions[0]
        for arg, new, init, result in zip(body.args[1:], body.yields, loop.operands[2:], loop.results, strict=True):
            if not arg.shape:
                continue
            self.owner[id(result)] = arg
            op = init.op
            reused = op is not None and op.opcode in ("loop", "dot") and len(self.reads(init)) == 1
            reused = reused and len(self.uses.uses(init)) == 1 and self.home[id(arg)].kind == self.home[id(init)].kind
            if reused and self.uses.region_of[id(init)] is self.uses.home[id(loop)]:
                self.owner[id(arg)] = init
            first = self._first_of_chain(new, body)
            if first is not None and self._old_is_done(arg, first, body):
                self.owner[id(self.buffer(new))] = arg

    def _first_of_chain(self, new: Value, body: Region) -> Op | None:
        """The first product of the chain that ends in `new`, if it stands in the loop's body and is only yielded."""
        if new.op is None or new.op.opcode != "dot" or self.uses.home[id(new.op)] is not body:
            return None
        if sum(u.kind == "yield" for u in self.uses.uses(new)) != 1:
            return None
        root = self.buffer(new)
        return root.op if root.op is not None and root.op.opcode == "dot" else None

    def _old_is_done(self, arg: Value, first: Op, body: Region) -> bool:
        """True when the carried value is last read, in place, by the start of the chain's accumulator."""
        start = self.uses.place[id(first)]
        for read in self.reads(arg):
            if read.kind == "yield":
                return False
            if read.op is first and read.kind == "acc" and read.exact:
                continue
            at = self.uses.outermost(read.op, body)
            if at is None or at >= start:
                return False
        return True


def _swap_only(op: Op, demands: list[Read], found: list[Read]) -> bool:
    return len(demands) == len(found) and op.opcode == "permute"


def _looped_over(read: Read) -> Value | None:
    """The tile over whose elements the code of a read goes, if it is another than what is read."""
    op = read.op
    if op.opcode in ("store", "atomic_add"):
        return op.operands[op.attrs["value_slot"]]
    if op.opcode in ("loop", "when"):
        return None
    return op.operands[0] if op.opcode in ("reduce", "scan", "argmax", "argmin") else op.result


def _padding(kernel: Kernel, schedule: TileLangSchedule) -> dict[int, int]:
    """Storage extents for the axes that are reduced: TileLang reduces powers of two, and multiples of what the threads
    read at once."""
    pad: dict[int, int] = {}
    for op in walk(kernel.body):
        if op.opcode == "reduce" and op.attrs.get("kind") is not None:
            n = op.operands[0].shape[op.attrs["axis"]]
            if n > 1 and pow2(n) != n and n % (schedule.threads * 8):
                pad[n] = max(32, pow2(n))
    return pad


__all__ = ["Home", "Placement", "operand"]
