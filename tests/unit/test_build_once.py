"""Processes that want the same machine code at the same time: one builds it, the others find it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from k3dsl.backends.base import Source
from k3dsl.backends.common import one_at_a_time


def source(text: str) -> Source:
    return Source("triton", "kernel", text, ())


def most_at_once(*wanted: tuple[str, str], together: bool = False) -> int:
    """Runs one thread for each (text, target), and says how many were inside together. together: each waits there for all."""
    inside, most, lock = 0, 0, threading.Lock()
    meeting = threading.Barrier(len(wanted) if together else 1)

    def build(text: str, target: str) -> None:
        nonlocal inside, most
        with one_at_a_time(source(text), target):
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.05)
            meeting.wait(60)
            with lock:
                inside -= 1

    threads = [threading.Thread(target=build, args=each) for each in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return most


def test_equal_sources_are_built_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path))
    assert most_at_once(*[("a", "sm_90a")] * 3) == 1
    assert most_at_once(("a", "sm_90a"), ("b", "sm_90a"), ("a", "sm_80"), together=True) == 3


def test_a_build_that_fails_lets_the_next_one_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path))
    with pytest.raises(KeyError), one_at_a_time(source("a"), "sm_90a"):
        raise KeyError
    assert most_at_once(("a", "sm_90a")) == 1


def test_a_folder_that_cannot_be_locked_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locks").write_text("no folder")
    monkeypatch.setenv("K3DSL_CACHE_DIR", str(tmp_path))
    assert most_at_once(*[("a", "sm_90a")] * 2, together=True) == 2
