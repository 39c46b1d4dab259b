"""A tile language and kernel compiler for the operators of the Kimi K3 network.

compile(kernel, ...) compiles a kernel of the language (k3dsl.language) for a target; load(folder) opens a bundle that
`k3dsl compile` wrote; lock() forbids compiling from then on; k3dsl.ops holds the operators as torch functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from k3dsl.runtime.bundle import load
    from k3dsl.runtime.compile import compile
    from k3dsl.runtime.lock import lock

__all__ = ["__version__", "compile", "load", "lock"]

_WHERE = {
    "compile": "k3dsl.runtime.compile",
    "load": "k3dsl.runtime.bundle",
    "lock": "k3dsl.runtime.lock",
}


def __dir__() -> list[str]:
    """What users name; packages that are imported by their own names included."""
    return sorted([*__all__, "autotune", "language", "model", "ops"])


def __getattr__(name: str) -> Any:
    """Imports on first use: a bundle loads without any compiler, and `import k3dsl` stays quick."""
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
