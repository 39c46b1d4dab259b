"""What makes two sweeps the same one, where a sweep keeps its files, and the floor that its times are held against."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from k3dsl import __version__
from k3dsl import settings as environment
from k3dsl.autotune.drawn import planned_calls
from k3dsl.autotune.space import Space
from k3dsl.backends.common import write_whole
from k3dsl.errors import ArgumentError, LegalityError
from k3dsl.ir.identity import kernel_hash
from k3dsl.runtime.op import Op
from k3dsl.runtime.plan import Plan
from k3dsl.runtime.timing import plan_work
from k3dsl.targets import Ceilings

RESULT = "result.json"
ABOUT = "study.json"
JOURNAL = "journal.jsonl"


def root() -> Path:
    """Where all sweeps keep their files."""
    return Path(environment.get("K3DSL_CACHE_DIR")) / "tune"


def about(space: Space, seed: int, identity: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides how a sweep goes. Raises LegalityError when the op's default cannot be traced."""
    try:
        kernels = [kernel_hash(launch.kernel) for launch in space.launches(space.default())]
    except LegalityError as error:
        raise LegalityError(f"{space.op.name} cannot be tuned here: {error.message}") from None
    return {
        "op": space.op.name,
        "dims": space.dims,
        "options": space.options,
        "target": str(space.target or "cpu"),
        "backends": space.backends,
        "fixed": space.fixed,
        "seed": seed,
        "kernels": kernels,
        "versions": {"k3dsl": __version__, **{name: _version(name) for name in ("optuna", "torch", *space.backends)}},
        **identity,
    }


def name_of(facts: Mapping[str, Any]) -> str:
    """Equal for sweeps that may go on from each other: the op, and a digest of everything else."""
    digest = hashlib.sha256(_text(facts).encode()).hexdigest()[:12]
    return f"{facts['op'].replace(':', '-')}-{digest}"


def folder_for(facts: Mapping[str, Any]) -> Path:
    """Where the sweep keeps its files; made, with a readable study.json. Raises ArgumentError."""
    folder = root() / name_of(facts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / ABOUT, _text(facts) + "\n")
    except OSError as error:
        raise ArgumentError(f"{folder} cannot be written: {error.strerror}", fix="set K3DSL_CACHE_DIR") from None
    return folder


def _text(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, indent=1, sort_keys=True, default=str)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def floor_of(op: Op, dims: Mapping[str, int], options: Mapping[str, Any], backend: str, rates: Ceilings) -> float:
    """Milliseconds that the op's launches take at those rates, each with the longer of its least memory traffic and its
    products, with its default settings."""
    calls: list[tuple[Plan, Mapping[str, int]]] = []
    if backend != "torch" and op.inputs is not None and op.call is not None:
        # dims that only a call knows, such as the chunks of packed sequences, count too
        draw = partial(op.inputs, op.resolve_dims(dims), op.resolve_options(options), "cpu", 0)
        calls = [(call.executable.plan, call.dims) for call in planned_calls(op, draw, backend, {})]
    if not calls:
        point = op.point(dims, options)
        known = {name: int(n) for name, n in point.dims.items() if isinstance(n, int)}
        calls = [(point.plan(backend), known)]
    return sum(work.floor_ms(rates) for plan, known in calls for work in plan_work(op, plan, known).values())
