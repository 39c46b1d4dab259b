"""Streams beside the caller's, on which steps of one call that do not need each other run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from k3dsl.runtime.plan import Step

Enqueue = Callable[[int | None], None]
"""Enqueues a step on a raw stream; None is the caller's."""
_of_thread = threading.local()


def _stream(device: torch.device, lane: int) -> torch.cuda.Stream:
    """This thread's stream for a lane: a capture in one thread then takes in no work of another."""
    streams: dict[tuple[int | None, int], torch.cuda.Stream] | None = getattr(_of_thread, "streams", None)
    if streams is None:
        streams = _of_thread.streams = {}
    key = (device.index, lane)
    if key not in streams:
        # CUDA takes what is above its range for the highest priority; a lower number is a higher one
        streams[key] = torch.cuda.Stream(device, priority=-100 if lane < 0 else 0)
    return streams[key]


@dataclass(frozen=True)
class _Place:
    """A step's lane, the steps of other lanes that it waits for, and whether a step of another lane waits for it."""

    lane: int
    waits: tuple[int, ...]
    awaited: bool


class Lanes:
    """The order of a call's steps on a GPU. Lanes fork from the caller's stream and join it again, so that the call is
    ordered on that stream like any other and can be captured in a CUDA graph."""

    def __init__(self, steps: Sequence[Step]) -> None:
        waits = [tuple(n for n in step.after if steps[n].lane != step.lane) for step in steps]
        awaited = {n for needed in waits for n in needed}
        self._places = [_Place(step.lane, waits[n], n in awaited) for n, step in enumerate(steps)]
        self._lanes = sorted({step.lane for step in steps} - {0})

    @property
    def several(self) -> bool:
        """Whether any step leaves the caller's stream."""
        return bool(self._lanes)

    def run(self, device: torch.device, steps: Sequence[Enqueue]) -> None:
        """Enqueues the steps on the device's current stream and the lanes beside it."""
        if not self._lanes:
            for enqueue in steps:
                enqueue(None)
            return
        caller = torch.cuda.current_stream(device)
        streams = {lane: _stream(device, lane) for lane in self._lanes} | {0: caller}
        fork = torch.cuda.Event()
        fork.record(caller)
        for lane in self._lanes:
            streams[lane].wait_event(fork)
        ended: dict[int, torch.cuda.Event] = {}
        try:
            for number, (place, enqueue) in enumerate(zip(self._places, steps, strict=True)):
                stream = streams[place.lane]
                for n in place.waits:
                    stream.wait_event(ended[n])
                enqueue(stream.cuda_stream if place.lane else None)
                if place.awaited:
                    ended[number] = torch.cuda.Event()
                    ended[number].record(stream)
        finally:  # also when a step fails: the caller's stream owns the memory that the others use
            for lane in self._lanes:
                caller.wait_stream(streams[lane])
