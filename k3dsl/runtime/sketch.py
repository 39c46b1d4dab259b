"""Shapes in place of inputs, for calls that are planned without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def sketched(make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Tensors laid out like the inputs that `make` draws on the CPU, for calls that are planned (see dispatch.planning).

    Their memory is never touched, and integers read as 0, unless what is drawn depends on what was drawn before: then it is
    drawn."""
    try:
        with FakeTensorMode():
            drawn = make()
    except Exception:  # torch raises what it likes where a shape depends on numbers
        return dict(make())
    return {name: _outline(x) for name, x in drawn.items()}


def _outline(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return type(x)(map(_outline, x))
    if not isinstance(x, torch.Tensor):
        return x
    offset = x.storage_offset()
    reach = offset + (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0)
    # pages of zeros that the system hands out when they are touched: an index that somebody follows has to be one
    memory = torch.from_numpy(np.zeros(max(1, reach) * x.dtype.itemsize, dtype=np.uint8)).view(x.dtype)
    return memory.as_strided(x.shape, x.stride(), offset)
