"""Evaluates a kernel on torch tensors: the entry point of this backend."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch

from k3dsl.backends.torch.access import Access
from k3dsl.backends.torch.batch import Batch
from k3dsl.backends.torch.binding import Binding, bind, layout_of, rebind, without_data
from k3dsl.backends.torch.dtypes import Numerics
from k3dsl.backends.torch.elementwise import ELEMENTWISE, Compute
from k3dsl.backends.torch.fixed import Budget, Tape, mark
from k3dsl.backends.torch.machine import Constants, Env, Machine
from k3dsl.backends.torch.memory import Memory
from k3dsl.backends.torch.plan import RegionPlan, bytes_per_program, plan
from k3dsl.backends.torch.races import access_kinds
from k3dsl.backends.torch.script import SMALL_BYTES, Launch, Script, launch_script
from k3dsl.backends.torch.threads import threads_for
from k3dsl.backends.torch.tiles import TILES
from k3dsl.errors import EvaluationError
from k3dsl.ir.graph import Kernel, Op

SLAB_BYTES = 256 * 2**20
LAYOUTS = 32
"""Layouts that an evaluator remembers, the last ones used."""
CONTENTS = 256
"""Most elements of the integer tensors whose contents a layout may go by."""
OFTEN = 32
"""Launches of the same contents before they count as a layout: what follows from them costs two launches to work out."""


_NOTHING = nullcontext()


@dataclass(frozen=True)
class Program:
    """A kernel's plan. settled: tensors whose accesses are the same in every launch of a layout. contents: tensors whose
    contents are a part of the layout."""

    body: RegionPlan
    settled: frozenset[str]
    contents: tuple[str, ...]

    @classmethod
    def of(cls, kernel: Kernel, numerics: Numerics, contents: tuple[str, ...] = ()) -> Program:
        """Plans a kernel and resolves what computes its ops."""
        body = plan(kernel.body)
        settled = mark(body, frozenset(contents))
        _resolve(body, numerics)
        return cls(body, settled, contents)


@dataclass
class Layout:
    """What an evaluator knows of launches of one layout. known: a binding without its tensors' data.
    accesses: by op. tapes: one a slab, of what is the same in all of them; None before they are recorded, or where they would
    be too long. scripts: one a tape, None where the tape is left to the machine. seen: launches so far. sighted: launches that
    would have been of this layout before it counted as one. ready: whether every slab has a script; small:
    and one thread is to run them. tables: the tensors whose contents may count. recurring: whether any did, else they are
    looked at now and then. by_contents: the same for launches whose small integer tensors hold the same."""

    program: Program
    known: Binding
    accesses: dict[int, Access] = field(default_factory=dict)
    tapes: list[Tape] | None = None
    scripts: list[Script | None] = field(default_factory=list)
    seen: int = 0
    sighted: int = 0
    ready: bool = False
    small: bool = False
    tables: tuple[str, ...] = ()
    recurring: bool = False
    by_contents: OrderedDict[bytes, Layout] = field(default_factory=OrderedDict)


class Evaluator:
    """A kernel made ready to be evaluated many times. Arguments and meaning as in `evaluate`.

    The second launch of a layout (dims, and shapes, strides, dtypes, device and aliasing of the tensors) records what follows
    from the layout alone, with the checks that it passed; later ones take it from there.
    """

    def __init__(
        self,
        kernel: Kernel,
        *,
        compute_dtype: torch.dtype | None = None,
        check: bool = True,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        self.kernel = kernel
        self.numerics = Numerics(compute_dtype)
        self.check = check
        self.kinds = access_kinds(kernel)
        self.program = Program.of(kernel, self.numerics)
        tables = [t.name for t in kernel.tensors if t.role == "in" and t.dtype.is_int and t.name in self.kinds]
        self.with_contents = Program.of(kernel, self.numerics, tuple(tables)) if tables else None
        self._constants: Constants = {}
        self._layouts: OrderedDict[Any, Layout] = OrderedDict()
        float_bytes = compute_dtype.itemsize if compute_dtype is not None else None
        self.bytes_per_program = bytes_per_program(self.program.body, float_bytes)
        self.programs_per_slab = max(1, slab_bytes // self.bytes_per_program)

    def __call__(
        self,
        tensors: Mapping[str, torch.Tensor | None],
        dims: Mapping[str, int] | None = None,
        scalars: Mapping[str, float] | None = None,
    ) -> None:
        with _without_gradients(), _full_precision():
            layout = self._layout(tensors, dims, scalars)
            launch = Launch(tensors, lambda: self._machine(layout, tensors, scalars))
            if layout.ready:
                inputs = launch.machine.scalars().values() if self.kernel.scalars else ()
                with threads_for(layout.small):
                    for script in layout.scripts:
                        assert script is not None
                        script.run(launch, inputs)
            else:
                held = prod(max(0, g) for g in layout.known.grid) * self.bytes_per_program
                with threads_for(held <= SMALL_BYTES):
                    self._run(layout, launch)

    def _machine(
        self,
        layout: Layout,
        tensors: Mapping[str, torch.Tensor | None],
        scalars: Mapping[str, float] | None,
    ) -> Machine:
        binding = rebind(layout.known, tensors, scalars)
        settled = layout.program.settled if layout.tapes is not None else frozenset[str]()
        memory = Memory(binding, self.numerics, self.kinds if self.check else None, layout.accesses, settled)
        return Machine(binding, self.numerics, memory, self._constants)

    def _run(self, layout: Layout, launch: Launch) -> None:
        """A launch of which not every slab has a script yet, or will ever have."""
        machine, program, tapes, again = launch.machine, layout.program, layout.tapes, layout.tapes is not None
        budget, grid = Budget(), layout.known.grid
        if layout.seen == 2:
            tapes = []
        total = prod(max(0, g) for g in grid)
        if total >= 2**31:
            raise EvaluationError(f"kernel {self.kernel.name}: a grid of {total} programs is too large")
        slabs = range(0, total, self.programs_per_slab)
        for n, first in enumerate(slabs):
            script = layout.scripts[n] if n < len(layout.scripts) else None
            if script is not None:
                script.run(launch, machine.scalars().values())
                continue
            ids = np.arange(first, min(total, first + self.programs_per_slab), dtype=np.int64)
            if tapes is not None:
                if not again:
                    tapes.append(Tape(budget))
                machine.use(tapes[n], again)
            batch = Batch(ids, grid)
            if again and n == len(layout.scripts) and tapes is not None:
                home = layout.known.device.type == "cpu"
                layout.scripts.append(launch_script(machine, program.body, tapes[n], batch) if home else None)
            machine.run(program.body, machine.scalars(), batch)
        if tapes is not None and not again and budget.left:
            layout.tapes = tapes
        layout.ready = len(layout.scripts) == len(slabs) and None not in layout.scripts
        layout.small = all(script is not None and script.small for script in layout.scripts)

    def _layout(
        self,
        tensors: Mapping[str, torch.Tensor | None],
        dims: Mapping[str, int] | None,
        scalars: Mapping[str, float] | None,
    ) -> Layout:
        """The layout of a launch. One that was not seen is checked in full."""
        signature = layout_of(self.kernel, tensors, dims, scalars)
        layout = self._layouts.get(signature)
        if layout is None or signature is None:
            binding = bind(self.kernel, tensors, dims, scalars)
            layout = Layout(self.program, without_data(binding), tables=self._tables(binding))
            if signature is not None:
                _remember(self._layouts, signature, layout, LAYOUTS)
        else:
            if len(self._layouts) > LAYOUTS // 2:  # far from full, the order does not matter
                self._layouts.move_to_end(signature)
            if layout.tables and (layout.recurring or layout.seen < 2 * OFTEN or not layout.seen % OFTEN):
                layout = self._by_contents(layout, tensors)
        layout.seen += 1
        return layout

    def _tables(self, binding: Binding) -> tuple[str, ...]:
        """The integer tensors whose contents a layout may go by, none where they are too large or not on the host."""
        if self.with_contents is None or binding.device.type != "cpu":
            return ()
        held = [binding.tensors[name] for name in self.with_contents.contents]
        if sum(t.data.numel() for t in held) > CONTENTS or not all(t.frozen for t in held):
            return ()
        return self.with_contents.contents

    def _by_contents(self, layout: Layout, tensors: Mapping[str, torch.Tensor | None]) -> Layout:
        """The layout that goes by what small integer tensors hold, once they have often held it."""
        held = [tensors[name] for name in layout.tables]
        contents = b"".join([t.numpy().tobytes() for t in held if t is not None])
        known = layout.by_contents.get(contents)
        if known is None:
            assert self.with_contents is not None
            known = Layout(self.with_contents, layout.known)
            _remember(layout.by_contents, contents, known, LAYOUTS)
        else:
            layout.by_contents.move_to_end(contents)
        if known.seen == 0:
            known.sighted += 1
            if known.sighted < OFTEN:
                return layout
            known.seen = 1
            layout.recurring = True
        return known


def _remember(known: OrderedDict[Any, Layout], key: Any, layout: Layout, most: int) -> None:
    known[key] = layout
    if len(known) > most:
        known.popitem(last=False)


def _resolve(region: RegionPlan, numerics: Numerics) -> None:
    """Gives every step of a pure op what computes it."""
    for step in region.steps:
        op = step.op
        maker = ELEMENTWISE.get(op.opcode) or TILES.get(op.opcode)
        if maker is not None:
            step.compute = maker(op, numerics)
            step.call = None if step.compute is None else _call(step.compute, op)
        for inner in step.regions:
            _resolve(inner, numerics)


def _call(f: Compute, op: Op) -> Callable[[Env], None]:
    """Computes an op from the values in an environment, and puts its result there."""
    operands, out = op.operands, op.result
    if len(operands) == 1:
        (a,) = operands

        def one(env: Env) -> None:
            env[out] = f(env[a])

        return one
    if len(operands) == 2:
        a, b = operands

        def two(env: Env) -> None:
            env[out] = f(env[a], env[b])

        return two

    def more(env: Env) -> None:
        env[out] = f(*[env[v] for v in operands])

    return more


def evaluate(
    kernel: Kernel,
    tensors: Mapping[str, torch.Tensor | None],
    dims: Mapping[str, int] | None = None,
    scalars: Mapping[str, float] | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
    check: bool = True,
    slab_bytes: int = SLAB_BYTES,
) -> None:
    """Runs a kernel on torch tensors of any device, writing its outputs in place.

    tensors: by parameter name, of any strides. dims: runtime dims; those that a tensor's shape or stride tells may be left
    out. scalars: by parameter name. compute_dtype: None computes in the IR's dtypes, rounding after every operation;
    torch.float64 computes every float in fp64, so that only loads and stores see the tensors' dtypes. check: look for
    programs that write (or read and write) the same element; bounds are always checked. slab_bytes: programs run together
    in batches that hold about this much.

    Elements that the kernel does not write stay what they were. A dot accumulates in fp32; 8-bit floats saturate; float to
    integer truncates and saturates; integer division by 0 gives -1; argmax and argmin count a NaN as the extreme.

    Raises ArgumentError when the arguments break what the kernel was traced for, and EvaluationError, with the user's line
    and the program, when an access is out of bounds, when programs conflict, or when an assumed fact does not hold.
    """
    Evaluator(kernel, compute_dtype=compute_dtype, check=check, slab_bytes=slab_bytes)(tensors, dims, scalars)


def _without_gradients() -> AbstractContextManager[Any]:
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def _full_precision() -> AbstractContextManager[None]:
    """fp32 products are fp32, whatever the process allows elsewhere."""
    before = torch.get_float32_matmul_precision()
    return _NOTHING if before == "highest" else _precision_raised(before)


@contextmanager
def _precision_raised(before: str) -> Iterator[None]:
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
