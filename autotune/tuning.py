"""The Python door of the tuner: which device, which backends and which budget a sweep gets, and where its winner is kept."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3dsl.errors import ArgumentError
from k3dsl.runtime.op import Op

if TYPE_CHECKING:
    from k3dsl.autotune.result import Result, State
    from k3dsl.targets import Ceilings, Target

Watch = Callable[["Problem", float], AbstractContextManager["Callable[[State], None] | None"]]
LEAST_S = 1.0
"""Of a total budget: what the last op gets when the others used it up; its default is still judged."""
START_S = {True: 30.0, False: 4.0}
"""About what processes take to start, on a machine with GPUs and on one without."""


@dataclass(frozen=True)
class Problem:
    """An op at dims, with what it computes and what is not searched. Made by `problem`, which checks the names."""

    op: Op
    dims: Mapping[str, int]
    options: Mapping[str, Any]
    fixed: Mapping[str, Any]


def problem(
    op: str | Op,
    dims: Mapping[str, int] | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    small: bool = False,
) -> Problem:
    """What to tune. op: name in the registry, or an Op. settings: options say what is computed; knobs and schedule fields
    ('scan.num_warps') are fixed. small: dims that are left open are what the op asks of a CPU.

    Raises UnknownNameError, ArgumentError.
    """
    from k3dsl.ops.registry import get_op

    chosen = get_op(op) if isinstance(op, str) else op
    knobs, options, _ = chosen.split_settings(settings or {})
    chosen.resolve_knobs(knobs)
    known = chosen.resolve_dims({**(chosen.cpu_dims if small else {}), **(dims or {})})
    numbers = {name: size for name, size in known.items() if isinstance(size, int)}
    fixed = {name: value for name, value in (settings or {}).items() if name not in options}
    return Problem(chosen, numbers, chosen.resolve_options(options), fixed)


def tune(
    op: str | Op,
    dims: Mapping[str, int] | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    target: str = "auto",
    backends: Sequence[str] | None = None,
    budget_s: float = 120.0,
    max_trials: int | None = None,
    stop_share: float = 0.95,
    seed: int = 0,
    resume: bool = True,
    devices: Sequence[int] | None = None,
    workers: int = 1,
    storage: str | None = None,
    keep: bool = True,
    watch: Watch | None = None,
) -> Result:
    """Finds the settings that run an op fastest at these dims on this machine, and keeps them for later calls of the op.

    op, dims, settings: see `problem`. target: 'cpu' (the torch backend), the name of this machine's GPU, or 'auto'. backends:
    launches may differ in theirs; None: all that are here. budget_s: seconds for trials and finalists. max_trials: at most so
    many. stop_share: stop at that share of the roofline, on a GPU. seed: of the search. resume: go on where the same sweep
    stopped, or begin anew. devices: numbers of GPUs that work on it; None: all of the first one's kind. workers: processes on
    a CPU. storage: a study that other machines share: an optuna URL ('sqlite:///FILE', 'postgresql://...') or the path of a
    file. keep: whether the winner is kept. watch: (problem, budget) -> a context manager that gives what is called after every
    step.

    A sweep begins in this process and runs candidates in others. It writes every trial to a journal, from which a killed one
    goes on; Ctrl-C ends it with Result.interrupted. Raises LockedError after k3dsl.lock(), UnknownNameError, ArgumentError,
    LegalityError (the op's default cannot be traced), LaunchError (the device cannot be used).
    """
    where = target_here(target)
    (result,) = tune_each(
        [problem(op, dims, settings, small=where is None)], target=target, backends=backends, budget_s=budget_s,
        max_trials=max_trials, stop_share=stop_share, seed=seed, resume=resume, devices=devices, workers=workers,
        storage=storage, keep=keep, watch=watch,
    )  # fmt: skip
    return result


def tune_each(
    problems: Sequence[Problem],
    *,
    target: str = "auto",
    backends: Sequence[str] | None = None,
    budget_s: float = 120.0,
    total_budget_s: float | None = None,
    max_trials: int | None = None,
    stop_share: float = 0.95,
    seed: int = 0,
    resume: bool = True,
    devices: Sequence[int] | None = None,
    workers: int = 1,
    storage: str | None = None,
    keep: bool = True,
    watch: Watch | None = None,
) -> Iterator[Result]:
    """Tunes one problem after the other, see `tune`; ends after one that was interrupted.

    budget_s: of each problem. total_budget_s: of all together; each gets an equal share of what is left of it, so that time
    which one does not need goes to those after it.
    """
    from k3dsl.autotune.result import Limits
    from k3dsl.autotune.sweep import machinery, sweep
    from k3dsl.runtime.op import check_names

    where = target_here(target)
    chosen = backends_here(backends, where)
    check_names("backend", chosen, ["torch", "triton", "tilelang"])
    if total_budget_s is not None and not total_budget_s > 0:
        raise ArgumentError(f"a total budget of {total_budget_s} s", fix="give seconds above 0")
    limits = Limits(budget_s, max_trials, stop_share)
    used = devices_here(where, devices, workers)
    rates, identity = _device_facts(used[0], problems)
    start = time.monotonic()
    with ExitStack() as open_until_the_end:  # processes take seconds to start: one set of them serves all problems
        make_pool, make_crew = machinery(where, used)
        pool = cache(lambda: open_until_the_end.enter_context(make_pool()))
        crew = cache(lambda: open_until_the_end.enter_context(make_crew()))
        for number, p in enumerate(problems):
            share = limits.budget_s
            if total_budget_s is not None:
                left = total_budget_s - (time.monotonic() - start)
                share = max(
                    LEAST_S,
                    min(share, _share(left, len(problems) - number, 0.0 if number else START_S[where is not None])),
                )
            with watch(p, share) if watch is not None else nullcontext() as seen:
                result = sweep(
                    p.op, p.dims, p.options, replace(limits, budget_s=share), target=where, backends=chosen, seed=seed,
                    resume=resume, fixed=p.fixed, devices=used, floor_ms=_floor(p, chosen[0], rates), storage=storage,
                    pool=lambda: nullcontext(pool()), worker=lambda: nullcontext(crew()), watch=seen, identity=identity,
                )  # fmt: skip
            yield replace(result, saved=_save(result, used[0])) if keep else result
            if result.interrupted:
                return


def _share(left_s: float, problems: int, start_s: float) -> float:
    """Of what is left for so many problems, seconds for the first of them. Processes that it has to start take `start_s`, which
    is not to be its loss alone."""
    start_s = min(start_s, left_s / problems)
    return start_s + (left_s - start_s) / problems


# ---- what is here ----------------------------------------------------------------------------------------------------------


def target_here(name: str) -> Target | None:
    """None for the CPU. A GPU must be the one that is here: candidates are timed on it. Raises ArgumentError."""
    from k3dsl.targets import detect, get_target

    if name == "cpu":
        return None
    here = detect()
    if name == "auto":
        return here
    wanted = get_target(name)
    if here is None or here.name != wanted.name:
        found = "there is none that torch can use" if here is None else f"this machine has {here.name}"
        raise ArgumentError(f"tuning for {wanted.name} runs candidates on such a GPU, and {found}", fix="--target cpu")
    return wanted


def backends_here(names: Sequence[str] | None, target: Target | None) -> tuple[str, ...]:
    """The backends of a sweep; None: all that are installed."""
    if names:
        return tuple(dict.fromkeys(names))
    if target is None:
        return ("torch",)
    return ("triton", "tilelang") if importlib.util.find_spec("tilelang") is not None else ("triton",)


def devices_here(target: Target | None, numbers: Sequence[int] | None, workers: int = 1) -> tuple[str, ...]:
    """The devices of a sweep, all of one kind, as torch names them. Raises ArgumentError."""
    if workers < 1:
        raise ArgumentError(f"{workers} workers", fix="give at least 1")
    if target is None:
        if numbers:
            raise ArgumentError("a CPU has no device numbers", fix="give the number of processes as workers")
        return ("cpu",) * workers
    if workers > 1:
        raise ArgumentError(
            "several workers on one GPU would disturb each other's times", fix="name more GPUs as devices"
        )
    import torch

    count = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(n) for n in range(count)]
    if numbers is None:
        return tuple(f"cuda:{n}" for n in range(count) if names[n] == names[0])
    chosen = tuple(dict.fromkeys(numbers))
    for n in chosen:
        if not 0 <= n < count:
            raise ArgumentError(f"there is no GPU {n}", fix=f"name some of 0 to {count - 1}")
        if names[n] != names[chosen[0]]:
            raise ArgumentError(f"GPU {n} is {names[n]}, GPU {chosen[0]} is {names[chosen[0]]}", fix="tune them apart")
    if not chosen:
        raise ArgumentError("no device is named", fix="name at least one")
    return tuple(f"cuda:{n}" for n in chosen)


def _device_facts(device: str, problems: Sequence[Problem]) -> tuple[Ceilings | None, Mapping[str, Any]]:
    """The device's measured rates (None on the CPU), and what tells it from others."""
    from k3dsl.autotune.key import describe_gpu
    from k3dsl.runtime.timing import ceilings

    products = any(p.op.flops is not None for p in problems)
    return None if device == "cpu" else ceilings(device, products=products), {"gpu": describe_gpu(device)}


def _floor(p: Problem, backend: str, rates: Ceilings | None) -> float | None:
    from k3dsl.autotune.study import floor_of

    return None if rates is None else floor_of(p.op, p.dims, p.options, backend, rates)


def _save(result: Result, device: str) -> Path | None:
    """Keeps the winner where later calls look for it; the file."""
    from k3dsl.autotune.key import describe_gpu
    from k3dsl.autotune.store import put, winner_from

    candidate, outcome = result.winner, result.outcome
    if candidate is None or outcome is None:
        return None
    measure = {"timer": "eager" if device == "cpu" else "graph", "cold_l2": device != "cpu"}
    return put(winner_from(candidate, outcome, describe_gpu(device), measure, result.repeats, result.roofline_share))
