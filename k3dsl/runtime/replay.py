"""Repeating a call of a torch function on like tensors: what its checks and its choice of code came to is kept, not redone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from math import prod
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from k3dsl.runtime import executable
from k3dsl.runtime.dispatch import ALIGNMENT, backend_override, forgotten_with
from k3dsl.runtime.executable import Call, Executable
from k3dsl.runtime.lanes import Enqueue
from k3dsl.runtime.op import forced_block

P = ParamSpec("P")
R = TypeVar("R")
MOST = 4096
"""Kinds of calls that a function remembers."""
SCRATCH_ALIGNMENT = 256
"""Bytes; what descriptors of the tensor memory accelerator ask for, and more."""
_PLAIN = (type(None), bool, int, float, str, torch.dtype)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_SEEN, _NEVER = "seen once", "not to be replayed"


def replayed(function: Callable[P, R]) -> Callable[P, R]:
    """A torch function of an op, whose third call of a kind and later ones go straight to their launches.

    A kind of call is everything about the arguments but the tensors' addresses and contents: shapes, strides, dtypes, devices,
    and the values of what is no tensor. The second call of a kind is watched: where each tensor that an executable took is a
    view of an argument or was made by an executable before, and each result is one of those, later calls take views, make
    outputs and launch alike. Any other call, and one that raises, runs `function` each time.

    `function` promises that beside checks, views and allocations it does nothing but call executables; that what it does
    follows from the kind of call and the settings that `provide`, `forced` and `using_backend` make; and that it looks at a
    tensor's numbers only through `rechecked`, or after `not_replayed`.

    Calls that somebody watches go through `function`, and so through torch's dispatcher: under torch.compile, tracing,
    torch.func and forward-mode differentiation, a torch function or dispatch mode or a profiler, with tensors of a subclass
    or that need a gradient, and inside `recording` and `allocating`.
    """
    memo = _Memo(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return memo(args, kwargs)

    return call


def rechecked(check: Callable[..., None], *arguments: Any) -> None:
    """Runs a check that looks at tensors' numbers, now and in every later call of this kind."""
    check(*arguments)
    trace = _trace.get()
    if trace is not None:
        trace.checks.append((check, arguments))


def not_replayed() -> None:
    """Says that the call under way depends on more than its kind, so that it is not to be replayed."""
    trace = _trace.get()
    if trace is not None:
        trace.whole = False


# ---- a kind of call ----------------------------------------------------------------------------------------------------


def _watched() -> bool:
    """Whether somebody wants to see calls as they are made; see `replayed`."""
    return bool(
        executable.observed()
        or _trace.get() is not None  # a call within a call that is being watched is a part of it
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def _describe(
    arguments: Sequence[Any], key: list[Any], tensors: list[torch.Tensor], addresses: list[int], gradients: bool
) -> bool:
    """Adds the arguments to a key, and the tensors among them with their addresses to lists; False for what no key tells."""
    for x in arguments:
        kind = type(x)
        if kind in _TENSORS:
            address = x.data_ptr()
            # what starts elsewhere is copied; an address of 0 is that of no data
            # what is_neg is to be negated when it is read, as the imaginary part of a conjugate
            if address == 0 or address % ALIGNMENT or (gradients and x.requires_grad) or x.is_neg():
                return False
            if x.is_contiguous():
                key += (x.dtype, x.shape, x.get_device())
            else:
                key += (x.dtype, x.shape, x.get_device(), x.stride())
            tensors.append(x)
            addresses.append(address)
        elif kind is float and not (x < 0 or x > 0):
            if x != x:  # a NaN is equal to nothing
                return False
            key += (kind, repr(x))  # 0.0 and -0.0 are equal
        elif kind in _PLAIN:
            key += (kind, x)  # True, 1 and 1.0 are equal, and not one kind of call
        elif kind is tuple or kind is list:
            key += (kind, len(x))
            if not _describe(x, key, tensors, addresses, gradients):
                return False
        else:
            return False
    return True


class _Memo:
    """What is known of the kinds of calls of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.known: dict[tuple[Any, ...], Any] = {}
        forgotten_with(self)

    def cache_clear(self) -> None:
        """Forgets every kind of call. A call under way may still add to what is forgotten, not to what is known."""
        self.known = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function, known = self.function, self.known
        if _watched():
            return function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        addresses: list[int] = []
        key: list[Any] = [forced_block(), backend_override(), os.environ.get("K3DSL_BACKEND"), len(args), *kwargs]
        gradients = torch.is_grad_enabled()
        try:
            plain = _describe(args, key, tensors, addresses, gradients)
            plain = plain and (not kwargs or _describe(tuple(kwargs.values()), key, tensors, addresses, gradients))
        except RuntimeError:  # a tensor without strides or without data
            plain = False
        if not plain:
            return function(*args, **kwargs)
        kind = tuple(key)
        found = known.get(kind)
        if found is None:
            result = function(*args, **kwargs)
            if len(known) >= MOST:
                known.clear()
            known[kind] = _SEEN
            return result
        if found is _SEEN:
            result, known[kind] = _watch(function, args, kwargs)
            return result
        return function(*args, **kwargs) if found is _NEVER else found(tensors, addresses)


# ---- the call that is watched ------------------------------------------------------------------------------------------


@dataclass
class _Trace:
    """A call as it went: executables and checks of numbers in order. whole: whether that is all there is to it."""

    calls: list[Call] = field(default_factory=list)
    checks: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    whole: bool = True


_trace: ContextVar[_Trace | None] = ContextVar("k3dsl_trace", default=None)


@contextmanager
def _tracing() -> Iterator[_Trace]:
    trace = _Trace()
    token = _trace.set(trace)
    try:
        with executable.noting(trace.calls.append):
            yield trace
    finally:
        _trace.reset(token)


def _twin(t: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory by a storage of its own: what is a view of it can be told from views of other arguments."""
    flat = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
    own = torch.from_dlpack(torch.utils.dlpack.to_dlpack(flat)).untyped_storage()
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(own, t.storage_offset(), t.size(), t.stride())


def _watch(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Runs the function; returns its result, and how to replay the call or _NEVER."""
    own: list[torch.Tensor] = []
    twins: list[torch.Tensor] = []

    def swap(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            own.append(x)
            twins.append(_twin(x))
            return twins[-1]
        return type(x)(map(swap, x)) if isinstance(x, (tuple, list)) else x

    try:
        swapped, named = [swap(x) for x in args], {n: swap(x) for n, x in kwargs.items()}
    except RuntimeError:  # memory that cannot be shared
        return function(*args, **kwargs), _NEVER
    with _tracing() as trace:
        result = function(*swapped, **named)
    try:
        replay: Any = _again(trace, twins, result)
    except _UnknownError:
        replay = _NEVER

    def back(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return next((t for t, twin in zip(own, twins, strict=True) if twin is x), x)
        if isinstance(x, tuple):
            return type(x)(*map(back, x)) if hasattr(x, "_fields") else tuple(map(back, x))
        return x

    return back(result), replay


class _UnknownError(Exception):
    """A tensor of a call that comes from somewhere unknown."""


@dataclass(frozen=True)
class _View:
    """A tensor as a view of source number `source`: the arguments, then what the executables made, in order. offset: from the
    source's address, in bytes. same: whether it is the source itself."""

    source: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    same: bool

    def of(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        base = sources[self.source]
        if self.same:
            return base
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset // base.element_size())


class _Sources:
    """The tensors that others may be views of, each with a storage of its own."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._number: dict[int, int] = {}
        for t in tensors:
            self.add(t)

    def add(self, t: torch.Tensor) -> None:
        self._number[t.untyped_storage()._cdata] = len(self.tensors)
        self.tensors.append(t)

    def find(self, t: torch.Tensor) -> _View | None:
        number = self._number.get(t.untyped_storage()._cdata)
        if number is None:
            return None
        base = self.tensors[number]
        if base.dtype != t.dtype:
            return None
        size, stride = tuple(t.size()), tuple(t.stride())
        offset = int(t.storage_offset() - base.storage_offset()) * t.element_size()
        same = offset == 0 and size == tuple(base.size()) and stride == tuple(base.stride())
        return _View(number, size, stride, offset, same)

    def view(self, t: torch.Tensor) -> _View:
        found = self.find(t)
        if found is None:
            raise _UnknownError
        return found


# ---- the call again ----------------------------------------------------------------------------------------------------

Again = Callable[[Sequence[torch.Tensor], Sequence[int]], Any]
"""A call again, of the tensors among its arguments and their addresses; returns what the function does."""


def _again(trace: _Trace, arguments: Sequence[torch.Tensor], result: Any) -> Again:
    """How to make the call of a trace again. Raises _UnknownError where that cannot be told."""
    if not trace.whole or not trace.calls:
        raise _UnknownError
    sources = _Sources(arguments)
    checks = [
        (check, [sources.view(x) if isinstance(x, torch.Tensor) else x for x in given]) for check, given in trace.checks
    ]
    steps = [_step(call, sources) for call in trace.calls]
    views: list[_View] = []
    build = _builder(result, sources, views)
    fixed = [[launch.fixed(own) for launch, own in step.executable.steps(step.dims)] for step in steps]
    if all(launch is not None for launches in fixed for launch in launches):
        run: Again = _ByAddress(steps, fixed, len(arguments), views, build)
    else:
        run = _ByTensors(steps, views, build)
    if not checks:
        return run

    def checked(tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> Any:
        for check, given in checks:
            check(*[x.of(tensors) if isinstance(x, _View) else x for x in given])
        return run(tensors, addresses)

    return checked


@dataclass(frozen=True)
class _Step:
    """One call of an executable: its caller's tensors, and the (name, shape, dtype) of those that it makes, in order."""

    executable: Executable
    given: dict[str, _View]
    made: list[tuple[str, tuple[int, ...], torch.dtype]]
    dims: dict[str, int]


def _step(call: Call, sources: _Sources) -> _Step:
    names = {name for name, _, _ in call.executable.made}
    given: dict[str, _View] = {}
    made = []
    for name, t in call.tensors.items():
        view = sources.find(t)
        if view is not None:
            given[name] = view
        elif name in names:
            made.append((name, tuple(t.shape), t.dtype))
            sources.add(t)
        else:
            raise _UnknownError
    return _Step(call.executable, given, made, dict(call.dims))


def _builder(result: Any, sources: _Sources, views: list[_View]) -> Callable[[Sequence[Any]], Any]:
    """Makes a function that puts a result together of its tensors, whose views it appends."""
    if isinstance(result, torch.Tensor):
        views.append(sources.view(result))
        place = len(views) - 1
        return lambda tensors: tensors[place]
    if isinstance(result, tuple):
        parts = [_builder(x, sources, views) for x in result]
        if hasattr(result, "_fields"):
            kind = type(result)
            return lambda tensors: kind(*[part(tensors) for part in parts])
        return lambda tensors: tuple([part(tensors) for part in parts])
    if type(result) in _PLAIN:
        return lambda _: result
    raise _UnknownError


class _ByTensors:
    """Calls the executables on views."""

    def __init__(self, steps: Sequence[_Step], views: Sequence[_View], build: Callable[[Sequence[Any]], Any]) -> None:
        self.steps, self.views, self.build = steps, views, build

    def __call__(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> Any:
        sources: list[Any] = list(tensors)
        for step in self.steps:
            out = step.executable({n: view.of(sources) for n, view in step.given.items()}, step.dims)
            sources += [out.get(name) for name, _, _ in step.made]  # scratch is nobody's source
        return self.build([view.of(sources) for view in self.views])


class _ByAddress:
    """Launches without views: every argument is a number, or an address so far from an argument's or a buffer's.

    The scratch of an executable is one buffer.
    """

    def __init__(
        self,
        steps: Sequence[_Step],
        fixed: Sequence[Sequence[Any]],
        arguments: int,
        views: Sequence[_View],
        build: Callable[[Sequence[Any]], Any],
    ) -> None:
        self.build = build
        self.views = list(views)
        self.steps: list[tuple[list[tuple[tuple[int, ...], torch.dtype, torch.device]], list[Any], Executable]] = []
        at = {n: (n, 0) for n in range(arguments)}  # of each source: which buffer it is in, and where, in bytes
        count = arguments
        for step, launches in zip(steps, fixed, strict=True):
            source = {n: (view.source, view.offset) for n, view in step.given.items()}
            device, scratch = step.executable.device, 0
            made: list[tuple[tuple[int, ...], torch.dtype, torch.device]] = []
            own = [n for n, _, _ in step.made if n in step.executable.outputs]
            pool = count + len(own)
            for name, shape, dtype in step.made:
                number = len(at)
                source[name] = (number, 0)
                if name in own:
                    at[number] = (count + len(made), 0)
                    made.append((self._shape(number, shape), dtype, device))
                else:
                    at[number] = (pool, scratch)
                    scratch += -(-prod(shape) * dtype.itemsize // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
            if scratch:
                made.append(((scratch,), torch.uint8, device))
            count += len(made)
            calls = []
            for launcher, grid, args, places in launches:
                found = [(i, *at[source[n][0]], source[n][1]) for i, n in places]
                calls.append(
                    (launcher, grid, args, [(i, buffer, start + offset) for i, buffer, start, offset in found])
                )
            self.steps.append((made, calls, step.executable))
        self.views = [replace(view, source=at[view.source][0]) for view in self.views]

    def _shape(self, source: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape to make a buffer in: that of the only result that it is, if it is one whole and in order."""
        places = [i for i, view in enumerate(self.views) if view.source == source]
        if len(places) != 1:
            return shape
        view = self.views[places[0]]
        if view.offset or view.stride != _contiguous(view.size) or prod(view.size) != prod(shape):
            return shape
        self.views[places[0]] = replace(view, same=True)
        return view.size

    def __call__(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> Any:
        buffers, starts = [*tensors], [*addresses]
        for made, launches, code in self.steps:
            for shape, dtype, device in made:
                buffer = torch.empty(shape, dtype=dtype, device=device)
                buffers.append(buffer)
                starts.append(buffer.data_ptr())
            beside: list[Enqueue] | None = [] if code.lanes.several else None
            for launcher, grid, fixed, pointers in launches:
                args = fixed.copy()
                for place, number, offset in pointers:
                    args[place] = starts[number] + offset
                if beside is None:
                    launcher(grid, args)
                else:
                    beside.append(partial(launcher, grid, args))
            if beside is not None:
                code.lanes.run(code.device, beside)
        return self.build([view.of(buffers) for view in self.views])


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(size, device="meta").stride()
