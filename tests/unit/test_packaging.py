"""What a user installs: a wheel with real files below k3dsl/ and nothing beside it, also by way of an sdist, also editable.

Everything is built from a copy of the tree, so that neither a build folder of an earlier day nor this run's files mix in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_FOLDERS = ("ops", "autotune", "model")
TREE = ("pyproject.toml", "LICENSE", "README.md", "k3dsl", *PACKAGE_FOLDERS, "tests")
LINKED = ("k3dsl.ops", "k3dsl.autotune", "k3dsl.model")

# Imports the package from a folder that is not the tree and prints where each module's file really is.
WHERE = f"""
import importlib.util, pathlib
for name in ("k3dsl", "k3dsl.targets", "k3dsl.settings") + {LINKED!r}:
    print(name, pathlib.Path(importlib.import_module(name).__file__).resolve())
for name in {PACKAGE_FOLDERS!r} + ("tests",):
    print(name, importlib.util.find_spec(name))
"""


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the sources, links kept as links: what a clone holds."""
    copy = tmp_path_factory.mktemp("clone")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, ignore=ignored)
        elif source.exists():
            shutil.copy2(source, copy / name)
    assert (copy / "k3dsl" / "ops").is_symlink()
    return copy


@pytest.fixture(scope="module")
def built(tree, tmp_path_factory) -> Path:
    """A folder with the sdist, the wheel built from it, and below `direct` a wheel built from the tree."""
    out = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--no-isolation")
    run(*build, "--outdir", out, tree, cwd=out)
    shutil.rmtree(tree / "build", ignore_errors=True)
    run(*build, "--wheel", "--outdir", out / "direct", tree, cwd=out)
    shutil.rmtree(tree / "build", ignore_errors=True)
    return out


def wheel_names(folder: Path) -> list[str]:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def empty_venv(folder: Path) -> Path:
    """A new environment without k3dsl; it finds this one's third-party packages, but not its editable installs."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    libraries = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (site / "third_party.pth").write_text("\n".join(libraries) + "\n", encoding="utf-8")
    return folder / "bin" / "python"


def locations(python: Path, cwd: Path) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in run(python, "-c", WHERE, cwd=cwd).splitlines())


def test_a_wheel_holds_the_package_and_nothing_beside_it(built):
    tops = {name.split("/")[0] for name in wheel_names(built)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"k3dsl"}


def test_a_wheel_holds_every_module_and_data_file_of_the_tree(tree, built):
    expected = set()
    for folder in ("k3dsl", *PACKAGE_FOLDERS):
        for path in (tree / folder).rglob("*"):
            if path.suffix in (".py", ".toml", ".json") or path.name == "py.typed":
                inside = path.relative_to(tree).as_posix()
                expected.add(inside if folder == "k3dsl" else f"k3dsl/{inside}")
    assert {"k3dsl/targets/targets.toml", "k3dsl/py.typed", "k3dsl/ops/__init__.py"} <= expected
    assert expected == {name for name in wheel_names(built) if ".dist-info/" not in name}


def test_a_wheel_is_the_same_from_the_tree_and_from_an_sdist(built):
    assert wheel_names(built) == wheel_names(built / "direct")


def test_an_sdist_holds_files_and_no_links(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    assert {member.name.split("/")[1] for member in members if "/" in member.name} & set(PACKAGE_FOLDERS) == set()


def test_an_installed_wheel_imports_from_another_folder(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    python = empty_venv(tmp_path / "venv")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found = locations(python, elsewhere)
    for name in ("k3dsl", "k3dsl.targets", "k3dsl.settings", *LINKED):
        assert Path(found[name]).is_relative_to(tmp_path / "venv")
    for name in (*PACKAGE_FOLDERS, "tests"):
        assert found[name] == "None"
    linked = [path for path in (tmp_path / "venv" / "lib").rglob("k3dsl/**/*") if path.is_symlink()]
    assert linked == []


def test_an_installed_wheel_has_the_version_and_the_command(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    python = empty_venv(tmp_path / "venv")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    code = "import importlib.metadata as m, k3dsl; print(k3dsl.__version__, m.version('k3dsl'))"
    version, recorded = run(python, "-c", code, cwd=tmp_path).split()
    assert version == recorded
    assert "k3dsl" in run(tmp_path / "venv" / "bin" / "k3dsl", "--help", cwd=tmp_path)


def test_an_editable_install_imports_the_tree(tree, tmp_path):
    python = empty_venv(tmp_path / "venv")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    run(*pip, "--no-build-isolation", "-e", tree, cwd=tmp_path)
    found = locations(python, tmp_path)
    assert Path(found["k3dsl"]) == (tree / "k3dsl" / "__init__.py").resolve()
    for name in LINKED:
        assert Path(found[name]) == (tree / name.removeprefix("k3dsl.") / "__init__.py").resolve()
    for name in (*PACKAGE_FOLDERS, "tests"):
        assert found[name] == "None"
