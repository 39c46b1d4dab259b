"""What surrounds a candidate while it is judged: guard zones around its buffers, other contents of memory, other load.

The zones tell whether it wrote where it had no business; the rest, whether its results depend on what is not its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

GUARD_BYTES = 16384
"""On either side. A multiple of what allocators align to, so that a guarded tensor is as aligned as any."""
CANARY = 0xA5
FILLS = (1, 0, 77, 3)
"""What memory holds in every other repeat, in place of NaN."""
STIRRED = 4
LOAD_BYTES = 64 << 20
LOADS = 64


@dataclasses.dataclass(frozen=True)
class _Zone:
    name: str
    whole: torch.Tensor
    used: int

    def problem(self) -> str | None:
        before = self.whole[:GUARD_BYTES] != CANARY
        after = self.whole[GUARD_BYTES + self.used :] != CANARY
        if not bool((before.any() | after.any()).item()):
            return None
        found = []
        if before.any():
            found.append(f"{int(before.sum())} bytes before its start, the first {GUARD_BYTES - _first(before)} off")
        if after.any():
            found.append(f"{int(after.sum())} bytes past its end, the first {_first(after)} off")
        return f"it wrote outside of {self.name}: {'; '.join(found)}"


def _first(mask: torch.Tensor) -> int:
    return int(mask.nonzero()[0])


class Guards:
    """The buffers of one call. `allocate` is what `executable.allocating` takes; `problem` says what was written astray.

    fill: what memory that is made holds; None for NaN (integers: their largest), which shows what nobody wrote.
    """

    def __init__(self, fill: int | None = None) -> None:
        self.fill = fill
        self._zones: list[_Zone] = []
        self._inputs: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A contiguous tensor between two zones."""
        size = dtype.itemsize
        for n in shape:
            size *= n
        made = self._between(name, size, device).view(dtype).view(shape)
        if self.fill is not None:
            return made.fill_(self.fill)
        return made.fill_(torch.nan if dtype.is_floating_point or dtype.is_complex else _largest(dtype))

    def inputs(self, given: Mapping[str, Any], mutated: tuple[str, ...]) -> dict[str, Any]:
        """Copies of the tensors, strides kept, between zones; those that a call may not change are watched for it."""
        found = dict(given)
        for name, x in given.items():
            if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.numel() == 0:
                continue
            extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
            if any(step < 0 for step in x.stride()):
                continue
            held = self._between(f"its input {name}", extent * x.dtype.itemsize, x.device).view(x.dtype)
            made = held.as_strided(x.shape, x.stride(), held.storage_offset())
            if all(step or n == 1 for n, step in zip(x.shape, x.stride(), strict=True)):
                made.copy_(x)
            else:  # expanded: written once an element of the storage
                held.copy_(x.as_strided((extent,), (1,), x.storage_offset()))
            found[name] = made
            if name not in mutated:
                self._inputs.append((name, made, x))
        return found

    def problem(self) -> str | None:
        """What a call wrote where it may not, in words; None for nothing."""
        for zone in self._zones:
            if (text := zone.problem()) is not None:
                return text
        for name, now, before in self._inputs:
            if not torch.equal(_bits(now), _bits(before)):
                return f"it changed its input {name}"
        return None

    def _between(self, name: str, size: int, device: torch.device) -> torch.Tensor:
        """`size` bytes of a larger allocation; what follows them up to its end is the second zone."""
        padded = -(-size // 16) * 16  # views of 8 bytes an element need a whole number of them before the middle
        whole = torch.empty(2 * GUARD_BYTES + padded, dtype=torch.uint8, device=device)
        whole[:GUARD_BYTES] = CANARY
        whole[GUARD_BYTES + size :] = CANARY
        self._zones.append(_Zone(name, whole, size))
        return whole[GUARD_BYTES : GUARD_BYTES + size]


def stir(shapes: list[tuple[tuple[int, ...], torch.dtype]], value: int, device: torch.device) -> None:
    """Leaves numbers in the freed memory that the next call is likely to be given for what is not a kernel's buffer."""
    held = [torch.full(shape, value, dtype=dtype, device=device) for shape, dtype in shapes for _ in range(STIRRED)]
    del held


def load(device: torch.device) -> None:
    """Gives a GPU other work at the same time, a few ms of copies on another stream: programs then run in another order."""
    if device.type != "cuda":
        return
    source = torch.empty(LOAD_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(LOADS):
            target.copy_(source)
    for held in (source, target):  # not given to anybody else before the copies are done
        held.record_stream(side)


def _largest(dtype: torch.dtype) -> int:
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
