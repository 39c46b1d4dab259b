"""Turns the tape of one launch into a script: a flat list of calls, with everything resolved that a layout decides.

A script does what the machine does with the tape, for less: loops whose trip count is fixed are unrolled, values lie in
numbered slots, and an access that was located is one or two views of its tensor. What depends on data is located and
checked in every launch (see k3dsl.backends.torch.moving), and where data decide what a region runs for, each outcome has a
script of its own.
Scripts are for small launches on the CPU, whose cost is the interpreter's; they keep every value until they end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from k3dsl.backends.torch.access import Access, Box, Elements, Located, Windows, box_of
from k3dsl.backends.torch.batch import Batch, host, take
from k3dsl.backends.torch.combine import combined_reduce, combined_scan
from k3dsl.backends.torch.elementwise import DIVISIONS, ELEMENTWISE
from k3dsl.backends.torch.fixed import Branch, Tape
from k3dsl.backends.torch.moving import Moving
from k3dsl.backends.torch.places import Gathered, Places
from k3dsl.backends.torch.plan import RegionPlan, Step
from k3dsl.ir.graph import Op, Value

if TYPE_CHECKING:
    from k3dsl.backends.torch.machine import Machine
    from k3dsl.backends.torch.memory import Memory

MAX_CALLS = 4096
MAX_BYTES = 32 * 2**20
"""What the values of a script may hold together, about."""
SMALL_BYTES = 4 * 2**20
"""What they hold together at most where one thread computes them."""
_HELD_BYTES = 8

Slots = list[Any]
"""The launch, then the values of one run of a script."""
Call = Callable[[Slots], None]


class Launch:
    """The tensors of one launch by parameter. machine: for what a script leaves to it, made when it is first asked for."""

    def __init__(self, tensors: Mapping[str, Tensor | None], make: Callable[[], Machine]) -> None:
        self.tensors, self._make = tensors, make

    @cached_property
    def machine(self) -> Machine:
        return self._make()

    def memory(self) -> Memory:
        return self.machine.memory


class Script:
    """Calls on slots. template: the slots with what is the same in every launch filled in. tensors: where the tensors of a
    name go, each followed by its storage offset. inputs, outputs: the slots of what the script takes and gives. small: whether
    one thread is to run it."""

    def __init__(
        self,
        calls: list[Call],
        template: Slots,
        tensors: dict[str, int],
        inputs: list[int],
        outputs: list[int],
        small: bool,
    ) -> None:
        self.calls, self.template, self.tensors = calls, template, list(tensors.items())
        self.inputs, self.outputs, self.small = inputs, outputs, small

    def run(self, launch: Launch, inputs: Collection[Tensor]) -> list[Tensor]:
        """Runs the calls on a launch's tensors."""
        slots = self.template.copy()
        slots[0] = launch
        bound = launch.tensors
        for name, slot in self.tensors:
            slots[slot] = tensor = bound[name]
            assert tensor is not None
            slots[slot + 1] = tensor.storage_offset()
        for slot, x in zip(self.inputs, inputs, strict=True):
            slots[slot] = x
        for call in self.calls:
            call(slots)
        return [slots[n] for n in self.outputs]


class _TooLargeError(Exception):
    """The launch is better left to the machine."""


def launch_script(machine: Machine, body: RegionPlan, tape: Tape, batch: Batch) -> Script | None:
    """The script of a slab, which takes the kernel's scalars. None: leave it to the machine."""
    takes = machine.binding.kernel.scalar_values
    return _built(machine, tape, list(takes), [None] * len(takes), lambda b: b.region(body, batch))


def _built(
    machine: Machine, tape: Tape, takes: list[Value], known: list[Any], emit: Callable[[_Builder], list[int]]
) -> Script | None:
    """known: what the script takes and is the same in every launch; None for what is not."""
    builder = _Builder(machine, tape)
    inputs = [builder.slot(x) for x in known]
    builder.names.update(zip(takes, inputs, strict=True))
    try:
        outputs = emit(builder)
    except _TooLargeError:
        return None
    small = builder.nbytes <= SMALL_BYTES
    return Script(builder.calls, builder.template, builder.tensors, inputs, outputs, small)


class _Builder:
    """Walks a region as the machine does in a launch that reads the tape, and writes down the calls."""

    def __init__(self, machine: Machine, tape: Tape) -> None:
        self.machine = machine
        self.next = iter(tape.items).__next__
        self.calls: list[Call] = []
        self.template: Slots = [None]
        self.tensors: dict[str, int] = {}
        self.names: dict[Value, int] = {}
        self.thin: dict[int, tuple[int, Call, int]] = {}
        self.nbytes = 0

    def slot(self, content: Any = None) -> int:
        self.template.append(content)
        return len(self.template) - 1

    def add(self, call: Call, made: int = 0) -> None:
        """Adds a call that makes so many elements."""
        self.calls.append(call)
        self.nbytes += made * _HELD_BYTES
        if len(self.calls) > MAX_CALLS or self.nbytes > MAX_BYTES:
            raise _TooLargeError

    def results(self, step: Step) -> list[int]:
        slots = [self.slot() for _ in step.op.results]
        self.names.update(zip(step.op.results, slots, strict=True))
        return slots

    def region(self, region: RegionPlan, batch: Batch) -> list[int]:
        """Adds the calls of a region; returns the slots of what it yields."""
        for step in region.again:
            opcode = step.op.opcode
            if step.fixed:
                self.names[step.op.result] = self.slot(self.next())
            elif opcode == "broadcast":
                self.broadcast(step, batch)
            elif step.compute is not None:
                operands = self.operands(step)
                compute = self.divided(opcode, operands[-1]) or step.compute
                self.add(_computed(compute, operands, *self.results(step)), step.op.result.type.size * batch.size)
            elif opcode == "load":
                self.load(step, batch)
            elif opcode in ("store", "atomic_add"):
                self.write(step, batch)
            elif opcode == "loop":
                self.loop(step, batch)
            elif opcode == "when":
                self.when(step, batch)
            elif opcode in ("reduce", "scan"):
                self.combine(step, batch)
            elif opcode == "assume":
                x = self.names[step.op.result] = self.at(step.op.operands[0])
                self.add(_assumed(step, x, batch))
            else:
                raise _TooLargeError
        return self.slots_of(region.region.yields)

    def broadcast(self, step: Step, batch: Batch) -> None:
        """A value that elementwise ops take as it is, beside a whole tile; it is expanded when something else takes it."""
        assert step.compute is not None
        (source,), (out,) = step.op.operands, self.results(step)
        thin = self.at(source)
        if source.type.rank == 0 and batch.size > 1:
            shape = (-1, *(1,) * step.op.result.type.rank)
            thin, scalar = self.slot(), thin
            self.add(_computed(lambda x: x.reshape(shape), [scalar], thin))
        self.thin[out] = thin, _computed(step.compute, [self.names[source]], out), step.op.result.type.size * batch.size

    def operands(self, step: Step) -> list[int]:
        """The slots of a pure op's operands."""
        slots = [self.names[v] for v in step.op.operands]
        whole = any(n not in self.thin for n in slots)
        if whole and len(slots) > 1 and step.op.opcode in ELEMENTWISE:
            return [self.thin[n][0] if n in self.thin else n for n in slots]
        return self.slots_of(step.op.operands)

    def at(self, v: Value) -> int:
        """The slot of a whole value."""
        slot = self.names[v]
        if slot in self.thin:
            _, expand, size = self.thin.pop(slot)
            self.add(expand, size)
        return slot

    def divided(self, opcode: str, divisor: int) -> Callable[..., Tensor] | None:
        """An integer division by what is known not to be 0."""
        known = self.template[divisor] if opcode in DIVISIONS else None
        return None if known is None or bool((known == 0).any()) else DIVISIONS[opcode]

    # Memory operations.

    def load(self, step: Step, batch: Batch) -> None:
        op, (out,) = step.op, self.results(step)
        if step.located:
            located = self.next()
            call = self.located_load(located, out)
            if call is None:

                def call(s: Slots) -> None:
                    s[out] = s[0].machine.memory.load(located)
        else:
            operands, moving = self.slots_of(op.operands), self.moving(op, batch)
            t = 0 if moving is None else self.tensor(moving.access.name)

            def call(s: Slots) -> None:
                xs = [s[n] for n in operands]
                x = None if moving is None else moving.load(xs, s[t], s[t + 1])
                if x is None:
                    memory = s[0].machine.memory
                    x = memory.load(memory.locate_load(op, xs, batch))
                s[out] = x

        self.add(call, op.result.type.size * batch.size)

    def write(self, step: Step, batch: Batch) -> None:
        op = step.op
        value = self.at(op.operands[op.attrs["value_slot"]])
        if step.located:
            located = self.next()
            call = self.located_store(located, value)
            if call is None:

                def call(s: Slots) -> None:
                    s[0].machine.memory.write(located, s[value])
        else:
            operands, moving = self.slots_of(op.operands), self.moving(op, batch)
            t = 0 if moving is None else self.tensor(moving.access.name)

            def call(s: Slots) -> None:
                xs, launch = [s[n] for n in operands], s[0]
                if moving is None or not moving.store(xs, s[value], s[t], s[t + 1], launch.memory):
                    memory = launch.memory()
                    memory.write(memory.locate_write(op, xs, batch), s[value])

        self.add(call)

    def moving(self, op: Op, batch: Batch) -> Moving | None:
        """What locates an access anew in every launch where it is small and plain; None leaves it to the memory."""
        memory = self.machine.memory
        access, tensor = memory.access_of(op), self.machine.binding.tensors[op.attrs["tensor"]]
        looked_at = op.opcode == "load" and not tensor.frozen and memory.looks_at(access)
        return None if looked_at else Moving.of(access, tensor, memory, batch)

    def tensor(self, name: str) -> int:
        """The slot of a tensor; its storage offset is in the next one."""
        if name not in self.tensors:
            self.tensors[name] = self.slot()
            self.slot()
        return self.tensors[name]

    def part(self, located: Located) -> Windows | Elements | None:
        """What an access is when it is nothing but one set of points in which no conflicts are looked for."""
        part, *others = located.parts
        tensor = self.machine.binding.tensors[located.access.name]
        if others or part.where is None or part.rows is not None or tensor.as_bytes:
            return None
        return None if self.machine.memory.looks_at(located.access) else part

    def views(self, access: Access, where: Places) -> Callable[[Slots], Tensor]:
        """Of points a step apart: the tile itself. Of gathered points: every window that fits, see Gathered."""
        w, t = where.window, self.tensor(access.name)
        if isinstance(where, Gathered):
            shape, strides = (
                (self.machine.binding.tensors[access.name].span - w.last, *w.merged_shape),
                (1, *w.merged_strides),
            )
            offset = 0
        else:
            shape, strides, offset = (where.count, *w.shape), (where.step, *w.strides), where.offset
        return lambda s: s[t].as_strided(shape, strides, s[t + 1] + offset)

    def box_views(self, access: Access, box: Box) -> Callable[[Slots], Tensor]:
        t = self.tensor(access.name)
        shape, strides, offset = box.shape, box.strides, box.offset
        return lambda s: s[t].as_strided(shape, strides, s[t + 1] + offset)

    def located_load(self, located: Located, out: int) -> Call | None:
        part, access, other = self.part(located), located.access, located.other
        if part is None:
            return None
        assert part.where is not None
        assert other is not None
        tensor = self.machine.binding.tensors[access.name]
        held, where = self.machine.numerics.held(tensor.param.dtype), part.where
        views, points = self.views(access, where), where.points if isinstance(where, Gathered) else None
        converted = None if held == tensor.data.dtype else held
        own = points is None and not tensor.frozen and converted is None  # a view that the launch may write under
        steps: list[Callable[[Tensor], Tensor]] = []
        if points is not None:
            steps.append(lambda x: x.index_select(0, points))
        if converted is not None:
            steps.append(lambda x: x.to(converted))
        if own:
            steps.append(torch.clone)
        box = box_of(part) if isinstance(part, Elements) else None
        if box is not None and isinstance(part, Elements):
            views, steps = self.box_views(access, box), []
            if converted is not None:
                steps.append(lambda x: x.to(converted))
            pad, whole, fill = box.pad, part.shape, other.item()
            steps.append(lambda x: torch.constant_pad_nd(x, pad, fill).contiguous().view(whole))
        elif isinstance(part, Elements):
            at, tile, merged = part.at, part.shape, where.window.merged_shape
            blank = other.expand(tile).clone(memory_format=torch.contiguous_format).view(-1, *merged)
            steps.append(lambda x: blank.index_copy(0, at, x).view(tile))
        else:
            shape, valid = (-1, *access.joint, *where.window.shape), part.valid
            if access.joint or (points is not None and where.window.merged_shape != where.window.shape):
                steps.append(lambda x: x.reshape(shape))
            if valid is not None:
                steps.append(lambda x: torch.where(valid, x, other))
        if access.to_tile is not None:
            axes = access.to_tile
            steps.append(lambda x: x.permute(axes))
        return _chain(views, steps, out)

    def located_store(self, located: Located, value: int) -> Call | None:
        part, access = self.part(located), located.access
        if part is None or access.op.opcode != "store":
            return None
        assert part.where is not None
        where, size, window = part.where, part.size, part.where.window
        views = self.views(access, where)
        if not isinstance(where, Gathered):
            if access.joint:
                return None

            def copy(s: Slots) -> None:
                views(s).copy_(s[value])

            return copy
        box = box_of(part) if isinstance(part, Elements) else None
        if box is not None:
            target, lead, inner, slices = self.box_views(access, box), box.lead, window.shape, box.slices

            def place(s: Slots) -> None:
                x = access.canonical(s[value])
                if x.shape[0] != size:
                    x = x.expand(size, *x.shape[1:])
                target(s).copy_(x.reshape(*lead, *inner)[slices])

            return place
        points, merged = where.points, window.merged_shape
        dtype = self.machine.binding.tensors[access.name].data.dtype
        at = part.at if isinstance(part, Elements) else None

        def scatter(s: Slots) -> None:
            x = access.canonical(s[value])
            x = x.expand(size, *x.shape[1:]).reshape(-1, *merged)
            if at is not None:
                x = x.index_select(0, at)
            views(s).index_copy_(0, points, x.to(dtype))

        return scatter

    # Control.

    def when(self, step: Step, batch: Batch) -> None:
        if step.located:
            self.region_for(step, batch, self.next(), step.free_again)
            return
        condition = self.at(step.op.operands[0])

        def decide(s: Slots) -> tuple[Hashable, Any]:
            if all(s[condition].tolist()):
                return None, None
            holds = host(s[condition]) != 0
            active = np.flatnonzero(holds)
            return active.tobytes(), active

        def emit(builder: _Builder, active: np.ndarray | None) -> list[int]:
            builder.region_for(step, batch, active, step.free)
            return []

        def interpret(machine: Machine, env: dict[Value, Tensor], active: np.ndarray | None) -> list[Tensor]:
            machine.run_for(step, env, batch, active)
            return []

        self.add(self.branch(step.free, [], decide, emit, interpret))

    def region_for(self, step: Step, batch: Batch, active: np.ndarray | None, free: list[Value]) -> None:
        """Adds a region for some programs of the batch, None for all of them."""
        if active is None:
            self.region(step.regions[0], batch)
        elif active.size:
            self.slots_of(free)
            outside, self.names = self.names, {}
            index = torch.from_numpy(active)
            for v in free:
                known = self.template[outside[v]]
                self.names[v] = self.slot(None if known is None else take(known, active))
                if known is None:
                    self.add(_taken(outside[v], index, self.names[v]), v.type.size * batch.size)
            self.region(step.regions[0], batch.subset(active))
            self.names = outside

    def loop(self, step: Step, batch: Batch) -> None:
        operands = step.op.operands
        if step.located:
            start, trips = self.next()
            carries = self.turns(step, batch, start, trips, self.slots_of(operands[2:]))
            self.names.update(zip(step.op.results, carries, strict=True))
            return
        first, last = self.slots_of(operands[:2])
        carried = self.slots_of(operands[2:])
        takes = list(dict.fromkeys([*step.free, *operands[2:]]))

        def decide(s: Slots) -> tuple[Hashable, Any]:
            start, stop = host(s[first]), host(s[last])
            trips = np.maximum(0, -(-(stop - start) // step.op.attrs["step"]))
            return (start.tobytes(), trips.tobytes()), (start, trips)

        def emit(builder: _Builder, bounds: tuple[np.ndarray, np.ndarray]) -> list[int]:
            return builder.turns(step, batch, *bounds, builder.slots_of(operands[2:]))

        def interpret(
            machine: Machine, env: dict[Value, Tensor], bounds: tuple[np.ndarray, np.ndarray]
        ) -> list[Tensor]:
            return machine.turns(step, env, batch, *bounds, [env[v] for v in operands[2:]])

        assert len(carried) == len(step.op.results)
        self.add(self.branch(takes, self.results(step), decide, emit, interpret))

    def branch(
        self,
        takes: list[Value],
        outs: list[int],
        decide: Callable[[Slots], tuple[Hashable, Any]],
        emit: Callable[[_Builder, Any], list[int]],
        interpret: Callable[[Machine, dict[Value, Tensor], Any], list[Tensor]],
    ) -> Call:
        """A region whose control data decide: by the script of the outcome, which is made from its tape once there is one."""
        branch: Branch = self.next()
        slots = self.slots_of(takes)
        known = [self.template[n] for n in slots]
        scripts: dict[Hashable, Script | None] = {}

        def call(s: Slots) -> None:
            launch: Launch = s[0]
            outcome, control = decide(s)
            script = scripts.get(outcome)
            if script is None and outcome not in scripts:
                tape = branch.tapes.get(outcome)
                if tape is not None:
                    script = scripts[outcome] = _built(launch.machine, tape, takes, known, lambda b: emit(b, control))
            if script is not None:
                found = script.run(launch, [s[n] for n in slots])
            else:
                env, machine = {v: s[n] for v, n in zip(takes, slots, strict=True)}, launch.machine
                found = machine.enter(branch, outcome, lambda: interpret(machine, env, control))
            for n, x in zip(outs, found, strict=True):
                s[n] = x

        return call

    def slots_of(self, values: list[Value] | tuple[Value, ...]) -> list[int]:
        return [self.at(v) for v in values]

    def turns(self, step: Step, batch: Batch, start: np.ndarray, trips: np.ndarray, carries: list[int]) -> list[int]:
        """Adds all iterations of a loop whose programs have equally many; returns the slots of what it gives."""
        if (trips != trips[0]).any():
            raise _TooLargeError
        body, count = step.regions[0], int(trips[0])
        stride, reverse = step.op.attrs["step"], step.op.attrs.get("reverse")
        for k in range(count):
            if body.takes_index:
                index = start + (count - 1 - k if reverse else k) * stride
                self.names[body.region.args[0]] = self.slot(torch.from_numpy(index.astype(np.int32)))
            self.names.update(zip(body.region.args[1:], carries, strict=True))
            carries = self.region(body, batch)
        return carries

    def combine(self, step: Step, batch: Batch) -> None:
        """A reduction or scan by a combine region, which the machine runs."""
        operands, free = self.slots_of(step.op.operands), [(v, self.at(v)) for v in step.free]
        outs = self.results(step)
        f = combined_reduce if step.op.opcode == "reduce" else combined_scan

        def call(s: Slots) -> None:
            found = f(s[0].machine, step, [s[n] for n in operands], {v: s[n] for v, n in free}, batch)
            for n, x in zip(outs, found, strict=True):
                s[n] = x

        self.add(call, sum(v.type.size for v in step.op.results) * batch.size)


def _computed(f: Callable[..., Tensor], operands: list[int], out: int) -> Call:
    if len(operands) == 1:
        (a,) = operands

        def one(s: Slots) -> None:
            s[out] = f(s[a])

        return one
    if len(operands) == 2:
        a, b = operands

        def two(s: Slots) -> None:
            s[out] = f(s[a], s[b])

        return two
    if len(operands) == 3:
        a, b, c = operands

        def three(s: Slots) -> None:
            s[out] = f(s[a], s[b], s[c])

        return three

    def more(s: Slots) -> None:
        s[out] = f(*[s[n] for n in operands])

    return more


def _chain(first: Callable[[Slots], Tensor], steps: list[Callable[[Tensor], Tensor]], out: int) -> Call:
    """Applies one after the other to what `first` gives."""
    if not steps:

        def none(s: Slots) -> None:
            s[out] = first(s)

        return none
    if len(steps) == 1:
        (f,) = steps

        def one(s: Slots) -> None:
            s[out] = f(first(s))

        return one

    def more(s: Slots) -> None:
        x = first(s)
        for f in steps:
            x = f(x)
        s[out] = x

    return more


def _assumed(step: Step, x: int, batch: Batch) -> Call:
    def call(s: Slots) -> None:
        s[0].machine.check_assumed(step.op, s[x], batch)

    return call


def _taken(x: int, index: Tensor, out: int) -> Call:
    def call(s: Slots) -> None:
        value = s[x]
        s[out] = value if value.shape[0] == 1 else value.index_select(0, index)

    return call
