"""Small accesses of scripts whose indices data decide: located in every launch, in plain numbers on the host.

What a launch's memory works out for any access takes it some dozens of tensor operations; here, the same bounds are checked
on lists of a few integers. An access that is out of the ordinary (out of bounds, masked unevenly, written by two programs) is
left to the memory, which works it out or reports it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from k3dsl.backends.torch.access import Access, Axis
from k3dsl.backends.torch.batch import Batch
from k3dsl.backends.torch.binding import BoundTensor
from k3dsl.backends.torch.memory import Memory
from k3dsl.backends.torch.places import Window

MOST = 128
"""Points that an access may have to be located here."""


class Clip:
    """The part of an access's window that is there in all programs: so many rows of each axis that has an end.

    by_row: the window is one row of that axis of it, of which programs have different numbers. pad: for constant_pad_nd, what
    is missing of a tile [point, *window]; None where nothing is. slices: of such a tile. height: most rows by by_row.
    """

    def __init__(self, access: Access, ends: list[Axis], counts: tuple[int, ...], by_row: int | None) -> None:
        shape, full = list(access.window.shape), list(access.window.shape)
        for axis, count in zip(ends, counts, strict=True):
            shape[_rows_of(axis)] = count
        self.height = 1 if by_row is None else full[by_row]
        if by_row is not None:
            shape[by_row] = full[by_row] = 1
        self.window = Window(tuple(shape), access.window.strides)
        missing = [most - n for most, n in zip(full, shape, strict=True)]
        self.pad: list[int] | None = [x for n in reversed(missing) for x in (0, n)] if any(missing) else None
        self.slices = tuple(slice(0, None if axis == by_row else n) for axis, n in enumerate(shape))
        self.empty = 0 in counts


Count = int | tuple[int, ...] | None
"""Rows of an axis that are there: of all programs, or of each; None without an end."""


class _Along:
    """Where an access leads along one axis: for operands that stay the same object, found once."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._start: Tensor | None = None
        self._end: Tensor | None = None
        self._found: tuple[list[int], Count] | None = None

    def __call__(self, xs: list[Tensor]) -> tuple[list[int], Count] | None:
        """Offsets, and rows that are there; None: not as simple as that."""
        axis = self.axis
        assert axis.start is not None
        start, end = xs[axis.start], None if axis.end is None else xs[axis.end]
        if start is not self._start or end is not self._end:
            self._found = self._work_out(start, end)
            self._start, self._end = start, end
        return self._found

    def _work_out(self, start: Tensor, end: Tensor | None) -> tuple[list[int], Count] | None:
        axis = self.axis
        count: Count = None
        if start.numel() > MOST:
            return None
        first = start.flatten().tolist() if axis.kind == "tile" else start.tolist()
        if min(first) < 0:
            return None
        size = 1 if axis.kind in ("tile", "scalar") else axis.size
        if end is not None:
            last = end.tolist()
            if len(first) == len(last):
                left = [e - s for s, e in zip(first, last, strict=True)]
            elif len(first) == 1:
                left = [e - first[0] for e in last]
            elif len(last) == 1:
                left = [last[0] - s for s in first]
            else:
                return None
            if min(left) < size and prod(axis.shape[:-1]) != 1:
                return None  # rows in the shape of a tile
            counts = [0 if x < 0 else x if x < size else size for x in left]
            if any(n != counts[0] for n in counts):
                if max(s + n for s, n in zip(first * (len(counts) // len(first)), counts, strict=True)) > axis.extent:
                    return None
                return [x * axis.stride for x in first], tuple(counts)
            size = count = counts[0]
            if prod(axis.shape[:-1]) != 1:
                count = axis.shape[-1]  # all of them
        if max(first) + size > axis.extent:
            return None
        return [x * axis.stride for x in first], count


class Moving:
    """One access of one script. batch: its programs. Methods return None or False where the memory has to do it."""

    def __init__(self, access: Access, tensor: BoundTensor, memory: Memory, batch: Batch) -> None:
        self.access, self.batch, self.size = access, batch, batch.size
        self.load_only = tensor.frozen
        self.span = tensor.span
        self.raw = tensor.data.dtype
        self.held = memory.numerics.held(tensor.param.dtype)
        self.axes = [_Along(axis) for axis in access.axes if axis.start is not None]
        self.ends = [axis for axis in access.axes if axis.end is not None]
        self._point = Clip(access, [], (), by_row=None)
        self.clips: dict[tuple[int | None, ...], Clip] = {}
        self.points = max(1, access.points)
        self.tracked = memory.looks_at(access)
        self.blank = memory.other_of(access) if access.op.opcode == "load" else None
        self.fill = 0 if self.blank is None else self.blank.item()

    @classmethod
    def of(cls, access: Access, tensor: BoundTensor, memory: Memory, batch: Batch) -> Moving | None:
        """None for an access that is not of this kind."""
        strides = access.window.strides
        ordered = all(a >= b for a, b in pairwise(strides))  # else what the memory gives is laid out otherwise
        masked = access.mask_slot is not None or any(axis.end is not None for axis in access.axes)
        plain = not tensor.as_bytes and (ordered or not masked)
        if access.op.opcode == "store" and access.mask_slot is not None:
            plain = plain and access.has_tiles and not access.window.shape
        if access.op.opcode not in ("load", "store") or not plain or batch.size * max(1, access.points) > MOST:
            return None
        return cls(access, tensor, memory, batch)

    def _locate(self, xs: list[Tensor]) -> tuple[list[int], Clip, list[int] | None] | None:
        """(offset of every point, program by program, of all programs or of one that stands for all; the window's clip; where
        programs have different numbers of rows, which rows of all the points are)."""
        programs, points, counts, each = [0], None, [], self.points
        rows: tuple[int, ...] | None = None
        by_row: int | None = None
        for along in self.axes:
            found = along(xs)
            if found is None:
                return None
            terms, count = found
            if isinstance(count, tuple):
                by_row = _rows_of(along.axis)
                alone = rows is None and not self.access.has_tiles and len(count) == self.size
                if not alone or prod(self.access.window.shape[:by_row]) != 1:
                    return None
                rows = count
                counts.append(1)
            elif count is not None:
                counts.append(count)
            if along.axis.kind != "tile":
                programs = _sum(programs, terms)
            elif points is None:
                points = terms
            else:
                longest = max(len(points), len(terms))
                points = _sum(points * (longest // len(points)), terms * (longest // len(terms)))
        key = (by_row, *counts)
        clip = self.clips.get(key)
        if clip is None:
            clip = self.clips[key] = Clip(self.access, self.ends, tuple(counts), by_row)
        if rows is not None:
            assert by_row is not None
            stride, size = self.access.window.strides[by_row], self.access.window.shape[by_row]
            programs = programs * (len(rows) // len(programs))
            there = [(n, row) for n, count in enumerate(rows) for row in range(count)]
            if len(there) > MOST:
                return None
            return [programs[n] + row * stride for n, row in there], clip, [n * size + row for n, row in there]
        if points is None:
            return programs, clip, None
        if len(programs) == 1:
            return _sum(points, programs), clip, None
        if len(points) == each:
            return [p + t for p in programs for t in points], clip, None
        return [programs[n // each] + t for n, t in enumerate(points)], clip, None

    def _locate_some(self, xs: list[Tensor], at: list[int]) -> tuple[list[int], Clip, None] | None:
        """As `_locate`, of some points of an access without a window. The others may lie anywhere."""
        offsets, points = [0] * len(at), self.points
        for along in self.axes:
            axis = along.axis
            assert axis.start is not None
            start = xs[axis.start]
            if start.numel() > MOST:
                return None
            held = start.flatten().tolist()
            if axis.kind != "tile":
                taken = held * len(at) if len(held) == 1 else [held[n // points] for n in at]
            else:
                taken = [held[n % len(held)] for n in at]
            if taken and (min(taken) < 0 or max(taken) >= axis.extent):
                return None
            offsets = [o + x * axis.stride for o, x in zip(offsets, taken, strict=True)]
        return offsets, self._point, None

    def load(self, xs: list[Tensor], data: Tensor, first: int) -> Tensor | None:
        """The tile that a load gives. data, first: the tensor and its storage offset."""
        access = self.access
        found = self._locate(xs)
        if found is None:
            return None
        offsets, clip, rows = found
        window, n = clip.window, len(offsets)
        programs = self.size if rows is not None else n // self.points if access.has_tiles else n
        if clip.pad is not None and programs != self.size:
            return None
        assert self.blank is not None
        if clip.empty:
            x = self.blank.expand(programs, *access.joint, *access.window.shape)
        else:
            step = _step(offsets) if rows is None and not access.has_tiles and (self.load_only or n == 1) else None
            if step is not None:
                x = data.as_strided((n, *window.shape), (step, *window.strides), first + offsets[0])
            else:
                x = self._windows(window, data, first).index_select(0, torch.tensor(offsets))
                if access.has_tiles or window.merged_shape != window.shape:
                    x = x.view(n, *window.shape)
            if x.dtype is not self.held:
                x = x.to(self.held)
            elif step is not None and not self.load_only and clip.pad is None:
                x = x.clone()
            if clip.pad is not None:
                x = torch.constant_pad_nd(x, clip.pad, self.fill).contiguous()
            if rows is not None:
                x = x.view(n, -1)
                tile = x.new_full((self.size * clip.height, x.shape[1]), self.fill)
                x = tile.index_copy_(0, torch.tensor(rows), x).view(self.size, *access.window.shape)
            elif access.has_tiles:
                x = x.view(programs, *access.joint, *access.window.shape)
        if access.mask_slot is not None:
            x = torch.where(access.canonical(xs[access.mask_slot]), x, self.blank)
        return x if access.to_tile is None else x.permute(access.to_tile)

    def _windows(self, window: Window, data: Tensor, first: int) -> Tensor:
        """Every window that fits, one a row; rows overlap."""
        return data.as_strided((self.span - window.last, *window.merged_shape), (1, *window.merged_strides), first)

    def store(self, xs: list[Tensor], value: Tensor, data: Tensor, first: int, memory: Callable[[], Memory]) -> bool:
        """Carries out a store; False: it is not done. memory: of the launch."""
        access, each = self.access, self.points
        at: list[int] | None = None
        if access.mask_slot is None:
            found = self._locate(xs)
        else:
            mask = access.canonical(xs[access.mask_slot])
            if mask.shape[0] != self.size:
                mask = mask.expand(self.size, *access.joint)
            at = [n for n, there in enumerate(mask.flatten().tolist()) if there]
            found = self._locate_some(xs, at)
        if found is None:
            return False
        offsets, clip, rows = found
        if clip.empty or at == [] or rows == []:
            return True
        if rows is not None:
            at, each = rows, clip.height
        elif at is None and len(offsets) != self.size * self.points:
            return False
        window = clip.window
        if not self.tracked:
            if not apart(offsets, window.last):
                return False
        else:
            numbers = range(len(offsets)) if at is None else at
            ids = self.batch.ids.tolist()
            if not memory().claim(access, window, offsets, [ids[n // each] for n in numbers]):
                return False
        x = access.canonical(value)
        if x.shape[0] != self.size:
            x = x.expand(self.size, *x.shape[1:])
        if clip.pad is not None:
            x = x[(slice(None),) * (1 + len(access.joint)) + clip.slices]
        step = _step(offsets) if at is None and not access.has_tiles else None
        if step is not None:
            data.as_strided((len(offsets), *window.shape), (step, *window.strides), first + offsets[0]).copy_(x)
            return True
        x = x.reshape(-1, *window.merged_shape)
        if at is not None and len(at) != x.shape[0]:
            x = x.index_select(0, torch.tensor(at))
        self._windows(window, data, first).index_copy_(0, torch.tensor(offsets), x.to(self.raw))
        return True


def _rows_of(axis: Axis) -> int:
    """Which axis of the window the rows of a span are; those before it that the span has too are of one row."""
    return axis.window_axis + len(axis.shape) - 1


def _sum(some: list[int], terms: list[int]) -> list[int]:
    """Sums of two lists, of which one may have a single number."""
    if len(terms) == 1:
        some, terms = terms, some
    if len(some) == 1:
        only = some[0]
        return [only + t for t in terms] if only else terms
    return [a + b for a, b in zip(some, terms, strict=True)]


def apart(offsets: list[int], last: int) -> bool:
    """Whether from the first element of a window to its `last` there is nothing of another one's."""
    return all(b - a > last for a, b in pairwise(sorted(offsets)))


def _step(offsets: list[int]) -> int | None:
    """The distance of points that are evenly apart, in order; 0 for a single one."""
    if len(offsets) == 1:
        return 0
    step = offsets[1] - offsets[0]
    if step <= 0 or any(b - a != step for a, b in pairwise(offsets)):
        return None
    return step
