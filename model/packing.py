"""Sequences of different lengths packed into one: offsets, and the way from padded batches and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from k3dsl.ops.common import check_offset_values, check_offsets, fail


@dataclass(frozen=True)
class Packing:
    """How T tokens are divided into sequences. lengths: of each, known on the host. cu_seqlens: [N + 1] int32, their offsets
    on the device. rows: [T] int64, where each token stands in the padded batch, counted row by row; None: there is no
    padding."""

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    rows: torch.Tensor | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, rows: torch.Tensor | None = None) -> Packing:
        """From the lengths of the sequences."""
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(tuple(lengths), offsets.to(device, non_blocking=True), rows)

    @classmethod
    def of_offsets(cls, cu_seqlens: torch.Tensor, tokens: int) -> Packing:
        """From offsets [N + 1], which are read back to the host. Raises ArgumentError."""
        check_offsets("cu_seqlens", cu_seqlens)
        numbers = cu_seqlens.tolist()
        check_offset_values("cu_seqlens", numbers, "input_ids", tokens)
        lengths = [b - a for a, b in pairwise(numbers)]
        return cls(tuple(lengths), cu_seqlens.to(torch.int32))

    @classmethod
    def of_mask(cls, attention_mask: torch.Tensor) -> Packing:
        """From a mask [B, T] that is 1 for tokens and 0 for padding, which is read back to the host.

        The tokens of a row must stand together: padding on the right, on the left, or both. Raises ArgumentError.
        """
        held = attention_mask.cpu() != 0
        edges = torch.nn.functional.pad(held, (1, 0)).int().diff(dim=1)
        if bool(((edges == 1).sum(1) > 1).any()):
            row = int(((edges == 1).sum(1) > 1).nonzero()[0])
            fail("attention_mask", f"has padding between the tokens of row {row}", "pad a row on its left or right")
        lengths = held.sum(1).tolist()
        device = attention_mask.device
        rows = None if bool(held.all()) else held.flatten().nonzero()[:, 0].to(device)
        return cls.of(lengths, device, rows)

    @property
    def tokens(self) -> int:
        """T, over all sequences."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths, default=0)

    @cached_property
    def uniform(self) -> bool:
        """Whether all sequences are equally long."""
        return len(set(self.lengths)) == 1

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, ...] as [tokens, ...] without padding."""
        flat = x.flatten(0, 1)
        return flat if self.rows is None else flat[self.rows]

    def unpack(self, x: torch.Tensor, batch: int, width: int) -> torch.Tensor:
        """[tokens, ...] as [batch, width, ...], zeros where there is padding."""
        if self.rows is None:
            return x.view(batch, width, *x.shape[1:])
        flat = x.new_zeros(batch * width, *x.shape[1:]).index_copy(0, self.rows, x)
        return flat.view(batch, width, *x.shape[1:])

    def last(self, count: int) -> torch.Tensor:
        """The packed positions of the last `count` tokens of every sequence, [N count]."""
        steps = torch.arange(-count, 0, device=self.cu_seqlens.device)
        return (self.cu_seqlens[1:, None].long() + steps).flatten()
