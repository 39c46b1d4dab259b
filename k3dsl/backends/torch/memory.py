"""Loads, stores and atomic additions of a batch of programs: index arithmetic, bounds, masks.

A program whose whole access lies in bounds and is not masked takes the quick way, as one point with a window around it.
The others (ragged edges, masked scatters, errors) are worked out element by element.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from k3dsl.backends.torch.batch import Batch, host, take
from k3dsl.backends.torch.binding import Binding, BoundTensor
from k3dsl.backends.torch.dtypes import Numerics
from k3dsl.backends.torch.places import ELEMENT, Gathered, Places, Window, places
from k3dsl.backends.torch.races import Races, program_name
from k3dsl.errors import EvaluationError
from k3dsl.ir.graph import Op


@dataclass(frozen=True)
class Axis:
    """One axis of an access: its index, and where its rows lie among the window's axes."""

    number: int
    kind: str
    start: int | None
    end: int | None
    size: int
    shape: tuple[int, ...]
    window_axis: int
    extent: int
    stride: int


class Access:
    """What is the same for every execution of one memory op.

    Tiles are brought to the layout [program, *joint axes of the index tiles, *window axes]; `to_tile` are the axes that
    bring it back to the tile's own layout, or None when they are the same.
    """

    def __init__(self, op: Op, tensor: BoundTensor) -> None:
        self.op = op
        self.tensor = tensor
        self.mask_slot: int | None = op.attrs.get("mask_slot")
        self.axes: list[Axis] = []
        self.joint: tuple[int, ...] = ()
        shape: list[int] = []
        strides: list[int] = []
        before: int | None = None
        for number, index in enumerate(op.index):
            extent, stride = tensor.extents[number], tensor.strides[number]
            rows = index.shape if index.kind in ("full", "span") else ()
            size = prod(rows)
            self.axes.append(Axis(number, index.kind, index.start, index.end, size, rows, len(shape), extent, stride))
            shape.extend(rows)
            strides.extend(prod(rows[k + 1 :]) * stride for k in range(len(rows)))
            if index.kind == "tile" and before is None:
                assert index.start is not None
                before, self.joint = len(shape), op.operands[index.start].shape
        self.window = Window(tuple(shape), tuple(strides))
        self.points = prod(self.joint)
        self.has_tiles = before is not None
        self.to_tile: tuple[int, ...] | None = None
        self.from_tile: tuple[int, ...] | None = None
        if before:
            j = len(self.joint)
            self.to_tile = (
                0,
                *range(1 + j, 1 + j + before),
                *range(1, 1 + j),
                *range(1 + j + before, 1 + j + len(shape)),
            )
            self.from_tile = tuple(int(i) for i in np.argsort(self.to_tile))

    def canonical(self, tile: Tensor) -> Tensor:
        return tile if self.from_tile is None else tile.permute(self.from_tile)

    def row_view(self, axis: Axis, rows: Tensor) -> Tensor:
        """Something per program and row of an axis, shaped to broadcast over [program, *joint, *window]."""
        shape = [1] * (len(self.joint) + len(self.window.shape))
        k = len(self.joint) + axis.window_axis
        shape[k : k + len(axis.shape)] = axis.shape
        return rows.reshape(-1, *shape)

    def point_view(self, values: Tensor) -> Tensor:
        """Something per program, or per program and point, shaped to broadcast over [program, *joint, *window]."""
        inner = values.shape[1:] or (1,) * len(self.joint)
        return values.reshape(values.shape[0], *inner, *(1,) * len(self.window.shape))


def _every(x: Tensor) -> np.ndarray:
    """Whether a bool tile holds everywhere, for each program."""
    return x.reshape(x.shape[0], -1).all(1).cpu().numpy()


class Memory:
    """The memory operations of one launch."""

    def __init__(self, binding: Binding, numerics: Numerics, check: bool) -> None:
        self.binding = binding
        self.numerics = numerics
        self.device = binding.device
        self.races = Races(binding) if check else None
        self._accesses: dict[int, Access] = {}

    def _access(self, op: Op) -> Access:
        access = self._accesses.get(id(op))
        if access is None:
            access = self._accesses[id(op)] = Access(op, self.binding.tensors[op.attrs["tensor"]])
        return access

    def load(self, op: Op, xs: list[Tensor], batch: Batch) -> Tensor:
        access = self._access(op)
        tracked = self.races is not None and not access.tensor.frozen and self.races.tracks(access.tensor.name)
        fit = self._fit(access, xs, batch.size, unmasked=tracked)
        if fit is None:
            out = self._load_windows(access, xs, batch, tracked)
        elif not fit.any():
            out = self._load_elements(access, xs, batch, tracked)
        else:
            yes, no = np.flatnonzero(fit), np.flatnonzero(~fit)
            a = self._load_windows(access, [take(x, yes) for x in xs], batch.subset(yes), tracked)
            b = self._load_elements(access, [take(x, no) for x in xs], batch.subset(no), tracked)
            out = torch.empty((batch.size, *a.shape[1:]), dtype=a.dtype, device=a.device)
            out[torch.from_numpy(yes).to(a.device)] = a
            out[torch.from_numpy(no).to(a.device)] = b
        return out if access.to_tile is None else out.permute(access.to_tile)

    def write(self, op: Op, xs: list[Tensor], batch: Batch) -> None:
        """A store or an atomic addition."""
        access = self._access(op)
        fit = self._fit(access, xs, batch.size, unmasked=True)
        if fit is None:
            self._write_windows(access, xs, batch)
            return
        yes, no = np.flatnonzero(fit), np.flatnonzero(~fit)
        if yes.size:
            self._write_windows(access, [take(x, yes) for x in xs], batch.subset(yes))
        if no.size:
            self._write_elements(access, [take(x, no) for x in xs], batch.subset(no))

    def _fit(self, access: Access, xs: list[Tensor], size: int, unmasked: bool) -> np.ndarray | None:
        """The programs whose whole access lies in bounds (and is not masked, if asked for); None for all of them."""
        fit: np.ndarray | None = None
        for axis in access.axes:
            if axis.kind == "full":
                continue
            assert axis.start is not None
            x = xs[axis.start]
            if axis.kind == "tile":
                if int(x.min()) >= 0 and int(x.max()) < axis.extent:
                    continue
                ok = _every((x >= 0) & (x < axis.extent))
            else:
                start = host(x)
                limit: int | np.ndarray = axis.extent
                if unmasked and axis.end is not None:
                    limit = np.minimum(limit, host(xs[axis.end]))
                ok = (start >= 0) & (start + axis.size <= limit)
            if not ok.all():
                fit = ok if fit is None else fit & ok
        if unmasked and access.mask_slot is not None:
            mask = xs[access.mask_slot]
            if not bool(mask.all()):
                ok = _every(mask)
                fit = ok if fit is None else fit & ok
        return None if fit is None else np.broadcast_to(fit, (size,))

    # The quick way: windows around points.

    def _places(self, access: Access, xs: list[Tensor], size: int | None, view: bool) -> Places:
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
                base = base + host(x) * axis.stride
        if gathered is not None:
            offsets = gathered + torch.from_numpy(base).to(gathered.device).view(-1, *(1,) * len(access.joint))
            if size is not None:
                offsets = offsets.expand(size, *access.joint)
            return Gathered(access.window, offsets.reshape(-1))
        if size is not None and base.size != size:
            base = np.broadcast_to(base, (size,)).copy()
        return places(access.window, base, self.device, view)

    def _load_windows(self, access: Access, xs: list[Tensor], batch: Batch, tracked: bool) -> Tensor:
        tensor = access.tensor
        if tracked:
            where = self._places(access, xs, batch.size, view=False)
            assert self.races is not None
            self.races.visit(access.op, tensor, where, self._tags(access, batch), access.has_tiles)
        else:
            where = self._places(access, xs, None, view=tensor.frozen)
        raw = where.read(tensor.flat)
        x = self.numerics.loaded(raw, tensor.param.dtype)
        if where.is_view and not tensor.frozen and x.data_ptr() == raw.data_ptr():
            x = x.clone()
        x = x.reshape(-1, *access.joint, *access.window.shape)
        valid = self._valid(access, xs, whole=False)
        return x if valid is None else torch.where(valid, x, self._other(access))

    def _write_windows(self, access: Access, xs: list[Tensor], batch: Batch) -> None:
        tensor, window = access.tensor, access.window
        where = self._places(access, xs, batch.size, view=True)
        if self.races is not None and self.races.tracks(tensor.name):
            self.races.visit(access.op, tensor, where, self._tags(access, batch), access.has_tiles)
        value = self._value(access, xs, batch.size).reshape(-1, *window.merged_shape)
        if access.op.opcode == "store":
            where.write(tensor.flat, value)
        else:
            where.add(tensor.flat, value)

    def _value(self, access: Access, xs: list[Tensor], size: int) -> Tensor:
        value = access.canonical(xs[access.op.attrs["value_slot"]]).to(self.device)
        return self.numerics.stored(value, access.tensor.param.dtype).expand(size, *value.shape[1:])

    def _tags(self, access: Access, batch: Batch) -> Tensor:
        return batch.tags(self.device).repeat_interleave(access.points)

    def _other(self, access: Access) -> Tensor:
        dtype = access.op.result.dtype
        value = access.op.attrs.get("other", 0)
        return torch.tensor(value, dtype=torch.float64).to(self.numerics.held(dtype)).to(self.device)

    def _valid(self, access: Access, xs: list[Tensor], whole: bool) -> Tensor | None:
        """Which elements are not masked, broadcastable over [program, *joint, *window]; None when all are.

        whole: do not look for the case that a span lies before its end altogether.
        """
        valid: Tensor | None = None
        for axis in access.axes:
            if axis.end is None:
                continue
            assert axis.start is not None
            start, end = host(xs[axis.start]), host(xs[axis.end])
            if not whole and (start + axis.size <= end).all():
                continue
            rows = (start[:, None] + np.arange(axis.size)) < end[:, None]
            term = access.row_view(axis, torch.from_numpy(rows).to(self.device))
            valid = term if valid is None else valid & term
        if access.mask_slot is not None:
            term = access.canonical(xs[access.mask_slot]).to(self.device)
            valid = term if valid is None else valid & term
        return valid

    # Element by element.

    def _elements(self, access: Access, xs: list[Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """(offsets, valid) of every element; an offset that is not valid is one of some element in bounds.

        Raises EvaluationError for an element that is out of bounds and not masked.
        """
        shape = (batch.size, *access.joint, *access.window.shape)
        masked = self._valid(access, xs, whole=True)
        valid = (torch.ones((), dtype=torch.bool, device=self.device) if masked is None else masked).expand(shape)
        offsets = torch.zeros((), dtype=torch.int64, device=self.device)
        for axis in access.axes:
            index = self._index(access, axis, xs)
            outside = (index < 0) | (index >= axis.extent)
            if bool(outside.any()):
                bad = outside & valid
                if bool(bad.any()):
                    self._out_of_bounds(access, axis, index.expand(shape), bad, batch)
            offsets = offsets + index.clamp(0, max(axis.extent - 1, 0)) * axis.stride
        return offsets.expand(shape), valid

    def _index(self, access: Access, axis: Axis, xs: list[Tensor]) -> Tensor:
        """The tensor index along an axis, broadcastable over [program, *joint, *window], int64."""
        if axis.start is None:
            return access.row_view(axis, torch.arange(axis.size, device=self.device))
        x = xs[axis.start].to(self.device, torch.int64)
        if axis.kind == "span":
            return access.row_view(axis, x[:, None] + torch.arange(axis.size, device=self.device))
        return access.point_view(x)

    def _out_of_bounds(self, access: Access, axis: Axis, index: Tensor, bad: Tensor, batch: Batch) -> None:
        first = tuple(int(i) for i in bad.expand(index.shape).nonzero()[0])
        program = program_name(int(batch.ids[first[0]]), self.binding.grid)
        name, op = access.tensor.name, access.op
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

    def _load_elements(self, access: Access, xs: list[Tensor], batch: Batch, tracked: bool) -> Tensor:
        tensor = access.tensor
        offsets, valid = self._elements(access, xs, batch)
        if not bool(valid.any()):
            return self._other(access).expand(offsets.shape)
        if tracked:
            self._visit_elements(access, offsets, valid, batch)
        raw = tensor.flat.index_select(0, offsets.reshape(-1)).view(offsets.shape)
        return torch.where(valid, self.numerics.loaded(raw, tensor.param.dtype), self._other(access))

    def _write_elements(self, access: Access, xs: list[Tensor], batch: Batch) -> None:
        tensor = access.tensor
        offsets, valid = self._elements(access, xs, batch)
        if not bool(valid.any()):
            return
        if self.races is not None and self.races.tracks(tensor.name):
            self._visit_elements(access, offsets, valid, batch)
        where = Gathered(ELEMENT, offsets[valid])
        value = self._value(access, xs, batch.size)[valid]
        if access.op.opcode == "store":
            where.write(tensor.flat, value)
        else:
            where.add(tensor.flat, value)

    def _visit_elements(self, access: Access, offsets: Tensor, valid: Tensor, batch: Batch) -> None:
        assert self.races is not None
        tags = batch.tags(self.device).view(-1, *(1,) * (offsets.dim() - 1)).expand(offsets.shape)
        where = Gathered(ELEMENT, offsets[valid])
        self.races.visit(access.op, access.tensor, where, tags[valid], access.has_tiles)
