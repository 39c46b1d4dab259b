"""The functions that the layers call, as one table: in plain torch, or the compiled ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from k3dsl.model import compiled_ops, torch_ops

Function = Callable[..., Any]


@dataclass(frozen=True)
class Functions:
    """What a layer computes with. Arguments and meaning of each function: see k3dsl.model.torch_ops, where it is defined in
    plain torch.

    differentiable: whether autograd works through all of them.
    """

    name: str
    differentiable: bool
    rmsnorm: Function
    gated_rmsnorm: Function
    activate: Function
    causal_conv1d: Function
    kda: Function
    kda_step: Function
    mla_prefill: Function
    mla_decode: Function
    cache_write: Function
    router: Function
    experts: Function
    attnres: Function


TORCH = Functions(
    name="torch",
    differentiable=True,
    rmsnorm=torch_ops.rmsnorm,
    gated_rmsnorm=torch_ops.gated_rmsnorm,
    activate=torch_ops.activate,
    causal_conv1d=torch_ops.causal_conv1d,
    kda=torch_ops.kda,
    kda_step=torch_ops.kda_step,
    mla_prefill=torch_ops.mla_prefill,
    mla_decode=torch_ops.mla_decode,
    cache_write=torch_ops.cache_write,
    router=torch_ops.router,
    experts=torch_ops.experts,
    attnres=torch_ops.attnres,
)

COMPILED = Functions(
    name="compiled",
    differentiable=False,
    rmsnorm=compiled_ops.rmsnorm,
    gated_rmsnorm=compiled_ops.gated_rmsnorm,
    activate=compiled_ops.activate,
    causal_conv1d=compiled_ops.causal_conv1d,
    kda=compiled_ops.kda,
    kda_step=compiled_ops.kda_step,
    mla_prefill=compiled_ops.mla_prefill,
    mla_decode=compiled_ops.mla_decode,
    cache_write=compiled_ops.cache_write,
    router=compiled_ops.router,
    experts=compiled_ops.experts,
    attnres=compiled_ops.attnres,
)
