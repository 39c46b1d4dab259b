"""How many threads torch computes with: small work is done by one, where waiting for others takes longer than the work."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NOTHING = nullcontext()


class _OneThread:
    """While active, this process's torch computes with one thread."""

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.before)


def threads_for(small: bool) -> AbstractContextManager[Any]:
    """One thread for small work, else as many as torch is set to."""
    return _OneThread() if small and torch.get_num_threads() > 1 else _NOTHING
