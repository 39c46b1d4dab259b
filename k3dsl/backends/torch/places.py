"""Where an access touches memory: sets of elements of a flat tensor that can be read, written and added to at once.

A set is made of points, each with the same window of elements around it: point `offset` covers offset + window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


class Window:
    """Elements at sum(index * stride) over a small shape. `merged` is the same set with neighbouring axes joined."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.shape = shape
        self.strides = strides
        merged: list[tuple[int, int]] = []
        for n, stride in zip(shape, strides, strict=True):
            if n == 1:
                continue
            if merged and merged[-1][1] == n * stride:
                merged[-1] = (merged[-1][0] * n, stride)
            else:
                merged.append((n, stride))
        self.merged_shape = tuple(n for n, _ in merged)
        self.merged_strides = tuple(s for _, s in merged)
        self.last = sum((n - 1) * s for n, s in merged)  # offset of the last element
        self._offsets: dict[torch.device, Tensor] = {}

    def offsets(self, device: torch.device) -> Tensor:
        """The offset of every element, in the shape `merged_shape`."""
        if device not in self._offsets:
            total = torch.zeros((), dtype=torch.int64, device=device)
            for n, stride in zip(self.merged_shape, self.merged_strides, strict=True):
                total = total[..., None] + torch.arange(n, device=device) * stride
            self._offsets[device] = total
        return self._offsets[device]


@dataclass(frozen=True)
class Strided:
    """`count` points at offset, offset + step, ...: a view."""

    window: Window
    count: int
    offset: int
    step: int

    is_view = True

    def _view(self, flat: Tensor) -> Tensor:
        w = self.window
        return flat.as_strided(
            (self.count, *w.merged_shape), (self.step, *w.merged_strides), flat.storage_offset() + self.offset
        )

    def read(self, flat: Tensor) -> Tensor:
        return self._view(flat)

    def tile(self, flat: Tensor, joint: tuple[int, ...]) -> Tensor:
        """What is read, [program, *joint, *window]."""
        w = self.window
        tile = flat.as_strided((self.count, *w.shape), (self.step, *w.strides), flat.storage_offset() + self.offset)
        return tile.reshape(-1, *joint, *w.shape) if joint else tile

    def write(self, flat: Tensor, values: Tensor) -> None:
        self._view(flat).copy_(values)

    def add(self, flat: Tensor, values: Tensor) -> None:
        if self.count == 1:
            self._view(flat).add_(values)
        else:
            Gathered(self.window, self._points(flat.device)).add(flat, values)

    def _points(self, device: torch.device) -> Tensor:
        return torch.arange(self.count, device=device) * self.step + self.offset

    def elements(self, flat: Tensor) -> Tensor:
        return Gathered(self.window, self._points(flat.device)).elements(flat)


@dataclass(frozen=True)
class Gathered:
    """Points at the given offsets (int64, 1-D)."""

    window: Window
    points: Tensor

    is_view = False

    def _windows(self, flat: Tensor) -> Tensor:
        """Every window that fits, one a row; rows overlap."""
        w = self.window
        return flat.as_strided((flat.numel() - w.last, *w.merged_shape), (1, *w.merged_strides), flat.storage_offset())

    def read(self, flat: Tensor) -> Tensor:
        return self._windows(flat).index_select(0, self.points)

    def tile(self, flat: Tensor, joint: tuple[int, ...]) -> Tensor:
        """What is read, [program, *joint, *window]."""
        return self.read(flat).reshape(-1, *joint, *self.window.shape)

    def write(self, flat: Tensor, values: Tensor) -> None:
        self._windows(flat).index_copy_(0, self.points, values)

    def add(self, flat: Tensor, values: Tensor) -> None:
        self._windows(flat).index_add_(0, self.points, values)

    def elements(self, flat: Tensor) -> Tensor:
        inner = self.window.offsets(flat.device)
        return self.points.view(-1, *(1,) * inner.dim()) + inner


Places = Strided | Gathered


def places(window: Window, offsets: np.ndarray, device: torch.device, view: bool) -> Places:
    """Places for point offsets known on the host. `view`: prefer a view where the offsets are evenly spaced."""
    n = offsets.size
    if n == 1:
        return Strided(window, 1, int(offsets[0]), 0)
    if view:
        steps = offsets[1:] - offsets[:-1]
        step = int(steps[0])
        if step > 0 and (steps == step).all():
            return Strided(window, n, int(offsets[0]), step)
    return Gathered(window, torch.from_numpy(offsets).to(device))
