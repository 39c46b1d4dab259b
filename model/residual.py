"""The residual stream: Block AttnRes (attention over depth) and the ordinary sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from k3dsl.model.config import KimiK3Config
    from k3dsl.model.functions import Functions
    from k3dsl.model.layers import RMSNorm


class Residual:
    """The stream of an ordinary residual network: one running sum, which every norm reads.

    site: of AttnRes, the query and the key norm; not used here.
    """

    def __init__(self, embedded: torch.Tensor, functions: Functions) -> None:
        self.total = embedded
        self.functions = functions

    def read(self, norm: RMSNorm, site: tuple[nn.Module, RMSNorm] | None, layer: int | None = None) -> torch.Tensor:
        """What an attention, an FFN or the head sees: the stream, aggregated and normed. layer: of an attention's read."""
        return self.functions.rmsnorm(self.total, norm.weight, norm.eps)

    def add(self, x: torch.Tensor) -> None:
        """Adds the output of an attention or an FFN."""
        self.total = self.total + x


class BlockAttnRes(Residual):
    """A bank of rows, one a finished block, and the partial sum of the block at work (AttnRes, arXiv 2603.15031).

    Row 0 is the embedding; row m the sum of all outputs of block m. Every read is a softmax mix of the rows and the partial
    sum. A layer that starts a block first aggregates for its attention, then moves the partial sum into the bank, and its
    attention's output starts the next partial sum.
    """

    def __init__(self, config: KimiK3Config, embedded: torch.Tensor, functions: Functions) -> None:
        super().__init__(embedded, functions)
        self.starts = frozenset(config.snapshot_layers)
        self.rows = 0
        self.empty = False  # whether the partial sum has nothing in it yet
        # autograd needs its rows unchanged; else they lie in one buffer that every site reads
        rows = 0 if functions.differentiable else len(self.starts)
        self.bank = embedded.new_empty((rows, *embedded.shape))

    def read(self, norm: RMSNorm, site: tuple[nn.Module, RMSNorm] | None, layer: int | None = None) -> torch.Tensor:
        assert site is not None
        query, key_norm = site
        snapshot = layer in self.starts
        target = self.bank[self.rows] if snapshot and not self.functions.differentiable else None
        seen = self.functions.attnres(
            self.bank[: self.rows],
            self.total,
            query.weight,
            key_norm.weight,
            key_norm.eps,
            norm.weight,
            norm.eps,
            target,
        )
        if snapshot:
            if target is None:
                self.bank = torch.cat([self.bank, self.total[None]])
            self.rows += 1
            self.empty = True
        return seen

    def add(self, x: torch.Tensor) -> None:
        self.total = x if self.empty else self.total + x
        self.empty = False
