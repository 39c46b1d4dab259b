"""k3dsl.compile: one kernel for one target, ready to call on tensors or to inspect."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from k3dsl.backends.base import Artifact, Source
from k3dsl.backends.torch import dtypes as torch_dtypes
from k3dsl.errors import ArgumentError, NumericsWarning
from k3dsl.frontend import Kernel, TensorSpec
from k3dsl.ir.graph import Kernel as IRKernel
from k3dsl.ir.scalars import integer_range
from k3dsl.ir.symbols import Expr, Sym
from k3dsl.ir.types import DTYPES, DType
from k3dsl.ir.verifier import verify
from k3dsl.passes.exponents import check_exponents
from k3dsl.passes.simplify import simplify
from k3dsl.runtime import backends, executable
from k3dsl.runtime.dispatch import ALIGNMENT, choose_backend, current_target
from k3dsl.runtime.executable import BoundLaunch
from k3dsl.runtime.extents import expression
from k3dsl.runtime.plan import Launch
from k3dsl.targets import Target, get_target

if TYPE_CHECKING:
    from k3dsl.backends.tilelang.schedule import TileLangSchedule
    from k3dsl.backends.triton.schedule import TritonSchedule

    Schedule: TypeAlias = TritonSchedule | TileLangSchedule


class CompiledKernel:
    """A kernel compiled for one target. Call it with tensors by parameter name; runtime dims are read off their shapes.

    Attributes: ir, the simplified IR; source, the generated text (None for the torch backend); artifact, the machine code
    (built on first use).
    """

    def __init__(self, launch: Launch, target: Target | None) -> None:
        self.launch = launch
        self.target = target
        self.ir: IRKernel = launch.kernel
        self._bound: dict[int, BoundLaunch] = {}
        self._dims = self._where_dims_are()
        self._names = [t.name for t in self.ir.tensors]
        self._scalars = {s.name: s.dtype for s in self.ir.scalars}
        self._facts = [(s.name, s.divisible_by, s.min, s.max) for s in self.ir.dims]
        self._expected = [(t.name, torch_dtypes.to_torch(t.dtype), t.rank, t.strides is None) for t in self.ir.tensors]
        self._extents = expression(tuple(e for t in self.ir.tensors for e in (*t.shape, *(t.strides or ()))))

    def _where_dims_are(self) -> list[tuple[str, str, int, bool]]:
        """(dim, tensor, axis, is a stride) for every runtime dim that stands alone in a shape or a stride."""
        found: dict[str, tuple[str, str, int, bool]] = {}
        for t in self.ir.tensors:
            for exprs, stride in ((t.shape, False), (t.strides or (), True)):
                for axis, e in enumerate(exprs):
                    for s in self.ir.dims:
                        if e == Expr.of(s):
                            found.setdefault(s.name, (s.name, t.name, axis, stride))
        return list(found.values())

    @property
    def source(self) -> Source | None:
        return None if self.target is None else executable.lower(self.launch, self.target)

    @property
    def artifact(self) -> Artifact | None:
        return None if self.target is None else executable.build(self.launch, self.target)

    def __call__(self, *positional: Any, **given: Any) -> None:
        """Launches on the current stream. Tensors, scalars, and those runtime dims that no shape tells, by name."""
        if positional:
            names = ", ".join(f"{n}=..." for n in [*self._names, *self._scalars])
            raise ArgumentError(f"kernel {self.ir.name} takes its arguments by name", fix=f"({names})")
        dims: dict[str, int] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, dtype, rank, contiguous in self._expected:
            t = given.pop(name, None)
            if (
                not isinstance(t, torch.Tensor)
                or t.dtype != dtype
                or t.dim() != rank
                or (contiguous and not t.is_contiguous())
            ):
                raise self._refused(name, t, dtype, rank)
            tensors[name] = t
        for dim, name, axis, stride in self._dims:
            dims[dim] = tensors[name].stride(axis) if stride else tensors[name].shape[axis]
        known = [(name, dtype) for name, dtype in self._scalars.items() if name in given]
        scalars = {name: self._number(name, dtype, given.pop(name)) for name, dtype in known}
        for name, divisor, low, high in self._facts:
            value = given.pop(name, dims.get(name))
            if value is None or type(value) is not int or value % divisor or not low <= value <= high:
                raise self._broken_fact(name, value, divisor, low, high)
            dims[name] = value
        if given or len(scalars) != len(self._scalars):
            missing = [n for n in self._scalars if n not in scalars]
            what = f"does not take {', '.join(given)}" if given else f"needs {', '.join(missing)}"
            raise ArgumentError(
                f"kernel {self.ir.name} {what}", fix=f"it takes {', '.join([*self._names, *self._scalars])}"
            )
        device = self._checked_device(tensors)
        found: tuple[int, ...] = ()
        for name, _, _, contiguous in self._expected:
            t = tensors[name]
            found += tuple(t.shape) if contiguous else (*t.shape, *t.stride())
        if found != self._extents(dims):
            raise self._misshapen(tensors, dims)
        bound = self._bound.get(device.index or 0)
        if bound is None:
            bound = self._bound[device.index or 0] = BoundLaunch(self.launch, self.target, device)
        bound.run_with(tensors, dims, scalars)

    def _number(self, name: str, dtype: DType, value: Any) -> bool | int | float:
        """The value of a scalar. Raises ArgumentError for what its dtype does not hold."""
        number = not isinstance(value, (bool, np.bool_))
        if dtype.is_bool:
            needs = "True or False"
            if not number:
                return bool(value)
        elif dtype.is_float:
            most = torch.finfo(torch_dtypes.to_torch(dtype)).max
            needs = f"a float of up to {most:.3g}"
            if number and isinstance(value, Real):
                with suppress(OverflowError):  # an int that no float holds
                    given = float(value)
                    if abs(given) <= most or not math.isfinite(given):
                        return given
        else:
            low, high = integer_range(dtype)
            needs = f"an int from {low} to {high}"
            if number and isinstance(value, Integral) and low <= int(value) <= high:
                return int(value)
        what, fix = repr(value), f"pass {needs}"
        if isinstance(value, torch.Tensor):
            what, fix = "a tensor", f"{name}.item()"
        raise ArgumentError(f"kernel {self.ir.name}: scalar {name} is {what}, needs {needs}", fix=fix)

    def _refused(self, name: str, t: torch.Tensor | None, dtype: torch.dtype, rank: int) -> ArgumentError:
        kernel = self.ir.name
        if t is None:
            return ArgumentError(f"kernel {kernel}: tensor {name!r} is missing", fix=f"pass {name}=...")
        if not isinstance(t, torch.Tensor):
            kind = type(t).__name__
            return ArgumentError(f"kernel {kernel}: {name} is a {kind}, no tensor", fix=f"torch.as_tensor({name})")
        if t.dtype != dtype:
            return ArgumentError(
                f"kernel {kernel}: {name} is {t.dtype}, compiled for {dtype}", fix=f"{name}.to({dtype})"
            )
        if t.dim() != rank:
            return ArgumentError(f"kernel {kernel}: {name} has {t.dim()} axes, compiled for {rank}", fix="reshape it")
        return ArgumentError(
            f"kernel {kernel}: {name} has strides {t.stride()}, compiled for a contiguous tensor",
            fix=f"pass {name}.contiguous(), or compile with a TensorSpec that has strides",
        )

    def _broken_fact(self, name: str, value: int | None, divisor: int, low: int, high: int) -> ArgumentError:
        if value is None:
            return ArgumentError(f"kernel {self.ir.name}: runtime dim {name} is not given", fix=f"pass {name}=...")
        return ArgumentError(
            f"kernel {self.ir.name}: {name} = {value} breaks a fact it was compiled with",
            fix=f"{name} must be a multiple of {divisor} from {low} to {high}; compile for other facts",
        )

    def _checked_device(self, tensors: Mapping[str, torch.Tensor]) -> torch.device:
        """The device of all tensors; generated code runs on a GPU and counts on 16-byte alignment."""
        device = next(iter(tensors.values())).device
        if self.target is not None and device.type == "cpu":
            raise ArgumentError(
                f"kernel {self.ir.name} is compiled for {self.target.name}, its tensors are on the CPU",
                fix="move them to the GPU, or compile with target='cpu'",
            )
        for name, t in tensors.items():
            if t.device != device:
                raise ArgumentError(
                    f"kernel {self.ir.name}: {name} is on {t.device}, {self._names[0]} is on {device}",
                    fix="put all tensors on one device",
                )
            if self.target is not None and t.data_ptr() % ALIGNMENT:
                raise ArgumentError(
                    f"kernel {self.ir.name}: {name} does not start at a multiple of {ALIGNMENT} bytes",
                    fix=f"pass {name}.clone()",
                )
        return device

    def _misshapen(self, tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int]) -> ArgumentError:
        for t in self.ir.tensors:
            given = tensors[t.name]
            for what, got, exprs in (("shape", given.shape, t.shape), ("strides", given.stride(), t.strides or ())):
                want = [e.evaluate(dims) for e in exprs]
                if want and list(got) != want:
                    return ArgumentError(
                        f"kernel {self.ir.name}: {t.name} has {what} {list(got)}, needs {want}",
                        fix=f"declared as [{', '.join(map(str, exprs))}]",
                    )
        raise AssertionError("every extent fits")


def compile(
    kernel: Kernel,
    *,
    dims: Mapping[str, int | Sym],
    knobs: Mapping[str, Any] | None = None,
    tensors: Mapping[str, DType | TensorSpec | torch.dtype | str | None] | None = None,
    target: str | Target | None = None,
    schedule: Schedule | Mapping[str, Any] | None = None,
    backend: str | None = None,
) -> CompiledKernel:
    """Compiles a kernel of the language.

    Args:
        dims: each an int (compiled in) or a `Sym` (read off the tensors at each call).
        knobs: the plain values that the kernel's second argument holds.
        tensors: dtype of each tensor whose declaration leaves it open (k3dsl or torch dtype, or name).
        target: 'sm_90a' and the like; 'cpu' for the torch backend; None for what this machine has.
        schedule: a TritonSchedule or TileLangSchedule, or its fields by name: num_warps or threads, stages by loop label.
            Threads that are left open are as many, up to 128, as let most products become matrix instructions.
        backend: 'triton' or 'tilelang'; None is that of the schedule, else what K3DSL_BACKEND says, else Triton.

    Raises:
        TraceError, VerifyError, LegalityError, ResourceError, BuildError: each with the user's file and line.

    Warns:
        NumericsWarning: an exponential whose argument has no provable bound; see k3dsl.passes.exponents.
    """
    if not isinstance(kernel, Kernel):
        raise ArgumentError(
            f"{kernel!r} is no kernel", fix="put @kernel(grid=...) from k3dsl.language before the function"
        )
    for what, given in (("dims", dims), ("knobs", knobs), ("tensors", tensors)):
        if given is not None and not isinstance(given, Mapping):
            raise ArgumentError(f"{what} is a {type(given).__name__}", fix=f"a dict by name: {what}={{...}}")
    for name, value in dims.items():
        if isinstance(value, Sym) and not _has_facts(value):
            raise ArgumentError(
                f"dims[{name!r}] is Sym({value.name!r}, {value.divisible_by!r}, {value.min!r}, {value.max!r})",
                fix="a name, a divisor of at least 1, and bounds from 0 on, all ints",
            )
        if isinstance(value, bool) or not isinstance(value, (int, Sym, Expr)) or (isinstance(value, int) and value < 0):
            raise ArgumentError(
                f"dims[{name!r}] is {value!r}", fix="an int of at least 0, which is compiled in, or a Sym"
            )
    specs = {name: _spec(name, value) for name, value in (tensors or {}).items()}
    ir = kernel.trace(dims, knobs, specs)
    verify(ir)
    ir = simplify(ir)
    for reason in check_exponents(ir):
        warnings.warn(str(reason), NumericsWarning, stacklevel=2)
    if target is None:
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        where = current_target(device)
    elif isinstance(target, str):
        where = None if target == "cpu" else get_target(target)
    else:
        where = target
    if not (where is None or isinstance(where, Target)):
        raise ArgumentError(
            f"target is {target!r}", fix="a name such as 'sm_90a', 'cpu', or None for what this machine has"
        )
    if not (schedule is None or isinstance(schedule, Mapping) or hasattr(schedule, "to_json")):
        raise ArgumentError(
            f"schedule is {schedule!r}", fix="a dict of its fields, a TritonSchedule or a TileLangSchedule"
        )
    if where is None:
        if schedule is not None or backend not in (None, "torch"):
            _scheduled(backend, schedule)  # what a GPU would be given is checked, though nothing follows from it
        return CompiledKernel(Launch(ir.name, ir, "torch", None), None)
    left_open = schedule is None or (isinstance(schedule, Mapping) and "threads" not in schedule)
    chosen, schedule = _scheduled(backend, schedule)
    if chosen == "tilelang" and left_open:
        from k3dsl.backends.tilelang.dots import threads_for
        from k3dsl.backends.tilelang.schedule import TileLangSchedule

        assert isinstance(schedule, TileLangSchedule)
        schedule = replace(schedule, threads=threads_for(ir, schedule, where))
    compiled = CompiledKernel(Launch(ir.name, ir, chosen, schedule), where)
    executable.lower(compiled.launch, where)
    return compiled


def _has_facts(value: Sym) -> bool:
    numbers = (value.divisible_by, value.min, value.max)
    if not isinstance(value.name, str) or not value.name.isidentifier():
        return False
    if any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
        return False
    return value.divisible_by >= 1 and 0 <= value.min <= value.max


def _scheduled(backend: str | None, schedule: Schedule | Mapping[str, Any] | None) -> tuple[str, Schedule]:
    """The backend's name, and its schedule. Raises ArgumentError where the two do not belong together."""
    if schedule is None or isinstance(schedule, Mapping):
        chosen = backend or choose_backend(torch.device("cuda"))
        backends.check_generating(chosen)
        return chosen, backends.schedule_from_json(chosen, schedule or {})
    own = "tilelang" if type(schedule).__name__ == "TileLangSchedule" else "triton"
    if backend not in (None, own):
        raise ArgumentError(
            f"the schedule is one of {own}, and the backend is {backend}", fix=f"pass backend={own!r}, or leave it out"
        )
    return own, schedule


def _spec(name: str, value: object) -> DType | TensorSpec | None:
    if value is None or isinstance(value, (DType, TensorSpec)):
        return value
    if isinstance(value, torch.dtype):
        return torch_dtypes.from_torch(value)
    if isinstance(value, str) and value in DTYPES:
        return DTYPES[value]
    raise ArgumentError(f"tensors[{name!r}]: {value!r} is no dtype", fix=f"one of {', '.join(DTYPES)}")
