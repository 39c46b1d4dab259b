"""The passes that a kernel goes through before placement."""

from __future__ import annotations

from k3dsl.backends.tilelang.rounding import round_operands
from k3dsl.ir.copying import copy_kernel
from k3dsl.ir.graph import Kernel
from k3dsl.passes.inverse import expand_inverses
from k3dsl.passes.simplify import simplify


def prepared(kernel: Kernel) -> Kernel:
    """The kernel as placement and printer see it; the given one stays as it is."""
    return round_operands(simplify(expand_inverses(copy_kernel(kernel))))
