"""What the printers of generated Python share: lines with origin comments, unique names, infix operators, arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from k3dsl.backends.base import Arg
from k3dsl.ir.graph import Kernel
from k3dsl.ir.symbols import INT32_MAX

POINTER_ALIGNMENT = 16
INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "floordiv": "//",
    "mod": "%",
    "and": "&",
    "or": "|",
    "xor": "^",
    "shl": "<<",
    "shr": ">>",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
}


class Writer:
    """Collects the lines of a function body and hands out names that are not in use."""

    def __init__(self, reserved: Iterable[str], depth: int) -> None:
        self.lines: list[str] = []
        self.depth = depth
        self.used: set[str] = set(reserved)
        self.last_loc: str | None = None

    def line(self, text: str, loc: str | None = None) -> None:
        """Adds a line at the present depth, below a comment with the user's file:line where that changed."""
        if loc is not None and loc != self.last_loc:
            self.lines.append("    " * self.depth + f"# {loc}")
            self.last_loc = loc
        self.lines.append("    " * self.depth + text)

    def name(self, wish: str | None, fallback: str = "t") -> str:
        """A name close to `wish` that nothing else has."""
        base = "".join(ch if ch.isalnum() or ch == "_" else "_" for ch in (wish or fallback)) or fallback
        if base[0].isdigit() or base == "_":
            base = f"{fallback}_{base}"
        name, k = base, 1
        while name in self.used:
            name, k = f"{base}_{k}", k + 1
        self.used.add(name)
        return name


def arguments(kernel: Kernel, names: Collection[str] | None = None) -> tuple[Arg, ...]:
    """A generated kernel's arguments: tensors, then runtime dims and strides, then scalars.

    names: where given, the runtime dims that the code reads; others are no arguments.
    """
    args = [Arg(t.name, "pointer", t.dtype.name, POINTER_ALIGNMENT, t.name) for t in kernel.tensors]
    strides = {
        str(s): f"{t.name}:{axis}"
        for t in kernel.tensors
        if t.strides is not None
        for axis, s in enumerate(t.strides)
        if s.constant is None
    }
    for s in kernel.dims:
        if names is not None and s.name not in names:
            continue
        dtype = "i32" if s.max <= INT32_MAX else "i64"
        if s.name in strides:
            args.append(Arg(s.name, "stride", dtype, s.divisible_by, strides[s.name]))
        else:
            args.append(Arg(s.name, "dim", dtype, s.divisible_by, s.name))
    args += [Arg(s.name, "scalar", s.dtype.name, 1, s.name) for s in kernel.scalars]
    return tuple(args)
