"""Built kernels on disk, one file each: what a second process needs to launch a kernel without TileLang."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3dsl import settings
from k3dsl.backends.base import Artifact, Inspection, Source
from k3dsl.backends.common import write_whole

_SCHEMA = 1


def key(
    source: Source, target: str, configs: Mapping[str, Any], tilelang: str, nvcc: str | None, flags: list[str]
) -> str:
    """Identity of everything that the machine code depends on."""
    args = [dataclasses.astuple(arg) for arg in source.args]
    parts = [_SCHEMA, source.name, source.text, args, sorted(configs.items()), target, tilelang, nvcc, flags]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def read(key: str, source: Source, target: str) -> Artifact | None:
    """The artifact kept under this key; None when there is none, or its file is not whole."""
    try:
        data = json.loads(_path(key).read_text(encoding="utf-8"))
        binary = base64.b64decode(data["binary"])
        if data["digest"] != hashlib.sha256(binary).hexdigest():
            return None
        return Artifact(
            source=source,
            target=target,
            format=data["format"],
            entry=data["entry"],
            binary=binary,
            launch=data["launch"],
            inspection=Inspection(**data["inspection"]),
            assembly=data["assembly"],
            cuda=data["cuda"],
            toolchain=data["toolchain"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(key: str, artifact: Artifact) -> None:
    """Keeps the artifact. A folder that cannot be written costs the next process a build, and nothing else."""
    data = {
        "source": artifact.source.name,
        "target": artifact.target,
        "format": artifact.format,
        "entry": artifact.entry,
        "binary": base64.b64encode(artifact.binary).decode(),
        "digest": hashlib.sha256(artifact.binary).hexdigest(),
        "launch": artifact.launch,
        "inspection": dataclasses.asdict(artifact.inspection),
        "assembly": artifact.assembly,
        "cuda": artifact.cuda,
        "toolchain": artifact.toolchain,
    }
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(data))
    except OSError:
        return


def _path(key: str) -> Path:
    return Path(settings.get("K3DSL_CACHE_DIR")) / "tilelang" / key[:2] / f"{key}.json"
