"""A sweep as a report for people: what won and by how much, how the trials ended, what mattered; Markdown with plots."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3dsl.autotune import journal as journals
from k3dsl.autotune import study
from k3dsl.autotune.journal import Record
from k3dsl.autotune.search import lanes_line
from k3dsl.autotune.trial import End, backends_of
from k3dsl.backends.common import write_whole
from k3dsl.errors import ArgumentError

PAGE = "report.md"
FAILURES = 20
LEAST_FOR_IMPORTANCE = 20
"""Timed trials below which the importance of a knob is noise."""
FAST_SHARE = 0.3
"""Of the timed trials: those that count as the fastest when importance is asked for."""


@dataclass(frozen=True)
class Study:
    """A sweep as its files tell it. about: study.json. result: of a sweep that came to its end with these trials, or None."""

    folder: Path
    about: Mapping[str, Any]
    records: tuple[Record, ...]
    result: Mapping[str, Any] | None

    @property
    def trials(self) -> list[Record]:
        return [r for r in self.records if r.stage == "trial"]

    @property
    def timed(self) -> list[Record]:
        return [r for r in self.trials if r.outcome.end is End.OK and r.outcome.time_ms is not None]

    @property
    def best(self) -> Record | None:
        return min(self.timed, key=lambda r: (r.outcome.time_ms, r.key), default=None)

    @property
    def floor_ms(self) -> float | None:
        return self.result.get("floor_ms") if self.result is not None else None

    @property
    def title(self) -> str:
        dims = " ".join(f"{name}={value}" for name, value in self.about["dims"].items())
        return f"{self.about['op']} {dims} on {self.about['target']}"

    def backend_of(self, record: Record) -> str:
        """'triton', 'tilelang', or both where the launches of an op differ."""
        first = self.about["backends"][0]
        labels = record.outcome.sources or {name.split(".")[0]: "" for name in record.settings if "." in name}
        used = backends_of(record.settings, labels or ("",), first)
        return " + ".join(name for name in self.about["backends"] if name in used)


def studies() -> list[Study]:
    """The sweeps of this machine, the latest first; what cannot be read is left out."""
    found = []
    for path in sorted(study.root().glob(f"*/{study.JOURNAL}"), key=lambda p: -p.stat().st_mtime):
        try:
            found.append(load(path))
        except ArgumentError:
            continue
    return found


def load(path: Path) -> Study:
    """The study of a journal or of the folder that it lies in. Raises ArgumentError."""
    folder = path if path.is_dir() else path.parent
    records = journals.read(folder / study.JOURNAL if path.is_dir() else path)
    try:
        about = json.loads((folder / study.ABOUT).read_text(encoding="utf-8"))
        if not all(name in about for name in ("op", "dims", "target", "backends", "seed", "versions")):
            raise ValueError("fields are missing")
    except (OSError, ValueError, TypeError) as error:
        raise ArgumentError(f"{folder} is no study: {study.ABOUT} cannot be used ({error})") from None
    result = None
    try:
        result = json.loads((folder / study.RESULT).read_text(encoding="utf-8"))
        if result["trials"] != sum(r.stage == "trial" for r in records) or result["interrupted"]:
            result = None  # of an earlier run
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return Study(folder, about, tuple(records), result)


def check_plots(what: str = "a report") -> None:
    """Raises ArgumentError where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError(f"{what} needs matplotlib, which is not installed", fix="pip install 'k3dsl[report]'")


def write_report(path: Path, folder: Path) -> Path:
    """Writes the report of a study into a folder, each file whole or not at all and the page last; returns the page.

    path: the study's journal or folder. Raises ArgumentError.
    """
    check_plots()
    from k3dsl.autotune import plots

    found = load(path)
    if not found.trials:
        raise ArgumentError(f"{found.folder} has no trials to report", fix="let the sweep run longer")
    importance = importance_of(found)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pictures = plots.write_all(found, importance, folder)
        page = folder / PAGE
        write_whole(page, text_of(found, importance, pictures))
    except OSError as error:
        raise ArgumentError(f"{folder} cannot be written: {error.strerror}", fix="choose another folder") from None
    return page


# ---- what is said ----------------------------------------------------------------------------------------------------------


def by_backend(found: Study) -> dict[str, list[Record]]:
    """The trials of each backend, in the order of the sweep's backends."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in found.trials:
        groups[found.backend_of(record)].append(record)
    return dict(sorted(groups.items(), key=lambda g: (len(g[0]), g[0])))


def ends_of(found: Study) -> dict[str, int]:
    """Trials by how they ended, with the illegal points that were drawn where the sweep's end tells them."""
    if found.result is not None:
        return dict(found.result["ends"])
    counts = Counter(r.outcome.end.value for r in found.trials)
    return {end.value: counts[end.value] for end in End if counts[end.value]}


def importance_of(found: Study) -> dict[str, float]:
    """How much each setting decides whether a trial is among the fastest, from 0 to 1 and 1 in all (PED-ANOVA, optuna).

    Empty when there are too few timed trials to tell.
    """
    import optuna

    timed = {r.key: ms for r in found.trials if (ms := _about_ms(r)) is not None}
    chosen = {r.key: r.settings for r in found.trials if r.key in timed}
    names = sorted({name for settings in chosen.values() for name in settings})
    values = {n: sorted({str(settings.get(n, "the op's")) for settings in chosen.values()}) for n in names}
    values = {n: among for n, among in values.items() if len(among) > 1}
    if len(timed) < LEAST_FOR_IMPORTANCE or not values:
        return {}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    told = optuna.create_study()
    distributions: dict[str, Any] = {
        n: optuna.distributions.CategoricalDistribution(among) for n, among in values.items()
    }
    for key, settings in chosen.items():
        params = {n: str(settings.get(n, "the op's")) for n in values}
        told.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=timed[key]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=FAST_SHARE)
        try:
            raw = optuna.importance.get_param_importances(told, evaluator=evaluator)
        except (RuntimeError, ValueError):
            return {}
    return dict(raw)


def _about_ms(record: Record) -> float | None:
    """The time of a trial; of one that was too slow to be timed, what its first calls took."""
    outcome = record.outcome
    if outcome.end is End.OK:
        return outcome.time_ms
    return min(outcome.samples_ms, default=None) if outcome.end is End.SLOW else None


def text_of(found: Study, importance: Mapping[str, float], pictures: Mapping[str, str]) -> str:
    """The page. pictures: files by what they show."""
    versions = ", ".join(f"{name} {version}" for name, version in found.about["versions"].items())
    gpu = found.about.get("gpu", {}).get("name", found.about["target"])
    parts = [f"# {found.title}\n", f"Measured on {gpu} with {versions}; seed {found.about['seed']}.\n", *_result(found)]
    parts += ["## Time by trial\n", _picture(pictures, "time"), *_machines(found)]
    parts += ["## Best by backend\n", _table(("backend", "trials", "ok", "best (ms)", *_share_head(found)), [
        (name, len(group), len(_ok(group)), _ms(_least(group)), *_share(found, _least(group)))
        for name, group in by_backend(found).items()
    ]), _picture(pictures, "backends")]  # fmt: skip
    parts += ["## How the trials ended\n", _table(("end", "points"), list(ends_of(found).items()))]
    parts += ["Points that end `illegal` or `over_resource` are refused before anything is compiled.\n"]
    parts += [_picture(pictures, "ends"), *_lanes(found)]
    parts.append("## What mattered\n")
    if importance:
        rows = [(f"`{name}`", f"{share:.0%}") for name, share in importance.items()]
        said = f"How much of being among the fastest {FAST_SHARE:.0%} a setting decides (PED-ANOVA).\n"
        parts += [said, _table(("setting", "share"), rows)]
        parts.append(_picture(pictures, "importance"))
    else:
        parts.append(f"Too few timed trials to tell, or too alike: under {LEAST_FOR_IMPORTANCE}.\n")
    parts += _failures(found)
    return "\n".join(part for part in parts if part)


def _result(found: Study) -> list[str]:
    result, best = found.result, found.best
    if result is None or not result["finalists"]:
        state = "nothing passed the gate" if result is not None else "the sweep has not come to its end"
        if best is None:
            return [f"## Result\n\nNo winner: {state}.\n"]
        return [
            f"## Result\n\nNo winner: {state}. Best trial: {_ms(best.outcome.time_ms)} ms.\n\n```\n{best.key}\n```\n"
        ]
    first = result["finalists"][0]
    lines = [f"## Result\n\n{_ms(first['time_ms'])} ms"]
    if result["default_ms"] is not None:
        lines.append(f", {result['default_ms'] / first['time_ms']:.2f} times the speed of the op's default")
    if result["roofline_share"] is not None:
        lines.append(f", {result['roofline_share']:.0%} of the roofline (floor {_ms(result['floor_ms'])} ms)")
    lines.append(f".\n\n```\n{result['set']}\n```\n\nStopped after {result['seconds']:.0f} s: {result['stopped']}.\n")
    rows = [
        (f"`{_settings(f['settings'])}`", _ms(f["time_ms"]), "yes" if f["tied"] else "no") for f in result["finalists"]
    ]
    table = _table(("finalist", "time (ms)", "as fast as the fastest"), rows)
    return ["".join(lines), "The fixed order (threads, shared memory, tiles) decides among equals.\n", table]


def _lanes(found: Study) -> list[str]:
    lanes: dict[str, list[Record]] = defaultdict(list)
    for record in found.trials:
        lanes[record.lane].append(record)
    rows = [(name, len(group), len(_ok(group)), _ms(_least(group))) for name, group in lanes.items()]
    line = lanes_line({name: (len(group), _least(group)) for name, group in lanes.items()})
    if line is None and "grid" in lanes:
        line = "The space is small enough for every legal point to have its turn"
    elif line is None and lanes and set(lanes) <= {"default", "seed"}:
        line = "Only the default and the op's own seeds were tried"
    said = [f"{line}.\n"] if line else []
    return ["## Search\n", *said, _table(("proposed by", "trials", "ok", "best (ms)"), rows)]


def _machines(found: Study) -> list[str]:
    counts = Counter(r.by for r in found.trials if r.by is not None)
    return [_table(("run by", "trials"), sorted(counts.items()))] if len(counts) > 1 else []


def _failures(found: Study) -> list[str]:
    failed = [r for r in found.trials if r.outcome.end not in (End.OK, End.SLOW) and r.same_as is None]
    if not failed:
        return []
    rows = [(r.outcome.end.value, f"`{_settings(r.settings)}`", r.outcome.detail.replace("|", "/")) for r in failed]
    more = f"\n{len(failed) - FAILURES} more are in the journal.\n" if len(failed) > FAILURES else ""
    return ["## What did not pass\n", _table(("end", "settings", "why"), rows[:FAILURES]), more]


def _ok(group: Sequence[Record]) -> list[float]:
    return [r.outcome.time_ms for r in group if r.outcome.end is End.OK and r.outcome.time_ms is not None]


def _least(group: Sequence[Record]) -> float | None:
    return min(_ok(group), default=None)


def _share_head(found: Study) -> tuple[str, ...]:
    return ("share of roofline",) if found.floor_ms is not None else ()


def _share(found: Study, time_ms: float | None) -> tuple[str, ...]:
    if found.floor_ms is None:
        return ()
    return ("-" if time_ms is None else f"{found.floor_ms / time_ms:.0%}",)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _settings(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(settings.items()))


def _picture(pictures: Mapping[str, str], name: str) -> str:
    return f"![{name}]({pictures[name]})\n" if name in pictures else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
