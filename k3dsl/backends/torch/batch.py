"""Batches of programs, and the helpers that pick programs out of batched values."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Batch:
    """Programs that run together: `ids` are their positions in the grid, counted row by row (last axis fastest)."""

    def __init__(self, ids: np.ndarray, grid: tuple[int, ...]) -> None:
        self.ids = ids
        self.grid = grid
        self._coordinates: tuple[Tensor, ...] | None = None
        self._tags: Tensor | None = None

    @property
    def size(self) -> int:
        return int(self.ids.size)

    def subset(self, positions: np.ndarray) -> Batch:
        return Batch(self.ids[positions], self.grid)

    def repeated(self, before: int, after: int) -> Batch:
        """A batch whose members are laid out as [before, program, after], flattened."""
        ids = np.broadcast_to(self.ids[None, :, None], (before, self.size, after))
        return Batch(ids.reshape(-1), self.grid)

    def coordinate(self, axis: int) -> Tensor:
        """program_id(axis), i32 on the host: one value when it is the same for all."""
        if axis >= len(self.grid):
            return torch.zeros(1, dtype=torch.int32)
        if self._coordinates is None:
            found = []
            for c in np.unravel_index(self.ids, self.grid):
                c = c.astype(np.int32)
                found.append(torch.from_numpy(c[:1].copy() if (c == c[0]).all() else c))
            self._coordinates = tuple(found)
        return self._coordinates[axis]

    def tags(self, device: torch.device) -> Tensor:
        """The programs' ids, int32."""
        if self._tags is None:
            self._tags = torch.from_numpy(self.ids.astype(np.int32)).to(device)
        return self._tags


def host(x: Tensor) -> np.ndarray:
    """A batched integer or bool scalar as int64 on the host."""
    return (x if x.is_cpu else x.cpu()).numpy().astype(np.int64)


def take(x: Tensor, positions: np.ndarray) -> Tensor:
    """The values of some programs of a batch; what is the same for all stays single."""
    if x.shape[0] == 1:
        return x
    return x.index_select(0, torch.from_numpy(positions).to(x.device))


def extremes(x: np.ndarray | Tensor) -> tuple[int, int]:
    """The least and the greatest of some integers."""
    if isinstance(x, Tensor):
        low, high = torch.aminmax(x)
        return int(low), int(high)
    if x.size <= 16:  # numpy takes longer to begin
        values = x.tolist()
        return min(values), max(values)
    return int(x.min()), int(x.max())
