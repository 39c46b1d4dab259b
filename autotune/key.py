"""What a tuned setting was measured for: every field in clear, a digest over them, and why two keys differ."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from k3dsl import __version__
from k3dsl.errors import ArgumentError
from k3dsl.ir.identity import kernel_hash
from k3dsl.runtime.bundle_writer import plain

if TYPE_CHECKING:
    import torch

    from k3dsl.autotune.trial import Candidate
    from k3dsl.runtime.op import Op, Point
    from k3dsl.runtime.plan import Plan
    from k3dsl.targets import Target

SCHEMA = 1
GATES = ("quick", "full", "ship")  # weakest first
CPU = {"name": "cpu", "sm": "cpu", "sm_count": 0, "shared_optin": 0}
NUMERIC_KNOBS = ("approx", "precision", "inverse", "inverse_precision", "factors")
"""Knobs that change rounding. They are part of the settings too; the key shows them where a reader looks for them."""


@dataclass(frozen=True)
class Key:
    """What a winner holds for. All values are plain JSON.

    ir: kernel hash by launch, at the winner's settings. numerics: what changes rounding. options: dtypes and what is
    computed. dims: exact. bucket: the class of the dims in words. facts: divisors of the runtime dims. gpu: name, sm,
    sm_count, shared_optin (bytes). toolchain: versions by name. measure: timer and whether L2 was cold. gate: the level.
    """

    op: str
    ir: Mapping[str, str]
    numerics: Mapping[str, Any]
    options: Mapping[str, Any]
    dims: Mapping[str, int]
    bucket: str
    facts: Mapping[str, int]
    gpu: Mapping[str, Any]
    toolchain: Mapping[str, str]
    measure: Mapping[str, Any]
    gate: str
    schema: int = SCHEMA

    @functools.cached_property
    def digest(self) -> str:
        """sha256 (hex) over every field."""
        return digest_of(self.to_json())

    @functools.cached_property
    def problem(self) -> str:
        """sha256 (hex) over what was tuned: two winners of one problem compete, whichever code and evidence they have."""
        return digest_of({n: x for n, x in self.to_json().items() if n not in ("ir", "numerics", "measure", "gate")})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Any) -> Key:
        """The key in parsed JSON. Raises ValueError, which says what is wrong, for anything else."""
        if not isinstance(data, dict):
            raise ValueError("the key is no object")
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema')!r}, and this k3dsl reads {SCHEMA}")
        for name, kind in _KINDS.items():
            if not isinstance(data.get(name), kind):
                raise ValueError(f"key field {name} is missing or of the wrong type")
        if unknown := sorted(set(data) - {*_KINDS, "schema"}):
            raise ValueError(f"unknown key fields {', '.join(unknown)}")
        if not all(type(v) is int and v >= 0 for v in data["dims"].values()):
            raise ValueError("a dim is no integer of at least 0")
        if data["gate"] not in GATES:
            raise ValueError(f"unknown gate level {data['gate']!r}")
        for name in ("ir", "toolchain"):
            if not all(isinstance(v, str) for v in data[name].values()):
                raise ValueError(f"key field {name} holds something that is no text")
        if set(CPU) - set(data["gpu"]):
            raise ValueError(f"the gpu lacks {', '.join(sorted(set(CPU) - set(data['gpu'])))}")
        return Key(**data)


_KINDS: dict[str, type] = {
    **dict.fromkeys(("ir", "numerics", "options", "dims", "facts", "gpu", "toolchain", "measure"), dict),
    **dict.fromkeys(("op", "bucket", "gate"), str),
}


def digest_of(data: Any) -> str:
    """sha256 (hex) of JSON data, the same for equal data in any order of its names."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, allow_nan=False).encode()).hexdigest()


# ---- dims ----------------------------------------------------------------------------------------------------------------


def bucket_of(value: int) -> int:
    """The least power of two that is not below the value; 0 for 0."""
    return 0 if value == 0 else 1 << (value - 1).bit_length()


def bucket_name(op: Op, dims: Mapping[str, int]) -> str:
    """The dims as words: 'H=96 T<=8192', static dims exact, runtime dims by their power of two."""
    static = {d.name for d in op.dims if d.static}
    return " ".join(f"{n}={v}" if n in static else f"{n}<={bucket_of(v)}" for n, v in sorted(dims.items()))


def exact_dims(point: Point) -> dict[str, int]:
    """The op's own dims of a point as numbers; those that only a call's tensors tell are left out."""
    return {d.name: point.dims[d.name] for d in point.op.dims if isinstance(point.dims.get(d.name), int)}


def options_of(op: Op, options: Mapping[str, Any]) -> dict[str, Any]:
    """Resolved options as plain JSON, equal for what is tuned alike: -5 is -5.0, what means nothing counts nothing, and numbers
    that are but constants of the code (a scale, an epsilon) are as by default."""
    same = dict(op.canonical(options) if op.canonical is not None else options)
    same |= {o.name: o.default for o in op.options if o.constant and o.name in same}
    for name in ("out_dtype", "weight_dtype"):  # None means the inputs' in every op
        if name in same and same[name] is None:
            same[name] = same["dtype"]
    free = {o.name for o in op.options if not o.choices}
    return {n: float(x) if n in free and isinstance(x, int) else plain(x) for n, x in same.items()}


# ---- where and with what ---------------------------------------------------------------------------------------------------


def describe_gpu(device: torch.device | str) -> dict[str, Any]:
    """The gpu field for a device of this machine. Raises ArgumentError for a GPU without facts."""
    import torch

    from k3dsl.runtime.dispatch import current_target

    where = torch.device(device)
    target = current_target(where)
    if target is None:
        return dict(CPU)
    properties = torch.cuda.get_device_properties(where)
    return {
        "name": properties.name,
        "sm": target.name,
        "sm_count": properties.multi_processor_count,
        "shared_optin": getattr(properties, "shared_memory_per_block_optin", target.shared_per_block),
    }


def target_of(gpu: Mapping[str, Any]) -> Target | None:
    """The target that a gpu field names; None for the CPU. Raises UnknownNameError."""
    from k3dsl.targets import get_target

    return None if gpu["sm"] == CPU["sm"] else get_target(str(gpu["sm"]))


def toolchain_of(backends: Iterable[str], target: Target | None) -> dict[str, str]:
    """Versions of what turns these backends' code into machine code; 'missing' for what is not installed."""
    found = {"k3dsl": __version__}
    for backend in sorted(set(backends)):
        found.update(_versions(backend, target))
    return found


@functools.lru_cache(maxsize=64)
def _versions(backend: str, target: Target | None) -> dict[str, str]:
    try:
        found = {backend: importlib.metadata.version(backend)}
    except importlib.metadata.PackageNotFoundError:
        return {backend: "missing"}
    if backend == "tilelang":
        from k3dsl.backends.tilelang import nvcc

        compiler = nvcc.find()
        found["nvcc"] = compiler.version if compiler else "missing"
    if backend == "triton" and target is not None and target.vendor == "nvidia":
        from triton.backends.nvidia.compiler import get_ptxas

        found["ptxas"] = str(get_ptxas(target.arch).version)
    return found


# ---- keys of candidates ----------------------------------------------------------------------------------------------------


def planned(candidate: Candidate) -> tuple[Point, Plan]:
    """The candidate's point with runtime dims as symbols, and its plan.

    Dims that follow from others are worked out first: the same code, whether they were given or left open.

    Raises UnknownNameError, ArgumentError, LegalityError, TraceError, VerifyError.
    """
    from k3dsl.ops.registry import get_op
    from k3dsl.runtime.op import defaults_only

    op = get_op(candidate.op)
    options = options_of(op, op.resolve_options(candidate.options))
    with defaults_only(op):
        dims = exact_dims(op.point(candidate.dims, options))
        point = op.point(dims, {**options, **candidate.settings}, symbolic=True)
        return point, point.plan(candidate.backend)


def key_of(
    candidate: Candidate,
    gpu: Mapping[str, Any],
    measure: Mapping[str, Any],
    gate: str,
    toolchain: Mapping[str, str] | None = None,
) -> Key:
    """The key of a candidate as the present code plans it. Raises what `planned` raises."""
    if gate not in GATES:
        raise ArgumentError(f"unknown gate level {gate!r}", fix=f"one of {', '.join(GATES)}")
    symbolic, plan = planned(candidate)
    op = symbolic.op
    dims = exact_dims(op.point(candidate.dims, candidate.options))
    used = toolchain_of((launch.backend for launch in plan.launches), target_of(gpu))
    return Key(
        op=candidate.op,
        ir={launch.label: kernel_hash(launch.kernel) for launch in plan.launches},
        numerics={
            **{n: plain(x) for n, x in symbolic.knobs.items() if n in NUMERIC_KNOBS},
            "fp_fusion": {x.label: getattr(x.schedule, "fp_fusion", None) for x in plan.launches},
        },
        options=options_of(op, symbolic.options),
        dims=dims,
        bucket=bucket_name(op, dims),
        facts={n: s.divisible_by for n, s in sorted(plan.symbols().items())},
        gpu=dict(gpu),
        toolchain=dict(used if toolchain is None else toolchain),
        measure=dict(measure),
        gate=gate,
    )


def explain_miss(wanted: Key, entries: Iterable[Key]) -> list[str]:
    """Why none of the entries is the wanted one, field by field against the nearest; empty when one is."""
    of_op = [entry for entry in entries if entry.op == wanted.op]
    if not of_op:
        return [f"op: nothing is kept for {wanted.op}"]
    found = [_differences(wanted, entry) for entry in of_op]
    return min(found, key=lambda lines: (len(lines), lines))


def _differences(wanted: Key, entry: Key) -> list[str]:
    lines: list[str] = []
    have, want = entry.to_json(), wanted.to_json()
    for name in sorted(_KINDS):
        if have[name] == want[name]:
            continue
        if not isinstance(have[name], dict):
            lines.append(f"{name}: wanted {want[name]!r}, the nearest entry has {have[name]!r}")
            continue
        for part in sorted({*have[name], *want[name]}):
            mine, other = want[name].get(part, "nothing"), have[name].get(part, "nothing")
            if mine != other:
                lines.append(f"{name}.{part}: wanted {_short(mine)}, the nearest entry has {_short(other)}")
    return lines


def _short(value: Any) -> str:
    text = str(value)
    return f"{text[:12]}..." if len(text) == 64 else repr(value) if not isinstance(value, str) else text
