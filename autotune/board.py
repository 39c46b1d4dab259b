"""A study that several machines share: an optuna storage in which each takes points, posts how they ended, and hears of others.

Every point is a trial of the study; its user attributes hold the settings as `--set` text, the outcome, the host and the
toolchain. A point is taken by creating its running trial: the storage numbers trials in the order of their creation, so of
two that take the same point at once the one with the lower number has it, and both see that.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from k3dsl.autotune.trial import End, Outcome
from k3dsl.errors import ArgumentError

CLAIM_S = 3600.0
"""After so long a taken point of which nothing was heard is free again: its taker is dead."""
RETRIES = 5
_OVER = (TrialState.COMPLETE, TrialState.PRUNED)
T = TypeVar("T")


@dataclass(frozen=True)
class Posted:
    """A trial that another taker finished."""

    key: str
    settings: Mapping[str, Any]
    lane: str
    outcome: Outcome
    by: str


class Board:
    """One taker's view of a shared study.

    url: 'sqlite:///FILE', 'postgresql://...', or a file's path for optuna's journal on a shared file system. name: of the
    study. facts: what the study is about, kept with it. taker: names this process, the same after a restart.
    Raises ArgumentError when the storage cannot be opened.
    """

    def __init__(self, url: str, name: str, facts: Mapping[str, Any], taker: str) -> None:
        self.url, self.taker = shown(url), taker
        self.host = platform.node()
        self._toolchain = json.dumps(facts.get("versions", {}), sort_keys=True)
        self._mine: dict[str, int] = {}
        self._heard: set[int] = set()
        self._seen: list[FrozenTrial] = []
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._storage = self._patiently(lambda: _open(url))
        study = self._patiently(
            lambda: optuna.create_study(
                storage=self._storage, study_name=name, direction="minimize", load_if_exists=True
            )
        )
        self._study = self._storage.get_study_id_from_name(study.study_name)
        self._patiently(lambda: study.set_user_attr("about", json.loads(json.dumps(dict(facts), default=str))))
        for trial in self._trials():  # what an earlier run of this taker had begun
            if trial.state is TrialState.RUNNING and trial.user_attrs.get("taker") == taker:
                self._close(trial._trial_id, TrialState.FAIL, released=True)

    def claim(
        self, key: str, lane: str, settings: Mapping[str, Any], choices: Mapping[str, tuple[Any, tuple[Any, ...]]]
    ) -> bool:
        """Takes a point. False when another has it or has finished it. choices: see Space.choices."""
        for look in (lambda: self._seen, self._trials):  # asks the storage only where the last look says no
            if not any(self._taken(trial, key) for trial in look()):
                break
        else:
            return False
        template = create_trial(
            state=TrialState.RUNNING,
            params={name: value for name, (value, _) in choices.items()},
            distributions={name: CategoricalDistribution(among) for name, (_, among) in choices.items()},
            user_attrs={
                "key": key,
                "lane": lane,
                "settings": dict(settings),
                "taker": self.taker,
                "host": self.host,
                "toolchain": self._toolchain,
                "since": time.time(),
            },
        )
        mine = self._patiently(lambda: self._storage.create_new_trial(self._study, template_trial=template))
        trials = self._trials()
        number = next(t.number for t in trials if t._trial_id == mine)
        if any(t.number < number and self._taken(t, key) for t in trials):
            self._close(mine, TrialState.FAIL, released=True)
            return False
        self._mine[key] = mine
        return True

    def post(self, key: str, outcome: Outcome, device: str | None = None) -> None:
        """Says how a point that was taken ended."""
        trial = self._mine.pop(key, None)
        if trial is None:
            return
        self._heard.add(trial)
        attributes: dict[str, Any] = {"outcome": outcome.to_json(), "end": outcome.end.value}
        if device is not None:
            attributes["device"] = device
        if outcome.end is End.OK and outcome.time_ms is not None:
            self._close(trial, TrialState.COMPLETE, outcome.time_ms, **attributes)
        else:
            self._close(trial, TrialState.PRUNED, **attributes)

    def news(self) -> list[Posted]:
        """What was finished since the last time, by others or by an earlier run of this taker."""
        found = []
        for trial in self._trials():
            if trial.state not in _OVER or trial._trial_id in self._heard:
                continue
            self._heard.add(trial._trial_id)
            try:
                known = trial.user_attrs
                outcome = Outcome.from_json(known["outcome"])
                by = str(known["host"]) + (f" {known['device']}" if known.get("device") else "")
                found.append(Posted(str(known["key"]), dict(known["settings"]), str(known["lane"]), outcome, by))
            except (KeyError, TypeError, ValueError):  # a trial that something else put into the study
                continue
        return found

    def pending(self) -> set[str]:
        """The points that others have taken and not finished."""
        now = time.time()
        return {
            str(t.user_attrs["key"])
            for t in self._trials()
            if t.state is TrialState.RUNNING and t.user_attrs.get("taker") != self.taker and _fresh(t, now)
        }

    def release(self) -> None:
        """Gives back what was taken and not finished."""
        for trial in self._mine.values():
            self._close(trial, TrialState.FAIL, released=True)
        self._mine.clear()

    def announce(self, final: Mapping[str, Any]) -> None:
        """Keeps with the study what this taker found to be the winner."""
        self._patiently(lambda: self._storage.set_study_user_attr(self._study, f"winner {self.taker}", dict(final)))

    def winners(self) -> dict[str, dict[str, Any]]:
        """What every taker announced, by its name."""
        found = self._patiently(lambda: self._storage.get_study_user_attrs(self._study))
        return {name.removeprefix("winner "): value for name, value in found.items() if name.startswith("winner ")}

    def close(self) -> None:
        """Gives back what was taken and ends the connection."""
        try:
            self.release()
        finally:
            self._storage.remove_session()

    # ---- the storage ---------------------------------------------------------------------------------------------------

    def _taken(self, trial: FrozenTrial, key: str) -> bool:
        if trial.user_attrs.get("key") != key:
            return False
        return trial.state in _OVER or (trial.state is TrialState.RUNNING and _fresh(trial, time.time()))

    def _trials(self) -> list[FrozenTrial]:
        self._seen = self._patiently(lambda: self._storage.get_all_trials(self._study, deepcopy=False))
        return self._seen

    def _close(self, trial: int, state: TrialState, value: float | None = None, **attributes: Any) -> None:
        def closing() -> None:
            for name, content in attributes.items():
                self._storage.set_trial_user_attr(trial, name, content)
            self._storage.set_trial_state_values(trial, state, None if value is None else [value])

        self._patiently(closing)

    def _patiently(self, action: Callable[[], T]) -> T:
        """The action's result; it is tried again a few times, as a database that others write to may be busy."""
        for again in range(RETRIES):
            try:
                return action()
            except (ImportError, ArgumentError, optuna.exceptions.UpdateFinishedTrialError):
                raise
            except Exception as error:
                if again == RETRIES - 1:
                    text = str(error.__cause__ or error).strip().splitlines()[0][:200] if str(error) else repr(error)
                    raise ArgumentError(
                        f"the storage {self.url} cannot be used: {text}",
                        fix="see that the database is there and may be written; what was tried so far is in the journal",
                    ) from None
                time.sleep(0.2 * 2**again)
        raise AssertionError


def _fresh(trial: FrozenTrial, now: float) -> bool:
    return now - float(trial.user_attrs.get("since", 0.0)) < CLAIM_S


def _open(url: str) -> BaseStorage:
    if "://" not in url:
        return JournalStorage(JournalFileBackend(url))
    how: dict[str, Any] = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    if url.startswith(("postgresql://", "postgres://")):  # whichever driver is here
        url = f"postgresql+{_driver()}://{url.partition('://')[2]}"
    try:
        return optuna.storages.get_storage(optuna.storages.RDBStorage(url, engine_kwargs=how))
    except ImportError as error:
        raise ArgumentError(
            f"the storage {shown(url)} needs a driver: {error}", fix="for PostgreSQL: pip install 'k3dsl[postgresql]'"
        ) from None


def _driver() -> str:
    import importlib.util

    return "psycopg2" if importlib.util.find_spec("psycopg2") and not importlib.util.find_spec("psycopg") else "psycopg"


def shown(url: str) -> str:
    """The URL without its password."""
    head, separator, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    return f"{head}{separator}{login.partition(':')[0]}{at}{place}" if separator else url
