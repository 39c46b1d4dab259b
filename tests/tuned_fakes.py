"""A pool and a worker that only pretend, for tests of what a sweep does with outcomes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from k3dsl.autotune.result import Limits, Result
from k3dsl.autotune.space import Space
from k3dsl.autotune.sweep import sweep
from k3dsl.autotune.trial import Candidate, End, Outcome
from k3dsl.autotune.worker import OneAtATime
from k3dsl.ops.registry import get_op
from k3dsl.targets import get_target

SM90 = get_target("sm_90a")
DIMS = {"B": 4, "H": 8}
POINTS = 25
"""Of kda.decode at these dims on Triton: 5 widths of v, 5 numbers of warps."""


def time_of(settings: Mapping[str, Any]) -> float:
    """Falls with block_v and warps."""
    return 1 + 8 / settings["block_v"] + 1 / settings.get("decode.num_warps", 1)


class FakeBatch:
    """Candidates that are built already."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes

    def outcome(self, index: int) -> Outcome:
        return self.outcomes[index]

    def stop(self) -> None:
        pass


class Fake(OneAtATime):
    """A pool and a worker in one.

    ends: what a point comes to, by block_v or (block_v, level). sources, binaries: generated code by settings. log: a file
    that every run is written to. delay: of a run in seconds. on_run: called with the number of every run.
    """

    def __init__(
        self,
        ends: Mapping[Any, End] | None = None,
        sources: Callable[[Any], str] | None = None,
        binaries: Callable[[Any], str] | None = None,
        log: Path | None = None,
        delay: float = 0.0,
        on_run: Callable[[int], None] | None = None,
    ) -> None:
        self.ends, self.sources, self.binaries = ends or {}, sources, binaries
        self.log, self.delay, self.on_run = log, delay, on_run
        self.built: list[str] = []
        self.ran: list[tuple[str, str | None, int, float | None]] = []

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, candidates: Any, deadline_s: float, *, built: Any, level: str, own: bool) -> FakeBatch:
        if not own:
            return FakeBatch([Outcome(End.OK)] * len(candidates))
        self.built += [Space.text(c.settings) for c in candidates]
        return FakeBatch([self._built(c) for c in candidates])

    def _built(self, candidate: Candidate) -> Outcome:
        if self.ends.get(candidate.settings["block_v"]) is End.COMPILE_TIMEOUT:
            return Outcome(End.COMPILE_TIMEOUT, "too long")
        text = Space.text(candidate.settings)
        source = self.sources(candidate.settings) if self.sources else text
        binary = self.binaries(candidate.settings) if self.binaries else source
        return Outcome(End.OK, sources={"decode": source}, binaries={"decode": binary})

    def run(
        self, candidate: Candidate, level: str | None, repeats: int, run_deadline_s: float, best_ms: float | None
    ) -> Outcome:
        key = Space.text(candidate.settings)
        self.ran.append((key, level, repeats, best_ms))
        if self.on_run is not None:
            self.on_run(len(self.ran))
        time.sleep(self.delay)
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{level} {key}\n")
        block = candidate.settings["block_v"]
        end = self.ends.get((block, level), self.ends.get(block, End.OK))
        if end is not End.OK:
            return Outcome(end, "said by the fake")
        ms = time_of(candidate.settings)
        return Outcome(End.OK, time_ms=ms, samples_ms=(ms,) * 5, gate=level)


def swept(fake: Fake, **extra: Any) -> Result:
    """A sweep of kda.decode with a fake; limits and arguments of `sweep` by name."""
    limits = {n: extra.pop(n) for n in ("budget_s", "max_trials", "stop_share", "finalists") if n in extra}
    how = {"target": SM90, "backends": ("triton",), "pool": lambda: fake, "worker": lambda: fake, **extra}
    return sweep(get_op("kda.decode"), DIMS, {}, Limits(**{"budget_s": 600, **limits}), **how)
