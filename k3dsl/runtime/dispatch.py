"""From a call on torch tensors to a compiled plan: picks the backend, remembers what was compiled."""

from __future__ import annotations

import importlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch

from k3dsl import settings
from k3dsl.errors import ArgumentError, BuildError, LaunchError, LegalityError, ResourceError
from k3dsl.ir.symbols import Sym
from k3dsl.runtime.backends import GENERATING
from k3dsl.runtime.executable import Call, Executable, watching
from k3dsl.runtime.op import Op, Point, forced_for, forced_key
from k3dsl.runtime.plan import Plan
from k3dsl.targets import Target, detect

log = logging.getLogger("k3dsl.autotune")
T = TypeVar("T")
NARROW = 1 << 24
ALIGNMENT = 16


Layouts = tuple[tuple[str, torch.Size, tuple[int, ...]], ...]
"""(name, shape, strides) of each tensor that is not contiguous."""


def layouts_of(tensors: Mapping[str, torch.Tensor]) -> Layouts:
    """The tensors that are not contiguous."""
    return tuple([(n, t.shape, t.stride()) for n, t in tensors.items() if not t.is_contiguous()])


def strides_of(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, tuple[int | Sym, ...]], dict[str, int]]:
    """`facts_of` tensors."""
    return facts_of(layouts_of(tensors))


def facts_of(layouts: Layouts) -> tuple[dict[str, tuple[int | Sym, ...]], dict[str, int]]:
    """Layout facts of the tensors that are not contiguous: a symbol an axis with its divisor and size class, and values.

    A stride of 1 is compiled in, on whichever axis it is: that is what lets a transposed tensor be read quickly. A symbol's
    facts depend only on the power of two that divides the stride and on whether it is under 2^24, so that similar calls
    share code.
    """
    facts: dict[str, tuple[int | Sym, ...]] = {}
    values: dict[str, int] = {}
    for name, shape, strides in layouts:
        symbols: list[int | Sym] = []
        last = len(shape) - 1
        for axis, stride in enumerate(strides):
            if stride == 1 if shape[axis] != 1 else axis == last:
                symbols.append(1)
                continue
            if shape[axis] == 1:
                stride = ALIGNMENT  # any would do; TMA's descriptors want a multiple of 16 bytes
            divisor = next(n for n in (16, 8, 4, 2, 1) if stride % n == 0)
            symbol = Sym(f"{name}_stride{axis}", divisor, 0, NARROW if stride <= NARROW else 1 << 45)
            symbols.append(symbol)
            values[symbol.name] = stride
        facts[name] = tuple(symbols)
    return facts, values


def aligned(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, those whose first element is not at a multiple of 16 bytes copied: generated code counts on it."""
    return {n: t if t.data_ptr() % ALIGNMENT == 0 else t.clone() for n, t in tensors.items()}


def current_target(device: torch.device) -> Target | None:
    """The target of a torch device; None for the CPU. Raises ArgumentError for a GPU that k3dsl does not know."""
    if device.type == "cpu":
        return None
    target = detect()
    if target is None:
        raise ArgumentError(f"no target is known for {device}", fix="`k3dsl doctor` lists what this machine offers")
    return target


_wanted: ContextVar[str | None] = ContextVar("k3dsl_backend", default=None)


@contextmanager
def using_backend(backend: str | None) -> Iterator[None]:
    """While active, ops on a GPU run through this backend, whatever K3DSL_BACKEND says. None changes nothing."""
    token = _wanted.set(backend or _wanted.get())
    try:
        yield
    finally:
        _wanted.reset(token)


_planning: ContextVar[bool] = ContextVar("k3dsl_planning", default=False)
_planned_for: ContextVar[Target | None] = ContextVar("k3dsl_planned_for", default=None)


@contextmanager
def planning(backend: str, target: Target | None = None) -> Iterator[list[Call]]:
    """While active, the executables that calls would run on a GPU through this backend, and the runtime dims, are appended to
    the list.

    Calls are made on CPU tensors, whose numbers nobody reads; they run nothing, and their outputs hold anything. For
    building ahead and for counting, where no GPU is. target: of that GPU, on which defaults may depend. Raises ArgumentError
    for a backend that builds nothing.
    """
    if backend not in GENERATING:
        raise ArgumentError(f"calls through the {backend} backend build nothing", fix=f"one of {', '.join(GENERATING)}")
    calls: list[Call] = []
    token, other = _planning.set(True), _planned_for.set(target)
    try:
        with using_backend(backend), watching(calls.append):
            yield calls
    finally:
        _planning.reset(token)
        _planned_for.reset(other)


def only_planned() -> bool:
    """Whether calls are planned and not run."""
    return _planning.get()


def computes_on_cpu(device: torch.device) -> bool:
    """Whether a call on this device runs through the torch backend."""
    return device.type == "cpu" and not _planning.get()


def backend_override() -> str | None:
    """The backend of `using_backend`, if one is active."""
    return _wanted.get()


def wanted_backend(device: torch.device) -> str:
    """torch on the CPU; on a GPU what `using_backend`, then K3DSL_BACKEND says: 'auto' leaves it to what was tuned."""
    named = _wanted.get() or str(settings.get("K3DSL_BACKEND"))  # refuses a name that there is not, on the CPU too
    return "torch" if computes_on_cpu(device) else named


def choose_backend(device: torch.device) -> str:
    """As `wanted_backend`, with Triton for 'auto'."""
    wanted = wanted_backend(device)
    return "triton" if wanted == "auto" else wanted


@dataclass(frozen=True)
class Problem:
    """One kind of call, for which an op's settings are chosen.

    dims: numbers, as many as are known; of a runtime dim one that stands for its size class. known: the dims that the
    plan takes. wanted: a backend, or 'auto'.
    """

    op: Op
    options: Mapping[str, Any]
    dims: Mapping[str, int]
    known: Mapping[str, Any]
    strides: Mapping[str, tuple[int | Sym, ...]]
    device: torch.device
    wanted: str


@dataclass(frozen=True)
class Choice:
    """How a call runs: knobs, schedule fields by launch, and the backend of the launches that those do not name."""

    knobs: Mapping[str, Any]
    schedules: Mapping[str, Mapping[str, Any]] | None
    backend: str


Provider = Callable[[Problem], "Choice | None"]
_provider: str | Provider | None = None


class Cache(Protocol):
    """What keeps choices of code."""

    def cache_clear(self) -> None: ...


_caches: weakref.WeakSet[Cache] = weakref.WeakSet()


def forgotten_with(cache: Cache) -> None:
    """Makes `forget` clear this cache too."""
    _caches.add(cache)


def remembered(choose: Callable[..., T]) -> Callable[..., T]:
    """The function with what it chose for 4096 kinds of calls, until `forget`."""
    found = lru_cache(maxsize=4096)(lambda _planned, *given: choose(*given))
    forgotten_with(found)

    def look(*given: Any) -> T:
        return found(_planned_for.get(), *given)

    return look


def forget() -> None:
    """Drops which code was chosen for which kinds of calls, so that each is chosen again; what is compiled stays."""
    for cache in list(_caches):
        cache.cache_clear()


def provide(provider: str | Provider | None) -> None:
    """Sets who knows tuned settings: a function, or 'module:function', imported when it is first needed. It is asked anew for
    kinds of calls that were seen before."""
    global _provider
    _provider = provider
    forget()


def tuned(problem: Problem) -> Choice | None:
    """What was tuned for such a call; None for nothing, and while settings are forced on the op."""
    global _provider
    if _provider is None or forced_key(problem.op) is not None:
        return None
    if isinstance(_provider, str):
        module, name = _provider.split(":")
        _provider = getattr(importlib.import_module(module), name)
    assert callable(_provider)
    return _provider(problem)


class Dispatcher:
    """Compiled plans of one op by everything that changes the code."""

    def __init__(self, plan: Callable[..., Plan]) -> None:
        self._plan = plan
        self._known: dict[Any, Executable] = {}

    def pick(self, problem: Problem) -> tuple[Executable, Mapping[str, Any]]:
        """The code for such a call with tuned settings if there are any, else the op's defaults; and the knobs it has."""
        choice = tuned(problem)
        how = problem.known, problem.options, problem.strides, problem.device
        if choice is not None:
            try:
                return self._with(choice, *how), choice.knobs
            except (
                LegalityError,
                ResourceError,
                BuildError,
                LaunchError,
            ) as error:  # such as TileLang's code without nvcc
                log.warning("%s: tuned settings do not run here, its default is used: %s", problem.op.name, error)
        backend = "triton" if problem.wanted == "auto" else problem.wanted
        on_cpu = computes_on_cpu(problem.device)
        target = _planned_for.get() if only_planned() else current_target(problem.device)
        knobs = problem.op.default_knobs(problem.options, problem.dims, on_cpu, target)
        choice = Choice(knobs, None, backend)
        return self._with(choice, *how), choice.knobs

    def _with(
        self,
        choice: Choice,
        dims: Mapping[str, Any],
        options: Mapping[str, Any],
        strides: Mapping[str, tuple[int | Sym, ...]],
        device: torch.device,
    ) -> Executable:
        return self(dims, choice.knobs, options, strides, device, choice.schedules, choice.backend)

    def __call__(
        self,
        dims: Mapping[str, Any],
        knobs: Mapping[str, Any],
        options: Mapping[str, Any],
        strides: Mapping[str, tuple[int | Sym, ...]],
        device: torch.device,
        schedules: Mapping[str, Mapping[str, Any]] | None = None,
        backend: str | None = None,
    ) -> Executable:
        backend = backend or choose_backend(device)
        force = forced_for(self._plan)
        if force is not None:
            schedules = force.schedules
        key = (
            backend,
            device,
            only_planned(),
            tuple(dims.items()),
            tuple(knobs.items()),
            tuple(options.items()),
            tuple(strides.items()),
            repr(schedules) if schedules else None,
        )
        found = self._known.get(key)
        if found is None:
            if force is not None:
                Point(force.op, dims, knobs, options, {}).check()
            plan = self._plan(dims, knobs, options, backend, schedules, strides)
            found = self._known[key] = Executable(plan, current_target(device), device, launched=not only_planned())
        return found
