"""Binds a launch's tensors, dims and scalars to a kernel's parameters, checking every fact that the kernel relies on."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from k3dsl.backends.torch.dtypes import to_torch
from k3dsl.errors import ArgumentError, UnknownNameError
from k3dsl.ir.graph import Kernel, TensorParam
from k3dsl.ir.symbols import Expr, Sym


@dataclass
class BoundTensor:
    """A parameter with its tensor.

    span: how many elements lie between the tensor's first and last one. frozen: nothing this launch writes shares its memory,
    so that reads may be views.
    """

    param: TensorParam
    data: torch.Tensor
    span: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    frozen: bool

    @cached_property
    def flat(self) -> torch.Tensor:
        """All elements of the span as a 1-D view, in the dtype that memory is moved in (bytes for 8-bit floats)."""
        raw = self.data.view(torch.uint8) if self.as_bytes else self.data
        return raw.as_strided((self.span,), (1,), raw.storage_offset())

    @property
    def as_bytes(self) -> bool:
        """Whether memory is moved as bytes."""
        return self.param.dtype.is_float and self.param.dtype.bits == 8

    @property
    def name(self) -> str:
        return self.param.name

    def position(self, offset: int) -> tuple[int, ...]:
        """The index of the element that lies `offset` elements after the first."""
        found = [0] * len(self.strides)
        for axis in sorted(range(len(self.strides)), key=lambda a: (-self.strides[a], self.extents[a])):
            if self.strides[axis] and self.extents[axis] > 1:
                found[axis], offset = divmod(offset, self.strides[axis])
        return tuple(found)


@dataclass(frozen=True)
class Binding:
    """What one launch runs on."""

    kernel: Kernel
    dims: dict[str, int]
    grid: tuple[int, ...]
    tensors: Mapping[str, BoundTensor]
    scalars: Mapping[str, float]
    device: torch.device


def bind(
    kernel: Kernel,
    tensors: Mapping[str, torch.Tensor | None],
    dims: Mapping[str, int] | None,
    scalars: Mapping[str, float] | None,
) -> Binding:
    """Checks the arguments of a launch. Raises ArgumentError, which names the argument, or UnknownNameError."""
    given = {n: t for n, t in tensors.items() if t is not None}
    _check_names(kernel, "tensor", given, [t.name for t in kernel.tensors])
    _check_names(kernel, "scalar", scalars or {}, [s.name for s in kernel.scalars])
    _check_names(kernel, "dim", dims or {}, [s.name for s in kernel.dims], required=False)
    for param in kernel.tensors:
        _check_tensor(kernel, param, given[param.name])
    devices = {t.device for t in given.values()}
    if len(devices) > 1:
        raise ArgumentError(
            f"kernel {kernel.name}: tensors are on {', '.join(sorted(map(str, devices)))}", fix="move all to one device"
        )
    values = _infer_dims(kernel, given, dims or {})
    for param in kernel.tensors:
        _check_layout(kernel, param, given[param.name], values)
    written = {_storage(given[p.name]) for p in kernel.tensors if p.role != "in"}
    bound = {p.name: _bound(p, given[p.name], _storage(given[p.name]) not in written) for p in kernel.tensors}
    grid = tuple(g.evaluate(values) for g in kernel.grid)
    device = devices.pop() if devices else torch.device("cpu")
    return Binding(kernel, values, grid, bound, dict(scalars or {}), device)


def layout_of(
    kernel: Kernel,
    tensors: Mapping[str, torch.Tensor | None],
    dims: Mapping[str, int] | None,
    scalars: Mapping[str, float] | None,
) -> Hashable | None:
    """All that `bind` looks at, so that arguments of one layout pass its checks or fail them together. None: do not ask."""
    if len(tensors) != len(kernel.tensors):
        return None
    found: list[Hashable] = []
    storages: dict[int | torch.SymInt, int] = {}
    for param in kernel.tensors:
        t = tensors.get(param.name)
        if t is None:
            return None
        # which tensors share a storage, by the number of the first that has it; of an empty one nothing is accessed
        storage = t.data_ptr() - t.storage_offset() * t.element_size()
        found.append((t.shape, t.stride(), t.dtype, t.device, storages.setdefault(storage, len(storages))))
    return tuple(found), tuple((dims or {}).items()), tuple(scalars or ())


class _Rebound(dict[str, BoundTensor]):
    """The parameters of a known binding with other tensors, made as they are asked for."""

    def __init__(self, known: Mapping[str, BoundTensor], tensors: Mapping[str, torch.Tensor | None]) -> None:
        super().__init__()
        self._known, self._tensors = known, tensors

    def __missing__(self, name: str) -> BoundTensor:
        tensor, known = self._tensors[name], self._known[name]
        assert tensor is not None
        found = self[name] = BoundTensor(known.param, tensor, known.span, known.extents, known.strides, known.frozen)
        return found


def rebind(known: Binding, tensors: Mapping[str, torch.Tensor | None], scalars: Mapping[str, float] | None) -> Binding:
    """A binding of the same layout to other tensors and scalars. Nothing is checked again."""
    return Binding(known.kernel, known.dims, known.grid, _Rebound(known.tensors, tensors), scalars or {}, known.device)


def without_data(binding: Binding) -> Binding:
    """A binding of the same layout to tensors on the meta device, which hold no memory."""
    bound = {
        name: BoundTensor(t.param, t.data.to("meta"), t.span, t.extents, t.strides, t.frozen)
        for name, t in binding.tensors.items()
    }
    return replace(binding, tensors=bound)


def _check_names(
    kernel: Kernel, what: str, given: Mapping[str, object], known: list[str], required: bool = True
) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(known)) or 'none'}"
            raise UnknownNameError(f"kernel {kernel.name} has no {what} {name!r}; {hint}")
    missing = [name for name in known if name not in given]
    if missing and required:
        raise ArgumentError(
            f"kernel {kernel.name}: {what} {', '.join(missing)} missing", fix=f"pass every {what}: {', '.join(known)}"
        )


def _check_tensor(kernel: Kernel, param: TensorParam, tensor: torch.Tensor) -> None:
    if tensor.dim() != param.rank:
        raise ArgumentError(
            f"kernel {kernel.name}: {param.name} has {tensor.dim()} axes {tuple(tensor.shape)}, declared are "
            f"{param.rank}: {_declared(param)}",
            fix="reshape the tensor",
        )
    if tensor.dtype != to_torch(param.dtype):
        raise ArgumentError(
            f"kernel {kernel.name}: {param.name} is {tensor.dtype}, the kernel was traced for {param.dtype}",
            fix=f"convert it, or trace the kernel with tensors={{{param.name!r}: ...}}",
        )
    if param.role != "in" and any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ArgumentError(
            f"kernel {kernel.name}: {param.name} is written but its elements share memory (an expanded tensor)",
            fix="pass a tensor of its own, e.g. .contiguous()",
        )


def _declared(param: TensorParam) -> str:
    return "[" + ", ".join(str(e) for e in param.shape) + "]"


def _unknown(expr: Expr, value: int, known: Mapping[str, int]) -> tuple[Sym, int] | None:
    """The symbol and value that make `expr` equal `value`, when it is a multiple of one symbol not known yet."""
    if len(expr.terms) != 1:
        return None
    ((monomial, coefficient),) = expr.terms.items()
    if len(monomial) != 1 or not isinstance(monomial[0], Sym) or monomial[0].name in known:
        return None
    quotient = value / coefficient
    return (monomial[0], int(quotient)) if quotient.denominator == 1 else None


def _infer_dims(kernel: Kernel, given: Mapping[str, torch.Tensor], dims: Mapping[str, int]) -> dict[str, int]:
    values = {name: int(value) for name, value in dims.items()}
    for bare in (True, False):  # a bare symbol first: it says the most about what the caller means
        for param in kernel.tensors:
            tensor = given[param.name]
            pairs = list(zip(param.shape, tensor.shape, strict=True))
            if param.strides is not None:
                pairs += list(zip(param.strides, tensor.stride(), strict=True))
            for expr, extent in pairs:
                found = _unknown(expr, extent, values)
                if found is not None and (not bare or str(expr) == found[0].name):
                    values[found[0].name] = found[1]
    missing = [s.name for s in kernel.dims if s.name not in values]
    if missing:
        raise ArgumentError(
            f"kernel {kernel.name}: the value of dim {', '.join(missing)} follows from no tensor's shape",
            fix=f"pass dims={{{missing[0]!r}: ...}}",
        )
    for s in kernel.dims:
        value = values[s.name]
        if not s.min <= value <= s.max:
            raise ArgumentError(
                f"kernel {kernel.name}: dim {s.name} is {value}, the kernel was traced for {s.min} to {s.max}",
                fix="trace the kernel with a Sym whose facts allow it",
            )
        if value % s.divisible_by:
            raise ArgumentError(
                f"kernel {kernel.name}: dim {s.name} is {value}, the kernel was traced for multiples of {s.divisible_by}",
                fix="pad the dim, or trace the kernel with a Sym without that divisor",
            )
    return values


def _check_layout(kernel: Kernel, param: TensorParam, tensor: torch.Tensor, dims: Mapping[str, int]) -> None:
    want = tuple(e.evaluate(dims) for e in param.shape)
    if want != tuple(tensor.shape):
        values = ", ".join(f"{n}={dims[n]}" for n in sorted({n for e in param.shape for n in e.symbols()}))
        raise ArgumentError(
            f"kernel {kernel.name}: {param.name} has shape {list(tensor.shape)}, declared is {_declared(param)}"
            + (f" = {list(want)} with {values}" if values else ""),
            fix="pass a tensor of the declared shape, or other dims",
        )
    for axis, expr in enumerate(param.strides or ()):
        stride = expr.evaluate(dims)
        if tensor.shape[axis] > 1 and stride != tensor.stride(axis):
            raise ArgumentError(
                f"kernel {kernel.name}: {param.name} has stride {tensor.stride(axis)} along axis {axis}, declared is "
                f"{expr}" + (f" = {stride}" if expr.constant is None else ""),
                fix="pass a tensor laid out as declared, or trace the kernel with another TensorSpec",
            )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bound(param: TensorParam, tensor: torch.Tensor, frozen: bool) -> BoundTensor:
    data = tensor.detach()
    size = 0
    if data.numel():
        size = 1 + sum((n - 1) * s for n, s in zip(data.shape, data.stride(), strict=True))
    return BoundTensor(param, data, size, tuple(data.shape), tuple(data.stride()), frozen)
