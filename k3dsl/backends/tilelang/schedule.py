"""The schedule of a TileLang kernel: everything about how it runs that does not change what it computes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from k3dsl.errors import ArgumentError, UnknownNameError

POLICIES = ("row", "col", "square")


@dataclass(frozen=True)
class TileLangSchedule:
    """threads: of the program's compute part, a power of two from 32 to 1024, or 384. stages: pipeline depth by loop label;
    1 is no pipelining.

    warp_specialize: whether a pipelined loop gets a warp group of its own for copies (128 more threads).
    min_blocks_per_sm: programs that a multiprocessor must have room for, or None. producer_registers,
    consumer_registers: registers a thread of each kind after the split; both or neither. swizzle: width in programs of the
    rasterisation panel, or None. policy: 'row', 'col' or 'square' by dot (d0, d1, ... in program order): which axis of the
    result the warps divide. staged: tensors whose stores go through a shared tile; None leaves it to placement. overlap: the
    wgmma products of a step of the loop with that warp group run beside each other instead of one by one.
    """

    threads: int = 128
    stages: Mapping[str, int] = field(default_factory=dict)
    warp_specialize: bool = True
    min_blocks_per_sm: int | None = None
    producer_registers: int | None = None
    consumer_registers: int | None = None
    swizzle: int | None = None
    policy: Mapping[str, str] = field(default_factory=dict)
    staged: tuple[str, ...] | None = None
    overlap: bool = False

    def __post_init__(self) -> None:
        if self.threads not in (32, 64, 128, 256, 384, 512, 1024):
            raise ArgumentError(f"threads must be a power of two from 32 to 1024, or 384, got {self.threads!r}")
        if not isinstance(self.stages, Mapping):
            raise ArgumentError(f"stages go by loop label, got {self.stages!r}", fix="name the loop: stages.LABEL=3")
        for label, n in self.stages.items():
            if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= 16:
                raise ArgumentError(f"stages[{label!r}] must be 1 to 16, got {n!r}")
        for name in ("warp_specialize", "overlap"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} must be true or false, got {getattr(self, name)!r}")
        self._number("min_blocks_per_sm", 1, 32)
        self._number("swizzle", 1, 64)
        for name in ("producer_registers", "consumer_registers"):
            self._number(name, 24, 240)
            n = getattr(self, name)
            if n is not None and n % 8:
                raise ArgumentError(f"{name} must be a multiple of 8, got {n}")
        if (self.producer_registers is None) != (self.consumer_registers is None):
            raise ArgumentError("producer_registers and consumer_registers go together: give both or neither")
        if not isinstance(self.policy, Mapping):
            raise ArgumentError(f"policies go by dot, got {self.policy!r}", fix="name the dot: policy.d0=row")
        for dot, policy in self.policy.items():
            if policy not in POLICIES:
                raise ArgumentError(f"policy[{dot!r}] must be one of {', '.join(POLICIES)}, got {policy!r}")
        object.__setattr__(self, "stages", dict(self.stages))
        object.__setattr__(self, "policy", dict(self.policy))
        if self.staged is not None:
            object.__setattr__(self, "staged", tuple(self.staged))

    def _number(self, name: str, low: int, high: int) -> None:
        n = getattr(self, name)
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or not low <= n <= high):
            raise ArgumentError(f"{name} must be {low} to {high} or None, got {n!r}")

    def options(self) -> dict[str, Any]:
        """Toolchain options that travel in Source.options."""
        return {"threads": self.threads, "pass_configs": {"tl.disable_warp_specialized": not self.warp_specialize}}

    def to_json(self) -> dict[str, Any]:
        staged = None if self.staged is None else list(self.staged)
        return {**asdict(self), "stages": dict(self.stages), "policy": dict(self.policy), "staged": staged}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TileLangSchedule:
        """The schedule with these fields. Raises UnknownNameError, with near misses, for a field that it does not have."""
        known = [f.name for f in fields(TileLangSchedule)]
        for name in data:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=3)
                hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
                raise UnknownNameError(f"unknown schedule field {name!r} of the tilelang backend; {hint}")
        staged = data.get("staged")
        return TileLangSchedule(**{**data, "staged": (staged,) if isinstance(staged, str) else staged})
