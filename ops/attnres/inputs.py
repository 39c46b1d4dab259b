"""The inputs on which AttnRes is tested and measured, by name: how rows, queries and weights are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Family:
    """rows(generator, N + 1, T, D) -> bank rows and prefix; query_std: of the query's numbers; group: for reports."""

    rows: Callable[[torch.Generator, int, int, int], torch.Tensor]
    query_std: float = 0.02
    group: str = "mild"


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _growing(generator: torch.Generator, n: int, t: int, d: int) -> torch.Tensor:
    """Each row ten times as large as the one before, from 1e-3: raw values count, keys are normalised."""
    sizes = 10.0 ** torch.arange(-3, n - 3, dtype=torch.float32).clamp(max=4)
    return _normal(generator, n, t, d) * sizes[:, None, None]


def _alike(generator: torch.Generator, n: int, t: int, d: int) -> torch.Tensor:
    """Rows that differ by a hundredth: the logits of neighbouring snapshots lie close together."""
    return _normal(generator, 1, t, d) + 0.01 * _normal(generator, n, t, d)


def _massive(generator: torch.Generator, n: int, t: int, d: int) -> torch.Tensor:
    """A few channels a thousand times as large as the rest, as trained networks have."""
    rows = _normal(generator, n, t, d)
    rows[..., :: max(1, d // 3)] *= 1000.0
    return rows


def _some_zero(generator: torch.Generator, n: int, t: int, d: int) -> torch.Tensor:
    """Every second row is 0: its mean square is 0 and its logit too."""
    rows = _normal(generator, n, t, d)
    rows[::2] = 0.0
    return rows


FAMILIES: dict[str, Family] = {
    "random": Family(_normal),
    "uniform": Family(_normal, query_std=0.0),
    "alike": Family(_alike, group="checkpoint"),
    "growing": Family(_growing, group="checkpoint"),
    "massive-channels": Family(_massive, group="checkpoint"),
    "sharp": Family(_normal, query_std=1.0, group="extreme"),
    "zero-rows": Family(_some_zero, query_std=0.2, group="extreme"),
    # eps decides how large the keys are
    "tiny": Family(lambda g, n, t, d: 1e-3 * _normal(g, n, t, d), query_std=0.2, group="extreme"),
    "large": Family(lambda g, n, t, d: 1e4 * _normal(g, n, t, d), query_std=0.1, group="extreme"),
}


def make(
    family: str,
    N: int,
    T: int,
    D: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    sites: int = 1,
    device: Any = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Draws bank [N, T, D], prefix [T, D], query [D] (or [S, D] for several sites), key_norm [D] and norm_weight [D].

    Drawn on the CPU, so that a seed gives the same numbers everywhere. Raises KeyError for a family that there is not.
    """
    chosen = FAMILIES[family]
    generator = torch.Generator().manual_seed(seed)
    rows = chosen.rows(generator, N + 1, T, D)
    query = chosen.query_std * _normal(generator, sites, D)
    key_norm, norm_weight = (1 + 0.1 * _normal(generator, D) for _ in range(2))
    drawn = {
        "bank": rows[:N],
        "prefix": rows[N],
        "query": query if sites > 1 else query[0],
        "key_norm": key_norm,
        "norm_weight": norm_weight,
    }
    return {name: x.to(dtype).to(device).contiguous() for name, x in drawn.items()}
