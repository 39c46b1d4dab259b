"""What the launcher asks of the driver, with a library that only writes down how it is called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from k3dsl.backends import driver


@pytest.mark.parametrize(
    ("shared_bytes", "asked"), [(0, []), (1024, [1024]), (48 * 1024, [48 * 1024]), (2**17, [2**17])]
)
def test_dynamic_shared_memory_is_opted_in_to_below_48_kib_too(shared_bytes: int, asked: list[int]) -> None:
    """The limit without it is of dynamic memory and what the kernel declares together: 48 KiB and a barrier are too much."""
    called: list[int] = []

    def set_attribute(function: Any, attribute: int, value: int) -> int:
        assert attribute == 8
        called.append(value)
        return 0

    cuda = driver._Cuda.__new__(driver._Cuda)
    cuda.library = SimpleNamespace(cuModuleGetFunction=lambda *_: 0, cuFuncSetAttribute=set_attribute)
    cuda._get_function(SimpleNamespace(entry="k", device=0), 1, shared_bytes)  # type: ignore[arg-type]
    assert called == asked
