"""Reductions and scans of tuples of tiles with the user's own combine region, which must be associative."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from k3dsl.backends.torch.batch import Batch
from k3dsl.backends.torch.plan import Step
from k3dsl.ir.graph import Value

if TYPE_CHECKING:
    from k3dsl.backends.torch.machine import Machine


class _Combine:
    """Applies the region to tiles of scalars: every element becomes one program of a larger batch."""

    def __init__(self, machine: Machine, step: Step, env: dict[Value, Tensor], batch: Batch) -> None:
        self.machine, self.step, self.env, self.batch = machine, step, env, batch

    def __call__(self, left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
        """left, right: tiles [n, programs, elements]."""
        shape = left[0].shape
        region = self.step.regions[0]
        inner = {v: self._spread(self.env[v], shape) for v in self.step.free}
        for v, x in zip(region.region.args, [*left, *right], strict=True):
            inner[v] = x.reshape(-1)
        outs = self.machine.run(region, inner, self.batch.repeated(shape[0], shape[2]))
        # integer results come as host scalars
        return [x.to(like.device).expand(shape.numel()).view(shape) for x, like in zip(outs, left, strict=True)]

    @staticmethod
    def _spread(x: Tensor, shape: torch.Size) -> Tensor:
        return x if x.shape[0] == 1 else x[None, :, None].expand(shape).reshape(-1)


def _lanes(step: Step, xs: list[Tensor], batch: Batch) -> list[Tensor]:
    """Tiles as [extent of the axis, programs, other elements]."""
    axis = step.op.attrs["axis"] + 1
    out = []
    for x in xs:
        x = x.expand(batch.size, *x.shape[1:]).movedim(axis, 0)
        out.append(x.reshape(x.shape[0], batch.size, -1))
    return out


def combined_reduce(
    machine: Machine, step: Step, xs: list[Tensor], env: dict[Value, Tensor], batch: Batch
) -> list[Tensor]:
    """Neighbours are combined in pairs until one is left; the order of the operands is kept."""
    combine, tiles = _Combine(machine, step, env, batch), _lanes(step, xs, batch)
    while (n := tiles[0].shape[0]) > 1:
        even = n - n % 2
        outs = combine([x[0:even:2] for x in tiles], [x[1:even:2] for x in tiles])
        if n % 2:
            outs = [torch.cat([y, x[even:]]) for y, x in zip(outs, tiles, strict=True)]
        tiles = outs
    return [x[0].reshape(x.shape[1], *v.shape) for x, v in zip(tiles, step.op.results, strict=True)]


def combined_scan(
    machine: Machine, step: Step, xs: list[Tensor], env: dict[Value, Tensor], batch: Batch
) -> list[Tensor]:
    """Inclusive scan in log2(extent) rounds; a reverse scan is a forward one of the flipped tiles."""
    combine, tiles = _Combine(machine, step, env, batch), _lanes(step, xs, batch)
    reverse, axis = bool(step.op.attrs.get("reverse")), step.op.attrs["axis"] + 1
    if reverse:
        tiles = [x.flip(0) for x in tiles]
    distance, n = 1, tiles[0].shape[0]
    while distance < n:
        outs = combine([x[:-distance] for x in tiles], [x[distance:] for x in tiles])
        tiles = [torch.cat([x[:distance], y]) for x, y in zip(tiles, outs, strict=True)]
        distance *= 2
    if reverse:
        tiles = [x.flip(0) for x in tiles]
    out = []
    for x, v in zip(tiles, step.op.results, strict=True):
        rest = [e for a, e in enumerate(v.shape) if a != axis - 1]
        out.append(x.reshape(x.shape[0], x.shape[1], *rest).movedim(0, axis))
    return out
