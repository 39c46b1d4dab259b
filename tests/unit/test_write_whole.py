"""Files are written whole or not at all, and others may read them as far as the umask lets them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from k3dsl.backends.common import write_whole


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_umask_says_who_may_read_a_file(mask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "pack.json", "{}\n")
    finally:
        os.umask(before)
    assert (tmp_path / "pack.json").stat().st_mode & 0o777 == mode


def test_what_was_there_stays_until_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "tä")
    assert path.read_bytes() == "tä".encode()
    write_whole(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    with pytest.raises(TypeError):
        write_whole(path, 7)  # type: ignore[arg-type]
    assert path.read_bytes() == b"\x00\xff"
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "nowhere" / "a.txt", "x")
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
