"""On which inputs a candidate is judged, level by level; and the op that a candidate names."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3dsl.autotune.trial import Candidate
from k3dsl.errors import ArgumentError
from k3dsl.ops.registry import get_op
from k3dsl.runtime.op import Case, Op

LEVELS = ("quick", "full", "ship")
QUICK_CASES = 4
QUICK_BUILT_CASES = 2
"""Of the op's own cases with code to be built, which for another shape or option takes seconds a launch."""


def find_op(name: str) -> Op:
    """The op of that name in the registry, or at 'module:attribute'. Raises UnknownNameError, ArgumentError."""
    if ":" not in name:
        return get_op(name)
    module, attribute = name.split(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"no op at {name!r}: {error}", fix="name it as module:attribute") from None
    if not isinstance(found, Op):
        raise ArgumentError(f"{name!r} is no op, but {type(found).__name__}")
    return found


@dataclass(frozen=True)
class GateCase:
    """A case of the gate. key: under which its reference is kept; None: checked for NaN and for repeating alone.

    must: whether the candidate is refused if it cannot run this case; the op's own cases are also of other dims and options.
    """

    case: Case
    key: Any
    must: bool = False


def gate_cases(op: Op, candidate: Candidate, level: str) -> list[GateCase]:
    """The cases that a candidate has to pass, those that fail fastest first.

    quick: a few of the op's small cases, ragged and extreme ones among them, and the candidate's own dims, reduced to what
    the op asks of a CPU where they are larger. full: the small cases and the candidate's dims. ship: the whole set.
    """
    if op.inputs is None or op.limits is None or op.call is None or op.reference is None:
        raise ArgumentError(f"{op.name} has no inputs, limits or reference to be judged on")
    options = op.resolve_options(candidate.options)
    op.resolve_dims(candidate.dims)  # refuses what is no dim
    dims = {d.name: int(candidate.dims.get(d.name, d.default)) for d in op.dims}
    varying = [d.name for d in op.dims if not d.static]
    reduced = {**dims, **{n: min(dims[n], v) for n, v in op.cpu_dims.items() if n in varying}}
    limits = op.limits(options)

    def given(name: str, size: Mapping[str, int], must: bool, compare: bool = True) -> GateCase:
        def make(device: Any, seed: int) -> dict[str, Any]:
            assert op.inputs is not None
            return op.inputs(size, options, device, seed)

        label = f"{name} ({','.join(f'{n}={v}' for n, v in size.items())})"
        key = (candidate.op, label, repr(sorted(options.items(), key=lambda o: o[0])))
        return GateCase(Case(label, "given", make, limits), key if compare else None, must)

    found = []
    size = "whole" if level == "ship" else "small"
    own = op.cases(size) if op.cases is not None else []
    few = QUICK_CASES if candidate.backend == "torch" else QUICK_BUILT_CASES
    chosen = _handful(own, few) if level == "quick" else own
    found += [GateCase(case, (candidate.op, size, case.name)) for case in chosen]
    if not own:
        ragged = {n: v - 1 if n in varying and v > 2 else v for n, v in reduced.items()}
        found.append(given("ragged dims", ragged, must=False))
    if level == "quick" and reduced != dims:
        found.append(given("reduced dims", reduced, must=False))
        found.append(given("given dims", dims, must=True, compare=False))
    else:
        found.append(given("given dims", dims, must=True))
    return found


def _handful(cases: list[Case], count: int) -> list[Case]:
    """The first case of each family, ragged and extreme families first."""
    first: dict[str, Case] = {}
    for case in cases:
        first.setdefault(case.family, case)
    order = sorted(first, key=lambda family: not any(word in family for word in ("ragged", "extreme")))
    return [first[family] for family in order[:count]]
