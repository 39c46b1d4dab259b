"""The network's operators in plain differentiable torch: the training path, and what the compiled ops are compared with.

Every function takes and returns the model's dtype and computes in fp32 (in fp64 when its input is fp64). They are right and
slow. Tokens of all sequences are packed along the first axis T.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import linear, silu, softplus

from k3dsl.model.packing import Packing
from k3dsl.ops.kda.chunked import chunked

Matrices = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""The weights of all experts, or their MXFP4 codes and scales."""


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in fp32, or in fp64 if that is what it has."""
    return x if x.dtype == torch.float64 else x.float()


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x rsqrt(mean(x^2) + eps), rounded to x's dtype, then times the weight [D] (Llama's order of rounding)."""
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y.to(x.dtype) * weight).to(x.dtype)


def gated_rmsnorm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm(x) times sigmoid(gate), both [..., D]; one rounding, at the end. weight: [D]."""
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * wide(weight)
    return (y * torch.sigmoid(wide(gate))).to(gate.dtype)


def activate(gate_up: torch.Tensor, activation: str, betas: tuple[float, float]) -> torch.Tensor:
    """The two-argument activation of [.., 2 I], gate then up: [.., I], one rounding at the end.

    'situ': [b tanh(gate / b) sigmoid(gate)] [c tanh(up / c)] with (b, c) = betas (SiTU-GLU); 'silu': gate sigmoid(gate) up.
    """
    g, u = wide(gate_up).chunk(2, -1)
    if activation == "silu":
        return (silu(g) * u).to(gate_up.dtype)
    b, c = betas
    return (b * torch.tanh(g / b) * torch.sigmoid(g) * (c * torch.tanh(u / c))).to(gate_up.dtype)


def positions(packing: Packing, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each packed token its sequence and its position within it, both [T] int64."""
    cu_seqlens = packing.cu_seqlens
    row = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    return sequence, row - cu_seqlens[sequence]


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, packing: Packing, window: torch.Tensor | None, keep: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """SiLU of a depthwise causal convolution: y_t = SiLU(sum_j w[:, j] u_{t - W + 1 + j}); the last tap is token t itself.

    Args:
        x: [T, P], the raw inputs u. weight: [P, W].
        window: [N, W - 1, P], the inputs before each sequence's first token; None is zeros.

    Returns:
        y [T, P], and with `keep` the window after each sequence's last token.
    """
    tokens, taps = x.shape[0], weight.shape[-1]
    cu_seqlens = packing.cu_seqlens.long()
    sequence, position = positions(packing, tokens)
    lengths = cu_seqlens.diff()
    if window is None:
        window = x.new_zeros(lengths.shape[0], taps - 1, x.shape[1])
    row = torch.arange(tokens, device=x.device)
    total = torch.zeros_like(wide(x))
    for j in range(taps):
        back = taps - 1 - j
        inside = position >= back
        own = x[torch.where(inside, row - back, 0)]
        before = window[sequence, torch.where(inside, 0, taps - 1 + position - back)] if back else own
        total = total + wide(weight[:, j]) * wide(torch.where(inside[:, None], own, before))
    y = silu(total).to(x.dtype)
    if not keep:
        return y, None
    # slot j of the new window holds position L - (W - 1) + j, which may lie in the old window
    place = lengths[:, None] - (taps - 1) + torch.arange(taps - 1, device=x.device)
    inside = place >= 0
    source = torch.where(inside, cu_seqlens[:-1, None] + place, 0)
    own = x[source] if tokens else x.new_zeros(*source.shape, x.shape[1])
    before = window.gather(1, torch.where(inside, 0, place + taps - 1)[..., None].expand_as(own).long())
    return y, torch.where(inside[..., None], own, before.to(x.dtype))


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
    keep: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi Delta Attention with the gate, the l2 norm of q and k, and the sigmoid of beta inside.

    Args:
        q, k: [T, H, K]. v: [T, H, V]. decay: [T, H, K], raw. beta: [T, H], raw. A_log: [H]. dt_bias: [H K].
        lower_bound: of the log decay: lower_bound sigmoid(exp(A_log) (decay + dt_bias)); None: -exp(A_log) softplus(...).
        state: [N, H, V, K] before each sequence; None is zeros.

    Returns:
        o [T, H, V], and with `keep` the state after each sequence, in fp32.
    """
    o, final = chunked(
        q[None],
        k[None],
        v[None],
        decay[None],
        beta[None],
        initial_state=state,
        output_final_state=keep,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        cu_seqlens=packing.cu_seqlens,
        state_v_first=True,
    )
    return o[0].to(v.dtype), final


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
    """One token of a KDA layer for each of B sequences: convolution, recurrence, gated norm; updates windows and states.

    Args:
        qkv: [B, 3 H K], the raw inputs of the convolution. conv_weight: [3 H K, W]. windows: [rows, W - 1, 3 H K].
        decay, gate: [B, H, K], beta: [B, H], raw. A_log, dt_bias, lower_bound: as `kda`. norm: [K], eps: of the gated norm.
        pool: [rows, H, V, K], the states. slots: [B], the row of each sequence; a negative one is padding, which changes
            no row and gives 0.

    Returns:
        [B, H, V].
    """
    B, H, K = decay.shape
    real = slots >= 0
    where = torch.where(real, slots, 0).long()
    each = Packing((1,) * B, torch.arange(B + 1, dtype=torch.int32, device=qkv.device))
    mixed, after = causal_conv1d(qkv, conv_weight, each, windows[where])
    assert after is not None
    q, k, v = wide(mixed).view(B, 3, H, K).unbind(1)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    z = wide(decay) + wide(dt_bias).view(H, K)
    rate = wide(A_log).exp()[:, None]
    g = -rate * softplus(z) if lower_bound is None else lower_bound * torch.sigmoid(rate * z)
    # S <- diag(exp(g)) S; S <- S + beta k (v - S^T k)^T; o = S^T q / sqrt(K), with S^T [V, K] in memory
    state = wide(pool[where]) * g.exp()[..., None, :]
    u = v - torch.einsum("bhvk,bhk->bhv", state, k)
    state = state + torch.einsum("bh,bhv,bhk->bhvk", torch.sigmoid(wide(beta)), u, k)
    o = torch.einsum("bhvk,bhk->bhv", state, q) * K**-0.5
    put(windows, slots, after.to(windows.dtype))
    put(pool, slots, state.to(pool.dtype))
    return torch.where(real[:, None, None], gated_rmsnorm(o.to(qkv.dtype), gate, norm, eps), 0.0)


def put(pool: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """pool[slots] = values, leaving out negative slots; in place."""
    kept = slots >= 0
    pool[slots[kept].long()] = values[kept]


def cache_write(
    latent: torch.Tensor,
    shared: torch.Tensor,
    pool: torch.Tensor,
    places: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Writes latents [T, rank], by `norm` through an RMSNorm, each followed by its shared key part [T, rope], into the pages
    [pages, page_size, rank + rope] at `places` [T], counted over all pages; a negative place is nowhere."""
    latent = latent if norm is None else rmsnorm(latent, norm, eps)
    put(pool.view(-1, pool.shape[-1]), places, torch.cat([latent, shared], -1).to(pool.dtype))


def output_gated(o: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """o times sigmoid(gate), rounded to o's dtype; o itself without a gate."""
    return o if gate is None else (wide(o) * torch.sigmoid(wide(gate))).to(o.dtype)


def expand(latents: torch.Tensor, kv_b: torch.Tensor, heads: int, nope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [S, H, nope + rope] and values [S, H, V] from latents [S, rank + rope] and kv_b [H (nope + V), rank]."""
    rank = kv_b.shape[1]
    c, shared = latents[:, :rank], latents[:, rank:]
    k, v = linear(c, kv_b).view(latents.shape[0], heads, -1).split([nope, kv_b.shape[0] // heads - nope], -1)
    return torch.cat([k, shared[:, None].expand(-1, heads, -1)], -1), v


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
    """Causal multi-head latent attention in its expanded form.

    Args:
        q: [T, H, nope + rope]. latents: [S, rank + rope], the tokens of each sequence, those before the queries included:
            the last query of a sequence sees all of its keys. kv_b: [H (nope + V), rank].
        packing, keys: of the queries and of the keys. gate: [T, H, V], of the output, raw; see `output_gated`.

    Returns:
        [T, H, V].
    """
    k, v = expand(latents, kv_b, q.shape[1], nope)
    out = []
    streams = (x.split(lengths.lengths) for x, lengths in ((q, packing), (k, keys), (v, keys)))
    for queries, own, values in zip(*streams, strict=True):
        T, S = queries.shape[0], own.shape[0]
        scores = torch.einsum("thd,shd->hts", wide(queries), wide(own)) * scale
        hidden = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
        out.append(torch.einsum("hts,shv->thv", weights, wide(values)))
    return output_gated(torch.cat(out).to(q.dtype), gate)


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
    """One query of each of B sequences over its pages, in the absorbed form: [B, H, V] from q [B, H, nope + rope].

    pool: [pages, page_size, rank + rope]. page_table: [B, most pages] int32. lengths: [B], the query's token included; 0 is
    padding, whose output is 0. kv_b: [H (nope + V), rank]. gate: as `mla_prefill`.
    """
    H, rank = q.shape[1], kv_b.shape[1]
    size = pool.shape[1]
    if lengths.device.type == "cpu":
        page_table = page_table[:, : max(1, -(-int(lengths.max()) // size))]
    rows = wide(pool[page_table.clamp(min=0).long()].flatten(1, 2))
    held = torch.arange(rows.shape[1], device=q.device) < lengths[:, None]
    rows = torch.where(held[..., None], rows, 0.0)
    up = wide(kv_b).view(H, -1, rank)
    absorbed = torch.einsum("bhn,hnr->bhr", wide(q[..., :nope]), up[:, :nope])
    query = torch.cat([absorbed, wide(q[..., nope:])], -1)
    scores = torch.einsum("bhd,bsd->bhs", query, rows) * scale
    scores = scores.masked_fill(~held[:, None], -math.inf)
    weights = torch.where(held[:, None], torch.softmax(scores, -1), 0.0)
    o = torch.einsum("bhs,bsr,hvr->bhv", weights, rows[..., :rank], up[:, nope:]).to(q.dtype)
    return output_gated(o, gate)


def router(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, renormalize: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen experts [T, k] int64 and their weights [T, k] in fp32; input and weight [E, D] are multiplied in fp32.

    s = sigmoid(x W^T). The experts are the k largest of s + bias, ties to the lower number; the weights are s without the
    bias, divided by their sum + 1e-20 with `renormalize`, times `scaling`.
    """
    s = torch.sigmoid(linear(wide(x), weight.to(wide(x).dtype)))
    ids = torch.sort(s.detach() + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = s.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scaling


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """MXFP4 as numbers: codes [.., D / 2], low nibble first, scale [.., D / 32] E8M0; exact in bf16 and wider."""
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float32, device=codes.device)
    values = table[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(-2)
    exponent = scale.int().repeat_interleave(values.shape[-1] // scale.shape[-1], -1) - 127
    return torch.ldexp(values, exponent).to(dtype)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: Matrices,
    w2: Matrices,
    activation: str,
    betas: tuple[float, float],
) -> torch.Tensor:
    """sum_k weights[t, k] expert_{ids[t, k]}(x_t), expert(z) = W2 act(W1 z, W3 z).

    Args:
        x: [T, D]. ids, weights: [T, k].
        w13: [E, 2 I, D], gate then up, and w2: [E, D, I]; or each a pair of MXFP4 codes and scales.
        activation: 'situ' with its two betas, or 'silu'.

    Each expert's output is rounded to x's dtype; the weighted sum is formed in fp32 and rounded once.
    """
    total = torch.zeros_like(wide(x))
    for e in torch.unique(ids).tolist():
        token, choice = torch.where(ids == e)
        up, down = (dequantize(m[0][e], m[1][e], x.dtype) if isinstance(m, tuple) else m[e] for m in (w13, w2))
        y = linear(activate(linear(x[token], up), activation, betas), down)
        total = total.index_add(0, token, wide(y) * weights[token, choice, None].to(total.dtype))
    return total.to(x.dtype)


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
    """Attention over depth, then an RMSNorm: of h = sum_j softmax_j(l)_j r_j with
    l_j = sum_d query_d key_norm_d r_jd rsqrt(mean(r_j^2) + eps).

    rows: [n, T, D], the bank; partial: [T, D], the last row. query, key_norm, norm: [D]. Without rows h is the partial sum.
    snapshot: [T, D], takes a copy of the partial sum.
    """
    h = partial
    if rows.shape[0]:
        r = wide(torch.cat([rows, partial[None]]))
        logits = (r * (wide(query) * wide(key_norm))).sum(-1) * torch.rsqrt(r.square().mean(-1) + eps)
        h = (torch.softmax(logits, 0)[..., None] * r).sum(0).to(partial.dtype)
    if snapshot is not None:
        snapshot.copy_(partial)
    return rmsnorm(h, norm, norm_eps)
