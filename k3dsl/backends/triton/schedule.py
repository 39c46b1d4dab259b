"""The schedule of a Triton kernel: everything about how it runs that does not change what it computes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from k3dsl.errors import ArgumentError, UnknownNameError


@dataclass(frozen=True)
class TritonSchedule:
    """num_warps: 1 to 32, a power of two. stages: pipeline depth by loop label; 1 is no pipelining.

    descriptors: names of tensors whose structured accesses go through tensor descriptors (TMA on Hopper and newer)
    instead of pointers. maxnreg: register cap a thread, or None. fp_fusion: whether a*b + c may become one rounding.
    """

    num_warps: int = 4
    stages: Mapping[str, int] = field(default_factory=dict)
    descriptors: tuple[str, ...] = ()
    maxnreg: int | None = None
    fp_fusion: bool = True

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4, 8, 16, 32):
            raise ArgumentError(f"num_warps must be a power of two up to 32, got {self.num_warps!r}")
        if not isinstance(self.stages, Mapping):
            raise ArgumentError(f"stages go by loop label, got {self.stages!r}", fix="name the loop: stages.LABEL=3")
        for label, n in self.stages.items():
            if not isinstance(n, int) or not 1 <= n <= 16:
                raise ArgumentError(f"stages[{label!r}] must be 1 to 16, got {n!r}")
        if self.maxnreg is not None and (not isinstance(self.maxnreg, int) or not 16 <= self.maxnreg <= 255):
            raise ArgumentError(f"maxnreg must be 16 to 255 or None, got {self.maxnreg!r}")
        if not isinstance(self.fp_fusion, bool):
            raise ArgumentError(f"fp_fusion must be true or false, got {self.fp_fusion!r}")
        object.__setattr__(self, "stages", dict(self.stages))
        object.__setattr__(self, "descriptors", tuple(self.descriptors))

    def options(self) -> dict[str, Any]:
        """Toolchain options that travel in Source.options."""
        return {
            "num_warps": self.num_warps,
            "num_stages": max([2, *self.stages.values()]),
            "maxnreg": self.maxnreg,
            "enable_fp_fusion": self.fp_fusion,
        }

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "stages": dict(self.stages), "descriptors": list(self.descriptors)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TritonSchedule:
        """The schedule with these fields. Raises UnknownNameError, with near misses, for a field that it does not have."""
        known = [f.name for f in fields(TritonSchedule)]
        for name in data:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=3)
                hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
                raise UnknownNameError(f"unknown schedule field {name!r} of the triton backend; {hint}")
        descriptors = data.get("descriptors", ())
        return TritonSchedule(
            **{**data, "descriptors": (descriptors,) if isinstance(descriptors, str) else tuple(descriptors)}
        )
