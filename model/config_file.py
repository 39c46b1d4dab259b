"""config.json and its fields: reading, the spellings that occur, checks, writing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from k3dsl.errors import ArgumentError

if TYPE_CHECKING:
    from k3dsl.model.config import KimiK3Config

T = TypeVar("T")
FILE = "config.json"
SPELLINGS = {
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "model_max_length": "max_position_embeddings",
    "torch_dtype": "dtype",
    "n_group": "num_expert_group",
}
INHERITED = (
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
)  # text's from the wrapper's
FLAT_LINEAR = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}

# Fields that leave no choice: what they must say for this network to be the one that is meant.
FIXED: dict[str, tuple[Any, ...]] = {
    "mla_use_nope": (True, None),
    "moe_router_activation_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "num_nextn_predict_layers": (0, None),
    "attention_bias": (False, None),
}
POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "intermediate_size", "rms_norm_eps", "mla_norm_eps", "q_lora_rank", "num_experts",
    "num_experts_per_token", "moe_intermediate_size", "routed_expert_hidden_size", "moe_layer_freq",
    "routed_scaling_factor", "attn_res_block_size", "activation_situ_beta", "activation_situ_linear_beta",
    "max_position_embeddings",
)  # fmt: skip
INNER_POSITIVE = ("num_heads", "head_dim", "short_conv_kernel_size")
DTYPES = ("bfloat16", "float16", "float32")


def fail(name: str, reason: str, remedy: str = "compare with the checkpoint's own config.json") -> NoReturn:
    """Raises ArgumentError: which field, what is wrong with it, what to do."""
    raise ArgumentError(f"{name}: {reason}", fix=remedy)


# ---- reading -----------------------------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object in a JSON file. Raises ArgumentError if there is no file, or no object in it."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ArgumentError(
            f"{path}: {reason}", fix="name a folder that has a config.json, or the file itself"
        ) from None
    except ValueError as error:
        raise ArgumentError(f"{path}: is no JSON: {error}", fix="download or write it again") from None
    if not isinstance(data, dict):
        raise ArgumentError(f"{path}: holds a {type(data).__name__}, not an object", fix="download or write it again")
    return data


def made_of(data: Mapping[str, Any], outer_type: type[T], inner_type: type) -> T:
    """A KimiK3Config (outer_type, with a LinearAttnConfig inside) from the content of a config.json."""
    wrapper = None
    if "text_config" in data:
        wrapper = {name: value for name, value in data.items() if name != "text_config"}
        data = data["text_config"]
        if not isinstance(data, Mapping):
            fail("text_config", f"is a {type(data).__name__}, needs an object")
    text = _respelled(data)
    if wrapper is not None:
        if text.get("quantization_config") is None and "quantization_config" in wrapper:
            text["quantization_config"] = wrapper.pop("quantization_config")
        for name, value in _respelled(wrapper).items():
            if name in INHERITED:
                text.setdefault(name, value)
    linear = _linear(text, text.get("num_hidden_layers"))
    text["linear_attn_config"] = _made(inner_type, linear, "linear_attn_config.")
    _dense_layers(text)
    if text.get("num_experts") is not None and "first_k_dense_replace" not in text:
        fail("first_k_dense_replace", "is missing; num_experts is given")  # readers differ in what they take for it
    if isinstance(text.get("eos_token_id"), list):
        text["eos_token_id"] = tuple(text["eos_token_id"])
    if isinstance(text.get("dtype"), str):
        text["dtype"] = text["dtype"].removeprefix("torch.")
    return _made(outer_type, text, "", wrapper=wrapper)


def _respelled(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields under one spelling; two spellings of one field must agree."""
    text: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, value in data.items():
        known = SPELLINGS.get(name, name)
        if known in text and text[known] != value:
            fail(name, f"is {value!r}, but {origin[known]}, the same field, is {text[known]!r}")
        text[known], origin[known] = value, name
    return text


def _linear(text: dict[str, Any], layers: Any) -> dict[str, Any]:
    """linear_attn_config as published, or from the flat fields that transformers writes, which must agree."""
    linear = text.pop("linear_attn_config", None)
    if linear is not None and not isinstance(linear, Mapping):
        fail("linear_attn_config", f"is a {type(linear).__name__}, needs an object")
    flat = {inner: text.pop(outer) for outer, inner in FLAT_LINEAR.items() if outer in text}
    types = text.pop("layer_types", None)
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            fail("layer_types", f"is not a list of num_hidden_layers = {layers} entries")
        kinds: dict[str, list[int]] = {"linear_attention": [], "full_attention": []}
        for number, kind in enumerate(types, 1):
            if kind not in kinds:
                fail("layer_types", f"layer {number - 1} is {kind!r}", f"use {' or '.join(kinds)}")
            kinds[kind].append(number)
        flat |= {"kda_layers": kinds["linear_attention"], "full_attn_layers": kinds["full_attention"]}
    if linear is None and types is None:
        fail("linear_attn_config", "is missing; it says which layers are KDA")
    found = dict(linear or {})
    for name, value in flat.items():
        known = found.setdefault(name, value)
        if (sorted(known) if isinstance(known, list) else known) != value:
            outer = next((one for one, inner in FLAT_LINEAR.items() if inner == name), "layer_types")
            fail(outer, f"contradicts linear_attn_config.{name}")
    return found


def _dense_layers(text: dict[str, Any]) -> None:
    """first_k_dense_replace from the list that transformers writes."""
    kinds = text.pop("mlp_layer_types", None)
    if kinds is None:
        return
    if not isinstance(kinds, list):
        fail("mlp_layer_types", f"is {kinds!r}, needs a list")
    dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        fail("mlp_layer_types", "has a dense layer after a sparse one", "dense layers must come first")
    if text.setdefault("first_k_dense_replace", dense) != dense:
        fail("mlp_layer_types", f"starts with {dense} dense layers, but first_k_dense_replace is not {dense}")


def _made(kind: type[T], given: Mapping[str, Any], prefix: str, **more: Any) -> T:
    """A dataclass from a JSON object: each field of the type that it is annotated with, the others as `extra`."""
    make: Any = kind
    found: dict[str, Any] = {}
    known = {one.name: one for one in fields(make)}
    for name, one in known.items():
        if name in ("extra", "wrapper"):
            continue
        optional = one.default is not MISSING
        if name not in given and not optional:
            fail(f"{prefix}{name}", "is missing")
        if name in given and not (given[name] is None and optional):
            found[name] = _value(f"{prefix}{name}", given[name], str(one.type))
    return make(**found, **more, extra={name: value for name, value in given.items() if name not in known})


def _value(name: str, value: Any, annotation: str) -> Any:
    """The value as its field's annotation wants it; lists become tuples. Raises ArgumentError for another type."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if annotation.startswith("tuple"):
        if isinstance(value, (list, tuple)) and all(type(one) is int for one in value):
            return tuple(value)
        fail(name, f"is {value!r}, needs a list of whole numbers")
    if "tuple" in annotation and isinstance(value, tuple):
        return value
    if annotation.startswith("int"):
        if number and value == int(value):
            return int(value)
        fail(name, f"is {value!r}, needs a whole number")
    if annotation.startswith("float"):
        if number:
            return float(value)
        fail(name, f"is {value!r}, needs a number")
    wanted = {"bool": bool, "str": str}.get(annotation)
    if wanted is not None and not isinstance(value, wanted):
        fail(name, f"is {value!r}, needs {'true or false' if wanted is bool else 'text'}")
    return value


# ---- checks ------------------------------------------------------------------------------------------------------------


def check(config: KimiK3Config) -> None:
    """Raises ArgumentError, naming the field, for a value out of range or fields that contradict one another."""
    for name in POSITIVE:
        value = getattr(config, name)
        if value is not None and not value > 0:
            fail(name, f"is {value}, needs to be positive")
    for name in INNER_POSITIVE:
        value = getattr(config.linear_attn_config, name)
        if not value > 0:
            fail(f"linear_attn_config.{name}", f"is {value}, needs to be positive")
    _check_layers(config)
    _check_moe(config)
    bound = config.gate_lower_bound
    if bound is not None and bound >= 0:
        fail("linear_attn_config.gate_lower_bound", f"is {bound}, needs to be negative: it bounds the log of the decay")
    betas = {n: getattr(config, n) for n in ("activation_situ_beta", "activation_situ_linear_beta")}
    if config.hidden_act not in ("situ", "silu"):
        fail("hidden_act", f"is {config.hidden_act!r}, needs 'situ' or 'silu'")
    for name, beta in betas.items():
        if config.hidden_act == "situ" and beta is None:
            fail(name, "is missing; hidden_act is 'situ'")
        if config.hidden_act == "silu" and beta is not None:
            fail(name, f"is {beta}, but hidden_act is 'silu'", "drop it, or set hidden_act to 'situ'")
    if config.dtype not in DTYPES:
        fail("dtype", f"is {config.dtype!r}, needs one of {', '.join(DTYPES)}")
    _check_tokens(config)
    for name, allowed in FIXED.items():
        if config.extra.get(name) not in allowed:
            fail(
                name, f"is {config.extra[name]!r}; only {allowed[0]!r} is supported", "use a checkpoint of this family"
            )
    heads = config.extra.get("num_key_value_heads")
    if heads not in (None, config.num_attention_heads):
        fail(
            "num_key_value_heads",
            f"is {heads}, but num_attention_heads is {config.num_attention_heads}; MLA has one number",
        )


def _check_layers(config: KimiK3Config) -> None:
    """The two lists number every layer once, from 1."""
    layers, linear = config.num_hidden_layers, config.linear_attn_config
    seen: dict[int, str] = {}
    for name in ("kda_layers", "full_attn_layers"):
        for number in getattr(linear, name):
            where = f"linear_attn_config.{name}"
            if not 1 <= number <= layers:
                fail(where, f"names layer {number}; layers are counted from 1 to num_hidden_layers = {layers}")
            if number in seen:
                fail(where, f"names layer {number}, which {seen[number]} has already")
            seen[number] = where
    left = sorted(set(range(1, layers + 1)) - set(seen))
    if left:
        fail("linear_attn_config", f"neither kda_layers nor full_attn_layers names layer {left[0]}")


def _check_moe(config: KimiK3Config) -> None:
    if config.first_k_dense_replace < 0:
        fail("first_k_dense_replace", f"is {config.first_k_dense_replace}, needs to be 0 or more")
    if config.num_shared_experts < 0:
        fail("num_shared_experts", f"is {config.num_shared_experts}, needs to be 0 or more")
    if config.latent_moe_use_norm and config.routed_expert_hidden_size is None:
        fail("latent_moe_use_norm", "is true, but there is no routed_expert_hidden_size, no latent space to norm in")
    if config.num_experts is None:
        for name in ("num_experts_per_token", "routed_expert_hidden_size"):
            if getattr(config, name) is not None:
                fail("num_experts", f"is missing, but {name} is {getattr(config, name)}")
        return
    for name in ("num_experts_per_token", "moe_intermediate_size"):
        if getattr(config, name) is None:
            fail(name, f"is missing; num_experts is {config.num_experts}")
    if (config.num_experts_per_token or 0) > config.num_experts:
        fail("num_experts_per_token", f"is {config.num_experts_per_token}, but num_experts is {config.num_experts}")
    groups, chosen = config.extra.get("num_expert_group", 1), config.extra.get("topk_group", 1)
    if groups not in (None, 1) and groups != chosen:
        fail("num_expert_group", f"is {groups} with topk_group {chosen}; choosing among groups is not supported")
    if config.experts_mxfp4:
        for name, width in (("expert_hidden_size", config.expert_hidden_size),
                            ("moe_intermediate_size", config.moe_intermediate_size or 0)):  # fmt: skip
            if width % 32:
                fail(name, f"is {width}, not a multiple of 32, the inputs that share one MXFP4 scale")


def _check_tokens(config: KimiK3Config) -> None:
    ids = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    for name, number in (*ids.items(), *(("eos_token_id", one) for one in config.eos_token_ids)):
        if number is not None and not 0 <= number < config.vocab_size:
            fail(name, f"is {number}, but vocab_size is {config.vocab_size}")


# ---- writing -----------------------------------------------------------------------------------------------------------


def content_of(config: KimiK3Config) -> dict[str, Any]:
    """The content of config.json. Fields that are None or at a default of ours alone are left out."""
    text: dict[str, Any] = {}
    for one in fields(config):
        value = getattr(config, one.name)
        if one.name in ("extra", "wrapper", "linear_attn_config") or (value is None and one.name != "q_lora_rank"):
            continue
        if one.name == "mla_norm_eps" and value == one.default:
            continue
        text[one.name] = list(value) if isinstance(value, tuple) else value
    linear = config.linear_attn_config
    text["linear_attn_config"] = {
        one.name: list(value) if isinstance(value, tuple) else value
        for one in fields(linear)
        if one.name != "extra" and (value := getattr(linear, one.name)) is not None
    } | dict(linear.extra)
    text = {"model_type": "kimi_linear", **config.extra, **text}
    return text if config.wrapper is None else {**config.wrapper, "text_config": text}


def write(content: Mapping[str, Any], folder: str | os.PathLike[str]) -> None:
    """Writes config.json so that a reader sees the whole of it or nothing."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    part = target / f".{FILE}.{os.getpid()}"
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(part, target / FILE)
