"""Evaluates a kernel on torch tensors: the entry point of this backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from k3dsl.backends.torch.batch import Batch
from k3dsl.backends.torch.binding import bind
from k3dsl.backends.torch.dtypes import Numerics
from k3dsl.backends.torch.machine import Constants, Machine
from k3dsl.backends.torch.memory import Memory
from k3dsl.backends.torch.plan import bytes_per_program, plan
from k3dsl.errors import EvaluationError
from k3dsl.ir.graph import Kernel

SLAB_BYTES = 256 * 2**20


class Evaluator:
    """A kernel made ready to be evaluated many times. Arguments and meaning as in `evaluate`."""

    def __init__(
        self,
        kernel: Kernel,
        *,
        compute_dtype: torch.dtype | None = None,
        check: bool = True,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        self.kernel = kernel
        self.numerics = Numerics(compute_dtype)
        self.check = check
        self.body = plan(kernel.body)
        self._constants: Constants = {}
        float_bytes = compute_dtype.itemsize if compute_dtype is not None else None
        self.programs_per_slab = max(1, slab_bytes // bytes_per_program(self.body, float_bytes))

    def __call__(
        self,
        tensors: Mapping[str, torch.Tensor | None],
        dims: Mapping[str, int] | None = None,
        scalars: Mapping[str, float] | None = None,
    ) -> None:
        with torch.no_grad(), _full_precision():
            binding = bind(self.kernel, tensors, dims, scalars)
            memory = Memory(binding, self.numerics, self.check)
            machine = Machine(binding, self.numerics, memory, self._constants)
            total = int(np.prod([max(0, g) for g in binding.grid], dtype=np.int64))
            if total >= 2**31:
                raise EvaluationError(f"kernel {self.kernel.name}: a grid of {total} programs is too large")
            for first in range(0, total, self.programs_per_slab):
                ids = np.arange(first, min(total, first + self.programs_per_slab), dtype=np.int64)
                machine.run(self.body, machine.scalars(), Batch(ids, binding.grid))


def evaluate(
    kernel: Kernel,
    tensors: Mapping[str, torch.Tensor | None],
    dims: Mapping[str, int] | None = None,
    scalars: Mapping[str, float] | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
    check: bool = True,
    slab_bytes: int = SLAB_BYTES,
) -> None:
    """Runs a kernel on torch tensors of any device, writing its outputs in place.

    tensors: by parameter name, of any strides. dims: runtime dims; those that a tensor's shape or stride tells may be left
    out. scalars: by parameter name. compute_dtype: None computes in the IR's dtypes, rounding after every operation;
    torch.float64 computes every float in fp64, so that only loads and stores see the tensors' dtypes. check: look for
    programs that write (or read and write) the same element; bounds are always checked. slab_bytes: programs run together
    in batches that hold about this much.

    Elements that the kernel does not write stay what they were. A dot accumulates in fp32; 8-bit floats saturate; float to
    integer truncates and saturates; integer division by 0 gives -1; argmax and argmin count a NaN as the extreme.

    Raises ArgumentError when the arguments break what the kernel was traced for, and EvaluationError, with the user's line
    and the program, when an access is out of bounds, when programs conflict, or when an assumed fact does not hold.
    """
    Evaluator(kernel, compute_dtype=compute_dtype, check=check, slab_bytes=slab_bytes)(tensors, dims, scalars)


@contextmanager
def _full_precision() -> Iterator[None]:
    """fp32 products are fp32, whatever the process allows elsewhere."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
