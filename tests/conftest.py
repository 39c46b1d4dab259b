"""What all tests share: golden files, the skip of GPU tests without a GPU, and a clean environment."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one core a worker

with contextlib.suppress(ImportError):  # a GPU machine may have no hypothesis
    import hypothesis

    # The same examples on every run: a failure that CI shows is one that anybody can repeat.
    hypothesis.settings.register_profile("k3dsl", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("k3dsl")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="run only the tests with golden files, and rewrite the files"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--update-golden"):
        return
    chosen = [item for item in items if "golden" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("torch sees no GPU")


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads the user's settings or writes to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("K3DSL_")]:
            patch.delenv(name)
        patch.setenv("K3DSL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares text with tests/golden/<test module>/<name>.txt; --update-golden rewrites it."""
    folder = GOLDEN / request.path.stem

    def compare(name: str, text: str) -> None:
        assert re.fullmatch(r"[\w.+-]+", name), f"a golden file's name is letters, digits and ._+-: {name!r}"
        path = folder / f"{name}.txt"
        actual = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(actual, encoding="utf-8")
            return
        shown = path.relative_to(GOLDEN.parent.parent)
        if not path.exists():
            pytest.fail(f"there is no golden file {shown}; `make golden` writes it", pytrace=False)
        expected = path.read_text(encoding="utf-8")
        if actual != expected:
            lines = difflib.unified_diff(
                expected.splitlines(), actual.splitlines(), str(shown), "this run", lineterm=""
            )
            pytest.fail(
                "\n".join([*lines, "", "If the change is meant, `make golden` updates the files; read their diff."]),
                pytrace=False,
            )

    return compare


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Every torch.empty of the test holds NaN (or the largest integer), so that an element nobody wrote shows."""
    from k3dsl.runtime.judge import poisoned

    with poisoned():
        yield
