"""The shape of a network: the fields of a checkpoint's config.json, checked, and what follows from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from k3dsl.errors import ArgumentError
from k3dsl.model import config_file, presets

LayerType = Literal["kda", "mla"]
MXFP4_GROUP = 32


@dataclass(frozen=True, kw_only=True)
class LinearAttnConfig:
    """The `linear_attn_config` of a checkpoint: which layers are KDA, and their dims.

    Attributes:
        kda_layers, full_attn_layers: numbers of the KDA and of the MLA layers, counted from 1 as checkpoints do.
        num_heads, head_dim: H and K of KDA; keys and values have the same width.
        short_conv_kernel_size: taps of the depthwise causal convolution before q, k and v.
        use_full_rank_gate: the output gate is one projection (Kimi K3); else two, of rank head_dim (Kimi Linear).
        gate_lower_bound: L of the bounded decay L*sigmoid(exp(A_log)*z), negative; None: -exp(A_log)*softplus(z).
        extra: fields that are not used here; kept for saving.
    """

    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]
    num_heads: int
    head_dim: int
    short_conv_kernel_size: int = 4
    use_full_rank_gate: bool = False
    gate_lower_bound: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True)
class KimiK3Config:
    """The text network of Kimi K3 or of Kimi Linear; the two differ only in the fields below.

    Fields bear the names they have in config.json (`text_config` of Kimi K3, the top level of Kimi Linear).

    Attributes:
        q_lora_rank: rank of MLA's query projection; None: one projection from the hidden state (Kimi Linear).
        mla_use_output_gate: MLA's output is multiplied by sigmoid(g_proj x) before o_proj.
        hidden_act: 'situ', with activation_situ_beta and activation_situ_linear_beta, or 'silu' (SwiGLU).
        num_experts: routed experts of an MoE layer; None: every layer is dense.
        num_shared_experts: of one fused MLP of width num_shared_experts * moe_intermediate_size; 0: none.
        routed_expert_hidden_size: width of the latent space of routed experts; None: they act on the hidden state.
        latent_moe_use_norm: RMSNorm on the sum of the routed experts, in the latent space.
        attn_res_block_size: layers of one block of Block AttnRes; None: ordinary residuals.
        rms_norm_eps: of every RMSNorm but MLA's two; mla_norm_eps: of q_a_layernorm and kv_a_layernorm.
        quantization_config: as in the checkpoint; see experts_mxfp4.
        extra: fields of the text config that are not used here; kept for saving.
        wrapper: the outer fields of a nested config.json without its text_config; None: config.json is flat.

    Raises:
        ArgumentError: a field that contradicts another or is out of range, by name.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    linear_attn_config: LinearAttnConfig
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    hidden_act: str
    rms_norm_eps: float
    q_lora_rank: int | None = None
    mla_use_output_gate: bool = False
    mla_norm_eps: float = 1e-6
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None
    num_experts: int | None = None
    num_experts_per_token: int | None = None
    moe_intermediate_size: int | None = None
    num_shared_experts: int = 0
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    attn_res_block_size: int | None = None
    tie_word_embeddings: bool = False
    max_position_embeddings: int | None = None
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    dtype: str = "bfloat16"
    quantization_config: Mapping[str, Any] | None = field(default=None, hash=False)
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    wrapper: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        config_file.check(self)

    # ---- ways to get one -----------------------------------------------------------------------------------------------

    @classmethod
    def from_name(cls, name: str) -> KimiK3Config:
        """A configuration by name: 'K3', 'K3-tiny', 'K3-slice', 'Kimi-Linear-48B-A3B' or 'Kimi-Linear-tiny'.

        Raises:
            UnknownNameError: for any other name.
        """
        return cls.from_dict(presets.read(name))

    @classmethod
    def k3(cls) -> KimiK3Config:
        """Kimi K3, text part: 2.78T parameters, 69 KDA and 24 MLA layers, routed experts in MXFP4."""
        return cls.from_name("K3")

    @classmethod
    def k3_tiny(cls) -> KimiK3Config:
        """A network with every feature of Kimi K3 in 9 layers of width 128 and a byte vocabulary (4.0M parameters)."""
        return cls.from_name("K3-tiny")

    @classmethod
    def k3_slice(cls) -> KimiK3Config:
        """The first 8 layers of Kimi K3 (6 KDA, 2 MLA, the first one dense) with 112 of its 896 experts, as one rank of eight
        holds; every width and the vocabulary are Kimi K3's (33.39B parameters)."""
        return cls.from_name("K3-slice")

    @classmethod
    def kimi_linear_48b(cls) -> KimiK3Config:
        """Kimi-Linear-48B-A3B: 20 KDA and 7 MLA layers, ordinary residuals, SwiGLU experts."""
        return cls.from_name("Kimi-Linear-48B-A3B")

    @classmethod
    def kimi_linear_tiny(cls) -> KimiK3Config:
        """A network with every feature of Kimi Linear in 5 layers of width 128 and a byte vocabulary (1.5M parameters)."""
        return cls.from_name("Kimi-Linear-tiny")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KimiK3Config:
        """From the content of a config.json: nested (with `text_config`) or flat, as published or as transformers saves it.

        Raises:
            ArgumentError: a field that is missing, of the wrong type or contradicts another, by name.
        """
        return config_file.made_of(data, cls, LinearAttnConfig)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> KimiK3Config:
        """From a config.json. Raises ArgumentError if there is none, it is no JSON, or for its fields; see from_dict."""
        return cls.from_dict(config_file.read(path))

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> KimiK3Config:
        """From the config.json of a checkpoint's folder; see from_json."""
        return cls.from_json(os.path.join(folder, config_file.FILE))

    def to_dict(self) -> dict[str, Any]:
        """The content of a config.json, nested if this came from a nested one; from_dict gives the same config back."""
        return config_file.content_of(self)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes config.json into a folder, which is made if need be."""
        config_file.write(self.to_dict(), folder)

    # ---- layers --------------------------------------------------------------------------------------------------------

    @cached_property
    def layer_types(self) -> tuple[LayerType, ...]:
        """'kda' or 'mla' for each layer, counted from 0."""
        full = set(self.linear_attn_config.full_attn_layers)
        return tuple("mla" if i + 1 in full else "kda" for i in range(self.num_hidden_layers))

    @cached_property
    def kda_layers(self) -> tuple[int, ...]:
        """Numbers of the KDA layers, counted from 0."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "kda")

    @cached_property
    def mla_layers(self) -> tuple[int, ...]:
        """Numbers of the MLA layers, counted from 0."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "mla")

    def is_moe(self, layer: int) -> bool:
        """Whether the FFN of a layer (from 0) is a mixture of experts; else it is one MLP of width intermediate_size."""
        if self.num_experts is None or layer < self.first_k_dense_replace:
            return False
        return layer % self.moe_layer_freq == 0

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the MoE layers, counted from 0."""
        return tuple(i for i in range(self.num_hidden_layers) if self.is_moe(i))

    @cached_property
    def snapshot_layers(self) -> tuple[int, ...]:
        """Layers (from 0) that append the partial sum to AttnRes's bank, after aggregating for their attention."""
        return (
            ()
            if self.attn_res_block_size is None
            else tuple(range(0, self.num_hidden_layers, self.attn_res_block_size))
        )

    def bank_rows(self, layer: int) -> int:
        """Rows in AttnRes's bank when a layer (from 0) aggregates for its attention; num_hidden_layers: for the output."""
        return sum(1 for i in self.snapshot_layers if i < layer)

    # ---- dims ----------------------------------------------------------------------------------------------------------

    @property
    def kda_num_heads(self) -> int:
        """H of KDA."""
        return self.linear_attn_config.num_heads

    @property
    def kda_head_dim(self) -> int:
        """K and V of KDA."""
        return self.linear_attn_config.head_dim

    @property
    def kda_width(self) -> int:
        """H * K of KDA, the width of q, k and v."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def short_conv_kernel_size(self) -> int:
        """Taps of KDA's short convolution."""
        return self.linear_attn_config.short_conv_kernel_size

    @property
    def use_full_rank_gate(self) -> bool:
        """KDA's output gate is g_proj; else g_b_proj after g_a_proj."""
        return self.linear_attn_config.use_full_rank_gate

    @property
    def gate_lower_bound(self) -> float | None:
        """The bound of KDA's decay in nats; None: softplus, without a bound."""
        return self.linear_attn_config.gate_lower_bound

    @property
    def qk_head_dim(self) -> int:
        """Width of MLA's queries and keys, nope and (never rotated) rope part; its -0.5th power is the softmax scale."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mla_cache_width(self) -> int:
        """Values that MLA keeps for a token and layer: the normed latent, then the shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expert_hidden_size(self) -> int:
        """D, the width that routed experts read and write."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the fused MLP of the shared experts; 0: none."""
        return self.num_shared_experts * (self.moe_intermediate_size or 0)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        ids = self.eos_token_id
        return () if ids is None else (ids,) if isinstance(ids, int) else ids

    # ---- what kind of network ------------------------------------------------------------------------------------------

    @property
    def is_k3(self) -> bool:
        """Whether this is a Kimi K3 text network. Its text config has Kimi Linear's model_type, so features decide."""
        return self.attn_res_block_size is not None or self.routed_expert_hidden_size is not None

    @property
    def experts_mxfp4(self) -> bool:
        """Whether the routed experts' weights are packed MXFP4 (E2M1 codes, one E8M0 scale for 32 inputs)."""
        return (self.quantization_config or {}).get("format") == "mxfp4-pack-quantized"

    @property
    def features(self) -> tuple[str, ...]:
        """What this network has of the parts in which networks of this family differ."""
        has = {
            "bounded_gate": self.gate_lower_bound is not None,
            "full_rank_gate": self.use_full_rank_gate,
            "q_lora": self.q_lora_rank is not None,
            "mla_output_gate": self.mla_use_output_gate,
            "situ": self.hidden_act == "situ",
            "moe": bool(self.moe_layers),
            "latent_moe": self.routed_expert_hidden_size is not None,
            "latent_norm": self.latent_moe_use_norm,
            "mxfp4_experts": self.experts_mxfp4,
            "attn_res": self.attn_res_block_size is not None,
            "tied_embeddings": self.tie_word_embeddings,
        }
        return tuple(name for name, present in has.items() if present)

    def with_mxfp4_experts(self) -> KimiK3Config:
        """This network with its routed experts in MXFP4. Raises ArgumentError where their widths do not allow it."""
        if self.num_experts is None:
            raise ArgumentError("num_experts: there are no experts to quantise", fix="take a config with an MoE")
        quantization = presets.read("K3")["text_config"]["quantization_config"]
        return replace(self, quantization_config=quantization)
