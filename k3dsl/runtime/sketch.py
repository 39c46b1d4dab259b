"""Shapes in place of inputs, for calls that are planned without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def sketched(make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Tensors laid out like the inputs that `make` draws on the CPU, for calls that are planned (see dispatch.planning).

    Their memory is never touched, unless what is drawn depends on what was drawn before: then it is drawn."""
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
    memory = torch.empty(reach, dtype=x.dtype)
    if not x.dtype.is_floating_point:
        memory.zero_()  # an index that somebody follows
    return memory.as_strided(x.shape, x.stride(), offset)
