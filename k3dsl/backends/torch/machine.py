"""Runs a planned kernel on a batch of programs.

A value is a tensor [programs, *tile shape], or [1, *tile shape] when it is the same for all programs. Integer and bool
scalars stay on the host, where they steer loops and addresses. Programs that a condition or a shorter loop leaves out are
taken out of the batch, so that nothing is ever computed, read or written for them.

What is the same in every launch of a layout is recorded on a tape, or taken from one; see k3dsl.backends.torch.fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from k3dsl.backends.torch.batch import Batch, host, take
from k3dsl.backends.torch.binding import Binding
from k3dsl.backends.torch.combine import combined_reduce, combined_scan
from k3dsl.backends.torch.dtypes import Numerics
from k3dsl.backends.torch.fixed import Branch, Tape
from k3dsl.backends.torch.memory import Memory
from k3dsl.backends.torch.plan import RegionPlan, Step
from k3dsl.backends.torch.races import program_name
from k3dsl.errors import EvaluationError
from k3dsl.ir.graph import Op, Value

Env = dict[Value, Tensor]
Constants = dict[tuple[int, torch.device], Tensor]
_CPU = torch.device("cpu")


def _nothing() -> NoReturn:
    raise AssertionError("there is no tape to read")


class Machine:
    """One launch of one kernel."""

    def __init__(
        self,
        binding: Binding,
        numerics: Numerics,
        memory: Memory,
        constants: Constants,
    ) -> None:
        self.tape: Tape | None = None
        self.record: Callable[[Any], None] | None = None
        self.again = False
        self._next: Callable[[], Any] = _nothing
        self.binding = binding
        self.numerics = numerics
        self.memory = memory
        self.device = binding.device
        self._constants = constants  # by op and device; shared with other launches of this kernel
        self._of_dims: Constants = {}

    def use(self, tape: Tape | None, again: bool) -> None:
        """Records the next run on a tape, or (again) takes from the tape what is fixed; None does neither."""
        self.tape = tape
        self.record, self.again = None if again or tape is None else tape.add, again
        self._next = iter(tape.items).__next__ if again and tape is not None else _nothing

    def scalars(self) -> Env:
        """The kernel's scalar arguments as values."""
        kernel = self.binding.kernel
        return {
            v: self._at_home(self._number(self.binding.scalars[p.name], v), v)
            for p, v in zip(kernel.scalars, kernel.scalar_values, strict=True)
        }

    def run(self, region: RegionPlan, env: Env, batch: Batch) -> list[Tensor]:
        """Runs the region's ops; `env` holds its arguments and what it takes from outside. Returns what it yields."""
        again, record, at_home = self.again, self.record, self.device == _CPU
        for step in region.again if again else region.steps:
            op = step.op
            if again and step.fixed:
                env[op.results[0]] = self._next()
            elif step.call is not None:
                if at_home:
                    step.call(env)
                else:
                    env[op.results[0]] = self._pure(step, [env[v] for v in op.operands])
            else:
                handler = _SPECIAL.get(op.opcode)
                if handler is None:
                    raise EvaluationError(f"the torch backend does not know the op {op.opcode!r}", where=op.loc)
                handler(self, step, env, batch)
            if record is not None and step.kept:
                record(env[op.results[0]])
            for v in step.dead_again if again else step.dead:
                del env[v]
        out = [env[v] for v in region.region.yields]
        for v in region.own_yields:
            del env[v]
        return out

    def _pure(self, step: Step, xs: list[Tensor]) -> Tensor:
        """A pure op on another device than the CPU."""
        assert step.compute is not None
        if any(x.device != _CPU for x in xs):
            xs = [x.to(self.device) for x in xs]
        return self._at_home(step.compute(*xs), step.op.result)

    def _at_home(self, x: Tensor, v: Value) -> Tensor:
        """Integer and bool scalars live on the host, everything else on the tensors' device."""
        return x.to(_CPU if v.shape == () and not v.dtype.is_float else self.device)

    def _number(self, value: float, v: Value) -> Tensor:
        exact = torch.tensor([value], dtype=torch.float64 if v.dtype.is_float else torch.int64)
        return self.numerics.settle(exact, v.dtype)

    def _program_id(self, step: Step, env: Env, batch: Batch) -> None:
        env[step.op.result] = batch.coordinate(step.op.attrs["axis"])

    def _constant(self, step: Step, env: Env, batch: Batch) -> None:
        op = step.op
        cache = self._of_dims if op.opcode == "dim" else self._constants
        key = (id(op), self.device)
        x = cache.get(key)
        if x is None:
            x = cache[key] = self._at_home(self._evaluate_constant(op), op.result)
        env[op.result] = x

    def _evaluate_constant(self, op: Op) -> Tensor:
        v = op.result
        if op.opcode == "iota":
            return torch.arange(op.attrs["size"], dtype=torch.int32)[None]
        value: Any = op.attrs["value"] if op.opcode == "const" else op.attrs["expr"].evaluate(self.binding.dims)
        return self._number(value, v).view(1, *(1,) * v.type.rank).expand(1, *v.shape)

    def _assume(self, step: Step, env: Env, batch: Batch) -> None:
        env[step.op.result] = x = env[step.op.operands[0]]
        self.check_assumed(step.op, x, batch)

    def check_assumed(self, op: Op, x: Tensor, batch: Batch) -> None:
        """Raises EvaluationError where a value is not what an `assume` says."""
        values, facts = host(x), op.attrs
        low, high, divisor = facts.get("min"), facts.get("max"), facts.get("divisible_by") or 1
        for text, bad in (
            (f"at least {low}", values < low if low is not None else None),
            (f"at most {high}", values > high if high is not None else None),
            (f"divisible by {divisor}", values % divisor != 0 if divisor != 1 else None),
        ):
            if bad is not None and bad.any():
                k = int(np.flatnonzero(bad)[0])
                raise EvaluationError(
                    f"assumed to be {text}, but the value is {values[k]} in program "
                    f"{program_name(int(batch.ids[k]), self.binding.grid)}",
                    where=op.loc,
                    fix="state only what holds for every input, or pass other inputs",
                )

    def _load(self, step: Step, env: Env, batch: Batch) -> None:
        op = step.op
        if self.again and step.located:
            located = self._next()
        else:
            located = self.memory.locate_load(op, [env[v] for v in op.operands], batch)
            if self.record is not None and step.located:
                self.record(located)
        x = self.memory.load(located)
        if self.record is not None and step.kept:
            x = x.clone()  # it may be a view of memory that is another's later on
        env[op.result] = x if self.device == _CPU else self._at_home(x, op.result)

    def _write(self, step: Step, env: Env, batch: Batch) -> None:
        op = step.op
        if self.again and step.located:
            located = self._next()
        else:
            located = self.memory.locate_write(op, [env[v] for v in op.operands], batch)
            if self.record is not None and step.located:
                self.record(located)
        self.memory.write(located, env[op.operands[op.attrs["value_slot"]]])

    def _when(self, step: Step, env: Env, batch: Batch) -> None:
        if self.again and step.located:
            active = self._next()
        else:
            holds = host(env[step.op.operands[0]]) != 0
            active = None if holds.all() else np.flatnonzero(holds)
            if self.record is not None and step.located:
                self.record(active)
        if step.located:
            self.run_for(step, env, batch, active)
        else:
            outcome = None if active is None else active.tobytes()
            self._branch(outcome, lambda: self.run_for(step, env, batch, active))

    def run_for(self, step: Step, env: Env, batch: Batch, active: np.ndarray | None) -> None:
        """Runs a region for some programs of the batch, None for all of them."""
        if active is None:
            self.run(step.regions[0], env, batch)
        elif active.size:
            self.run(step.regions[0], self._taken(step, env, active), batch.subset(active))

    def _taken(self, step: Step, env: Env, positions: np.ndarray | None = None) -> Env:
        """What a step's region takes from outside, of some programs."""
        free = step.free_again if self.again and step.located else step.free
        return {v: env[v] if positions is None else take(env[v], positions) for v in free}

    def _branch(self, outcome: Hashable, run: Callable[[], Any]) -> Any:
        """Runs a region whose control data decide, by the tape of this outcome, or recording one."""
        if self.again:
            branch = self._next()
        elif self.record is not None and self.tape is not None:
            branch = Branch(self.tape.budget)
            self.record(branch)
        else:
            return run()
        return self.enter(branch, outcome, run)

    def enter(self, branch: Branch, outcome: Hashable, run: Callable[[], Any]) -> Any:
        """Runs a region by the tape that a branch has for an outcome, or recording one."""
        before = self.tape, self.record, self.again, self._next
        known = branch.tapes.get(outcome)
        tape = Tape(branch.budget) if known is None else known
        self.use(tape if known is not None or branch.budget.left else None, known is not None)
        try:
            result = run()
        finally:
            self.tape, self.record, self.again, self._next = before
        if known is None and branch.budget.left:
            branch.tapes[outcome] = tape
        return result

    def _loop(self, step: Step, env: Env, batch: Batch) -> None:
        op = step.op
        if self.again and step.located:
            start, trips = self._next()
        else:
            start, stop = host(env[op.operands[0]]), host(env[op.operands[1]])
            trips = np.maximum(0, -(-(stop - start) // op.attrs["step"]))
            if self.record is not None and step.located:
                self.record((start, trips))
        carries = [env[v] for v in op.operands[2:]]
        if step.located:
            carries = self.turns(step, env, batch, start, trips, carries)
        else:
            outcome = (start.tobytes(), trips.tobytes())
            carries = self._branch(outcome, lambda: self.turns(step, env, batch, start, trips, carries))
        for v, x in zip(op.results, carries, strict=True):
            env[v] = x

    def turns(
        self, step: Step, env: Env, batch: Batch, start: np.ndarray, trips: np.ndarray, carries: list[Tensor]
    ) -> list[Tensor]:
        """All iterations of a loop."""
        if (trips == trips[0]).all():
            return self._iterate(step, env, batch, start, trips[:1], 0, int(trips[0]), carries)
        return self._ragged_loop(step, env, batch, start, trips, carries)

    def _iterate(
        self,
        step: Step,
        env: Env,
        batch: Batch,
        start: np.ndarray,
        trips: np.ndarray,
        first: int,
        last: int,
        carries: list[Tensor],
    ) -> list[Tensor]:
        """Iterations first .. last - 1, for a batch whose programs all have at least `last` of them."""
        body = step.regions[0]
        stride, reverse = step.op.attrs["step"], step.op.attrs.get("reverse")
        for k in range(first, last):
            if body.takes_index or not self.again:
                index = start + ((trips - 1 - k) if reverse else k) * stride
                env[body.region.args[0]] = torch.from_numpy(index.astype(np.int32))
            for v, x in zip(body.region.args[1:], carries, strict=True):
                env[v] = x
            carries = self.run(body, env, batch)
        return carries

    def _ragged_loop(
        self, step: Step, env: Env, batch: Batch, start: np.ndarray, trips: np.ndarray, carries: list[Tensor]
    ) -> list[Tensor]:
        """A loop whose trip count differs: programs leave the batch when theirs is reached."""
        trips = np.broadcast_to(trips, (batch.size,))
        start = np.broadcast_to(start, (batch.size,)) if start.size > 1 else start
        results = [x.expand(batch.size, *x.shape[1:]).clone() for x in carries]
        inner = self._taken(step, env)
        rest = np.arange(batch.size)  # the programs still running, as positions in the whole batch
        done = 0
        for count in np.unique(trips):
            carries = self._iterate(step, inner, batch, start, trips, done, int(count), carries)
            done = int(count)
            leaving, staying = np.flatnonzero(trips == count), np.flatnonzero(trips > count)
            where = torch.from_numpy(rest[leaving])
            for result, x in zip(results, carries, strict=True):
                result[where.to(result.device)] = take(x, leaving)
            rest, trips, batch = rest[staying], trips[staying], batch.subset(staying)
            start = start[staying] if start.size > 1 else start
            carries = [take(x, staying) for x in carries]
            inner = {v: take(x, staying) for v, x in inner.items()}
        return results

    def _combine(self, step: Step, env: Env, batch: Batch) -> None:
        """A reduction or scan by a combine region; those that have a name are pure ops."""
        op = step.op
        f = combined_reduce if op.opcode == "reduce" else combined_scan
        for v, x in zip(op.results, f(self, step, [env[v] for v in op.operands], env, batch), strict=True):
            env[v] = self._at_home(x, v)


_SPECIAL: dict[str, Callable[[Machine, Step, Env, Batch], None]] = {
    "program_id": Machine._program_id,
    "const": Machine._constant,
    "dim": Machine._constant,
    "iota": Machine._constant,
    "assume": Machine._assume,
    "load": Machine._load,
    "store": Machine._write,
    "atomic_add": Machine._write,
    "loop": Machine._loop,
    "when": Machine._when,
    "reduce": Machine._combine,
    "scan": Machine._combine,
}
