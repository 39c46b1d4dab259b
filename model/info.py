"""What a network weighs: parameters by part, bytes of its weights and of its caches; all from shapes, without weights."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from k3dsl.errors import UnknownNameError
from k3dsl.model import presets
from k3dsl.model.config import MXFP4_GROUP, KimiK3Config, LayerType
from k3dsl.model.shapes import PARTS, parameters

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class CacheInfo:
    """What generating keeps; bytes.

    Attributes:
        per_token: of MLA: the normed latent and the shared key part of every MLA layer, in the network's dtype.
        kda_state: of one request: S of every KDA layer, float32.
        conv_state: of one request: the last inputs of every KDA layer's convolution, in the network's dtype.
        break_even_tokens: context at which MLA's cache is as large as both states.
        attn_res_bank_per_token: of the running chunk, inside a forward pass only: the bank's rows.
    """

    per_token: int
    kda_state: int
    conv_state: int
    break_even_tokens: int
    attn_res_bank_per_token: int

    def at(self, tokens: int) -> int:
        """Bytes of one request with a context of so many tokens."""
        return tokens * self.per_token + self.kda_state + self.conv_state


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a network.

    Attributes:
        name: the configuration's or the folder's.
        features: see KimiK3Config.features.
        layer_types: 'kda' or 'mla' of each layer, from 0.
        moe_layers, snapshot_layers: layers with experts, and those where AttnRes appends to its bank; from 0.
        parameters: weights in the checkpoint's tensors, by part.
        total: of all parts.
        active: that one token meets: all but the embedding table and the experts that it is not routed to.
        weight_bytes: as the config has them; bf16_weight_bytes: all weights in bf16; mxfp4_weight_bytes: routed experts in
            MXFP4 (None where there are none, or their widths do not allow it). Parameters that are always float32 are in all.
        cache: see CacheInfo.
    """

    name: str
    features: tuple[str, ...]
    layer_types: tuple[LayerType, ...]
    moe_layers: tuple[int, ...]
    snapshot_layers: tuple[int, ...]
    parameters: dict[str, int]
    total: int
    active: int
    weight_bytes: int
    bf16_weight_bytes: int
    mxfp4_weight_bytes: int | None
    cache: CacheInfo

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def load_config(name: str | os.PathLike[str]) -> tuple[str, KimiK3Config]:
    """A configuration by name, or from a checkpoint's folder or config.json; and what to call it.

    Raises:
        UnknownNameError: neither a name nor a path that exists.
        ArgumentError: a config.json that cannot be used.
    """
    place = Path(name)
    if place.is_dir():
        return place.resolve().name, KimiK3Config.from_pretrained(place)
    if place.is_file():
        return place.resolve().parent.name, KimiK3Config.from_json(place)
    try:
        return presets.canonical(str(name)), KimiK3Config.from_name(str(name))
    except UnknownNameError as error:
        raise UnknownNameError(
            f"{str(name)!r} is neither a configuration nor a folder with a config.json", fix=error.fix
        ) from None


def describe(config: KimiK3Config, name: str = "") -> ModelInfo:
    """The facts about a network of this config."""
    counts: Counter[str] = Counter()
    always32 = 0
    for one in parameters(config):
        counts[one.part] += one.values
        if one.kind == "float32":
            always32 += sum(prod(source.shape) for source in one.sources)
    total = counts.total()
    experts = counts["routed_experts"]
    met = experts * (config.num_experts_per_token or 0) // config.num_experts if config.num_experts else 0
    packed = experts // 2 + experts // MXFP4_GROUP
    own = BYTES[config.dtype]
    others = total - experts - always32
    fits = experts > 0 and not (config.expert_hidden_size % MXFP4_GROUP or config.moe_intermediate_size % MXFP4_GROUP)  # type: ignore[operator]
    return ModelInfo(
        name=name,
        features=config.features,
        layer_types=config.layer_types,
        moe_layers=config.moe_layers,
        snapshot_layers=config.snapshot_layers,
        parameters={part: counts[part] for part in PARTS if counts[part]},
        total=total,
        active=total - counts["embedding"] - experts + met,
        weight_bytes=own * others + 4 * always32 + (packed if config.experts_mxfp4 else own * experts),
        bf16_weight_bytes=2 * (others + experts) + 4 * always32,
        mxfp4_weight_bytes=2 * others + 4 * always32 + packed if fits else None,
        cache=cache_info(config),
    )


def cache_info(config: KimiK3Config) -> CacheInfo:
    """Bytes that generating keeps for a token and for a request."""
    own = BYTES[config.dtype]
    kda = len(config.kda_layers)
    per_token = len(config.mla_layers) * config.mla_cache_width * own
    state = kda * config.kda_width * config.kda_head_dim * 4
    convolution = kda * 3 * (config.short_conv_kernel_size - 1) * config.kda_width * own
    return CacheInfo(
        per_token=per_token,
        kda_state=state,
        conv_state=convolution,
        break_even_tokens=-(-(state + convolution) // per_token) if per_token else 0,
        attn_res_bank_per_token=len(config.snapshot_layers) * config.hidden_size * own,
    )
