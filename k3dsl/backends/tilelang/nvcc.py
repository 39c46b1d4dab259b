"""Finds NVIDIA's compiler and turns TileLang's CUDA source into machine code."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3dsl.errors import BuildError

DEADLINE_S = 300
HOW_TO_GET = (
    "install the CUDA toolkit 12.8 or newer (nvcc on the PATH, or CUDA_HOME set), "
    "or pip install nvidia-cuda-nvcc nvidia-cuda-cccl"
)
_FLAGS = ("-std=c++20", "-O3", "-lineinfo", "-w", "-Xptxas=-v")


@dataclass(frozen=True)
class Nvcc:
    """A compiler: its path and version ('13.0.88')."""

    path: str
    version: str


@dataclass(frozen=True)
class Compiled:
    """What nvcc gives: machine code, PTX, and the log in which ptxas says what the kernel uses."""

    cubin: bytes
    ptx: str
    log: str


def find() -> Nvcc | None:
    """The compiler to use: that of CUDA_HOME, the one on the PATH, /usr/local/cuda, or the pip package's."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [str(Path(home, "bin", "nvcc"))] if home else []
    candidates += [path for path in (shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc", _from_pip()) if path]
    for path in candidates:
        if os.access(path, os.X_OK) and (version := _version(path)) is not None:
            return Nvcc(path, version)
    return None


def _from_pip() -> str | None:
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(file.locate()) for file in files if file.name == "nvcc"), None)


@functools.cache
def _version(path: str) -> str | None:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bV(\d+\.\d+\.\d+)", done.stdout)
    return found.group(1) if found else None


def flags(pass_configs: Mapping[str, Any]) -> list[str]:
    """The compiler's flags for TileLang's pass configs: the ones that TileLang itself gives it."""
    found = list(_FLAGS)
    extra = pass_configs.get("tl.device_compile_flags") or ()
    for flag in [extra] if isinstance(extra, str) else extra:
        found += shlex.split(str(flag))
    if pass_configs.get("tl.enable_fast_math"):
        found.append("--use_fast_math")
    if (level := pass_configs.get("tl.ptxas_register_usage_level")) is not None:
        found.append(f"--ptxas-options=--register-usage-level={int(level)}")
    return found


def include_folders() -> list[str]:
    """Where TileLang keeps the headers that its CUDA source includes. Does not import TileLang."""
    spec = importlib.util.find_spec("tilelang")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("TileLang is not installed", fix="pip install 'k3dsl[tilelang]'")
    root = Path(spec.submodule_search_locations[0])
    return [str(root / "src"), str(root / "3rdparty" / "cutlass" / "include")]


def compile_cuda(name: str, code: str, arch: str, options: list[str], compiler: Nvcc) -> Compiled:
    """Compiles CUDA source for an architecture such as 'sm_90a'. Raises BuildError with the compiler's own reason."""
    with tempfile.TemporaryDirectory(prefix="k3dsl-nvcc-") as folder:
        source, cubin = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        source.write_text(code, encoding="utf-8")
        command = [compiler.path, f"-arch={arch}", *options, *(f"-I{path}" for path in include_folders())]
        command += ["--keep", f"--keep-dir={folder}", "-cubin", "-o", str(cubin), str(source)]
        # a session of its own: nvcc starts other programs, and all of them must end at the deadline
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            log, _ = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise BuildError(
                f"{name}: nvcc took more than {DEADLINE_S} s for {arch}",
                fix="use smaller tiles or fewer unrolled steps",
            ) from None
        if process.returncode or not cubin.exists():
            usual = "`k3dsl show OP --stage cuda` prints that source; try other tiles or threads"
            incomplete = "fatal error: nv/target" in log
            raise BuildError(
                f"{name}: nvcc {compiler.version} refuses the CUDA source for {arch}: {_reason(log)}",
                fix=f"this toolkit lacks its headers: {HOW_TO_GET}" if incomplete else usual,
            )
        return Compiled(cubin.read_bytes(), Path(folder, "kernel.ptx").read_text(encoding="utf-8"), log)


def _reason(log: str) -> str:
    complaints = [line.strip() for line in log.splitlines() if re.search(r"\b(error|fatal)\b", line)]
    lines = complaints or log.strip().splitlines()[-4:]
    return "\n".join(lines[:8]) or "it gives no reason"
