"""`k3dsl doctor`: what is installed, what the machine has, and what will work on it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from typing import Any

from k3dsl.cli.common import Json
from k3dsl.cli.output import print_json, print_table

NAME = "doctor"
TRITON_RANGE = ((3, 6), (3, 10))  # from, and below


def doctor_command(as_json: Json = False) -> None:
    """Show versions, the GPU, settings, and what will work here."""
    found = examine()
    if as_json:
        print_json(found)
        return
    print_table("versions", ("what", "version"), list(found["versions"].items()))
    gpu = found["gpu"]
    if gpu is None:
        print("GPU: none that torch can use\n")
    else:
        print(f"GPU: {gpu['name']}, target {gpu['target'] or 'not known to k3dsl'}\n")
    rows = [[s["name"], s["value"], "set" if s["set"] else "default", s["doc"]] for s in found["settings"]]
    print_table("settings (environment variables)", ("name", "value", "from", "what"), rows)
    for name, fix in found["misspelt"].items():
        print(f"warning: {name} is set, but k3dsl reads no such variable; {fix}")
    print_table(
        "what will work", ("what", "works", "why"), [[w["what"], _yes(w["works"]), w["why"]] for w in found["works"]]
    )


def _yes(works: bool) -> str:
    return "yes" if works else "no"


def examine() -> dict[str, Any]:
    """All that the command shows, as JSON data. Nothing here raises because of what the machine lacks."""
    from k3dsl import settings

    torch_version, torch_problem = _version("torch")
    triton_version, triton_problem = _version("triton")
    if triton_version is not None and not TRITON_RANGE[0] <= _numbers(triton_version) < TRITON_RANGE[1]:
        triton_problem = f"version {triton_version} is not tested: use 3.6 to 3.9"
    gpu = _gpu() if torch_problem is None else None
    tilelang_version, tilelang_problem = _tilelang()
    compiler, compiler_problem = _nvcc()
    return {
        "versions": {
            "k3dsl": _version("k3dsl")[0],
            "python": platform.python_version(),
            "torch": torch_version or torch_problem,
            "triton": triton_version or triton_problem,
            **{name: _version(name)[0] or "not installed" for name in ("numpy", "fla")},
            "tilelang": tilelang_version or "not installed",
            "nvcc": compiler or "not found",
        },
        "gpu": gpu,
        "settings": [_setting(s) for s in settings.all()],
        "misspelt": settings.misspelt(),
        "works": _works(torch_problem, triton_problem, tilelang_problem, compiler_problem, gpu),
    }


def _version(module: str) -> tuple[str | None, str | None]:
    """(version, None), or (None, why it cannot be imported)."""
    try:
        if importlib.util.find_spec(module) is None:
            return None, "not installed"
        return str(getattr(importlib.import_module(module), "__version__", "unknown")), None
    except Exception as error:  # a package may be installed and broken
        return None, f"cannot be imported ({type(error).__name__}: {error})".splitlines()[0]


def _tilelang() -> tuple[str | None, str | None]:
    """TileLang's version, and why it cannot be used. It is not imported: that takes seconds."""
    from k3dsl.backends.tilelang.build import HOW_TO_GET, TESTED

    try:
        version = importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:
        return None, HOW_TO_GET
    return version, None if version == TESTED else f"version {version} is not tested: use {TESTED}"


def _nvcc() -> tuple[str | None, str | None]:
    """The version and path of NVIDIA's compiler, or how to get it."""
    from k3dsl.backends.tilelang import nvcc

    found = nvcc.find()
    return (f"{found.version} ({found.path})", None) if found else (None, nvcc.HOW_TO_GET)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _gpu() -> dict[str, Any] | None:
    import torch

    from k3dsl.targets import detect, device_facts

    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    target, facts = detect(), device_facts(name)
    return {
        "name": name,
        "target": target and target.name,
        "count": torch.cuda.device_count(),
        "facts": facts is not None,
    }


def _setting(setting: Any) -> dict[str, Any]:
    from k3dsl.errors import ArgumentError

    try:
        value = setting.value()
        shown = "unset" if value is None else str(value)
    except ArgumentError as error:
        shown = f"wrong: {error.message}"
    return {"name": setting.name, "value": shown, "set": setting.is_set(), "type": setting.type, "doc": setting.doc}


def _works(
    torch_problem: str | None,
    triton_problem: str | None,
    tilelang_problem: str | None,
    compiler_problem: str | None,
    gpu: dict[str, Any] | None,
) -> list[dict[str, Any]]:
    from k3dsl.targets import all_targets

    targets = ", ".join(target.name for target in all_targets())
    known_gpu = gpu is not None and gpu["target"] is not None
    no_gpu = "torch sees no GPU" if gpu is None else "k3dsl has no facts about this GPU"
    cache_problem = _cache_problem()
    build_problem = torch_problem or (f"triton: {triton_problem}" if triton_problem else None) or cache_problem
    lower_problem = torch_problem or tilelang_problem or cache_problem
    nvidia = ", ".join(target.name for target in all_targets() if target.vendor == "nvidia")
    rows = [
        ("run ops on the CPU (torch backend)", torch_problem is None, torch_problem or "needs torch only"),
        (f"compile for {targets}", build_problem is None, build_problem or "needs no GPU"),
        (
            "run ops on this GPU (triton backend)",
            build_problem is None and known_gpu,
            build_problem or (f"target {gpu['target']}" if gpu is not None and known_gpu else no_gpu),
        ),
        (
            f"compile through TileLang for {nvidia}",
            lower_problem is None and compiler_problem is None,
            lower_problem or (f"CUDA source only: {compiler_problem}" if compiler_problem else "needs no GPU"),
        ),
        (
            "run ops on this GPU (tilelang backend)",
            lower_problem is None and compiler_problem is None and known_gpu,
            lower_problem or compiler_problem or (f"target {gpu['target']}" if gpu and known_gpu else no_gpu),
        ),
        (
            "load and run bundles",
            torch_problem is None and gpu is not None,
            torch_problem or ("needs torch and the driver only" if gpu is not None else no_gpu),
        ),
    ]
    return [{"what": what, "works": works, "why": why} for what, works, why in rows]


def _cache_problem() -> str | None:
    """Why generated code cannot be kept."""
    from k3dsl import settings
    from k3dsl.errors import ArgumentError

    try:
        folder = settings.get("K3DSL_CACHE_DIR")
    except ArgumentError as error:
        return error.message
    while not folder.exists():
        folder = folder.parent
    return None if os.access(folder, os.W_OK) else f"{folder} cannot be written; set K3DSL_CACHE_DIR"
