"""Runs a planned kernel on a batch of programs.

A value is a tensor [programs, *tile shape], or [1, *tile shape] when it is the same for all programs. Integer and bool
scalars stay on the host, where they steer loops and addresses. Programs that a condition or a shorter loop leaves out are
taken out of the batch, so that nothing is ever computed, read or written for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3dsl.backends.torch.batch import Batch, host, take
from k3dsl.backends.torch.binding import Binding
from k3dsl.backends.torch.combine import combined_reduce, combined_scan
from k3dsl.backends.torch.dtypes import Numerics
from k3dsl.backends.torch.elementwise import ELEMENTWISE
from k3dsl.backends.torch.memory import Memory
from k3dsl.backends.torch.plan import RegionPlan, Step
from k3dsl.backends.torch.races import program_name
from k3dsl.backends.torch.tiles import TILES, named_reduce, named_scan
from k3dsl.errors import EvaluationError
from k3dsl.ir.graph import Op, Value

Env = dict[Value, Tensor]
Constants = dict[tuple[int, torch.device], Tensor]
_CPU = torch.device("cpu")


class Machine:
    """One launch of one kernel."""

    def __init__(self, binding: Binding, numerics: Numerics, memory: Memory, constants: Constants) -> None:
        self.binding = binding
        self.numerics = numerics
        self.memory = memory
        self.device = binding.device
        self._constants = constants  # by op and device; shared with other launches of this kernel
        self._of_dims: Constants = {}
        self._special = {
            "program_id": self._program_id,
            "const": self._constant,
            "dim": self._constant,
            "iota": self._constant,
            "assume": self._assume,
            "load": self._load,
            "store": self._write,
            "atomic_add": self._write,
            "loop": self._loop,
            "when": self._when,
            "reduce": self._reduce,
            "scan": self._scan,
        }

    def scalars(self) -> Env:
        """The kernel's scalar arguments as values."""
        kernel = self.binding.kernel
        return {
            v: self._at_home(self._number(self.binding.scalars[p.name], v), v)
            for p, v in zip(kernel.scalars, kernel.scalar_values, strict=True)
        }

    def run(self, region: RegionPlan, env: Env, batch: Batch) -> list[Tensor]:
        """Runs the region's ops; `env` holds its arguments and what it takes from outside. Returns what it yields."""
        for step in region.steps:
            op = step.op
            special = self._special.get(op.opcode)
            if special is not None:
                special(step, env, batch)
            else:
                env[op.results[0]] = self._pure(op, [env[v] for v in op.operands])
            for v in step.dead:
                del env[v]
        out = [env[v] for v in region.region.yields]
        for v in region.own_yields:
            del env[v]
        return out

    def _pure(self, op: Op, xs: list[Tensor]) -> Tensor:
        f = ELEMENTWISE.get(op.opcode) or TILES.get(op.opcode)
        if f is None:
            raise EvaluationError(f"the torch backend does not know the op {op.opcode!r}", where=op.loc)
        if self.device == _CPU:
            return f(op, xs, self.numerics)
        if any(x.device != _CPU for x in xs):
            xs = [x.to(self.device) for x in xs]
        return self._at_home(f(op, xs, self.numerics), op.result)

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
        op = step.op
        env[op.result] = x = env[op.operands[0]]
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
        x = self.memory.load(op, [env[v] for v in op.operands], batch)
        env[op.result] = x if self.device == _CPU else self._at_home(x, op.result)

    def _write(self, step: Step, env: Env, batch: Batch) -> None:
        self.memory.write(step.op, [env[v] for v in step.op.operands], batch)

    def _when(self, step: Step, env: Env, batch: Batch) -> None:
        holds = host(env[step.op.operands[0]]) != 0
        if holds.all():
            self.run(step.regions[0], env, batch)
        elif holds.any():
            active = np.flatnonzero(holds)
            inner = {v: take(env[v], active) for v in step.free}
            self.run(step.regions[0], inner, batch.subset(active))

    def _loop(self, step: Step, env: Env, batch: Batch) -> None:
        op = step.op
        start, stop = host(env[op.operands[0]]), host(env[op.operands[1]])
        trips = np.maximum(0, -(-(stop - start) // op.attrs["step"]))
        carries = [env[v] for v in op.operands[2:]]
        if (trips == trips[0]).all():
            carries = self._iterate(step, env, batch, start, trips[:1], 0, int(trips[0]), carries)
        else:
            carries = self._ragged_loop(step, env, batch, start, trips, carries)
        for v, x in zip(op.results, carries, strict=True):
            env[v] = x

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
        inner = {v: env[v] for v in step.free}
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

    def _reduce(self, step: Step, env: Env, batch: Batch) -> None:
        op = step.op
        xs = [env[v] for v in op.operands]
        if step.regions:
            outs = combined_reduce(self, step, xs, env, batch)
        else:
            outs = [named_reduce(op, xs, self.numerics)]
        for v, x in zip(op.results, outs, strict=True):
            env[v] = x if self.device == _CPU else self._at_home(x, v)

    def _scan(self, step: Step, env: Env, batch: Batch) -> None:
        op = step.op
        xs = [env[v] for v in op.operands]
        outs = combined_scan(self, step, xs, env, batch) if step.regions else [named_scan(op, xs, self.numerics)]
        for v, x in zip(op.results, outs, strict=True):
            env[v] = x
