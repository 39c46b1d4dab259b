"""The network of Kimi K3 and of Kimi Linear in float64, token by token, from the published formulas alone.

Nothing of k3dsl is used here: it takes the content of a config.json and the tensors of a checkpoint under their own names.
Sources: KDA, Kimi Linear (arXiv 2510.26692); Block Attention Residuals (arXiv 2603.15031); LatentMoE and SiTU, Kimi K3 report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MLA_NORM_EPS = 1e-6


@dataclass
class Trace:
    """What a run gives: logits [T, vocab], and of each layer what a test may compare with.

    Attributes:
        stream: residual stream after each layer, [T, hidden]; with AttnRes the running partial sum of the block.
        states: S of each KDA layer after the last token, [H, K, V].
        inputs: what each KDA layer's convolution has read, [T, 3*H*K], before the convolution.
        latents: what each MLA layer keeps of a token, [T, rank + rope]: normed latent, then shared key part.
        experts: experts that each MoE layer sends a token to, [T, k], in no order.
        final: input of lm_head, [T, hidden].
    """

    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    final: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    stream: list[torch.Tensor] = field(default_factory=list)
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    latents: dict[int, torch.Tensor] = field(default_factory=dict)
    experts: dict[int, torch.Tensor] = field(default_factory=dict)


class ReferenceNetwork:
    """A network of one checkpoint. config: config.json's content, nested or flat. tensors: by checkpoint name."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.c = config.get("text_config", config)
        self.linear = self.c["linear_attn_config"]
        self.tensors = {name.removeprefix("language_model."): value for name, value in tensors.items()}

    def __call__(self, ids: torch.Tensor) -> Trace:
        """Runs one sequence, ids [T], from its start."""
        trace = Trace()
        p = self.w("model.embed_tokens.weight")[ids]
        run = self._attn_res if self.c.get("attn_res_block_size") else self._residual
        h = run(p, trace)
        trace.final = rms_norm(h, self.w("model.norm.weight"), self.c["rms_norm_eps"])
        head = "model.embed_tokens.weight" if self.c.get("tie_word_embeddings") else "lm_head.weight"
        trace.logits = trace.final @ self.w(head).T
        return trace

    def w(self, name: str) -> torch.Tensor:
        """A checkpoint tensor in float64."""
        return self.tensors[name].double()

    # ---- residual streams ----------------------------------------------------------------------------------------------

    def _residual(self, x: torch.Tensor, trace: Trace) -> torch.Tensor:
        for i in range(self.c["num_hidden_layers"]):
            x = x + self._attention(i, x, trace)
            x = x + self._ffn(i, x, trace)
            trace.stream.append(x)
        return x

    def _attn_res(self, embedded: torch.Tensor, trace: Trace) -> torch.Tensor:
        bank: list[torch.Tensor] = []
        p: torch.Tensor | None = embedded
        for i in range(self.c["num_hidden_layers"]):
            name = f"model.layers.{i}."
            h = self._aggregate(bank, p, f"{name}self_attention_res")
            if i % self.c["attn_res_block_size"] == 0:
                bank.append(p)
                p = None
            a = self._attention(i, h, trace)
            p = a if p is None else p + a
            h = self._aggregate(bank, p, f"{name}mlp_res")
            p = p + self._ffn(i, h, trace)
            trace.stream.append(p)
        return self._aggregate(bank, p, "model.output_attn_res")

    def _aggregate(self, bank: list[torch.Tensor], p: torch.Tensor, site: str) -> torch.Tensor:
        """Softmax over rows of query . RMSNorm(row); the values are the rows themselves."""
        if not bank:
            return p
        rows = torch.stack([*bank, p])  # [n, T, hidden]
        keys = rms_norm(rows, self.w(f"{site}_norm.weight"), self.c["rms_norm_eps"])
        logits = (keys * self.w(f"{site}_proj.weight").reshape(-1)).sum(-1)
        return (torch.softmax(logits, 0)[..., None] * rows).sum(0)

    def _attention(self, i: int, h: torch.Tensor, trace: Trace) -> torch.Tensor:
        x = rms_norm(h, self.w(f"model.layers.{i}.input_layernorm.weight"), self.c["rms_norm_eps"])
        return (self._kda if i + 1 in self.linear["kda_layers"] else self._mla)(i, x, trace)

    def _ffn(self, i: int, h: torch.Tensor, trace: Trace) -> torch.Tensor:
        name = f"model.layers.{i}."
        x = rms_norm(h, self.w(f"{name}post_attention_layernorm.weight"), self.c["rms_norm_eps"])
        if i < self.c.get("first_k_dense_replace", 0):
            return self._mlp(f"{name}mlp.", x)
        return self._moe(i, f"{name}block_sparse_moe.", x, trace)

    # ---- attention -----------------------------------------------------------------------------------------------------

    def _kda(self, i: int, x: torch.Tensor, trace: Trace) -> torch.Tensor:
        name = f"model.layers.{i}.self_attn."
        tokens, heads, dim = x.shape[0], self.linear["num_heads"], self.linear["head_dim"]
        raw = [x @ self.w(f"{name}{n}_proj.weight").T for n in "qkv"]
        trace.inputs[i] = torch.cat(raw, -1)
        q, k, v = (
            silu(causal_conv(one, self.w(f"{name}{n}_conv1d.weight")[:, 0])).reshape(tokens, heads, dim)
            for n, one in zip("qkv", raw, strict=True)
        )
        q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * dim**-0.5
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        f = x @ self.w(f"{name}f_a_proj.weight").T @ self.w(f"{name}f_b_proj.weight").T
        z = (f + self.w(f"{name}dt_bias")).reshape(tokens, heads, dim)
        rate = self.w(f"{name}A_log").reshape(-1)[:heads].exp()[:, None]
        bound = self.linear.get("gate_lower_bound")
        decay = -rate * torch.nn.functional.softplus(z) if bound is None else bound * torch.sigmoid(rate * z)
        beta = torch.sigmoid(x @ self.w(f"{name}b_proj.weight").T)
        state = torch.zeros(heads, dim, dim, dtype=torch.float64)
        o = torch.empty(tokens, heads, dim, dtype=torch.float64)
        for t in range(tokens):
            state = decay[t].exp()[..., None] * state
            u = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + beta[t][:, None, None] * k[t][..., None] * u[:, None]
            o[t] = torch.einsum("hkv,hk->hv", state, q[t])
        trace.states[i] = state
        if self.linear.get("use_full_rank_gate"):
            gate = x @ self.w(f"{name}g_proj.weight").T
        else:
            gate = x @ self.w(f"{name}g_a_proj.weight").T @ self.w(f"{name}g_b_proj.weight").T
        y = rms_norm(o, self.w(f"{name}o_norm.weight"), self.c["rms_norm_eps"])
        y = y * torch.sigmoid(gate).reshape(tokens, heads, dim)
        return y.reshape(tokens, -1) @ self.w(f"{name}o_proj.weight").T

    def _mla(self, i: int, x: torch.Tensor, trace: Trace) -> torch.Tensor:
        name = f"model.layers.{i}.self_attn."
        tokens, heads, rank = x.shape[0], self.c["num_attention_heads"], self.c["kv_lora_rank"]
        nope, rope, width = self.c["qk_nope_head_dim"], self.c["qk_rope_head_dim"], self.c["v_head_dim"]
        if self.c.get("q_lora_rank") is None:
            q = x @ self.w(f"{name}q_proj.weight").T
        else:
            a = x @ self.w(f"{name}q_a_proj.weight").T
            q = rms_norm(a, self.w(f"{name}q_a_layernorm.weight"), MLA_NORM_EPS) @ self.w(f"{name}q_b_proj.weight").T
        q = q.reshape(tokens, heads, nope + rope)
        kept = x @ self.w(f"{name}kv_a_proj_with_mqa.weight").T
        c = rms_norm(kept[:, :rank], self.w(f"{name}kv_a_layernorm.weight"), MLA_NORM_EPS)
        k_p = kept[:, rank:]
        trace.latents[i] = torch.cat([c, k_p], -1)
        kv = (c @ self.w(f"{name}kv_b_proj.weight").T).reshape(tokens, heads, nope + width)
        k = torch.cat([kv[..., :nope], k_p[:, None].expand(tokens, heads, rope)], -1)
        score = torch.einsum("thd,shd->hts", q, k) * (nope + rope) ** -0.5
        score = score.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
        o = torch.einsum("hts,shd->thd", torch.softmax(score, -1), kv[..., nope:]).reshape(tokens, -1)
        if self.c.get("mla_use_output_gate"):
            o = o * torch.sigmoid(x @ self.w(f"{name}g_proj.weight").T)
        return o @ self.w(f"{name}o_proj.weight").T

    # ---- FFN -----------------------------------------------------------------------------------------------------------

    def _activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.c["hidden_act"] == "silu":
            return silu(gate) * up
        b, l = self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"]
        return b * torch.tanh(gate / b) * torch.sigmoid(gate) * l * torch.tanh(up / l)

    def _mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = self._activate(x @ self.w(f"{name}gate_proj.weight").T, x @ self.w(f"{name}up_proj.weight").T)
        return y @ self.w(f"{name}down_proj.weight").T

    def _moe(self, i: int, name: str, x: torch.Tensor, trace: Trace) -> torch.Tensor:
        scores = torch.sigmoid(x @ self.w(f"{name}gate.weight").T)
        biased = scores + self.w(f"{name}gate.e_score_correction_bias")
        chosen = biased.topk(self.c["num_experts_per_token"], -1).indices
        weights = scores.gather(-1, chosen)
        if self.c.get("moe_renormalize", True):
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * self.c["routed_scaling_factor"]
        trace.experts[i] = chosen
        latent = self.c.get("routed_expert_hidden_size") is not None
        z = x @ self.w(f"{name}routed_expert_down_proj.weight").T if latent else x
        y = torch.zeros_like(z)
        for e in chosen.unique().tolist():
            token, slot = (chosen == e).nonzero(as_tuple=True)
            w1, w2, w3 = (self._expert(f"{name}experts.{e}.{n}.") for n in ("w1", "w2", "w3"))
            out = self._activate(z[token] @ w1.T, z[token] @ w3.T) @ w2.T
            y[token] += weights[token, slot][:, None] * out
        if self.c.get("latent_moe_use_norm"):
            y = rms_norm(y, self.w(f"{name}routed_expert_norm.weight"), self.c["rms_norm_eps"])
        if latent:
            y = y @ self.w(f"{name}routed_expert_up_proj.weight").T
        return y + self._mlp(f"{name}shared_experts.", x) if self.c.get("num_shared_experts") else y

    def _expert(self, name: str) -> torch.Tensor:
        if f"{name}weight" in self.tensors:
            return self.w(f"{name}weight")
        return dequantized(self.tensors[f"{name}weight_packed"], self.tensors[f"{name}weight_scale"])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def causal_conv(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """y_t = sum_j taps[:, j] * x_{t-n+1+j}, with zeros before the start. x: [T, C], taps: [C, n]."""
    n = taps.shape[1]
    padded = torch.cat([torch.zeros(n - 1, x.shape[1], dtype=x.dtype), x])
    return sum(taps[:, j] * padded[j : j + x.shape[0]] for j in range(n))


def dequantized(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Values of MXFP4: packed [out, in/2] with the even input in the low nibble; scale [out, in/32], 2^(byte - 127)."""
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    factor = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
    return table[codes.long()] * factor
