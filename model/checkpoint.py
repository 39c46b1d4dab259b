"""Loading a checkpoint into a network's parameters, tensor by tensor, and saving them in the checkpoint's layout."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from pathlib import Path

import torch

from k3dsl.errors import ArgumentError, CheckpointError
from k3dsl.model import checkpoint_files as files
from k3dsl.model import config_file
from k3dsl.model.checkpoint_files import Stored
from k3dsl.model.config import KimiK3Config
from k3dsl.model.shapes import Parameter, Source, parameters
from k3dsl.ops.common import dtype_name, fail

State = Mapping[str, torch.Tensor]
FLOATS = ("BF16", "F16", "F32", "F64")
SAVED = (torch.bfloat16, torch.float16, torch.float32)
_DTYPES = {"float32": torch.float32, "uint8": torch.uint8}


@dataclass
class Mismatch:
    """In what a checkpoint and a network differ; all names are as the checkpoint would have them, without prefix.

    Attributes:
        missing: tensors that the network needs and the checkpoint lacks.
        unused: tensors of the checkpoint that the network has no place for.
        wrong: one line each for tensors of another shape or dtype, or with values where zeros belong.
        repeated: names that occur twice.
    """

    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """What differs, one line a kind, the first names of each."""
        kinds = {
            "missing": self.missing,
            "unused": self.unused,
            "repeated": self.repeated,
            "not as expected": self.wrong,
        }
        return [f"{len(names):,} {kind}: {files.some(names)}" for kind, names in kinds.items() if names]


class CheckpointMismatch(CheckpointError):
    """A checkpoint that is sound but not one of this network; `mismatch` has all names."""

    def __init__(self, path: object, mismatch: Mismatch, fix: str) -> None:
        self.mismatch = mismatch
        super().__init__(f"{path}: does not fit the network; " + "; ".join(mismatch.lines()), fix=fix)


# ---- loading -----------------------------------------------------------------------------------------------------------


def load_checkpoint(path: str | os.PathLike[str], config: KimiK3Config, into: torch.nn.Module | State) -> None:
    """Fills a network's parameters from safetensors files.

    Before anything is written, all names, shapes and dtypes are compared. Then each tensor is read and copied into its
    place, so that beside the parameters no more than one tensor of the checkpoint is held. Weights take the dtype and the
    device that the parameter has; float32 parameters stay float32, and packed MXFP4 experts stay packed.

    Accepted: the prefix `language_model.`, AttnRes's older spellings, A_log padded with zeros or with dims of 1. Tensors
    of the vision tower and its projector are skipped.

    Args:
        path: a folder with model.safetensors.index.json and shards, or with one file; or a safetensors file.
        into: the network, or its state dict, with the parameters that `k3dsl.model.shapes.parameters` lists.

    Raises:
        CheckpointMismatch: missing, unused, repeated or ill-shaped tensors, all of them in one error.
        CheckpointError: there is no checkpoint, or a file is damaged.
        ArgumentError: `into` is no network of this config.
    """
    state = _state(into)
    wanted = list(parameters(config))
    _check_state(config, wanted, state)
    places = {source.name: (one, source) for one in wanted for source in one.sources}
    found, index = files.find(path)
    stored = list(files.contents(found, index))
    _compare(path, config, places, stored)
    with torch.no_grad():
        for file, group in groupby(stored, key=lambda one: one.file):
            with files.opened(file) as handle:
                for one in group:
                    name = files.plain_name(one.key)
                    if name is not None:
                        parameter, source = places[name]
                        _fill(state[parameter.name], source, handle.get_tensor(one.key))


def _fill(parameter: torch.Tensor, source: Source, value: torch.Tensor) -> None:
    place = parameter[source.index]
    place.copy_(value.reshape(-1)[: place.numel()].reshape(place.shape))


def _compare(
    path: object, config: KimiK3Config, places: Mapping[str, tuple[Parameter, Source]], stored: list[Stored]
) -> None:
    """Raises CheckpointMismatch unless the files hold just what the network needs."""
    mismatch = Mismatch()
    names: list[str] = []
    for one in stored:
        name = files.plain_name(one.key)
        if name is None:
            continue
        names.append(name)
        if name not in places:
            mismatch.unused.append(name)
            continue
        mismatch.wrong += _differences(name, *places[name], one)
    mismatch.repeated = files.repeated(names)
    mismatch.missing = sorted(set(places) - set(names))
    if mismatch.lines():
        raise CheckpointMismatch(path, mismatch, _advice(config, mismatch))


def _differences(name: str, parameter: Parameter, source: Source, one: Stored) -> list[str]:
    """What is wrong with a stored tensor. Dims of 1 do not count; zeros may follow the values of A_log."""
    found = []
    flat = tuple(n for n in one.shape if n != 1)
    wanted = tuple(n for n in source.shape if n != 1)
    if name.endswith("A_log"):
        heads = parameter.shape[0]
        if len(flat) > 1 or prod(flat) < heads:
            found.append(f"{name} has shape {list(one.shape)}, needs {heads} values")
        elif prod(flat) > heads and _has_tail(one, heads):
            found.append(f"{name} has {prod(flat)} values of which only the first {heads} may differ from zero")
    elif flat != wanted:
        found.append(f"{name} has shape {list(one.shape)}, needs {list(source.shape)}")
    fine = ("U8",) if parameter.kind == "uint8" else FLOATS
    if one.dtype not in fine:
        found.append(f"{name} is {one.dtype}, needs {' or '.join(fine)}")
    return found


def _has_tail(one: Stored, count: int) -> bool:
    with files.opened(one.file) as handle:
        return bool(handle.get_tensor(one.key).reshape(-1)[count:].count_nonzero())


def _advice(config: KimiK3Config, mismatch: Mismatch) -> str:
    missing, unused = mismatch.missing, mismatch.unused
    if any(name.endswith(".weight_packed") for name in unused) and not config.experts_mxfp4:
        return "its experts are MXFP4: take its own config.json, or a config with_mxfp4_experts()"
    if any(name.endswith(".weight_packed") for name in missing) and any(".experts." in name for name in unused):
        return "its experts are not MXFP4: drop quantization_config from the config"
    return "take the config.json that belongs to the checkpoint; if it is the right one, download the files again"


# ---- saving ------------------------------------------------------------------------------------------------------------


def save_checkpoint(
    folder: str | os.PathLike[str],
    config: KimiK3Config,
    state: torch.nn.Module | State,
    max_shard_size: int | str = "5GB",
) -> None:
    """Writes config.json and the parameters under the checkpoint's names, shapes and dtypes.

    A folder that is new appears when all is written; see `checkpoint_files.Writer` for one that is not. One shard at a
    time is copied to host memory. config.json says the dtype that the weights have.

    Args:
        state: the network, or its state dict.
        max_shard_size: bytes of one file, or text such as '5GB'; a larger tensor gets a file of its own. If all fits in
            one file, there is no index.

    Raises:
        ArgumentError: `state` is no network of this config, or max_shard_size is no size.
        OSError: the disk is full, or the folder cannot be written.
    """
    tensors = _state(state)
    wanted = list(parameters(config))
    _check_state(config, wanted, tensors)
    most = files.size_in_bytes(max_shard_size)
    own = tensors["model.embed_tokens.weight"].dtype
    if own not in SAVED:
        reason = f"its weights are {dtype_name(own)}, which config.json cannot say"
        raise ArgumentError(f"state: {reason}", fix="cast the network to bfloat16, float16 or float32")
    prefix = files.PREFIX if config.wrapper is not None else ""
    with files.Writer(folder) as writer:
        config_file.write(replace(config, dtype=dtype_name(own)).to_dict(), writer.staging)
        shard: dict[str, torch.Tensor] = {}
        held = 0
        for parameter in wanted:
            tensor = tensors[parameter.name].detach()
            if parameter.part == "router" and parameter.kind == "weight":
                tensor = _narrowed(tensor, own)
            for source in parameter.sources:
                size = prod(source.shape) * tensor.element_size()
                if shard and held + size > most:
                    writer.shard(shard)
                    shard, held = {}, 0
                shard[prefix + source.name] = _stored(tensor[source.index], source)
                held += size
        writer.shard(shard)


def _narrowed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in the network's dtype if that loses nothing: a router that is held in float32 and was never trained."""
    narrow = tensor.to(dtype)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


def _stored(view: torch.Tensor, source: Source) -> torch.Tensor:
    """A copy in host memory of the checkpoint's shape, with zeros behind the values where that is larger."""
    stored = torch.zeros(source.shape, dtype=view.dtype)
    stored.view(-1)[: view.numel()] = view.reshape(-1)
    return stored


# ---- state -------------------------------------------------------------------------------------------------------------


def empty_state(
    config: KimiK3Config, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Uninitialised tensors for all parameters of a network. dtype: of its weights; None: the config's."""
    own = getattr(torch, config.dtype) if dtype is None else dtype
    return {p.name: torch.empty(p.shape, dtype=_DTYPES.get(p.kind, own), device=device) for p in parameters(config)}


def _state(network: torch.nn.Module | State) -> State:
    return network.state_dict() if isinstance(network, torch.nn.Module) else network


def _check_state(config: KimiK3Config, wanted: list[Parameter], state: State) -> None:
    """Raises ArgumentError unless the state has the parameters of the config, no others, and none on the meta device."""
    problems = [f"lacks {one.name}" for one in wanted if one.name not in state]
    problems += [f"has {name}, which is no parameter" for name in state.keys() - {one.name for one in wanted}]
    for one in wanted:
        tensor = state.get(one.name)
        if tensor is None:
            continue
        dtype = _DTYPES.get(one.kind)
        if tuple(tensor.shape) != one.shape:
            problems.append(f"{one.name} has shape {list(tensor.shape)}, needs {list(one.shape)}")
        if tensor.dtype != dtype if dtype is not None else not tensor.dtype.is_floating_point:
            problems.append(f"{one.name} is {tensor.dtype}, needs {dtype or 'a floating point dtype'}")
        if tensor.device.type == "meta":
            problems.append(f"{one.name} has no memory yet")
    if problems:
        kind = "Kimi K3" if config.is_k3 else "Kimi Linear"
        raise ArgumentError(
            f"state: is not that of this {kind} config: {'; '.join(problems[:12])}"
            + (f" and {len(problems) - 12:,} more" if len(problems) > 12 else ""),
            fix="pass a network made from the same config, on a real device",
        )


def config_of(path: str | os.PathLike[str]) -> KimiK3Config:
    """The config beside a checkpoint: of the folder, or of the folder that the file is in. Raises ArgumentError."""
    if not isinstance(path, (str, os.PathLike)):
        fail("folder", f"is {path!r}", "pass the path of a checkpoint's folder")
    place = Path(path)
    if not place.exists():
        fail(
            "folder",
            f"{str(path)!r} does not exist",
            "pass a checkpoint's folder on this machine; nothing is downloaded",
        )
    return KimiK3Config.from_pretrained(place if place.is_dir() else place.parent)
