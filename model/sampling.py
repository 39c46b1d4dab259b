"""From logits to the next token: greedy, temperature, top-k, top-p."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from k3dsl.model.arguments import integer, number
from k3dsl.ops.common import fail

LEAST_TEMPERATURE = 1e-6
"""Logits divided by less leave fp32."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    temperature: divides the logits; 0 takes the most likely token. top_k: only the k most likely tokens; 0: all.
    top_p: only the fewest most likely tokens whose probabilities sum to at least p; 1: all. Filters apply in this order.

    Raises ArgumentError for numbers that mean nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        remedy = f"pass 0 for the most likely token, or a number from {LEAST_TEMPERATURE:g} on"
        temperature = number("temperature", self.temperature, remedy)
        if temperature and not LEAST_TEMPERATURE <= temperature < math.inf:
            fail("temperature", f"is {temperature}", remedy)
        integer("top_k", self.top_k, 0, "pass how many tokens may be drawn, or 0 for all")
        if not 0 < number("top_p", self.top_p, "pass a probability above 0, up to 1") <= 1:
            fail("top_p", f"is {self.top_p}", "pass a probability above 0, up to 1")


def probabilities(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """The distribution [B, vocab] that tokens are drawn from, for a positive temperature."""
    scaled = logits / how.temperature
    order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    ranked = torch.softmax(order.values, -1)
    kept = torch.ones_like(ranked, dtype=torch.bool)
    if how.top_k:
        kept[:, how.top_k :] = False
        ranked = torch.where(kept, ranked, 0.0)
        ranked = ranked / ranked.sum(-1, keepdim=True)
    if how.top_p < 1:
        kept &= ranked.cumsum(-1) - ranked < how.top_p
    ranked = torch.where(kept, ranked, 0.0)
    return torch.zeros_like(ranked).scatter(-1, order.indices, ranked / ranked.sum(-1, keepdim=True))


def sample(logits: torch.Tensor, how: Sampling, generator: torch.Generator | None = None) -> torch.Tensor:
    """One token [B] int64 for each row of logits [B, vocab]; of equal logits the lowest token where the choice is greedy."""
    if how.temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial(probabilities(logits, how), 1, generator=generator)[:, 0]
