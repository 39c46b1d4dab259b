"""What is known of a memory operation: before it runs, from the kernel; and once its indices are, for a batch of programs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from k3dsl.backends.torch.binding import BoundTensor
from k3dsl.backends.torch.places import Gathered, Places, Window
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
    bring it back to the tile's own layout, or None when they are the same. `located`: where it led, by `scalars` and batch.
    `other`: what a masked element reads.
    """

    def __init__(self, op: Op, tensor: BoundTensor) -> None:
        self.op = op
        self.name = tensor.name
        self.located: OrderedDict[Hashable, Located] = OrderedDict()
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
        self._inner: dict[int, Window] = {}
        # the operands that are scalars on the host, and whether nothing else says where the access leads
        starts = {axis.start for axis in self.axes if axis.kind != "tile"}
        self.scalars = frozenset({n for n in (*starts, *(axis.end for axis in self.axes)) if n is not None})
        self.plain = before is None and self.mask_slot is None
        self.other: dict[torch.device, Tensor] = {}
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

    def inner(self, first: int) -> Window:
        """The window's axes from `first` on."""
        if first not in self._inner:
            self._inner[first] = Window(self.window.shape[first:], self.window.strides[first:])
        return self._inner[first]

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


@dataclass(frozen=True)
class Windows:
    """Programs that take the quick way. rows: their positions in the batch, None for all. size: how many they are. valid:
    which elements are not masked, None for all. tags: the program of each point, None where nobody asks."""

    rows: Tensor | None
    size: int
    where: Places
    valid: Tensor | None
    tags: Tensor | None


@dataclass(frozen=True)
class Elements:
    """Programs whose masks and bounds are worked out element by element, but for trailing axes that are whole in all of them:
    the windows of the points. shape: of their tile. where: the valid points, None for none. at: their numbers among all
    points of the tile. tags: the program of each."""

    rows: Tensor | None
    size: int
    shape: tuple[int, ...]
    where: Gathered | None
    at: Tensor
    tags: Tensor | None


@dataclass(frozen=True)
class Located:
    """An access of a batch, worked out. other: what a masked element reads."""

    access: Access
    size: int
    parts: tuple[Windows | Elements, ...]
    other: Tensor | None = None

    def nbytes(self) -> int:
        """About what this holds."""
        if all(isinstance(part, Windows) and part.valid is None and part.tags is None for part in self.parts):
            return 64 * len(self.parts)
        return sum(_size(x) for part in self.parts for x in vars(part).values()) + 64 * len(self.parts)


def _size(x: object) -> int:
    if isinstance(x, Gathered):
        x = x.points
    return x.untyped_storage().nbytes() if isinstance(x, Tensor) else 0


@dataclass(frozen=True)
class Box:
    """Elements that are all those up to some row of each axis: a view of the tensor, and what is missing of the tile [*lead,
    *window] around it, as padding of constant_pad_nd. slices: of the tile's lead."""

    lead: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    pad: list[int]
    slices: tuple[slice, ...]


def box_of(part: Elements) -> Box | None:
    """The box that the elements of a part are, None where they are none."""
    assert part.where is not None
    window, at, points = part.where.window, part.at.numpy(), part.where.points.numpy()
    lead = part.shape[: len(part.shape) - len(window.shape)]
    where = np.unravel_index(at, lead)
    counts = tuple(int(axis.max()) + 1 for axis in where)
    if at.size != np.prod(counts) or not (np.ravel_multi_index(np.indices(counts), lead).ravel() == at).all():
        return None
    grid = points.reshape(counts)
    first = (0,) * len(counts)
    strides = []
    for axis, n in enumerate(counts):
        second = tuple(int(a == axis) for a in range(len(counts)))
        strides.append(int(grid[second] - grid[first]) if n > 1 else 0)
    expected = int(grid[first]) + sum(i * s for i, s in zip(np.indices(counts), strides, strict=True))
    if min(strides, default=0) < 0 or not (grid == expected).all():
        return None
    missing = [*(full - n for full, n in zip(lead, counts, strict=True)), *(0 for _ in window.shape)]
    pad = [x for n in reversed(missing) for x in (0, n)]
    slices = tuple(slice(0, n) for n in counts)
    return Box(lead, (*counts, *window.shape), (*strides, *window.strides), int(grid[first]), pad, slices)
