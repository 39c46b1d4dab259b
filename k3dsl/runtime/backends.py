"""The backends by name: how each lowers, builds, loads and judges a launch. A backend is imported when it is first used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from k3dsl.errors import LegalityError, UnknownNameError

if TYPE_CHECKING:
    from k3dsl.backends.base import Artifact, Reason, Source
    from k3dsl.backends.common import Launcher
    from k3dsl.ir.graph import Kernel
    from k3dsl.targets import Target

BACKENDS = ("torch", "triton", "tilelang")
GENERATING = ("triton", "tilelang")  # the others run IR directly


def check_generating(backend: str) -> None:
    """Raises UnknownNameError for no backend, LegalityError for one that generates no code."""
    if backend not in BACKENDS:
        raise UnknownNameError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
    if backend not in GENERATING:
        raise LegalityError(f"backend {backend!r} runs IR directly and generates no source")


def schedule_from_json(backend: str, fields: Mapping[str, Any]) -> Any:
    """The backend's schedule with these fields; None for a backend that has none. Raises ArgumentError."""
    if backend == "triton":
        from k3dsl.backends.triton.schedule import TritonSchedule

        return TritonSchedule.from_json(fields)
    if backend == "tilelang":
        from k3dsl.backends.tilelang.schedule import TileLangSchedule

        return TileLangSchedule.from_json(fields)
    if backend in BACKENDS:
        return None
    raise UnknownNameError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")


def lower(backend: str, kernel: Kernel, schedule: Any, target: Target) -> Source:
    """The generated source. Raises LegalityError with what the backend cannot lower."""
    check_generating(backend)
    if backend == "triton":
        from k3dsl.backends.triton.lower import lower as lower_triton

        return lower_triton(kernel, schedule, target)
    from k3dsl.backends.tilelang.lower import lower as lower_tilelang

    return lower_tilelang(kernel, schedule, target)


def build(source: Source, target: Target) -> Artifact:
    """The machine code of a source. Raises BuildError, ResourceError, LegalityError."""
    from k3dsl.backends.common import one_at_a_time

    check_generating(source.backend)
    with one_at_a_time(source, target.name):
        if source.backend == "triton":
            from k3dsl.backends.triton.build import build as build_triton

            return build_triton(source, target)
        from k3dsl.backends.tilelang.build import build as build_tilelang

        return build_tilelang(source, target)


def load(artifact: Artifact, device: int) -> Launcher:
    """What launches an artifact on a device of this machine. Raises LaunchError, ResourceError."""
    if artifact.source.backend == "triton":
        from k3dsl.backends.triton.load import load as load_triton

        return load_triton(artifact, device)
    from k3dsl.backends.tilelang.load import load as load_tilelang

    return load_tilelang(artifact, device)


def legality(backend: str, kernel: Kernel, schedule: Any, target: Target) -> list[Reason]:
    """What the backend cannot lower, with its reasons; empty for a backend that runs everything."""
    if backend == "triton":
        from k3dsl.backends.triton.legality import check as check_triton

        return check_triton(kernel, schedule, target)
    if backend == "tilelang":
        from k3dsl.backends.tilelang.legality import check as check_tilelang

        return check_tilelang(kernel, schedule, target)
    return []
