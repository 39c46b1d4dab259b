"""Registers differentiable ops with torch.library: what torch.library.custom_op does, without a second of imports on the first
call (torch.compile's, which it needs to hide the function from) and some 10 us on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("k3dsl", "FRAGMENT")


class TorchOp:
    """A function of tensors as the op torch.ops.k3dsl.<name>, for every device. It changes none of its arguments, and gives
    tensors that share no memory with them."""

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self.name = f"k3dsl::{name}"
        schema = torch.library.infer_schema(run, mutates_args=())
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, run, "CompositeExplicitAutograd")
        self._call = getattr(torch.ops.k3dsl, name).default

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """What the op gives for tensors without data; see torch.library.register_fake."""
        return torch.library.register_fake(self.name, fake, lib=_library)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """The backward pass; see torch.library.register_autograd."""
        torch.library.register_autograd(self.name, backward, setup_context=setup_context, lib=_library)


def torch_op(name: str) -> Callable[[Callable[..., Any]], TorchOp]:
    """Registers a function whose annotations give the op's schema; `register_autograd` has to follow."""
    return lambda run: TorchOp(name, run)
