"""The identity of a kernel: a hash of what it computes, the same in every process and Python version."""

from __future__ import annotations

import hashlib

from k3dsl.ir.graph import Kernel
from k3dsl.ir.printer import print_kernel


def kernel_hash(kernel: Kernel) -> str:
    """sha256 (hex) of the kernel's text with values named by position and without source locations.

    Names of variables and lines of source do not count; constants, attributes, shapes, facts of dims and the grid do.
    """
    return hashlib.sha256(print_kernel(kernel, positional=True).encode()).hexdigest()
