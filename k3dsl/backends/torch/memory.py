"""Loads, stores and atomic additions of a batch of programs: index arithmetic, bounds, masks.

A program whose whole access lies in bounds and is not masked takes the quick way, as one point with a window around it.
The others (ragged edges, masked scatters, errors) are worked out element by element.

An access is first located, which works out and checks everything that its indices say, and then carried out. Where the
indices are the same in every launch, what was located is kept (see k3dsl.backends.torch.fixed).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3dsl.backends.torch.access import Access, Axis, Elements, Located, Windows
from k3dsl.backends.torch.batch import Batch, extremes, host, take
from k3dsl.backends.torch.binding import Binding, BoundTensor
from k3dsl.backends.torch.dtypes import Numerics
from k3dsl.backends.torch.places import Gathered, Places, Window, places
from k3dsl.backends.torch.races import Races, program_name
from k3dsl.errors import EvaluationError
from k3dsl.ir.graph import Op

KEPT, KEPT_BYTES = 32, 2**16
"""How many places of one access are kept, and how large one of them may be."""


Operands = list[Any]
"""Of a memory op: integer scalars as int64 arrays on the host, [programs] or [1]; everything else as tensors."""


def _take(x: Any, positions: np.ndarray) -> Any:
    if isinstance(x, np.ndarray):
        return x if x.size == 1 else x[positions]
    return take(x, positions)


def _every(x: Tensor) -> np.ndarray:
    """Whether a bool tile holds everywhere, for each program."""
    return x.reshape(x.shape[0], -1).all(1).cpu().numpy()


class Memory:
    """The memory operations of one launch.

    kinds: see races.access_kinds; None looks for no conflicts. accesses: kept by whoever runs launches of the same layout one
    after the other. settled: tensors whose accesses were found free of conflicts in an earlier launch of this layout, and are
    the same in this one.
    """

    def __init__(
        self,
        binding: Binding,
        numerics: Numerics,
        kinds: Mapping[str, set[str]] | None,
        accesses: dict[int, Access] | None = None,
        settled: frozenset[str] = frozenset(),
    ) -> None:
        self.binding = binding
        self.numerics = numerics
        self.device = binding.device
        self.races = Races(binding, kinds) if kinds is not None and not settled.issuperset(kinds) else None
        self.settled = settled
        self._alone = prod(binding.grid) == 1
        self._accesses: dict[int, Access] = {} if accesses is None else accesses

    def access_of(self, op: Op) -> Access:
        access = self._accesses.get(id(op))
        if access is None:
            access = self._accesses[id(op)] = Access(op, self.binding.tensors[op.attrs["tensor"]])
        return access

    def looks_at(self, access: Access) -> bool:
        """Whether conflicts of this access are looked for: a single program has none, but for points of one store."""
        if self.races is None or access.name in self.settled or (self._alone and not access.has_tiles):
            return False
        return self.races.tracks(access.name)

    def claim(self, access: Access, window: Window, offsets: list[int], programs: list[int]) -> bool:
        """Records a store by so many programs where it is clear of itself and of all other accesses; see races.Races.claim."""
        assert self.races is not None
        return self.races.claim(access.name, window, offsets, programs)

    def locate_load(self, op: Op, xs: list[Tensor], batch: Batch) -> Located:
        """Where a load reads. Raises EvaluationError for an element out of bounds that is not masked."""
        access = self.access_of(op)
        tracked = not self.binding.tensors[access.name].frozen and self.looks_at(access)
        return self._located(access, xs, batch, tracked, load=True)

    def locate_write(self, op: Op, xs: list[Tensor], batch: Batch) -> Located:
        """Where a store or an atomic addition writes. Raises EvaluationError as `locate_load`."""
        access = self.access_of(op)
        return self._located(access, xs, batch, self.looks_at(access), load=False)

    def _located(self, access: Access, xs: list[Tensor], batch: Batch, tracked: bool, load: bool) -> Located:
        """Works out an access, or takes it from an earlier one with the same scalars by the same programs."""
        at: Operands = [host(x) if n in access.scalars else x for n, x in enumerate(xs)]
        key: Hashable = None
        if access.plain:
            key = (tracked, batch.ids.tobytes(), *[at[n].tobytes() for n in access.scalars])
            known = access.located.get(key)
            if known is not None:
                return known
        fit = self._fit(access, at, batch.size, unmasked=tracked or not load)
        parts = self._parts(access, at, batch, fit, tracked, load)
        located = Located(access, batch.size, parts, self.other_of(access) if load else None)
        if key is not None and located.nbytes() <= KEPT_BYTES:
            access.located[key] = located
            if len(access.located) > KEPT:
                access.located.popitem(last=False)
        return located

    def _parts(
        self, access: Access, xs: Operands, batch: Batch, fit: np.ndarray | None, tracked: bool, load: bool
    ) -> tuple[Windows | Elements, ...]:
        if fit is None:
            return (self._windows(access, xs, None, batch, tracked, load),)
        if not fit.any():
            return (self._elements(access, xs, None, batch, tracked),)
        parts: list[Windows | Elements] = []
        for kind, rows in ((self._windows, np.flatnonzero(fit)), (self._elements, np.flatnonzero(~fit))):
            if rows.size:
                some, inner = [_take(x, rows) for x in xs], batch.subset(rows)
                index = torch.from_numpy(rows).to(self.device)
                if kind == self._windows:
                    parts.append(self._windows(access, some, index, inner, tracked, load))
                else:
                    parts.append(self._elements(access, some, index, inner, tracked))
        return tuple(parts)

    def _windows(
        self, access: Access, xs: Operands, rows: Tensor | None, batch: Batch, tracked: bool, load: bool
    ) -> Windows:
        frozen = self.binding.tensors[access.name].frozen
        every = batch.size if tracked or not load else None
        where = self._places(access, xs, every, view=not load or (frozen and not tracked))
        valid = self._valid(access, xs) if load else None
        tags = batch.tags(self.device).repeat_interleave(access.points) if tracked else None
        return Windows(rows, batch.size, where, valid, tags)

    def load(self, located: Located) -> Tensor:
        """The tile that a load gives."""
        access = located.access
        tensor = self.binding.tensors[access.name]
        tracked = not tensor.frozen and self.looks_at(access)
        if len(located.parts) == 1:
            out = self._read(located, located.parts[0], tensor, tracked)
        else:
            tiles = [self._read(located, part, tensor, tracked) for part in located.parts]
            out = torch.empty((located.size, *tiles[0].shape[1:]), dtype=tiles[0].dtype, device=self.device)
            for part, tile in zip(located.parts, tiles, strict=True):
                assert part.rows is not None
                out[part.rows] = tile
        return out if access.to_tile is None else out.permute(access.to_tile)

    def _read(self, located: Located, part: Windows | Elements, tensor: BoundTensor, tracked: bool) -> Tensor:
        access, other = located.access, located.other
        assert other is not None
        if tracked:
            self._visit(access, part, tensor)
        if isinstance(part, Elements):
            if part.where is None:
                return other.expand(part.shape)
            x = self.numerics.loaded(part.where.read(tensor.flat), tensor.param.dtype)
            tile = other.expand(part.shape).clone(memory_format=torch.contiguous_format)
            tile.view(-1, *part.where.window.merged_shape).index_copy_(0, part.at, x)
            return tile
        raw = part.where.tile(tensor.flat, access.joint)
        x = self.numerics.loaded(raw, tensor.param.dtype)
        if part.where.is_view and not tensor.frozen and x.data_ptr() == raw.data_ptr():
            x = x.clone()
        return x if part.valid is None else torch.where(part.valid, x, other)

    def write(self, located: Located, value: Tensor) -> None:
        """Carries out a store or an atomic addition of a tile."""
        access = located.access
        tensor, tracked = self.binding.tensors[access.name], self.looks_at(access)
        value = access.canonical(value).to(self.device)
        value = self.numerics.stored(value, tensor.param.dtype)
        for part in located.parts:
            if isinstance(part, Elements) and part.where is None:
                continue
            if tracked:
                self._visit(access, part, tensor)
            own = value if part.rows is None or value.shape[0] == 1 else value.index_select(0, part.rows)
            own = own.expand(part.size, *own.shape[1:])
            assert part.where is not None
            own = own.reshape(-1, *part.where.window.merged_shape)
            if isinstance(part, Elements):
                own = own.index_select(0, part.at)
            if access.op.opcode == "store":
                part.where.write(tensor.flat, own)
            else:
                part.where.add(tensor.flat, own)

    def _visit(self, access: Access, part: Windows | Elements, tensor: BoundTensor) -> None:
        if part.where is not None:
            assert self.races is not None
            assert part.tags is not None
            self.races.visit(access.op, tensor, part.where, part.tags, access.has_tiles)

    def _fit(self, access: Access, xs: Operands, size: int, unmasked: bool) -> np.ndarray | None:
        """The programs that may take the quick way; None for all of them.

        unmasked: their whole access must lie in bounds and not be masked. Else what is not past a span's end must lie in
        bounds, and the rest anywhere in the tensor: it is read and not used.
        """
        fit: np.ndarray | None = None
        beyond = False
        for axis in access.axes:
            if axis.kind == "full":
                continue
            assert axis.start is not None
            x = xs[axis.start]
            low, high = extremes(x)
            if axis.kind == "tile":
                if low >= 0 and high < axis.extent:
                    continue
                ok = _every((x >= 0) & (x < axis.extent))
            else:
                start = x
                if (axis.end is None or not unmasked) and low >= 0 and high + axis.size <= axis.extent:
                    continue
                stop = start + axis.size
                ok = stop <= axis.extent
                if axis.end is not None:
                    end = xs[axis.end]
                    if unmasked:
                        ok = ok & (stop <= end)
                    elif not ok.all():
                        beyond, ok = True, ok | (end <= axis.extent)
                ok = ok & (start >= 0)
            if not ok.all():
                fit = ok if fit is None else fit & ok
        if beyond:
            inside = self._last(access, xs) < self.binding.tensors[access.name].span
            if not inside.all():
                fit = inside if fit is None else fit & inside
        if unmasked and access.mask_slot is not None:
            mask = xs[access.mask_slot]
            if not bool(mask.all()):
                ok = _every(mask)
                fit = ok if fit is None else fit & ok
        return None if fit is None else np.broadcast_to(fit, (size,))

    def _last(self, access: Access, xs: Operands) -> np.ndarray:
        """The offset of the last element that each program's whole access would touch."""
        last = np.full(1, access.window.last, dtype=np.int64)
        for axis in access.axes:
            if axis.start is not None:
                x = xs[axis.start]
                start = host(x.reshape(x.shape[0], -1).amax(1)) if axis.kind == "tile" else x
                last = last + start * axis.stride
        return last

    # The quick way: windows around points.

    def _places(self, access: Access, xs: Operands, size: int | None, view: bool) -> Places:
        """The points of every program; `size` repeats what is the same for all programs, None leaves it single."""
        base = np.zeros(1, dtype=np.int64)
        gathered: Tensor | None = None
        for axis in access.axes:
            if axis.start is None:
                continue
            x = xs[axis.start]
            if axis.kind == "tile":
                term = x.to(torch.int64) * axis.stride
                gathered = term if gathered is None else gathered + term
            else:
                base = base + x * axis.stride
        if gathered is not None:
            offsets = gathered + torch.from_numpy(base).to(gathered.device).view(-1, *(1,) * len(access.joint))
            if size is not None:
                offsets = offsets.expand(size, *access.joint)
            return Gathered(access.window, offsets.reshape(-1))
        if size is not None and base.size != size:
            base = np.broadcast_to(base, (size,)).copy()
        return places(access.window, base, self.device, view)

    def other_of(self, access: Access) -> Tensor:
        """What a masked element of a load reads."""
        if self.device not in access.other:
            dtype = access.op.result.dtype
            value = torch.tensor(access.op.attrs.get("other", 0), dtype=torch.float64)
            access.other[self.device] = value.to(self.numerics.held(dtype)).to(self.device)
        return access.other[self.device]

    def _valid(self, access: Access, xs: Operands, whole: int | None = None) -> Tensor | None:
        """Which elements are not masked, broadcastable over [program, *joint, *window]; None when all are.

        whole: the number of the first axis from which on none is masked, where that was looked for.
        """
        valid: Tensor | None = None
        for axis in access.axes[:whole]:
            if axis.end is None:
                continue
            assert axis.start is not None
            start, end = xs[axis.start], xs[axis.end]
            if whole is None and (start + axis.size <= end).all():
                continue
            rows = (start[:, None] + np.arange(axis.size)) < end[:, None]
            term = access.row_view(axis, torch.from_numpy(rows).to(self.device))
            valid = term if valid is None else valid & term
        if access.mask_slot is not None:
            term = access.canonical(xs[access.mask_slot]).to(self.device)
            valid = term if valid is None else valid & term
        return valid

    # Element by element.

    def _elements(self, access: Access, xs: Operands, rows: Tensor | None, batch: Batch, tracked: bool) -> Elements:
        """Every element of the batch.

        Raises EvaluationError for an element that is out of bounds and not masked.
        """
        whole = self._whole(access, xs)
        rank = len(access.window.shape)
        first = (
            access.axes[whole].window_axis if whole < len(access.axes) else rank
        )  # of the window's axes that are whole
        inner = access.inner(first)
        shape = (batch.size, *access.joint, *access.window.shape[:first], *(1,) * (rank - first))
        masked = self._valid(access, xs, whole)
        valid = (torch.ones((), dtype=torch.bool, device=self.device) if masked is None else masked).expand(shape)
        offsets = torch.zeros((), dtype=torch.int64, device=self.device)
        for axis in access.axes:
            if axis.number >= whole and axis.kind != "scalar":
                if axis.start is not None:
                    start = torch.from_numpy(xs[axis.start]).to(self.device)
                    offsets = offsets + access.point_view(start) * axis.stride
                continue
            index = self._index(access, axis, xs)
            outside = (index < 0) | (index >= axis.extent)
            if bool(outside.any()):
                bad = outside & valid
                if bool(bad.any()):
                    self._out_of_bounds(access, axis, index.expand(shape), bad, batch)
            offsets = offsets + index.clamp(0, max(axis.extent - 1, 0)) * axis.stride
        tile = (batch.size, *access.joint, *access.window.shape)
        at = valid.reshape(-1).nonzero()[:, 0]
        if not at.numel():
            return Elements(rows, batch.size, tile, None, at, None)
        where = Gathered(inner, offsets.expand(shape).reshape(-1).index_select(0, at))
        tags = None
        if tracked:
            points = prod(shape[1:])
            tags = batch.tags(self.device).index_select(0, at // points)
        return Elements(rows, batch.size, tile, where, at, tags)

    def _whole(self, access: Access, xs: Operands) -> int:
        """The number of the first axis from which on every row of every program is in bounds and not masked."""
        if not access.plain:
            return len(access.axes)
        whole = len(access.axes)
        for axis in reversed(access.axes):
            if axis.kind == "span":
                assert axis.start is not None
                start = xs[axis.start]
                stop = start + axis.size
                if (
                    start.min() < 0
                    or stop.max() > axis.extent
                    or (axis.end is not None and (stop > xs[axis.end]).any())
                ):
                    break
            whole = axis.number
        return whole

    def _index(self, access: Access, axis: Axis, xs: Operands) -> Tensor:
        """The tensor index along an axis, broadcastable over [program, *joint, *window], int64."""
        if axis.start is None:
            return access.row_view(axis, torch.arange(axis.size, device=self.device))
        x = xs[axis.start]
        x = (torch.from_numpy(x) if axis.kind != "tile" else x).to(self.device, torch.int64)
        if axis.kind == "span":
            return access.row_view(axis, x[:, None] + torch.arange(axis.size, device=self.device))
        return access.point_view(x)

    def _out_of_bounds(self, access: Access, axis: Axis, index: Tensor, bad: Tensor, batch: Batch) -> None:
        first = tuple(int(i) for i in bad.expand(index.shape).nonzero()[0])
        program = program_name(int(batch.ids[first[0]]), self.binding.grid)
        name, op = access.name, access.op
        hint = {
            "span": "end the span where the tensor ends, span(start, size, end=...)",
            "tile": "mask the elements that do not exist, mask=...",
        }.get(axis.kind, "keep the index within the tensor, or guard the access with @when")
        raise EvaluationError(
            f"{op.opcode} of {name} is out of bounds: index {int(index[first])} along axis {axis.number}, whose extent is "
            f"{axis.extent}, in program {program}",
            where=op.loc,
            fix=hint,
        )
