"""Which points of a space are tried, in which order: all of a small one, else what optuna proposes and some at random."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from k3dsl.autotune.space import Space
from k3dsl.autotune.trial import Outcome, end_of_reasons

if TYPE_CHECKING:
    import optuna

RANDOM_EVERY = 5
TRIES = 100
STARTUP = 10
"""Trials before TPE's model takes over from chance."""


@dataclass(frozen=True)
class Proposal:
    """A legal point that was not proposed before. lane: 'default', 'seed', 'grid', 'tpe' or 'random'."""

    number: int
    lane: str
    settings: Mapping[str, Any]
    key: str
    trial: Any = None


class Search(Protocol):
    """Proposes points and learns how they ended. refused: illegal points that were drawn, by how they would have ended."""

    refused: Counter[str]

    def ask(self, count: int) -> list[Proposal]:
        """Up to `count` points; none when the space is used up."""
        ...

    def tell(self, proposal: Proposal, outcome: Outcome) -> None: ...

    def leave(self, proposal: Proposal) -> None:
        """Leaves a proposal to another machine, which has it; `learn` tells how it ended."""
        ...

    def left(self) -> list[Proposal]:
        """What was left to others and not learned of yet."""
        ...

    def take_back(self, proposal: Proposal) -> None:
        """Takes what was left to another machine, which did not run it."""
        ...

    def learn(self, lane: str, settings: Mapping[str, Any], outcome: Outcome) -> Proposal | None:
        """What another machine found out about a point, which is not proposed any more. None for one that is known."""
        ...


def make_search(space: Space, seed: int, folder: Path | None) -> Search:
    """The search that fits the space's size. folder: where optuna's journal is kept; None keeps it in memory."""
    points = space.small()
    return GridSearch(space, points, seed) if points is not None else OptunaSearch(space, seed, folder)


class _Proposer:
    """Numbers proposals, and proposes no point twice."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.refused: Counter[str] = Counter()
        self.seen: set[str] = set()
        self._left: dict[str, Proposal] = {}

    def leave(self, proposal: Proposal) -> None:
        self._left[proposal.key] = proposal

    def left(self) -> list[Proposal]:
        return list(self._left.values())

    def take_back(self, proposal: Proposal) -> None:
        self._left.pop(proposal.key, None)

    def _refuses(self, settings: Mapping[str, Any]) -> bool:
        reasons = self.space.reasons(settings)
        if reasons:
            self.refused[end_of_reasons(reasons).value] += 1
        return bool(reasons)

    def _proposal(self, lane: str, settings: Mapping[str, Any], trial: Any = None) -> Proposal | None:
        """None for a point that was proposed before."""
        key = self.space.text(settings)
        if key in self.seen:
            return None
        self.seen.add(key)
        return Proposal(len(self.seen) - 1, lane, settings, key, trial)


class GridSearch(_Proposer):
    """Every legal point once: the default, the seeds, then the rest in an order that the seed decides."""

    def __init__(self, space: Space, points: list[dict[str, Any]], seed: int) -> None:
        super().__init__(space)
        rest = list(points)
        random.Random(seed).shuffle(rest)
        first = [("default", space.default()), *(("seed", point) for point in space.seeds())]
        self._waiting = [*first, *(("grid", point) for point in rest)]
        self._waiting.reverse()

    def ask(self, count: int) -> list[Proposal]:
        found: list[Proposal] = []
        while self._waiting and len(found) < count:
            lane, settings = self._waiting.pop()
            if self._refuses(settings):
                continue
            proposal = self._proposal(lane, settings)
            if proposal is not None:
                found.append(proposal)
        return found

    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        """What a grid proposes does not depend on it."""

    def learn(self, lane: str, settings: Mapping[str, Any], outcome: Outcome) -> Proposal | None:
        left = self._left.pop(self.space.text(settings), None)
        return left if left is not None else self._proposal(lane, settings)


class OptunaSearch(_Proposer):
    """TPE over the parameters of the space, the default and the seeds first, every few trials one at random.

    Two searches with one seed that are told the same propose the same. An illegal point is told to optuna as pruned and
    drawn again, so that no trial begins with one; after `TRIES` in vain the next is random, and after as many again the
    space counts as used up.
    """

    def __init__(self, space: Space, seed: int, folder: Path | None, random_every: int = RANDOM_EVERY) -> None:
        super().__init__(space)
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.ERROR)  # it warns of every parameter that is conditional
        self._states = optuna.trial.TrialState
        storage: optuna.storages.BaseStorage | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "optuna.log"
            path.unlink(missing_ok=True)  # the sweep's own journal is what a killed sweep goes on from
            storage = JournalStorage(JournalFileBackend(str(path)))
        how: dict[str, Any] = {"multivariate": True, "group": True, "constant_liar": True, "n_startup_trials": STARTUP}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(seed=seed, **how)
        self.study = optuna.create_study(
            storage=storage, sampler=sampler, direction="minimize", study_name=space.op.name
        )
        self._first = [("default", space.default()), *(("seed", point) for point in space.seeds())]
        self._first.reverse()
        self._rng = random.Random(seed + 1)
        self._random_every = random_every
        self._values: dict[str, float | None] = {}

    def ask(self, count: int) -> list[Proposal]:
        found: list[Proposal] = []
        while len(found) < count:
            proposal = self._next()
            if proposal is None:
                break
            found.append(proposal)
        return found

    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        self._values[proposal.key] = outcome.time_ms
        proposal.trial.set_user_attr("end", outcome.end.value)
        self._close(proposal.trial, outcome.time_ms)

    def learn(self, lane: str, settings: Mapping[str, Any], outcome: Outcome) -> Proposal | None:
        left = self._left.pop(self.space.text(settings), None)
        if left is not None:
            self.tell(left, outcome)
            return left
        found = self._proposal(lane, settings)
        if found is not None:
            import optuna

            choices = self.space.choices(settings)
            state = self._states.PRUNED if outcome.time_ms is None else self._states.COMPLETE
            self._values[found.key] = outcome.time_ms
            self.study.add_trial(
                optuna.trial.create_trial(
                    state=state,
                    value=outcome.time_ms,
                    params={name: value for name, (value, _) in choices.items()},
                    distributions={
                        name: optuna.distributions.CategoricalDistribution(among)
                        for name, (_, among) in choices.items()
                    },
                    user_attrs={"lane": lane, "end": outcome.end.value},
                )
            )
        return found

    def _next(self) -> Proposal | None:
        while self._first:
            lane, settings = self._first.pop()
            if not self._refuses(settings) and (found := self._given(lane, settings)) is not None:
                return found
        if self._random_every and len(self.seen) % self._random_every == self._random_every - 1:
            return self._random()
        for _ in range(TRIES):
            trial = self.study.ask()
            settings = self._sampled(trial)
            if self._refuses(settings):
                self._close(trial, None)
            elif (found := self._proposal("tpe", settings, trial)) is not None:
                trial.set_user_attr("lane", "tpe")
                return found
            else:
                self._close(trial, self._values.get(self.space.text(settings)))
        return self._random()

    def _random(self) -> Proposal | None:
        for _ in range(TRIES):
            settings = self.space.draw(self._rng)
            if self.space.text(settings) in self.seen or self._refuses(settings):
                continue
            return self._given("random", settings)
        return None

    def _given(self, lane: str, settings: Mapping[str, Any]) -> Proposal | None:
        """The point as a trial of the study, unless it was proposed before."""
        found = self._proposal(lane, settings)
        if found is None:
            return None
        self.study.enqueue_trial(self.space.parameters(settings), user_attrs={"lane": lane})
        trial = self.study.ask()
        self._sampled(trial)
        return Proposal(found.number, lane, settings, found.key, trial)

    def _sampled(self, trial: optuna.Trial) -> dict[str, Any]:
        return self.space.sample(lambda p: trial.suggest_categorical(p.name, p.choices))

    def _close(self, trial: optuna.Trial, value: float | None) -> None:
        if value is None:
            self.study.tell(trial, state=self._states.PRUNED)
        else:
            self.study.tell(trial, value)


def lanes_line(best: Mapping[str, tuple[int, float | None]]) -> str | None:
    """Whether TPE beat chance. best: for each lane its number of trials and its best time in ms."""
    if "tpe" not in best or "random" not in best:
        return None
    (searched, tpe), (drawn, chance) = best["tpe"], best["random"]
    if tpe is None or chance is None:
        lacking = f"none of {searched} trials by TPE" if tpe is None else f"none of {drawn} trials at random"
        return f"TPE cannot be compared with chance: {lacking} has a time"
    verdict = "TPE beat the random lane" if tpe < chance else "TPE did not beat the random lane"
    return f"{verdict}: best {tpe:.4g} ms of {searched} trials, {chance:.4g} ms of {drawn} at random"
