"""The house rules that a reader relies on: which part may import which, and how large a file may be."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("ops", "autotune", "model")  # top-level folders that are k3dsl.ops, k3dsl.autotune and k3dsl.model

# What each part of the package may import, beside itself. Arrows point one way:
# ir <- frontend <- passes <- backends <- runtime <- ops <- autotune <- model <- cli.
FACTS = {"errors", "targets", "settings"}
COMPILER = FACTS | {"ir", "frontend", "passes", "backends", "runtime"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "settings": {"errors"},
    "targets": {"errors"},
    "ir": {"errors"},
    "frontend": {"errors", "ir"},
    "language": {"frontend"},  # the frontend's public names, for those who write kernels
    "passes": {"errors", "targets", "ir", "frontend", "backends.base"},
    "backends": FACTS | {"ir", "passes"},
    "runtime": FACTS | {"ir", "frontend", "passes", "backends"},
    "ops": COMPILER | {"language"},
    "autotune": COMPILER | {"language", "ops"},
    "model": COMPILER | {"language", "ops", "autotune"},
    "cli": COMPILER | {"language", "ops", "autotune", "model"},
}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """The name a file is imported under: ops/kda/space.py is k3dsl.ops.kda.space."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in LINKS:
        parts = ("k3dsl", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_files() -> dict[str, Path]:
    # rglob does not follow the links below k3dsl/, so each file comes once.
    return {module_name(path): path for path in python_files("k3dsl", *LINKS) if not path.is_symlink()}


def imported(tree: ast.AST, module: str, is_package: bool) -> list[tuple[int, str]]:
    """(line, dotted name) of everything that a module imports; `from a import b` counts as a.b."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                kept = parents[: len(parents) - node.level + (1 if is_package else 0)]
                base = ".".join([*kept, *filter(None, [node.module])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """Imports of this module that point against the arrows."""
    part = module.split(".")[1] if "." in module else ""
    if not part:  # k3dsl/__init__.py is the public surface and imports what it shows
        return []
    wrong = []
    for line, name in imported(ast.parse(source), module, is_package):
        if name.split(".")[0] != "k3dsl" or name == "k3dsl.__version__":
            continue
        inner = ".".join(name.split(".")[1:])
        target = inner.split(".")[0]
        if part == "backends" and target == "backends":
            # A backend uses what all of them share (backends/*.py), never another backend's folder.
            mine, other = module.split("."), inner.split(".")
            if len(other) > 1 and (ROOT / "k3dsl" / "backends" / other[1]).is_dir() and mine[2:3] != other[1:2]:
                wrong.append(f"line {line}: one backend imports another: {name}")
            continue
        if part == "cli" and target not in ALLOWED:
            continue  # the command line may use the public surface
        fine = target == part or any(inner == one or inner.startswith(f"{one}.") for one in ALLOWED[part])
        if not fine:
            wrong.append(f"line {line}: {part} may not import {name}")
    return wrong


def test_every_part_of_the_package_has_a_place_in_the_order():
    parts = {module.split(".")[1] for module in package_files() if "." in module}
    assert parts <= set(ALLOWED) | {"__main__"}


def test_the_order_of_the_parts_has_no_circle():
    ready: set[str] = set()
    while len(ready) < len(ALLOWED):
        more = {part for part, needs in ALLOWED.items() if needs - {"backends.base"} <= ready} - ready
        assert more, f"a circle among {sorted(set(ALLOWED) - ready)}"
        ready |= more


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("k3dsl.ir.types", "from k3dsl.frontend import kernel"),
        ("k3dsl.ir.types", "from ..frontend.trace import kernel"),
        ("k3dsl.ir.types", "def f():\n    import k3dsl.settings"),
        ("k3dsl.passes.simplify", "from k3dsl.backends.triton import lower"),
        ("k3dsl.backends.triton.lower", "from k3dsl.backends.torch import evaluate"),
        ("k3dsl.backends.triton.lower", "from k3dsl import ops"),
        ("k3dsl.ops.kda.api", "from k3dsl.model.config import Config"),
        ("k3dsl.ops.kda.api", "from k3dsl import compile"),
    ],
)
def test_the_check_sees_an_import_against_the_arrows(module, source):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("k3dsl.ir.printer", "from .types import Tile\nfrom k3dsl.errors import ParseError\nimport torch"),
        ("k3dsl.passes.legality", "from k3dsl.backends.base import Reason"),
        ("k3dsl.backends.triton.lower", "from k3dsl.backends.triton.names import name\nfrom k3dsl import settings"),
        ("k3dsl.runtime.compile", "from k3dsl.backends.triton import lower\nfrom k3dsl import __version__"),
        ("k3dsl.cli.main", "import k3dsl\nfrom k3dsl.model import config"),
    ],
)
def test_the_check_allows_an_import_along_the_arrows(module, source):
    assert violations(module, source) == []


def test_imports_follow_the_arrows():
    wrong = [
        f"{path.relative_to(ROOT)} {problem}"
        for module, path in package_files().items()
        for problem in violations(module, path.read_text(encoding="utf-8"), path.name == "__init__.py")
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_the_linked_folders_as_packages_of_their_own():
    wrong = [
        f"{path.relative_to(ROOT)} line {line}: import k3dsl.{name}, not {name}"
        for path in python_files("k3dsl", *LINKS, "tests")
        for line, name in imported(ast.parse(path.read_text(encoding="utf-8")), module_name(path), False)
        if name.split(".")[0] in LINKS
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", LINKS)
def test_a_linked_folder_is_a_relative_link(name):
    link = ROOT / "k3dsl" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


def test_no_file_is_above_600_lines():
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files("k3dsl", *LINKS, "tests")
    }
    assert {name: length for name, length in lengths.items() if length > 600} == {}


def test_every_folder_with_modules_is_a_package():
    """setuptools leaves out a folder that has no __init__.py, without a word."""
    folders = {path.parent for path in package_files().values()}
    assert sorted(str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()) == []
