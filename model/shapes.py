"""Names, shapes and dtypes of a network's parameters, and the checkpoint tensors that each is made of.

The one source of these facts for the network, the checkpoint code and `k3dsl model info`. The contract:

- A parameter has the name that the checkpoint gives it, without the prefix `language_model.`, and holds one tensor; but
  projections of one input are stacked along their output rows, in the order that the name lists, and experts along a
  leading dim E:

  ========================================================  =====================  ==================================
  parameter, below `model.layers.{i}.`                      shape                  checkpoint tensors
  ========================================================  =====================  ==================================
  self_attn.qkv_proj.weight (KDA)                           [3*H*K, hidden]        q_proj, k_proj, v_proj
  self_attn.qkv_conv1d.weight (KDA, fp32)                   [3*H*K, taps]          q_conv1d, k_conv1d, v_conv1d [.., 1, ..]
  self_attn.A_log (KDA, fp32)                               [H]                    padded with zeros to a multiple of 128 in
                                                                                   Kimi K3, [1, 1, H, 1] in Kimi Linear
  mlp.gate_up_proj.weight                                   [2*width, hidden]      gate_proj, up_proj
  block_sparse_moe.shared_experts.gate_up_proj.weight       [2*width, hidden]      gate_proj, up_proj
  block_sparse_moe.experts.w13                              [E, 2*I, D]            experts.{e}.w1 (gate), .w3 (up)
  block_sparse_moe.experts.w2                               [E, D, I]              experts.{e}.w2
  block_sparse_moe.experts.w13_packed, .w13_scale (uint8)   [E, 2*I, D/2], D/32    .weight_packed, .weight_scale
  block_sparse_moe.experts.w2_packed, .w2_scale (uint8)     [E, D, I/2], [.., I/32]
  *_res_proj.weight                                         [hidden]               [1, hidden]
  ========================================================  =====================  ==================================

- With MXFP4 experts the packed pairs take the place of w13 and w2. D is expert_hidden_size, I moe_intermediate_size.
- dtype: 'weight' is the network's own (bfloat16 as published); A_log, dt_bias, the convolution, o_norm and the router's
  e_score_correction_bias are float32 whatever the network's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from k3dsl.model.config import MXFP4_GROUP, KimiK3Config

Index = tuple[int | slice, ...]
Kind = Literal["weight", "float32", "uint8"]
PARTS = (
    "embedding", "kda", "mla", "dense_mlp", "router", "routed_experts", "shared_experts", "latent_projections",
    "attn_res", "norms", "lm_head",
)  # fmt: skip
A_LOG_PADDING = 128


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor and its place in a parameter.

    Attributes:
        name: in the checkpoint, without the prefix.
        shape: in the checkpoint. Its values in row-major order fill the place, and zeros follow where it is larger.
        index: the place, an index of the parameter; () is all of it.
    """

    name: str
    shape: tuple[int, ...]
    index: Index = ()


@dataclass(frozen=True)
class Parameter:
    """A parameter of the network.

    Attributes:
        name: in the network's state dict.
        shape: of the tensor.
        kind: 'weight': the network's dtype; 'float32' and 'uint8' are always that.
        part: of the network that it counts to, one of PARTS.
        sources: the checkpoint tensors that it is made of.
        values: weights in the checkpoint tensors: their elements, but two a byte where packed, and none in scales.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    part: str
    sources: Sequence[Source]
    values: int


def parameters(config: KimiK3Config) -> Iterator[Parameter]:
    """All parameters of a network, in order from the embedding to lm_head."""
    hidden = config.hidden_size
    yield _same("model.embed_tokens.weight", (config.vocab_size, hidden), "embedding")
    for layer in range(config.num_hidden_layers):
        yield from layer_parameters(config, layer)
    if config.attn_res_block_size is not None:
        yield from _aggregation("model.output_attn_res", hidden)
    yield _same("model.norm.weight", (hidden,), "norms")
    if not config.tie_word_embeddings:
        yield _same("lm_head.weight", (config.vocab_size, hidden), "lm_head")


def layer_parameters(config: KimiK3Config, layer: int) -> Iterator[Parameter]:
    """The parameters of one decoder layer, counted from 0."""
    prefix = f"model.layers.{layer}."
    hidden = config.hidden_size
    if config.attn_res_block_size is not None:
        yield from _aggregation(f"{prefix}self_attention_res", hidden)
    yield _same(f"{prefix}input_layernorm.weight", (hidden,), "norms")
    attention = _kda if config.layer_types[layer] == "kda" else _mla
    yield from attention(config, f"{prefix}self_attn.")
    if config.attn_res_block_size is not None:
        yield from _aggregation(f"{prefix}mlp_res", hidden)
    yield _same(f"{prefix}post_attention_layernorm.weight", (hidden,), "norms")
    if config.is_moe(layer):
        yield from _moe(config, f"{prefix}block_sparse_moe.")
    else:
        yield from _mlp(f"{prefix}mlp.", hidden, config.intermediate_size, "dense_mlp")


def _same(name: str, shape: tuple[int, ...], part: str, kind: Kind = "weight") -> Parameter:
    """A parameter that is one checkpoint tensor of the same name and shape."""
    return Parameter(name, shape, kind, part, (Source(name, shape),), prod(shape))


def _rows(name: str, sources: tuple[str, ...], rows: int, width: int, part: str) -> Parameter:
    """A parameter of [len(sources)*rows, width] that stacks checkpoint tensors of [rows, width]."""
    parts = tuple(Source(one, (rows, width), (slice(i * rows, (i + 1) * rows),)) for i, one in enumerate(sources))
    shape = (len(sources) * rows, width)
    return Parameter(name, shape, "weight", part, parts, prod(shape))


def _aggregation(site: str, hidden: int) -> Iterator[Parameter]:
    """Query and key norm of one AttnRes site."""
    name = f"{site}_proj.weight"
    yield Parameter(name, (hidden,), "weight", "attn_res", (Source(name, (1, hidden)),), hidden)
    yield _same(f"{site}_norm.weight", (hidden,), "attn_res")


def _mlp(prefix: str, hidden: int, width: int, part: str) -> Iterator[Parameter]:
    names = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    yield _rows(f"{prefix}gate_up_proj.weight", names, width, hidden, part)
    yield _same(f"{prefix}down_proj.weight", (hidden, width), part)


def _kda(config: KimiK3Config, prefix: str) -> Iterator[Parameter]:
    heads, dim, width, hidden = config.kda_num_heads, config.kda_head_dim, config.kda_width, config.hidden_size
    taps = config.short_conv_kernel_size
    yield _rows(f"{prefix}qkv_proj.weight", tuple(f"{prefix}{n}_proj.weight" for n in "qkv"), width, hidden, "kda")
    convolutions = tuple(
        Source(f"{prefix}{n}_conv1d.weight", (width, 1, taps), (slice(i * width, (i + 1) * width),))
        for i, n in enumerate("qkv")
    )
    shape = (3 * width, taps)
    yield Parameter(f"{prefix}qkv_conv1d.weight", shape, "float32", "kda", convolutions, prod(shape))
    yield _same(f"{prefix}f_a_proj.weight", (dim, hidden), "kda")
    yield _same(f"{prefix}f_b_proj.weight", (width, dim), "kda")
    yield _same(f"{prefix}b_proj.weight", (heads, hidden), "kda")
    if config.use_full_rank_gate:
        yield _same(f"{prefix}g_proj.weight", (width, hidden), "kda")
    else:
        yield _same(f"{prefix}g_a_proj.weight", (dim, hidden), "kda")
        yield _same(f"{prefix}g_b_proj.weight", (width, dim), "kda")
    padded = -(-heads // A_LOG_PADDING) * A_LOG_PADDING
    stored = (padded,) if config.is_k3 else (1, 1, heads, 1)
    name = f"{prefix}A_log"
    yield Parameter(name, (heads,), "float32", "kda", (Source(name, stored),), prod(stored))
    yield _same(f"{prefix}dt_bias", (width,), "kda", "float32")
    yield _same(f"{prefix}o_norm.weight", (dim,), "kda", "float32")
    yield _same(f"{prefix}o_proj.weight", (hidden, width), "kda")


def _mla(config: KimiK3Config, prefix: str) -> Iterator[Parameter]:
    heads, hidden, latent = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
    queries, out = heads * config.qk_head_dim, heads * config.v_head_dim
    if config.q_lora_rank is None:
        yield _same(f"{prefix}q_proj.weight", (queries, hidden), "mla")
    else:
        yield _same(f"{prefix}q_a_proj.weight", (config.q_lora_rank, hidden), "mla")
        yield _same(f"{prefix}q_a_layernorm.weight", (config.q_lora_rank,), "mla")
        yield _same(f"{prefix}q_b_proj.weight", (queries, config.q_lora_rank), "mla")
    yield _same(f"{prefix}kv_a_proj_with_mqa.weight", (config.mla_cache_width, hidden), "mla")
    yield _same(f"{prefix}kv_a_layernorm.weight", (latent,), "mla")
    yield _same(f"{prefix}kv_b_proj.weight", (heads * (config.qk_nope_head_dim + config.v_head_dim), latent), "mla")
    if config.mla_use_output_gate:
        yield _same(f"{prefix}g_proj.weight", (out, hidden), "mla")
    yield _same(f"{prefix}o_proj.weight", (hidden, out), "mla")


def _moe(config: KimiK3Config, prefix: str) -> Iterator[Parameter]:
    hidden, width, inner = config.hidden_size, config.expert_hidden_size, config.moe_intermediate_size
    experts = config.num_experts
    assert experts is not None
    assert inner is not None
    yield _same(f"{prefix}gate.weight", (experts, hidden), "router")
    yield _same(f"{prefix}gate.e_score_correction_bias", (experts,), "router", "float32")
    if config.routed_expert_hidden_size is not None:
        yield _same(f"{prefix}routed_expert_down_proj.weight", (width, hidden), "latent_projections")
    yield from _experts(f"{prefix}experts.", "w13", ("w1", "w3"), experts, inner, width, config.experts_mxfp4)
    yield from _experts(f"{prefix}experts.", "w2", ("w2",), experts, width, inner, config.experts_mxfp4)
    if config.latent_moe_use_norm:
        yield _same(f"{prefix}routed_expert_norm.weight", (width,), "latent_projections")
    if config.routed_expert_hidden_size is not None:
        yield _same(f"{prefix}routed_expert_up_proj.weight", (hidden, width), "latent_projections")
    if config.shared_intermediate_size:
        yield from _mlp(f"{prefix}shared_experts.", hidden, config.shared_intermediate_size, "shared_experts")


def _experts(
    prefix: str, name: str, matrices: tuple[str, ...], experts: int, rows: int, width: int, packed: bool
) -> Iterator[Parameter]:
    """One weight of all experts, [E, len(matrices)*rows, width], or its packed codes and their scales."""
    forms: tuple[tuple[str, str, int, Kind, int], ...] = (("", ".weight", width, "weight", 1),)
    if packed:
        codes: tuple[str, str, int, Kind, int] = ("_packed", ".weight_packed", width // 2, "uint8", 2)
        forms = (codes, ("_scale", ".weight_scale", width // MXFP4_GROUP, "uint8", 0))
    for suffix, stored, columns, kind, weights in forms:
        shape = (experts, len(matrices) * rows, columns)
        sources = ExpertSources(prefix, stored, experts, matrices, (rows, columns))
        yield Parameter(f"{prefix}{name}{suffix}", shape, kind, "routed_experts", sources, weights * prod(shape))


@dataclass(frozen=True)
class ExpertSources(Sequence[Source]):
    """The tensors of all experts, made when asked for: Kimi K3 has half a million."""

    prefix: str
    suffix: str
    experts: int
    matrices: tuple[str, ...]
    shape: tuple[int, int]

    def __len__(self) -> int:
        return self.experts * len(self.matrices)

    def __getitem__(self, number: Any) -> Any:
        expert, which = divmod(range(len(self))[number], len(self.matrices))
        rows = self.shape[0]
        name = f"{self.prefix}{expert}.{self.matrices[which]}{self.suffix}"
        return Source(name, self.shape, (expert, slice(which * rows, (which + 1) * rows)))
