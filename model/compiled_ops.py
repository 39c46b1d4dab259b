"""The layers' functions on the compiled ops: arguments and meaning as in k3dsl.model.torch_ops."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from k3dsl import ops
from k3dsl.model.packing import Packing
from k3dsl.model.torch_ops import Matrices, output_gated


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """k3dsl.ops.rmsnorm."""
    return ops.rmsnorm(x, weight, eps)


def gated_rmsnorm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """k3dsl.ops.gated_rmsnorm."""
    return ops.gated_rmsnorm(x, gate, weight, eps)


def _batched(packing: Packing, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Packed tensors [T, ...] as [N, T / N, ...] where the sequences are equally long, else as [1, T, ...]."""
    batch = len(packing.lengths) if packing.uniform else 1
    return tuple(x.unflatten(0, (batch, -1)) if x.shape[0] else x[None] for x in tensors)


def _offsets(packing: Packing) -> torch.Tensor | None:
    """Offsets of packed sequences; None where they are equally long, and so a batch."""
    return None if packing.uniform and packing.tokens else packing.cu_seqlens


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, packing: Packing, window: torch.Tensor | None, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """k3dsl.ops.causal_conv1d."""
    (batch,) = _batched(packing, x)
    y, after = ops.causal_conv1d(
        batch, weight, initial_state=window, output_final_state=keep, cu_seqlens=_offsets(packing)
    )
    return y.flatten(0, 1), after


def kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    packing: Packing,
    state: torch.Tensor | None,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """k3dsl.ops.kda."""
    queries, keys, values, decays, betas = _batched(packing, q, k, v, decay, beta)
    o, final = ops.kda(
        queries,
        keys,
        values,
        decays,
        betas,
        initial_state=state,
        output_final_state=keep,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=lower_bound,
        state_v_first=True,
        cu_seqlens=_offsets(packing),
        A_log=A_log,
        dt_bias=dt_bias,
    )
    return o.flatten(0, 1), final


def kda_step(
    qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    windows: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    norm: torch.Tensor,
    eps: float,
    pool: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """k3dsl.ops.kda_step."""
    o = ops.kda_step(
        qkv[:, None],
        decay[:, None],
        beta[:, None],
        gate[:, None],
        conv_weight,
        A_log,
        norm,
        pool,
        windows,
        slots,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        norm_eps=eps,
        state_v_first=True,
    )
    assert isinstance(o, torch.Tensor)
    return o[:, 0]


def mla_prefill(
    q: torch.Tensor,
    latents: torch.Tensor,
    kv_b: torch.Tensor,
    packing: Packing,
    keys: Packing,
    nope: int,
    scale: float,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """k3dsl.ops.mla_prefill on keys and values expanded by kv_b."""
    heads, rank = q.shape[1], kv_b.shape[1]
    kv = linear(latents[:, :rank], kv_b).view(latents.shape[0], heads, -1)
    offsets: torch.Tensor | None = None
    key_offsets: torch.Tensor | None = None
    if not (packing.uniform and keys.uniform and packing.tokens):
        offsets, key_offsets = packing.cu_seqlens, keys.cu_seqlens
        packing, keys = (Packing((p.tokens,), p.cu_seqlens) for p in (packing, keys))  # one sequence of all tokens
    queries, *gates = _batched(packing, q, *(() if gate is None else (gate,)))
    expanded, shared = _batched(keys, kv, latents[:, rank:])
    k_nope, v = expanded.split([nope, kv.shape[-1] - nope], -1)
    o = ops.mla_prefill(
        queries, k_nope, shared, v, scale=scale, gate=gates[0] if gates else None, cu_seqlens=offsets,
        cu_seqlens_k=key_offsets,
    )  # fmt: skip
    assert isinstance(o, torch.Tensor)
    return o.flatten(0, 1)


def mla_decode(
    q: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    kv_b: torch.Tensor,
    nope: int,
    scale: float,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """k3dsl.ops.mla_decode between the two halves of kv_b: queries are absorbed into the latent space, outputs leave it."""
    heads, rank = q.shape[1], kv_b.shape[1]
    up = kv_b.view(heads, -1, rank)
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1), up[:, :nope]).transpose(0, 1)
    query = torch.cat([absorbed, q[..., nope:]], -1)[:, None]
    o = ops.mla_decode(query, pool, page_table, lengths, scale=scale, kv_lora_rank=rank)
    assert isinstance(o, torch.Tensor)
    values = torch.bmm(o[:, 0].transpose(0, 1), up[:, nope:].transpose(1, 2)).transpose(0, 1)
    return output_gated(values, gate)


def cache_write(
    latent: torch.Tensor,
    shared: torch.Tensor,
    pool: torch.Tensor,
    places: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """k3dsl.ops.mla_cache_write."""
    ops.mla_cache_write(latent, shared, pool, places, norm_weight=norm, eps=eps)


def activate(gate_up: torch.Tensor, activation: str, betas: tuple[float, float]) -> torch.Tensor:
    """k3dsl.ops.situ or k3dsl.ops.swiglu."""
    if activation == "silu":
        return ops.swiglu(gate_up)
    return ops.situ(gate_up, beta=betas[0], linear_beta=betas[1])


def router(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, renormalize: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """k3dsl.ops.moe_router."""
    weights, ids = ops.moe_router(x, weight, bias, top_k, renormalize=renormalize, scale=scaling)
    return ids, weights


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: Matrices,
    w2: Matrices,
    activation: str,
    betas: tuple[float, float],
) -> torch.Tensor:
    """k3dsl.ops.moe_experts."""
    up, up_scale = w13 if isinstance(w13, tuple) else (w13, None)
    down, down_scale = w2 if isinstance(w2, tuple) else (w2, None)
    beta, linear_beta = (4.0, 25.0) if activation == "silu" else betas  # SwiGLU has none
    return ops.moe_experts(
        x, up, None, down, weights, ids, gate_scale=up_scale, down_scale=down_scale, activation=activation, beta=beta,
        linear_beta=linear_beta,
    )  # fmt: skip


def attnres(
    rows: torch.Tensor,
    partial: torch.Tensor,
    query: torch.Tensor,
    key_norm: torch.Tensor,
    eps: float,
    norm: torch.Tensor,
    norm_eps: float,
    snapshot: torch.Tensor | None = None,
) -> torch.Tensor:
    """k3dsl.ops.attnres."""
    normed = ops.attnres(
        rows, partial, query, key_norm, eps=eps, norm_weight=norm, norm_eps=norm_eps, snapshot=snapshot, return_h=False
    )
    assert isinstance(normed, torch.Tensor)
    return normed
