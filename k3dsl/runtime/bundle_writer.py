"""Writes a plan as a bundle: IR text, generated source and machine code of every launch, and one metadata.json."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from k3dsl import __version__
from k3dsl.backends.base import MATRIX_FAMILIES, Artifact
from k3dsl.errors import ArgumentError, BundleError
from k3dsl.ir.graph import walk
from k3dsl.ir.printer import print_kernel
from k3dsl.ir.symbols import Expr, Sym
from k3dsl.ir.types import DType
from k3dsl.ir.verifier import verify
from k3dsl.runtime import executable
from k3dsl.runtime.bundle import FORMAT, METADATA, SCHEMA, read_metadata
from k3dsl.runtime.plan import Buffer, Launch, Plan, Step
from k3dsl.targets import Target, get_target


def save(plan: Plan, target: Target | str, folder: str | Path) -> dict[str, Any]:
    """Builds every launch of the plan for the target and writes a bundle.

    The folder appears whole or not at all. A bundle that is there already is replaced; anything else is left alone.

    Returns a summary: the folder, op, target, and for each launch its resources and notes on its instructions.

    Raises:
        BundleError: the folder exists and is no bundle, or cannot be written.
        ArgumentError, LegalityError, ResourceError, BuildError: a launch cannot be built.
    """
    target = get_target(target) if isinstance(target, str) else target
    path = Path(folder).expanduser().absolute()
    check_replaceable(path)
    plan.check()
    built: list[tuple[Launch, Artifact]] = []
    for launch in plan.launches:
        verify(launch.kernel)
        built.append(executable.fitted(launch, target))
    files: dict[str, bytes] = {}
    for launch, artifact in built:
        if launch.label in {name.rsplit(".", 1)[0] for name in files}:
            raise ArgumentError(f"{plan.op}: two launches are called {launch.label!r}")
        files[f"{launch.label}.ir"] = print_kernel(launch.kernel).encode()
        files[f"{launch.label}.py"] = artifact.source.text.encode()
        if artifact.cuda:
            files[f"{launch.label}.cu"] = artifact.cuda.encode()
        files[f"{launch.label}.{artifact.format}"] = artifact.binary
    metadata = describe_plan(plan, target, built)
    metadata["files"] = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    files[METADATA] = (json.dumps(metadata, indent=1, allow_nan=False) + "\n").encode()
    _write_folder(path, files)
    return summarise(plan, target, built) | {"folder": str(folder)}


def summarise(plan: Plan, target: Target, built: list[tuple[Launch, Artifact]]) -> dict[str, Any]:
    """What the built launches use, and what a person should know about the instructions they got."""
    launches = []
    for launch, artifact in built:
        launches.append(
            {
                "label": launch.label,
                "backend": launch.backend,
                **dataclasses.asdict(artifact.inspection),
                "threads": artifact.launch["threads"],
                "needs": artifact.launch.get("needs"),
                "note": instruction_note(launch, artifact, target),
            }
        )
    return {"op": plan.op, "target": target.name, "launches": launches}


def instruction_note(launch: Launch, artifact: Artifact, target: Target) -> str | None:
    """Which of a kernel's dots missed the target's best matrix instructions; None when all is well, or without dots."""
    dots = sum(op.opcode == "dot" for op in walk(launch.kernel.body))
    inverses = any(op.opcode == "unit_lower_inverse" for op in walk(launch.kernel.body))
    if not dots and not inverses:
        return None
    found = {name: n for name, n in artifact.inspection.instructions.items() if name in MATRIX_FAMILIES}
    best = target.matrix_instructions
    if not found:
        return f"no matrix instructions: its dots run on the ordinary units instead of {best}"
    notes = []
    if others := [name for name in found if name != best]:
        if best not in found:
            notes.append(f"{' and '.join(others)} only: none of its dots became {best}")
        else:
            notes.append(f"some of its dots are {' and '.join(others)} instead of {best}")
    if artifact.inspection.instructions.get("wgmma.serialized"):
        notes.append("ptxas could not overlap its wgmma instructions")
    return "; ".join(notes) or None


def describe_plan(plan: Plan, target: Target, built: list[tuple[Launch, Artifact]]) -> dict[str, Any]:
    """The metadata of a bundle, without the digests of its files."""
    symbols = plan.symbols()
    static = {n: v for n, v in plan.dims.items() if isinstance(v, int)}
    derived = {n: str(v) for n, v in plan.dims.items() if n not in static and not _is_symbol(n, v)}
    toolchain = {"k3dsl": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for _, artifact in built:
        toolchain.update(artifact.toolchain)
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "op": plan.op,
        "target": target.name,
        "dims": {
            "static": static,
            "runtime": {
                n: {"divisible_by": s.divisible_by, "min": s.min, "max": s.max} for n, s in sorted(symbols.items())
            },
            "derived": derived,
        },
        "knobs": {n: plain(v) for n, v in plan.knobs.items()},
        "options": {n: plain(v) for n, v in plan.options.items()},
        "buffers": [_buffer(b) for b in plan.buffers.values()],
        "launches": [_launch(launch, artifact) for launch, artifact in built],
        "steps": [_step(step) for step in plan.order()],
        "toolchain": toolchain,
    }


def _is_symbol(name: str, value: int | Sym | Expr) -> bool:
    return isinstance(value, Sym) and value.name == name


def _buffer(b: Buffer) -> dict[str, Any]:
    return {
        "name": b.name,
        "dtype": b.dtype.name,
        "shape": [str(e) for e in b.shape],
        "role": b.role,
        "strides": None if b.strides is None else [str(e) for e in b.strides],
    }


def _launch(launch: Launch, artifact: Artifact) -> dict[str, Any]:
    made = artifact.launch
    return {
        "label": launch.label,
        "kernel": launch.kernel.name,
        "backend": launch.backend,
        "format": artifact.format,
        "entry": artifact.entry,
        "grid": [str(e) for e in launch.kernel.grid],
        "threads": made["threads"],
        "shared_bytes": made["shared_bytes"],
        "global_scratch_bytes": made.get("global_scratch_bytes", 0),
        "num_ctas": made.get("num_ctas", 1),
        "params": list(made["params"]),
        **{name: made[name] for name in ("host_call", "needs") if name in made},
        "args": [dataclasses.asdict(arg) for arg in artifact.source.args],
        "buffers": {t.name: launch.buffer_of(t.name) for t in launch.kernel.tensors},
        "scalars": dict(launch.scalars),
        "schedule": launch.schedule.to_json(),
        "inspection": dataclasses.asdict(artifact.inspection),
        "ir_hash": artifact.source.ir_hash,
        "files": {
            "ir": f"{launch.label}.ir",
            "source": f"{launch.label}.py",
            "binary": f"{launch.label}.{artifact.format}",
        },
    }


def _step(step: Step) -> dict[str, Any]:
    dims = {n: str(e) for n, e in step.dims.items()}
    return {"launch": step.launch, "dims": dims, "lane": step.lane, "after": list(step.after)}


def plain(value: Any) -> Any:
    """A knob's or option's value as JSON: dtypes by name."""
    if isinstance(value, DType):
        return value.name
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    return value


def check_replaceable(path: Path) -> None:
    """Raises BundleError when something other than a bundle lies where a bundle is to be written."""
    other = "choose another folder with -o, or move this one away"
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise BundleError(f"{path} exists and is no folder", fix=other)
    if not path.exists() or not any(path.iterdir()):
        return
    try:
        known = {METADATA, *read_metadata(path)["files"]}
    except BundleError:
        raise BundleError(f"{path} exists and is no bundle, so it is not overwritten", fix=other) from None
    if strange := sorted(p.name for p in path.iterdir() if p.name not in known):
        raise BundleError(f"{path} is a bundle with other files in it ({', '.join(strange[:3])})", fix=other)


def _write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Writes beside the place, then renames: a reader sees the old bundle or the new one, never a part of one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        workplace = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise BundleError(f"{path} cannot be written: {error.strerror}", fix="choose another folder with -o") from None
    try:
        fresh, old = workplace / "new", workplace / "old"
        fresh.mkdir()
        for name, content in files.items():
            (fresh / name).write_bytes(content)
        if path.exists():
            os.rename(path, old)
        try:
            os.rename(fresh, path)
        except OSError:
            if old.exists():
                os.rename(old, path)
            raise
    except OSError as error:
        raise BundleError(f"{path} cannot be written: {error.strerror}", fix="choose another folder with -o") from None
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
