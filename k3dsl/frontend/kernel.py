"""`@kernel`: an ordinary Python function that is traced into IR once for each set of static dims, knobs and dtypes."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from k3dsl.errors import ArgumentError, K3Error, KernelCodeError, ParseError, TraceError, UnknownNameError
from k3dsl.frontend.builder import Builder, internal, short_path, user_location
from k3dsl.frontend.tensor import Declaration, Span, TensorRef, TensorSpec
from k3dsl.frontend.tile import Tile
from k3dsl.ir.graph import Kernel as IRKernel
from k3dsl.ir.graph import ScalarParam, TensorParam, Value
from k3dsl.ir.symbols import Expr, Sym, parse_expr, when_unequal
from k3dsl.ir.types import DType, TileType

DimValue = Any  # int | Sym | Expr


class Namespace:
    """Dims or knobs by attribute: d.T, c.BV. An unknown name says which names there are."""

    def __init__(self, what: str, values: Mapping[str, Any]) -> None:
        self._what = what
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise UnknownNameError(_not_given(self._what, name, self._values), where=user_location()) from None

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)


def _unknown(what: str, name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(known)) or 'none'}"
    return f"unknown {what} {name!r}; {hint}"


def _not_given(what: str, name: str, given: Mapping[str, Any]) -> str:
    """Of a name that a kernel asks for: either side may have it wrong."""
    near = difflib.get_close_matches(name, list(given), n=3)
    hint = f"is {' or '.join(near)} meant?" if near else f"given: {', '.join(sorted(given)) or 'none'}"
    return f"the kernel asks for the {what} {name!r}, which was not given; {hint}"


class Kernel:
    """A kernel in the language. `trace` turns it into IR; k3dsl.compile and the ops do so for you."""

    def __init__(self, fn: Callable[..., None], grid: Callable[[Any, Any], tuple[Any, ...]], name: str | None) -> None:
        self.fn = fn
        self.grid = grid
        self.name = name or fn.__name__
        self.__doc__ = fn.__doc__
        self.parameters: dict[str, Declaration] = {}
        parameters = list(inspect.signature(fn).parameters.values())
        if len(parameters) < 2 or any(isinstance(p.default, Declaration) for p in parameters[:2]):
            raise TraceError(
                f"kernel {self.name} takes ({', '.join(p.name for p in parameters)})",
                where=self.location,
                fix="the first two parameters are the dims and the knobs: (d, c, x=In(...), ...)",
            )
        if not callable(grid):
            raise TraceError(
                f"kernel {self.name}: grid is {grid!r}, no function",
                where=self.location,
                fix="grid=lambda d, c: (d.T,)",
            )
        for p in parameters[2:]:
            if not isinstance(p.default, Declaration):
                raise TraceError(
                    f"parameter {p.name!r} of kernel {self.name} is not declared",
                    where=self.location,
                    fix=f'give it a declaration as default: {p.name}=In("T H"), Out(...), InOut(...) or Scalar(f32)',
                )
            self.parameters[p.name] = p.default

    def __call__(self, *_: Any, **__: Any) -> None:
        raise TraceError(
            f"kernel {self.name} is called before it is compiled",
            where=user_location(),
            fix=f"k3dsl.compile({self.name}, dims=..., target=...)(x=..., y=...): one call with the tensors by name",
        )

    def __getitem__(self, _: Any) -> None:
        raise TraceError(
            f"kernel {self.name} takes no grid at a call",
            where=user_location(),
            fix=f"its grid is in @kernel(grid=...); k3dsl.compile({self.name}, dims=..., target=...)(x=..., y=...)",
        )

    @property
    def location(self) -> str:
        return f"{short_path(self.fn.__code__.co_filename)}:{self.fn.__code__.co_firstlineno}"

    def trace(
        self,
        dims: Mapping[str, DimValue],
        knobs: Mapping[str, Any] | None = None,
        tensors: Mapping[str, DType | TensorSpec | None] | None = None,
    ) -> IRKernel:
        """Runs the function once with symbolic values.

        dims: each an int (static) or a Sym (runtime, with facts). knobs: plain values. tensors: a dtype or TensorSpec for
        each parameter whose declaration leaves the dtype open; None leaves an optional one out.
        Raises TraceError with the user's file and line.
        """
        given = dict(tensors or {})
        for name in given:
            if name not in self.parameters:
                raise UnknownNameError(_unknown(f"parameter of kernel {self.name}", name, self.parameters))
        values = {n: Expr.of(v) if isinstance(v, (Sym, Expr)) else v for n, v in dims.items()}
        symbols = {v.name: v for v in dims.values() if isinstance(v, Sym)}
        knobs = dict(knobs or {})
        d, c = Namespace("dim", values), Namespace("knob", knobs)

        params: list[TensorParam] = []
        scalars: list[ScalarParam] = []
        arguments: dict[str, Any] = {}
        for name, declaration in self.parameters.items():
            if declaration.role == "scalar":
                assert declaration.dtype is not None
                scalars.append(ScalarParam(name, declaration.dtype))
                continue
            spec = given.get(name, declaration.dtype if not declaration.optional else None)
            if spec is None:
                if not declaration.optional:
                    raise ArgumentError(
                        f"kernel {self.name}: no dtype given for tensor {name!r}",
                        where=self.location,
                        fix=f"pass tensors={{{name!r}: bf16}}",
                    )
                arguments[name] = None
                continue
            if isinstance(spec, DType):
                spec = TensorSpec(spec)
            param = self._tensor_param(name, declaration, spec, values, knobs)
            for stride in spec.strides or ():
                if isinstance(stride, Sym):
                    symbols[stride.name] = stride
            params.append(param)
            arguments[name] = TensorRef(param)

        builder = Builder({p.name: p for p in params})
        scalar_values = [Value(TileType(s.dtype), None, s.name) for s in scalars]
        for s, v in zip(scalars, scalar_values, strict=True):
            builder.home[id(v)] = builder.body
            arguments[s.name] = Tile(v)
        with _located(self):
            grid = self.grid(d, c)
        for extent in grid if isinstance(grid, tuple) else (grid,):
            if not isinstance(extent, (int, Expr)) or isinstance(extent, bool):
                raise TraceError(
                    f"kernel {self.name}: a grid extent is an integer, got {extent!r}", where=self.location
                )
        extents = tuple(Expr.of(g) for g in (grid if isinstance(grid, tuple) else (grid,)))
        if not 1 <= len(extents) <= 3:
            raise TraceError(f"kernel {self.name}: a grid has 1 to 3 axes, got {len(extents)}", where=self.location)
        builder.grid = extents
        with builder.active(), _located(self), _variable_names():
            result = self.fn(d, c, **arguments)
        if result is not None:
            raise TraceError(f"kernel {self.name} returns a value", where=self.location, fix="store results in tensors")
        return IRKernel(
            self.name, params, scalars, list(symbols.values()), extents, builder.body, scalar_values, self.location
        )

    def _tensor_param(
        self, name: str, declaration: Declaration, spec: TensorSpec, dims: Mapping[str, Any], knobs: Mapping[str, Any]
    ) -> TensorParam:
        if declaration.dtype is not None and spec.dtype != declaration.dtype:
            raise ArgumentError(f"kernel {self.name}: tensor {name!r} is {declaration.dtype}, got {spec.dtype}")
        names = {n: v for n, v in {**knobs, **dims}.items() if isinstance(v, (int, Expr)) and not isinstance(v, bool)}
        try:
            shape = tuple(parse_expr(token, names) for token in declaration.shape.split())
        except ParseError as error:
            raise TraceError(
                f"kernel {self.name}: shape {declaration.shape!r} of {name!r}: {error.message}",
                where=self.location,
                fix=error.fix or "name dims, knobs and integers, separated by spaces",
            ) from None
        strides = None
        if spec.strides is not None:
            if len(spec.strides) != len(shape):
                raise ArgumentError(f"tensor {name!r} has {len(shape)} axes, got {len(spec.strides)} strides")
            strides = tuple(Expr.of(s) for s in spec.strides)
        return TensorParam(name, spec.dtype, shape, declaration.role, strides)


def kernel(
    function: object = None, *, grid: Callable[[Any, Any], Any] | None = None, name: str | None = None
) -> Callable[[Callable[..., None]], Kernel]:
    """Declares a kernel. grid: (dims, knobs) -> a tuple of 1 to 3 extents."""
    if function is not None or grid is None:
        what = "@kernel without a grid" if grid is None else "@kernel takes its function as a decorator does"
        raise TraceError(what, where=user_location(), fix="@kernel(grid=lambda d, c: (d.T,)): programs along each axis")

    def decorate(fn: Callable[..., None]) -> Kernel:
        return Kernel(fn, grid, name)

    return decorate


PYTHONS_OWN = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)
"""Errors that Python raises over what a kernel's function does."""
_OTHERS = tuple(os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))


_tracing: ContextVar[bool] = ContextVar("k3dsl_tracing", default=False)


def _decidable(a: Expr, b: Expr) -> None:
    """Raises TraceError where a kernel's code compares dims that may be equal or not: `d.N == 8` has no answer yet."""
    if not _tracing.get() or internal(sys._getframe(2).f_code.co_filename):
        return
    apart = a - b
    if not ((apart - 1).nonnegative() or (-apart - 1).nonnegative()):
        raise TraceError(
            f"{a} compared with {b} is only known at run time",
            fix="make the dim static, or compare traced values: scalar(d.T) == n, in where() or when()",
        )


when_unequal(_decidable)


@contextmanager
def _located(kernel: Kernel) -> Iterator[None]:
    """While active, what goes wrong in the user's code names the line, Python's own errors too."""
    token = _tracing.set(True)
    try:
        yield
    except K3Error as error:
        if error.where is not None or type(error) is not TraceError:
            raise
        raise TraceError(error.message, where=_user_line(error, kernel), fix=error.fix) from error
    except PYTHONS_OWN as error:
        message = f"kernel {kernel.name}: {type(error).__name__}: {error}"
        raise KernelCodeError(message, where=_user_line(error, kernel)) from error
    finally:
        _tracing.reset(token)


def _user_line(error: BaseException, kernel: Kernel) -> str:
    """file:line of the user's code that was the last to run when the error was raised; the kernel's where none was."""
    found = kernel.location
    own = kernel.fn.__code__.co_filename
    trace = error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if path == own or not (internal(path) or os.path.realpath(path).startswith(_OTHERS)):
            found = f"{short_path(path)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


@contextmanager
def _variable_names() -> Iterator[None]:
    """While active, a traced value takes the name of the user's variable that holds it, for readable output."""

    def watch(frame: Any, event: str, arg: Any) -> None:
        if event != "return" or internal(frame.f_code.co_filename):
            return
        for name, held in list(frame.f_locals.items()):
            if isinstance(held, Span) and isinstance(held.start, Tile):
                held, name = held.start, f"{name}_start"
            if isinstance(held, Tile):
                if held.value.name is None:
                    held.value.name = name
            elif isinstance(held, tuple) and held and all(isinstance(h, Tile) for h in held):
                for k, h in enumerate(held):
                    if h.value.name is None:
                        h.value.name = f"{name}_{k}"

    previous = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        if previous is None or callable(previous):
            sys.setprofile(previous)
        else:
            previous.enable()  # cProfile's, which is not set by a call of this
