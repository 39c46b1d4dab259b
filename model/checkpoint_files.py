"""The safetensors files of a checkpoint: finding them, reading what they hold, writing them so that none is seen half done."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from k3dsl.errors import ArgumentError, CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PREFIX = "language_model."
OTHER_TOWERS = ("vision_tower.", "mm_projector.")
_SPELLINGS = (
    (
        re.compile(r"(self_attention_res|mlp_res|output_attn_res)\.(proj|norm)_weight$"),
        r"\1_\2.weight",
    ),  # older K3 exports
    (re.compile(r"\.block_sparse_moe\.((?:gate|up|down)_proj)\."), r".mlp.\1."),  # dense layers, saved by transformers
)
_OURS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: the file, its key there, its shape, and its dtype as safetensors names it."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str


def plain_name(key: str) -> str | None:
    """The name of a tensor without prefix and in the published spelling; None for tensors of the vision tower."""
    if key.startswith(OTHER_TOWERS):
        return None
    name = key.removeprefix(PREFIX)
    for pattern, published in _SPELLINGS:
        name = pattern.sub(published, name)
    return name


# ---- reading -----------------------------------------------------------------------------------------------------------


def find(path: str | os.PathLike[str]) -> tuple[list[Path], dict[str, str]]:
    """The files of a checkpoint, and the index: which file holds a tensor; empty where there is none.

    path: a folder with model.safetensors.index.json and its shards, or with one safetensors file; or such a file.

    Raises:
        CheckpointError: nothing to load there, or shards that the index names are missing.
    """
    place = Path(path)
    if place.is_file():
        if place.name.endswith(".json"):
            return find(place.parent)
        return [place], {}
    if not place.is_dir():
        raise CheckpointError(f"{place}: there is no such file or folder", fix="name a checkpoint's folder")
    if (place / INDEX).exists():
        index = _index(place / INDEX)
        files = sorted({place / name for name in index.values()})
        missing = [one.name for one in files if not one.is_file()]
        if missing:
            reason = f"{len(missing)} of {len(files)} shards are missing: {some(missing)}"
            raise CheckpointError(f"{place}: {reason}", fix="download them")
        return files, index
    files = sorted(place.glob("*.safetensors"))
    if len(files) > 1 and (place / SINGLE) in files:
        files = [place / SINGLE]
    if len(files) == 1:
        return files, {}
    if files:
        reason = f"has {len(files)} safetensors files and no {INDEX}"
        raise CheckpointError(f"{place}: {reason}", fix="download the index; without it, a lost shard goes unseen")
    raise CheckpointError(f"{place}: has no safetensors file", fix="name a folder with model.safetensors or its shards")


def _index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: is no index: {error!r}", fix="download or write it again") from None
    if not isinstance(index, dict) or not all(isinstance(one, str) for one in index.values()):
        raise CheckpointError(f"{path}: its weight_map does not give a file for each tensor", fix="download it again")
    outside = [name for name in index.values() if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{path}: names a file outside its folder: {outside[0]}", fix="download it again")
    return index


def contents(files: Iterable[Path], index: dict[str, str]) -> Iterator[Stored]:
    """What the files hold, from their headers alone.

    Raises:
        CheckpointError: a file that is damaged, or that lacks a tensor that the index places there.
    """
    promised: dict[str, set[str]] = defaultdict(set)
    for name, holder in index.items():
        promised[holder].add(name)
    for file in files:
        with opened(file) as handle:
            keys = list(handle.keys())
            lost = sorted(promised[file.name] - set(keys))
            if lost:
                reason = f"lacks tensors that {INDEX} places there: {some(lost)}"
                raise CheckpointError(f"{file}: {reason}", fix="download the file and the index again")
            for key in keys:
                header = handle.get_slice(key)
                yield Stored(file, key, tuple(header.get_shape()), header.get_dtype())


def opened(file: Path) -> Any:
    """safetensors' handle of a file, for `with`. Raises CheckpointError if it is damaged."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        _damaged(file, error)


def _damaged(file: Path, error: Exception) -> NoReturn:
    try:
        with file.open("rb") as handle:
            pointer = handle.read(40).startswith(b"version https://git-lfs")
    except OSError:
        pointer = False
    if pointer:
        raise CheckpointError(f"{file}: is a Git LFS pointer, not the weights", fix="git lfs pull") from None
    reason = f"is no safetensors file, or cut short ({file.stat().st_size:,} bytes): {error}"
    raise CheckpointError(f"{file}: {reason}", fix="download or write it again") from None


def some(names: Iterable[str], most: int = 12) -> str:
    """The first few of many names."""
    listed = list(names)
    more = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more:,} more" if more > 0 else "")


# ---- writing -----------------------------------------------------------------------------------------------------------


def size_in_bytes(size: int | str) -> int:
    """Bytes of a size such as 5_000_000, '5GB' or '512 MiB'. Raises ArgumentError."""
    if isinstance(size, int) and not isinstance(size, bool):
        number: float = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
        if match is None or match[2].upper() not in _UNITS:
            raise ArgumentError(f"max_shard_size: {size!r} is no size", fix="write bytes, or '5GB' or '512MiB'")
        number = float(match[1]) * _UNITS[match[2].upper()]
    if number < 1:
        raise ArgumentError(f"max_shard_size: is {size!r}, needs to be positive", fix="write '5GB'")
    return int(number)


class Writer:
    """Writes a checkpoint's files beside their folder, and moves them there when all are written.

    A folder that does not exist yet, or is empty, appears in one step. In a folder with files the steps are in an order in
    which a run that is killed leaves the old checkpoint, or the new one, or a folder that `find` refuses; never a mixture.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not isinstance(folder, (str, os.PathLike)):
            raise ArgumentError(f"folder: is {folder!r}", fix="pass the path of a folder")
        self.folder = Path(folder).absolute()
        self.staging = self.folder.parent / f".{self.folder.name}.saving-{os.getpid()}"
        self.names: list[str] = []
        self.index: dict[str, str] = {}
        self.bytes = 0

    def __enter__(self) -> Writer:
        if self.folder.exists() and not self.folder.is_dir():
            raise ArgumentError(f"folder: {self.folder} is a file", fix="name a folder")
        shutil.rmtree(self.staging, ignore_errors=True)
        try:
            self.staging.mkdir(parents=True)
        except OSError as error:
            raise OSError(error.errno, f"{self.folder} cannot be written: {error.strerror}") from None
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            shutil.rmtree(self.staging, ignore_errors=True)

    def shard(self, tensors: dict[str, torch.Tensor]) -> None:
        """Writes one file."""
        name = f"{len(self.names) + 1:05d}"
        try:
            save_file(tensors, self.staging / name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{self.folder} cannot be written: {error}") from None
        with (self.staging / name).open("rb") as handle:
            os.fsync(handle.fileno())
        self.names.append(name)
        self.index |= dict.fromkeys(tensors, name)
        self.bytes += sum(one.numel() * one.element_size() for one in tensors.values())

    def _publish(self) -> None:
        total = len(self.names)
        final = {n: SINGLE if total == 1 else f"model-{n}-of-{total:05d}.safetensors" for n in self.names}
        for name, target in final.items():
            os.rename(self.staging / name, self.staging / target)
        if total > 1:
            places = {tensor: final[name] for tensor, name in self.index.items()}
            text = json.dumps({"metadata": {"total_size": self.bytes}, "weight_map": places}, indent=2)
            (self.staging / INDEX).write_text(text + "\n", encoding="utf-8")
        if not self.folder.exists() or not any(self.folder.iterdir()):
            if self.folder.exists():
                self.folder.rmdir()
            os.rename(self.staging, self.folder)
            return
        old = [one for one in self.folder.iterdir() if _OURS.fullmatch(one.name) and one.name not in final.values()]
        if total > 1:
            (self.folder / INDEX).unlink(missing_ok=True)
        # weights, then the config, then the index, which is what switches from the old files to the new ones
        for one in sorted(self.staging.iterdir(), key=lambda path: (path.name == INDEX, path.suffix != ".safetensors")):
            os.replace(one, self.folder / one.name)
        if total == 1:
            (self.folder / INDEX).unlink(missing_ok=True)
        for one in old:
            one.unlink()


def repeated(names: Iterable[str]) -> list[str]:
    """Names that occur more than once."""
    return sorted(name for name, times in Counter(names).items() if times > 1)
