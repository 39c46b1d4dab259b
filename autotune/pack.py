"""A pack: the winners that ship, as one readable JSON file whose text can be compared and merged."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3dsl.autotune.key import exact_dims, planned, target_of, toolchain_of
from k3dsl.autotune.store import Winner
from k3dsl.autotune.trial import written
from k3dsl.backends.common import write_whole
from k3dsl.errors import ArgumentError, K3Error, PackError
from k3dsl.ir.identity import kernel_hash
from k3dsl.runtime.explain import legality

FORMAT = "k3dsl-pack"
SCHEMA = 1


@dataclass(frozen=True)
class Pack:
    """Winners, one a problem, in an order that depends on nothing but them."""

    rows: tuple[Winner, ...]

    def text(self) -> str:
        """The file's text; equal packs have equal text."""
        data = {"format": FORMAT, "schema": SCHEMA, "rows": [row.to_json() for row in self.rows]}
        return json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n"


def build(winners: Iterable[Winner]) -> Pack:
    """The best winner of each problem."""
    best: dict[str, Winner] = {}
    for winner in winners:
        known = best.get(winner.key.problem)
        if known is None or winner.rank < known.rank:
            best[winner.key.problem] = winner
    return Pack(tuple(sorted(best.values(), key=_order)))


def _order(row: Winner) -> tuple[Any, ...]:
    key = row.key
    return (key.op, str(key.gpu["name"]), sorted(key.dims.items()), json.dumps(key.options, sort_keys=True), row.name)


def title(row: Winner) -> str:
    """A row as a person would name it: op, dims, the options that are not the default, backends, GPU."""
    dims = ",".join(f"{name}={value}" for name, value in row.key.dims.items())
    options = "".join(f" {text}" for text in written(row.unusual))
    return f"{row.key.op} {dims}{options} through {' + '.join(row.backends)} on {row.key.gpu['name']}"


def load(path: Path) -> Pack:
    """The pack in a file. Raises PackError, which says which row is wrong and why."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PackError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise PackError(f"{path} is no JSON: {error}", fix="build it again with `k3dsl pack build`") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PackError(f"{path} is no pack of k3dsl", fix="`k3dsl pack build` makes one")
    if data.get("schema") != SCHEMA:
        raise PackError(
            f"{path} has schema {data.get('schema')!r}, and this k3dsl reads {SCHEMA}",
            fix="use the k3dsl that wrote it, or build it again",
        )
    if not isinstance(data.get("rows"), list):
        raise PackError(f"{path} has no rows")
    rows = []
    for number, row in enumerate(data["rows"], 1):
        try:
            rows.append(Winner.from_json(row))
        except (ValueError, TypeError) as error:
            raise PackError(f"{path}, row {number}: {error}") from None
    return build(rows)


def save(pack: Pack, path: Path) -> None:
    """Writes the pack, whole or not at all. Raises ArgumentError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, pack.text())
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error.strerror}", fix="choose another file") from None


def merge(packs: Iterable[Pack]) -> tuple[Pack, list[str]]:
    """One pack of several, the better evidence for each problem; and a line for each problem on what was done."""
    best: dict[str, Winner] = {}
    done: dict[str, str] = {}
    for pack in packs:
        for row in pack.rows:
            problem = row.key.problem
            known = best.get(problem)
            if known is None:
                best[problem], done[problem] = row, f"{title(row)}: added"
            elif row == known:
                done[problem] = f"{title(row)}: the same in both"
            else:
                kept, left = (row, known) if row.rank < known.rank else (known, row)
                best[problem] = kept
                done[problem] = f"{title(row)}: kept {_evidence(kept)} over {_evidence(left)}"
    merged = build(best.values())
    return merged, [done[row.key.problem] for row in merged.rows]


def _evidence(row: Winner) -> str:
    return f"gate {row.key.gate}, {row.evidence['repeats']} repeats, {row.time_ms:.4g} ms"


def diff(old: Pack, new: Pack) -> list[str]:
    """What changes from one pack to the other: '+' a row, '-' a row, '~' a row with its fields."""
    before = {row.key.problem: row for row in old.rows}
    after = {row.key.problem: row for row in new.rows}
    lines = [f"- {title(row)}" for problem, row in before.items() if problem not in after]
    for problem, row in after.items():
        if problem not in before:
            lines.append(f"+ {title(row)}")
        elif changes := _changes(before[problem], row):
            lines.append(f"~ {title(row)}: {'; '.join(changes)}")
    return sorted(lines, key=lambda line: (line[2:], line[0]))


def _changes(old: Winner, new: Winner) -> list[str]:
    found = []
    for name in sorted({*old.settings, *new.settings}):
        a, b = old.settings.get(name, "default"), new.settings.get(name, "default")
        if a != b:
            found.append(f"{name} {a} -> {b}")
    pairs = (
        ("backend", old.backend, new.backend),
        ("gate", old.key.gate, new.key.gate),
        ("repeats", old.evidence["repeats"], new.evidence["repeats"]),
        ("ms", old.time_ms, new.time_ms),
    )
    found += [f"{name} {a} -> {b}" for name, a, b in pairs if a != b]
    if old.key.ir != new.key.ir:
        found.append("other IR")
    if old.region != new.region:
        found.append("other region")
    if not found and old.to_json() != new.to_json():
        found.append("other evidence or record")
    return found


def verify(pack: Pack, here: bool = False) -> list[str]:
    """What is wrong with the rows, a line each; empty for a pack whose rows are all legal for their targets.

    here: also compares the toolchain with the one that is installed.
    """
    return [f"{title(row)}: {reason}" for row in pack.rows for reason in check(row, toolchain=here)]


def check(row: Winner, toolchain: bool = True) -> list[str]:
    """Why a winner does not hold for its own dims and target as the present code has them; empty when it does."""
    try:
        target = target_of(row.key.gpu)
        point, plan = planned(row.candidate())
        if set(row.key.dims) != set(exact_dims(point.op.point(row.key.dims, row.key.options))):
            return [f"its dims are not those of {row.key.op}"]
        if target is not None and any(launch.backend == "torch" for launch in plan.launches):
            return [f"backend torch generates no code for {target.name}"]
        reasons = foreign([x.backend for x in plan.launches], row, toolchain)
        hashes = {launch.label: kernel_hash(launch.kernel) for launch in plan.launches}
        for label in sorted({*hashes, *row.key.ir}):
            if hashes.get(label) != row.key.ir.get(label):
                reasons.append(f"{label}: its kernel changed since it was tuned")
        if target is not None:
            reasons += [f"{x.label}: {r.message}" for x in plan.launches for r in legality(x, target)]
        return reasons
    except K3Error as error:
        return [error.message]
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # settings of a shape that nothing expects
        return [f"its settings cannot be used ({type(error).__name__}: {error})"]


def foreign(backends: Iterable[str], row: Winner, here: bool = True) -> list[str]:
    """How the toolchain of a winner's key is not that of its launches or, with `here`, not the one installed here."""
    have, named = toolchain_of(backends, target_of(row.key.gpu)), row.key.toolchain
    found = []
    if names := sorted(set(named) - set(have)):
        found.append(f"its key names {', '.join(names)}, which no launch of it goes through now: tune it again")
    if names := sorted(set(have) - set(named)):
        found.append(f"its key does not name {', '.join(names)}, which launches of it go through now: tune it again")
    if here:
        both = sorted(set(have) & set(named))
        found += [
            f"tuned with {name} {named[name]}, here is {have[name]}" for name in both if have[name] != named[name]
        ]
    return found
