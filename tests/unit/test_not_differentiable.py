"""Ops for inference say that they have no gradient, where torch would give none without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from k3dsl import ops
from k3dsl.errors import ArgumentError


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "kda_decode": lambda q: ops.kda_decode(
        q, r(2, 1, 1, 64), r(2, 1, 1, 64), -r(2, 1, 1, 64).abs(), r(2, 1, 1).sigmoid(), torch.zeros(2, 1, 64, 64)
    ),
    "linear_attention_decode": lambda q: ops.linear_attention_decode(
        q, r(2, 1, 1, 64), r(2, 1, 1, 64), torch.zeros(2, 1, 64, 64)
    ),
    "attention_decode": lambda q: ops.attention_decode(
        q, r(2, 8, 1, 64), r(2, 8, 1, 64), torch.tensor([3, 8], dtype=torch.int32)
    ),
    "causal_conv1d_update": lambda q: ops.causal_conv1d_update(q.flatten(1), torch.zeros(2, 3, 64), r(64, 4)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_through_an_op_for_inference_is_refused(name: str) -> None:
    call, q = CALLS[name], r(2, 1, 1, 64)
    call(q)
    with pytest.raises(ArgumentError, match=r"is for inference, but an input requires a gradient(.|\n)*torch.no_grad"):
        call(q.clone().requires_grad_())
    with torch.no_grad():
        call(q.clone().requires_grad_())


def test_the_network_is_refused_nothing() -> None:
    """It computes without gradients where it uses these ops."""
    from k3dsl.model import KimiK3ForCausalLM

    network = KimiK3ForCausalLM.from_config("K3-tiny", dtype="float32")
    assert network.dtype == torch.float32
    cache = network.new_cache(1)
    network(torch.ones(1, 5, dtype=torch.long), past=cache)
    network(torch.ones(1, 1, dtype=torch.long), past=cache)
    network.train()
    network(torch.ones(1, 5, dtype=torch.long), labels=torch.ones(1, 5, dtype=torch.long)).loss.backward()
