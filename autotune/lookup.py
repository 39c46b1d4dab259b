"""From a call to the winner it runs with: exact, a neighbouring bucket, the GPU's family, else the op's default.

A process keeps what it chose for a kind of call; winners that are found later count from the next process on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from k3dsl import settings
from k3dsl.autotune import pack, store
from k3dsl.autotune.key import describe_gpu, options_of, target_of
from k3dsl.autotune.store import Winner, warn_once
from k3dsl.errors import ArgumentError, K3Error, PackError
from k3dsl.ir.verifier import verify
from k3dsl.runtime.backends import GENERATING
from k3dsl.runtime.dispatch import Choice, Problem
from k3dsl.runtime.explain import legality
from k3dsl.runtime.op import Op, Point

log = logging.getLogger("k3dsl.autotune")


class Step(IntEnum):
    """Which step of a lookup hit."""

    EXACT = 0
    BUCKET = 1
    FAMILY = 2
    DEFAULT = 3


@dataclass(frozen=True)
class Found:
    """choice, winner: None where the op's default is used. refused: why nearer winners were passed over."""

    step: Step
    choice: Choice | None
    winner: Winner | None
    refused: tuple[str, ...]


def knobs_for(problem: Problem) -> Choice | None:
    """What dispatch asks: the tuned settings of a kind of call, or None for the op's default. Never raises."""
    try:
        found = find(problem, describe_gpu(problem.device), winners(problem.op.name))
    except Exception as error:  # no call may fail by what it could have run faster with
        warn_once(f"{problem.op.name}: tuned settings cannot be looked up ({error})", f"lookup {problem.op.name}")
        return None
    _report(problem, found)
    return found.choice


def winners(op: str) -> list[Winner]:
    """What K3DSL_PACK lets an op pick from: this machine's winners, then packs."""
    chosen = settings.get("K3DSL_PACK")
    if chosen == "off":
        return []
    paths = packs() if chosen == "auto" else [Path(chosen)]
    return store.entries(op) + [row for path in paths for row in _pack(path) if row.key.op == op]


def packs() -> list[Path]:
    """The packs that come with k3dsl: results/<gpu>/pack.json beside the package."""
    return sorted(Path(settings.__file__).resolve().parent.parent.glob("results/*/pack.json"))


_packs: dict[Path, tuple[tuple[int, int], tuple[Winner, ...]]] = {}


def _pack(path: Path) -> tuple[Winner, ...]:
    """The rows of a pack, remembered until its file changes; none, and one warning, for one that cannot be read."""
    try:
        stat = path.stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
        if path not in _packs or _packs[path][0] != stamp:
            _packs[path] = (stamp, pack.load(path).rows)
        return _packs[path][1]
    except (OSError, PackError) as error:
        warn_once(f"{path}: this pack is ignored ({error})", str(path))
        return ()


def find(problem: Problem, gpu: Mapping[str, Any], known: Iterable[Winner]) -> Found:
    """The best of the known winners for a problem on a GPU that is legal there."""
    options = options_of(problem.op, problem.options)
    order: list[tuple[Step, float, Winner]] = []
    refused: list[str] = []
    for winner in known:
        if winner.key.op == problem.op.name and _options(problem.op, winner) == options:
            step = _step(problem.op, winner, problem.dims, gpu)
            if step is not None:
                order.append((step, _distance(winner, problem.dims), winner))
    for step, _, winner in sorted(order, key=lambda entry: (entry[0], entry[1], entry[2].rank)):
        reasons, choice = _fit(winner, problem, gpu)
        if choice is not None:
            return Found(step, choice, winner, tuple(refused))
        refused.append(f"{pack.title(winner)}: {'; '.join(reasons)}")
    return Found(Step.DEFAULT, None, None, tuple(refused))


_known_options: dict[str, Mapping[str, Any]] = {}


def _options(op: Op, winner: Winner) -> Mapping[str, Any]:
    """The winner's options as keys have them now; it may be from when they named what counts nothing any more."""
    found = _known_options.get(winner.name)
    if found is None:
        found = winner.key.options
        with suppress(ArgumentError):  # of an option that there is no longer
            found = options_of(op, op.resolve_options(found))
        _known_options[winner.name] = found
    return found


def _step(op: Op, winner: Winner, dims: Mapping[str, int], gpu: Mapping[str, Any]) -> Step | None:
    """By which step a winner could serve dims, those that the caller knows; None for by none."""
    if winner.key.gpu["sm"] != gpu["sm"]:
        return None
    inside = all(lo <= dims[n] <= hi for n, (lo, hi) in winner.region.items() if n in dims)
    same = all(dims[n] == value for n, value in op.asked(winner.key.dims).items() if n in dims)
    if not inside and not same:
        return None
    if any(winner.key.gpu[n] != gpu[n] for n in ("name", "sm_count", "shared_optin")):
        return Step.FAMILY
    return Step.EXACT if same else Step.BUCKET


def _distance(winner: Winner, dims: Mapping[str, int]) -> float:
    """How many doublings lie between the dims of a winner and of a call."""
    pairs = [(dims[n], value) for n, value in winner.key.dims.items() if n in dims]
    return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs)


_checked: dict[str, list[str]] = {}


def _fit(winner: Winner, problem: Problem, gpu: Mapping[str, Any]) -> tuple[list[str], Choice | None]:
    """Why a winner cannot serve the problem as the present code, toolchain and GPU are; or the choice it makes."""
    if winner.name not in _checked:
        _checked[winner.name] = pack.check(winner)
    if reasons := _checked[winner.name]:
        return reasons, None
    try:
        op = problem.op
        knobs, _, schedules = op.split_settings(winner.settings)
        chosen = op.resolve_knobs(knobs)  # a knob that the op got since is left as if there were none
        reasons = Point(op, problem.known, chosen, problem.options, schedules).reasons()
        if reasons:
            return reasons, None
        plan = op.plan(problem.known, chosen, problem.options, winner.backend, schedules, problem.strides)
        target = target_of(gpu)
        allowed = GENERATING if problem.wanted == "auto" else (problem.wanted,)
        for launch in plan.launches:
            if launch.backend not in allowed:
                reasons.append(f"{launch.label} goes through {launch.backend}, and {problem.wanted} is asked for")
                continue
            verify(launch.kernel)
            if target is not None:
                reasons += [f"{launch.label}: {r.message}" for r in legality(launch, target)]
    except K3Error as error:
        return [error.message], None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        return [f"its settings cannot be used ({type(error).__name__}: {error})"], None
    return reasons, None if reasons else Choice(chosen, schedules or None, winner.backend)


_reported: set[str] = set()


def _report(problem: Problem, found: Found) -> None:
    """Logs once for a kind of call which step hit, and what was passed over."""
    at = ", ".join(f"{n}={v}" for n, v in problem.dims.items())
    if found.winner is None:
        text = f"{problem.op.name} at {at}: the op's default, nothing tuned fits"
    else:
        text = f"{problem.op.name} at {at}: {found.step.name.lower()} hit, {pack.title(found.winner)}"
    text += "".join(f"\n  passed over: {reason}" for reason in found.refused)
    if text not in _reported:
        _reported.add(text)
        log.info(text)
