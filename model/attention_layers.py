"""The two kinds of attention: Kimi Delta Attention and multi-head latent attention without positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from k3dsl.model.cache import KDASlots, MLAPages
from k3dsl.model.config import KimiK3Config
from k3dsl.model.layers import KeepsFloat32, OutputNorm, RMSNorm, ShortConvolution, float32_of, linear
from k3dsl.model.step import Step


class KDA(KeepsFloat32):
    """Kimi Delta Attention (arXiv 2510.26692, section 3): convolution, gated delta rule, gated norm, projection.

    The output gate is one projection (Kimi K3) or two of low rank (Kimi Linear); the decay has a lower bound (Kimi K3) or
    none (Kimi Linear).
    """

    float32 = ("A_log", "dt_bias")

    def __init__(self, config: KimiK3Config, layer: int, **factory: Any) -> None:
        super().__init__()
        self.layer = layer
        hidden, width, dim = config.hidden_size, config.kda_width, config.kda_head_dim
        self.heads, self.dim, self.lower_bound = config.kda_num_heads, dim, config.gate_lower_bound
        self.qkv_proj = linear(hidden, 3 * width, **factory)
        self.qkv_conv1d = ShortConvolution(3 * width, config.short_conv_kernel_size, **factory)
        self.f_a_proj = linear(hidden, dim, **factory)
        self.f_b_proj = linear(dim, width, **factory)
        self.b_proj = linear(hidden, self.heads, **factory)
        if config.use_full_rank_gate:
            self.g_proj = linear(hidden, width, **factory)
        else:
            self.g_a_proj = linear(hidden, dim, **factory)
            self.g_b_proj = linear(dim, width, **factory)
        self.A_log = nn.Parameter(torch.empty(self.heads, **float32_of(factory)))
        self.dt_bias = nn.Parameter(torch.empty(width, **float32_of(factory)))
        self.o_norm = OutputNorm(dim, config.rms_norm_eps, **factory)
        self.o_proj = linear(width, hidden, **factory)
        self.reset_gate()

    def reset_gate(self) -> None:
        """exp(A_log) uniform in (1, 16); softplus(dt_bias) log-uniform in (0.001, 0.1), as Mamba 2 and its kin start."""
        with torch.no_grad():
            self.A_log.uniform_(1, 16).log_()
            step = self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp()
            self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, hidden], normed, to [T, hidden]."""
        f, shape = step.functions, (x.shape[0], self.heads, self.dim)
        qkv = self.qkv_proj(x)
        decay = self.f_b_proj(self.f_a_proj(x)).view(shape)
        beta = self.b_proj(x)
        gate = (self.g_proj(x) if hasattr(self, "g_proj") else self.g_b_proj(self.g_a_proj(x))).view(shape)
        cached = None if step.cache is None else step.cache.layers[self.layer]
        norm, eps = self.o_norm.weight, self.o_norm.eps
        if step.decode:
            assert isinstance(cached, KDASlots)
            y = f.kda_step(
                qkv, self.qkv_conv1d.weight, cached.windows, decay, beta, gate, self.A_log, self.dt_bias,
                self.lower_bound, norm, eps, cached.state, step.slots,
            )  # fmt: skip
            return self.o_proj(y.flatten(1))
        window = state = slots = None
        if cached is not None:
            assert isinstance(cached, KDASlots)
            assert step.slots is not None
            slots = step.slots.long()
            if not step.fresh:
                window, state = cached.windows[slots], cached.state[slots]
        keep = slots is not None
        mixed, window = f.causal_conv1d(qkv, self.qkv_conv1d.weight, step.packing, window, keep)
        q, k, v = mixed.view(x.shape[0], 3, self.heads, self.dim).unbind(1)
        gating = self.A_log, self.dt_bias, self.lower_bound
        o, state = f.kda(q, k, v, decay, beta, *gating, step.packing, state, keep)
        if slots is not None:
            assert isinstance(cached, KDASlots)
            cached.windows[slots] = window.detach().to(cached.windows.dtype)
            cached.state[slots] = state.detach().to(cached.state.dtype)
        return self.o_proj(f.gated_rmsnorm(o, gate, norm, eps).flatten(1))


class MLA(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) without rotation: keys and values of all heads come from a
    normed latent of kv_lora_rank, the last qk_rope_head_dim columns of the keys are shared. Kimi K3 gates the output by
    sigmoid(g_proj x) of the layer's normed input."""

    def __init__(self, config: KimiK3Config, layer: int, **factory: Any) -> None:
        super().__init__()
        self.layer = layer
        hidden, rank = config.hidden_size, config.kv_lora_rank
        self.heads, self.rank = config.num_attention_heads, rank
        self.nope, self.rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.scale = config.qk_head_dim**-0.5
        queries, out = self.heads * config.qk_head_dim, self.heads * config.v_head_dim
        if config.q_lora_rank is None:
            self.q_proj = linear(hidden, queries, **factory)
        else:
            self.q_a_proj = linear(hidden, config.q_lora_rank, **factory)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.mla_norm_eps, **factory)
            self.q_b_proj = linear(config.q_lora_rank, queries, **factory)
        self.kv_a_proj_with_mqa = linear(hidden, config.mla_cache_width, **factory)
        self.kv_a_layernorm = RMSNorm(rank, config.mla_norm_eps, **factory)
        self.kv_b_proj = linear(rank, self.heads * (self.nope + config.v_head_dim), **factory)
        self.g_proj = linear(hidden, out, **factory) if config.mla_use_output_gate else None
        self.o_proj = linear(out, hidden, **factory)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, hidden], normed, to [T, hidden]."""
        f, tokens = step.functions, x.shape[0]
        q = self.q_proj(x) if hasattr(self, "q_proj") else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x), f))
        q = q.view(tokens, self.heads, -1)
        gate = None if self.g_proj is None else self.g_proj(x).view(tokens, self.heads, -1)
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], -1)
        kv_b, norm = self.kv_b_proj.weight, self.kv_a_layernorm
        pages: torch.Tensor | None = None
        if step.cache is not None:
            cached = step.cache.layers[self.layer]
            assert isinstance(cached, MLAPages)
            pages = cached.pages
        if step.decode:
            f.cache_write(latent, shared, pages, step.places, norm.weight, norm.eps)
            o = f.mla_decode(q, pages, step.page_table, step.lengths, kv_b, self.nope, self.scale, gate)
            return self.o_proj(o.flatten(1))
        latent = norm(latent, f)
        latents = torch.cat([latent, shared], -1)
        if pages is not None:
            f.cache_write(latent.detach(), shared.detach(), pages, step.places)
            if step.key_places is not None:
                latents = pages.flatten(0, 1)[step.key_places].to(latents.dtype)
        o = f.mla_prefill(q, latents, kv_b, step.packing, step.keys, self.nope, self.scale, gate)
        return self.o_proj(o.flatten(1))
