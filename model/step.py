"""What the layers need to know of one call: how tokens are packed, and where the cache keeps what belongs to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from k3dsl.model.cache import Cache
from k3dsl.model.functions import Functions
from k3dsl.model.packing import Packing


@dataclass(frozen=True)
class Step:
    """One call of the network.

    Attributes:
        functions: what to compute with.
        packing: of the tokens; one a sequence in a decode step.
        cache: None without one.
        slots: [N] int32, the row of each sequence in the cache, -1 for padding.
        decode: whether every sequence gets one token, through the kernels for that; nothing then waits for the device.
        fresh: whether no sequence has earlier tokens.
        places: [T] int64, where each token's latent goes, counted over all pages; -1: nowhere.
        keys: of a prefill, the packing of all tokens of each sequence, earlier ones included.
        key_places: [S] int64, where the latents of those tokens lie; None where they are this call's own.
        lengths: of a decode step, [N] int32, tokens that each query sees, its own included; 0 for padding.
        page_table: of a decode step, [N, most pages] int32.
    """

    functions: Functions
    packing: Packing
    cache: Cache | None = None
    slots: torch.Tensor | None = None
    decode: bool = False
    fresh: bool = True
    places: torch.Tensor | None = None
    keys: Packing | None = None
    key_places: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    page_table: torch.Tensor | None = None


def prefill(functions: Functions, packing: Packing, cache: Cache | None, rows: Sequence[int] | None) -> Step:
    """A step of any number of tokens a sequence; makes room for them in the cache's rows."""
    if cache is None:
        return Step(functions, packing, keys=packing)
    known = list(range(len(packing.lengths)) if rows is None else rows)
    cache.reserve(packing.lengths, known)
    starts = [cache.length(row) for row in known]
    ends = [start + new for start, new in zip(starts, packing.lengths, strict=True)]
    fresh = not any(starts)
    return Step(
        functions,
        packing,
        cache,
        torch.tensor(known, dtype=torch.int32).to(cache.device, non_blocking=True),
        fresh=fresh,
        places=cache.places_of(known, starts, ends),
        keys=packing if fresh else Packing.of(ends, cache.device),
        key_places=None if fresh else cache.places_of(known, [0] * len(ends), ends),
    )


def decode(functions: Functions, cache: Cache, slots: torch.Tensor) -> Step:
    """A step of one token a sequence. Its room is reserved already. Only works on the device, so a CUDA graph can hold it."""
    where = slots.clamp(min=0).long()
    everyone = slots is cache.slots
    lengths = cache.lengths + 1 if everyone else torch.where(slots >= 0, cache.lengths[where] + 1, 0)
    number = slots.shape[0]
    each = Packing((1,) * number, torch.arange(number + 1, dtype=torch.int32, device=slots.device))
    return Step(
        functions,
        each,
        cache,
        slots,
        decode=True,
        fresh=False,
        places=cache.places(slots),
        lengths=lengths.to(torch.int32),
        page_table=cache.page_table if everyone else cache.page_table[where],
    )
