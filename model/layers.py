"""Building blocks of the network: norms, MLPs, and modules with parameters that stay in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from k3dsl.model.config import KimiK3Config
    from k3dsl.model.functions import Functions

Factory = dict[str, Any]
"""dtype and device of new parameters, as keyword arguments."""


class KeepsFloat32(nn.Module):
    """A module some of whose own parameters, those named in `float32`, stay fp32 when a model is cast to a narrower dtype.

    `.to(torch.bfloat16)`, `.half()` and the like leave them alone, bit for bit; `.double()` widens them.
    """

    float32: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        own = [p for name in self.float32 if (p := self._parameters.get(name)) is not None]
        kept = {id(t) for p in own for t in (p, p.grad) if t is not None}

        def careful(t: torch.Tensor) -> torch.Tensor:
            out = fn(t)
            narrowed = id(t) in kept and out.dtype.is_floating_point and out.dtype.itemsize < 4
            return t.to(out.device) if narrowed else out

        return super()._apply(careful, recurse)


def float32_of(factory: Factory) -> Factory:
    """The factory for parameters that stay in fp32 (fp64 in a network of fp64)."""
    return {**factory, "dtype": torch.float64 if factory.get("dtype") == torch.float64 else torch.float32}


class RMSNorm(nn.Module):
    """x rsqrt(mean(x^2) + eps), rounded, times a weight [width]."""

    def __init__(self, width: int, eps: float, **factory: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, **factory))

    def forward(self, x: torch.Tensor, functions: Functions) -> torch.Tensor:
        return functions.rmsnorm(x, self.weight, self.eps)


class ShortConvolution(KeepsFloat32):
    """The weights [3 P, W] of the depthwise causal convolutions of q, k and v, in fp32."""

    float32 = ("weight",)

    def __init__(self, channels: int, taps: int, **factory: Any) -> None:
        super().__init__()
        bound = taps**-0.5
        self.weight = nn.Parameter(torch.empty(channels, taps, **float32_of(factory)).uniform_(-bound, bound))


class OutputNorm(KeepsFloat32):
    """The weight [D] of KDA's gated norm over a head, in fp32."""

    float32 = ("weight",)

    def __init__(self, width: int, eps: float, **factory: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, **float32_of(factory)))


def linear(inputs: int, outputs: int, **factory: Any) -> nn.Linear:
    """A linear map without bias."""
    return nn.Linear(inputs, outputs, bias=False, **factory)


class Query(nn.Module):
    """The query [width] of an AttnRes site; zeros at first, so that it starts as a mean of the rows."""

    def __init__(self, width: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, **factory))


class MLP(nn.Module):
    """down(act(gate x, up x)), hidden_size to `width` and back: dense layers and shared experts."""

    def __init__(self, config: KimiK3Config, width: int, **factory: Any) -> None:
        super().__init__()
        self.gate_up_proj = linear(config.hidden_size, 2 * width, **factory)
        self.down_proj = linear(width, config.hidden_size, **factory)
        self.activation = config.hidden_act, betas_of(config)

    def forward(self, x: torch.Tensor, functions: Functions) -> torch.Tensor:
        return self.down_proj(functions.activate(self.gate_up_proj(x), *self.activation))


def betas_of(config: KimiK3Config) -> tuple[float, float]:
    """The two bounds of SiTU-GLU; zeros for SwiGLU, which has none."""
    return config.activation_situ_beta or 0.0, config.activation_situ_linear_beta or 0.0
