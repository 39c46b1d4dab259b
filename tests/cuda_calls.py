"""What every op promises on a GPU: a call never waits for it, and a CUDA graph of a call follows its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def no_waiting() -> Iterator[None]:
    """While active, whatever makes the host wait for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_replays(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> None:
    """Captures a call that ran before, then replays it on other numbers and compares bit for bit with a plain call."""
    function(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(*inputs)
    for _ in range(3):
        for x in inputs:
            x.copy_(torch.randn_like(x))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, function(*inputs))
