"""Small checkpoints with random weights, for tests of the network."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from k3dsl.model.config import KimiK3Config
from k3dsl.model.shapes import Source, parameters

DTYPES = {"float32": torch.float32, "uint8": torch.uint8}


def random_checkpoint(
    config: KimiK3Config, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Tensors under their checkpoint names, prefix included, scaled so that every part of the network matters.

    Norm weights differ from 1 and biases from 0, AttnRes queries are large enough that mixes are not uniform, decays range
    from slow to fast, A_log ends in zeros where the checkpoint pads it. dtype: of what is not always float32.
    """
    generator = torch.Generator().manual_seed(seed)
    prefix = "" if config.wrapper is None else "language_model."
    return {
        prefix + source.name: _random(source, one.shape[0], generator).to(DTYPES.get(one.kind, dtype))
        for one in parameters(config)
        for source in one.sources
    }


def _random(source: Source, rows: int, generator: torch.Generator) -> torch.Tensor:
    name, shape = source.name, source.shape
    normal = torch.randn(shape, generator=generator)
    if name.endswith("weight_packed"):
        return torch.randint(0, 256, shape, generator=generator)
    if name.endswith("weight_scale"):
        return torch.randint(122, 126, shape, generator=generator)
    if name.endswith("A_log"):
        value = torch.zeros(shape)
        value.view(-1)[:rows] = torch.rand(rows, generator=generator) * 2 - 1
        return value
    if name.endswith("dt_bias"):
        return normal - 1
    if name.endswith("e_score_correction_bias"):
        return 0.1 * normal
    if "norm" in name:
        return 1 + 0.2 * normal
    if "_res_proj" in name:
        return 0.3 * normal
    if "embed_tokens" in name:
        return normal
    if "conv1d" in name:
        return normal / 2
    return normal / math.sqrt(shape[-1])


def write_checkpoint(folder: Path, config: KimiK3Config, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """A checkpoint as others would write it: config.json, and all in one file or in shards with an index."""
    import json

    config.save_pretrained(folder)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[i::shards]
        save_file({name: tensors[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder
