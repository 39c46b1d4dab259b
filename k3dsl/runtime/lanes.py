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
    """This thread's stream for a lane, so that a capture in one thread takes in no work of another; torch hands out 32 of a
    priority in turns, so this is so for as many threads."""
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


class _Beside(threading.local):
    """What a thread keeps for a call's lanes: their streams and events, which its next call uses again. An event is waited
    for by what is enqueued after it was recorded, before the thread records it anew."""

    def __init__(self) -> None:
        self.of: dict[int | None, tuple[dict[int, torch.cuda.Stream], list[torch.cuda.Event]]] = {}

    def get(
        self, device: torch.device, lanes: Sequence[int], events: int
    ) -> tuple[dict[int, torch.cuda.Stream], list[torch.cuda.Event]]:
        found = self.of.get(device.index)
        if found is None:
            streams = {lane: _stream(device, lane) for lane in lanes}
            found = self.of[device.index] = streams, [torch.cuda.Event() for _ in range(events)]
        return found


class Lanes:
    """The order of a call's steps on a GPU. Lanes fork from the caller's stream and join it again, so that the call is
    ordered on that stream like any other and can be captured in a CUDA graph."""

    def __init__(self, steps: Sequence[Step]) -> None:
        waits = [tuple(n for n in step.after if steps[n].lane != step.lane) for step in steps]
        awaited = {n for needed in waits for n in needed}
        self._places = [_Place(step.lane, waits[n], n in awaited) for n, step in enumerate(steps)]
        self._lanes = sorted({step.lane for step in steps} - {0})
        self._beside = _Beside()

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
        # an event for each step, then one for the fork and one for each lane's end
        streams, events = self._beside.get(device, self._lanes, len(steps) + 1 + len(self._lanes))
        fork, *ends = events[len(steps) :]
        fork.record(caller)
        for lane in self._lanes:
            streams[lane].wait_event(fork)
        try:
            for place, enqueue, event in zip(self._places, steps, events, strict=False):
                stream = streams[place.lane] if place.lane else caller
                for n in place.waits:
                    stream.wait_event(events[n])
                enqueue(stream.cuda_stream if place.lane else None)
                if place.awaited:
                    event.record(stream)
        finally:  # also when a step fails: the caller's stream owns the memory that the others use
            for lane, event in zip(self._lanes, ends, strict=True):
                event.record(streams[lane])
                caller.wait_event(event)
