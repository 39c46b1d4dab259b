"""Winners for tests of the tuner's keys, store, packs and lookups; the times are made up."""

from __future__ import annotations

from typing import Any

from k3dsl.autotune.key import CPU
from k3dsl.autotune.store import Winner, winner_from
from k3dsl.autotune.trial import Candidate, End, Outcome

H200 = {"name": "NVIDIA H200", "sm": "sm_90a", "sm_count": 132, "shared_optin": 232448}
H100 = {"name": "NVIDIA H100 80GB HBM3", "sm": "sm_90a", "sm_count": 132, "shared_optin": 232448}
B200 = {"name": "NVIDIA B200", "sm": "sm_100a", "sm_count": 148, "shared_optin": 232448}
MEASURE = {"timer": "events", "cold_l2": True}
DIMS = {"M": 512, "N": 256, "K": 128}


def winner(
    settings: dict[str, Any] | None = None,
    gpu: dict[str, Any] = H200,
    dims: dict[str, int] = DIMS,
    op: str = "matmul",
    backend: str | None = None,
    time_ms: float = 1.0,
    gate: str = "full",
    repeats: int = 30,
    options: dict[str, Any] | None = None,
) -> Winner:
    """A winner whose key is that of the present code."""
    candidate = Candidate(op, dims, options or {}, settings or {}, backend or ("torch" if gpu == CPU else "triton"))
    outcome = Outcome(End.OK, time_ms=time_ms, errors={"o": 1e-3}, gate=gate)
    return winner_from(candidate, outcome, gpu, MEASURE, repeats, roofline_share=0.5, recorded={"when": "then"})
