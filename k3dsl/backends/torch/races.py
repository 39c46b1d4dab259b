"""Finds programs of one launch that touch the same element in ways whose result depends on their order.

For each tensor and each kind of access there is a map: for every element, the program that accessed it so far. Where a
tensor is only written, and in few places that are clear of each other, the places stand in for the map.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from k3dsl.backends.torch.binding import Binding, BoundTensor
from k3dsl.backends.torch.places import Gathered, Places, Window
from k3dsl.errors import EvaluationError
from k3dsl.ir.graph import MEMORY_OPS, Kernel, Op, walk

CLAIMS = 256
"""Most places of a tensor that stand in for its map."""
NOBODY = -1
MANY = 2**31 - 1  # several programs; only reads and atomic additions may have this

_DOES = {"store": "writes", "load": "reads", "atomic_add": "adds to"}
_DO = {"store": "write", "load": "read", "atomic_add": "add to"}
# What an access of each kind may not meet from another program.
_CONFLICTS = {
    "store": ("store", "load", "atomic_add"),
    "load": ("store", "atomic_add"),
    "atomic_add": ("store", "load"),
}


def access_kinds(kernel: Kernel) -> dict[str, set[str]]:
    """In which ways a kernel accesses each of its tensors: opcodes by name."""
    kinds: dict[str, set[str]] = {}
    for op in walk(kernel.body):
        if op.opcode in MEMORY_OPS:
            kinds.setdefault(op.attrs["tensor"], set()).add(op.opcode)
    return kinds


class Races:
    """The maps of one launch. Every method takes one access: its places, and the program of each point."""

    def __init__(self, binding: Binding, kinds: Mapping[str, set[str]]) -> None:
        self.binding = binding
        self.kinds = kinds
        self.maps: dict[tuple[str, str], Tensor] = {}
        self.claims: dict[str, list[tuple[Window, list[int], list[int]]]] = {}
        self._taken: dict[str, list[tuple[int, int]]] = {}

    def tracks(self, name: str) -> bool:
        """Whether accesses of a tensor can conflict at all: a tensor that is only read or only added to cannot."""
        return self.kinds[name] not in ({"load"}, {"atomic_add"})

    def claim(self, name: str, window: Window, offsets: list[int], programs: list[int]) -> bool:
        """Records a store of a window at each offset, by so many programs, if it is clear of itself and of all other accesses
        of the tensor: from the first element of a window to its last there is nothing of another."""
        if self.kinds[name] != {"store"} or (name, "store") in self.maps:
            return False
        taken = self._taken.get(name, [])
        if len(taken) + len(offsets) > CLAIMS:
            return False
        last = window.last
        spans = sorted([*taken, *[(offset, offset + last) for offset in offsets]])
        if any(before[1] >= after[0] for before, after in pairwise(spans)):
            return False
        self._taken[name] = spans
        self.claims.setdefault(name, []).append((window, offsets, programs))
        return True

    def _settle_claims(self, tensor: BoundTensor) -> None:
        """Brings what was claimed to the map."""
        for window, offsets, programs in self.claims.pop(tensor.name, []):
            where, tags = Gathered(window, torch.tensor(offsets)), torch.tensor(programs, dtype=torch.int32)
            owners = self._map(tensor, "store")
            where.write(owners, self._spread(tags.view(-1, *(1,) * len(window.merged_shape)), where))

    def visit(self, op: Op, tensor: BoundTensor, where: Places, programs: Tensor, scatter: bool) -> None:
        """Records an access. `programs`: int32, one a point. `scatter`: one program may have several points.

        Raises EvaluationError when it conflicts with an earlier access of another program, or a store with itself.
        """
        self._settle_claims(tensor)
        tags = programs.view(-1, *(1,) * len(where.window.merged_shape))
        for kind in _CONFLICTS[op.opcode]:
            if kind in self.kinds[tensor.name]:
                self._compare(op, kind, tensor, where, tags)
        if op.opcode == "store":
            self._own(op, tensor, where, tags, scatter)
        elif self.kinds[tensor.name] - {op.opcode}:
            self._join(op, tensor, where, tags)

    def _map(self, tensor: BoundTensor, kind: str) -> Tensor:
        key = (tensor.name, kind)
        if key not in self.maps:
            self.maps[key] = torch.full_like(tensor.flat, NOBODY, dtype=torch.int32)
        return self.maps[key]

    def _compare(self, op: Op, kind: str, tensor: BoundTensor, where: Places, tags: Tensor) -> None:
        earlier = where.read(self._map(tensor, kind))
        if int(earlier.max()) == NOBODY:
            return
        bad = (earlier != NOBODY) & (earlier != tags)
        if bool(bad.any()):
            self._report(op, kind, tensor, where, tags, bad, earlier)

    def _own(self, op: Op, tensor: BoundTensor, where: Places, tags: Tensor, scatter: bool) -> None:
        owners = self._map(tensor, "store")
        if scatter:  # number the points: what is overwritten by a later point of the same store shows
            numbers = torch.arange(tags.shape[0], dtype=torch.int32, device=tags.device).view(tags.shape)
            where.write(owners, self._spread(numbers, where))
            last = where.read(owners)
            if not torch.equal(last, self._spread(numbers, where)):
                self._report(op, "store", tensor, where, tags, last != numbers, tags.flatten()[last.long()])
        where.write(owners, self._spread(tags, where))
        if scatter or tags.shape[0] == 1:
            return
        last = where.read(owners)
        if not torch.equal(last, self._spread(tags, where)):
            self._report(op, "store", tensor, where, tags, last != tags, last)

    def _join(self, op: Op, tensor: BoundTensor, where: Places, tags: Tensor) -> None:
        seen = self._map(tensor, op.opcode)
        earlier = where.read(seen)
        mine = torch.where((earlier == NOBODY) | (earlier == tags), tags, MANY)
        where.write(seen, mine)
        shared = where.read(seen) != mine
        if bool(shared.any()):
            seen.index_fill_(0, where.elements(seen)[shared], MANY)

    @staticmethod
    def _spread(tags: Tensor, where: Places) -> Tensor:
        return tags.expand(tags.shape[0], *where.window.merged_shape)

    def _report(
        self, op: Op, kind: str, tensor: BoundTensor, where: Places, tags: Tensor, bad: Tensor, other: Tensor
    ) -> NoReturn:
        first = tuple(int(i) for i in bad.nonzero()[0])
        offset = int(where.elements(tensor.flat)[first])
        element = f"{tensor.name}[{', '.join(map(str, tensor.position(offset)))}]"
        me, it = int(tags.expand(bad.shape)[first]), int(other.expand(bad.shape)[first])
        verb = (_DO if it == MANY else _DOES)[kind]
        message, fix = _message(op.opcode, kind, verb, element, self._name(me), self._name(it))
        raise EvaluationError(message, where=op.loc, fix=fix)

    def _name(self, program: int) -> str:
        return "several programs" if program == MANY else f"program {program_name(program, self.binding.grid)}"


def _message(opcode: str, kind: str, verb: str, element: str, me: str, it: str) -> tuple[str, str]:
    if me == it:
        return f"one store of {me} writes {element} twice", "make the index tile's values distinct, or mask the repeats"
    if opcode == kind == "store":
        return f"{me} and {it} both write {element}", "give each element one writer, or use atomic_add"
    return (
        f"{me} {_DOES[opcode]} {element}, which {it} {verb} in the same launch; programs run in no fixed order",
        "split the launch in two, or write to another tensor",
    )


def program_name(program: int, grid: tuple[int, ...]) -> str:
    """The program's position on the grid, as in (3, 0)."""
    return "(" + ", ".join(str(int(i)) for i in np.unravel_index(program, grid)) + ")"
