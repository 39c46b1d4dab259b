"""Why a point of an op's space is refused: by the op, by the backend, by the target's resources or by the toolchain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3dsl.backends.base import Artifact, Reason
from k3dsl.errors import BuildError, K3Error, LegalityError, ResourceError, TraceError, VerifyError
from k3dsl.ir.verifier import verify
from k3dsl.runtime import backends, executable
from k3dsl.runtime.op import Point
from k3dsl.runtime.plan import Launch, Plan
from k3dsl.targets import Target

_CODES: tuple[tuple[type[K3Error], str], ...] = (
    (ResourceError, "resources"),
    (BuildError, "build"),
    (LegalityError, "legality"),
    (TraceError, "trace"),
    (VerifyError, "verify"),
)


@dataclass(frozen=True)
class Refusal:
    """One reason, and the launch it is about (None: the whole op)."""

    launch: str | None
    reason: Reason
    fix: str | None = None


@dataclass(frozen=True)
class Explanation:
    """refusals: every reason found; empty for a point that is fine. built: the launches that could be built."""

    refusals: tuple[Refusal, ...]
    built: tuple[tuple[Launch, Artifact], ...]
    plan: Plan | None


def explain(point: Point, backend: str, target: Target) -> Explanation:
    """Tries a point as far as it goes, launch by launch, and collects every reason on the way. One that the op itself refuses
    is not built.

    Raises ArgumentError for settings that mean nothing (those of a schedule too).
    """
    refusals = [Refusal(None, Reason("constraint", text)) for text in point.reasons()]
    refused = bool(refusals)
    try:
        plan = point.op.plan(point.dims, point.knobs, point.options, backend, point.schedules)
    except (TraceError, VerifyError, LegalityError) as error:
        if not refused:  # else the constraint says it better
            refusals.append(_refusal(None, error))
        return Explanation(tuple(refusals), (), None)
    built: list[tuple[Launch, Artifact]] = []
    for launch in plan.launches:
        reasons = legality(launch, target)
        refusals += [Refusal(launch.label, reason) for reason in dict.fromkeys(reasons)]
        if reasons or refused:
            continue
        try:
            verify(launch.kernel)
            built.append(executable.fitted(launch, target))
        except (VerifyError, LegalityError, ResourceError, BuildError) as error:
            refusals.append(_refusal(launch.label, error))
    return Explanation(tuple(refusals), tuple(built), plan)


def legality(launch: Launch, target: Target) -> list[Reason]:
    """What the launch's backend cannot lower, with any of the launch's schedules, or the target not hold."""
    if (reason := executable.too_large(launch, target)) is not None:
        return [Reason("shared_memory", reason)]
    found = [backends.legality(launch.backend, launch.kernel, s, target) for s in (launch.schedule, *launch.smaller)]
    return found[0] if all(found) else []


def _refusal(launch: str | None, error: K3Error) -> Refusal:
    code = next(name for kind, name in _CODES if isinstance(error, kind))
    return Refusal(launch, Reason(code, error.message, error.where), error.fix)


def to_json(found: Explanation) -> list[dict[str, Any]]:
    """The refusals as JSON."""
    return [
        {
            "launch": r.launch,
            "code": r.reason.code,
            "message": r.reason.message,
            "where": r.reason.where,
            "fix": r.fix,
        }
        for r in found.refusals
    ]
