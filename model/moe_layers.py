"""Mixtures of experts: the router, the experts' weights, and the latent space that Kimi K3 runs them in."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from k3dsl.model.config import MXFP4_GROUP, KimiK3Config
from k3dsl.model.layers import MLP, Factory, KeepsFloat32, RMSNorm, betas_of, float32_of, linear
from k3dsl.model.step import Step

E2M1_RMS = math.sqrt((0.5**2 + 1 + 1.5**2 + 2**2 + 3**2 + 4**2 + 6**2) / 8)
"""Root mean square of the E2M1 numbers."""


class Gate(KeepsFloat32):
    """The router's weight [E, hidden] and the bias [E] that chooses but does not weigh, both fp32. No gradient reaches the
    bias."""

    float32 = ("weight", "e_score_correction_bias")

    def __init__(self, config: KimiK3Config, **factory: Any) -> None:
        super().__init__()
        experts, precise = config.num_experts, float32_of(factory)
        assert experts is not None
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size, **precise))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(experts, **precise), requires_grad=False)


class Experts(nn.Module):
    """Weights of all routed experts: w13 [E, 2 I, D] (gate, then up) and w2 [E, D, I], or both as MXFP4 codes and scales."""

    def __init__(self, config: KimiK3Config, **factory: Any) -> None:
        super().__init__()
        experts, inner, width = config.num_experts, config.moe_intermediate_size, config.expert_hidden_size
        assert experts is not None
        assert inner is not None
        self.packed = config.experts_mxfp4
        for name, rows, columns in (("w13", 2 * inner, width), ("w2", width, inner)):
            if self.packed:
                where: Factory = {"device": factory.get("device"), "dtype": torch.uint8}
                codes = torch.empty(experts, rows, columns // 2, **where)
                scale = torch.empty(experts, rows, columns // MXFP4_GROUP, **where)
                self.register_parameter(f"{name}_packed", nn.Parameter(codes, requires_grad=False))
                self.register_parameter(f"{name}_scale", nn.Parameter(scale, requires_grad=False))
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(experts, rows, columns, **factory)))

    def reset_parameters(self, std: float) -> None:
        """Normal numbers; as MXFP4 all codes alike, with a scale that gives about this deviation."""
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                if name.endswith("_packed"):
                    parameter.random_(0, 256)
                elif name.endswith("_scale"):
                    parameter.fill_(127 + round(math.log2(std / E2M1_RMS)))
                else:
                    parameter.normal_(0, std)

    def weights(self, name: str) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """w13 or w2, or its codes and scales."""
        if not self.packed:
            return self.get_parameter(name)
        return self.get_parameter(f"{name}_packed"), self.get_parameter(f"{name}_scale")


class SparseMoE(nn.Module):
    """Routed and shared experts. In Kimi K3 the routed ones have a latent space: down, experts, norm of the whole sum, up."""

    def __init__(self, config: KimiK3Config, **factory: Any) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.expert_hidden_size
        self.top_k, self.renormalize = config.num_experts_per_token, config.moe_renormalize
        self.scaling, self.activation = config.routed_scaling_factor, (config.hidden_act, betas_of(config))
        latent = config.routed_expert_hidden_size is not None
        self.gate = Gate(config, **factory)
        self.routed_expert_down_proj = linear(hidden, width, **factory) if latent else None
        self.experts = Experts(config, **factory)
        self.routed_expert_norm = RMSNorm(width, config.rms_norm_eps, **factory) if config.latent_moe_use_norm else None
        self.routed_expert_up_proj = linear(width, hidden, **factory) if latent else None
        shared = config.shared_intermediate_size
        self.shared_experts = MLP(config, shared, **factory) if shared else None

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, hidden], normed, to [T, hidden]."""
        f, gate = step.functions, self.gate
        bias = gate.e_score_correction_bias
        ids, weights = f.router(x, gate.weight, bias, self.top_k, self.renormalize, self.scaling)
        z = x if self.routed_expert_down_proj is None else self.routed_expert_down_proj(x)
        y = f.experts(z, ids, weights, self.experts.weights("w13"), self.experts.weights("w2"), *self.activation)
        if self.routed_expert_norm is not None:
            y = self.routed_expert_norm(y, f)
        if self.routed_expert_up_proj is not None:
            y = self.routed_expert_up_proj(y)
        return y if self.shared_experts is None else y + self.shared_experts(x, f)
