"""Generated Triton does what the IR says: run in Triton's interpreter, fp32, on tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from interpreter_cases import CASES

TESTS = Path(__file__).resolve().parents[1]


pytestmark = pytest.mark.skipif(
    version("triton").startswith("3.6."), reason="Triton 3.6's interpreter cannot run loops with today's numpy"
)


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases, in one process that has the interpreter on: Triton reads TRITON_INTERPRET when it is imported."""
    path = tmp_path_factory.mktemp("interpreted") / "results.json"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(TESTS / "interpreter_cases.py"), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_interpreter_agrees(name: str, results: dict[str, Any]) -> None:
    outcome = results[name]
    assert isinstance(outcome, dict), outcome
    assert outcome
    for output, (error, limit) in outcome.items():
        assert error <= limit, f"{output}: relative RMS error {error:.2e} is above {limit:.0e}"
