"""The rules of the IR, executable. `verify` runs after tracing and, in tests, after every pass."""

from __future__ import annotations

from typing import Any

from k3dsl.errors import K3Error, VerifyError
from k3dsl.ir import opset
from k3dsl.ir.attributes import Attr, attributes_of
from k3dsl.ir.bounds import check_index
from k3dsl.ir.graph import MEMORY_OPS, Kernel, Op, Region, Value, walk
from k3dsl.ir.opset import OPSET
from k3dsl.ir.printer import op_lines, value_names
from k3dsl.ir.scalars import integer_range, never_runs
from k3dsl.ir.symbols import Expr, Sym
from k3dsl.ir.types import DType, TileType

ROLES = ("in", "out", "inout")


def verify(kernel: Kernel) -> None:
    """Checks every rule. Raises VerifyError with the op's text, the user's file:line, the reason and what to change."""
    _Verifier(kernel).run()


class _Verifier:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.tensors = {t.name: t for t in kernel.tensors}
        self.dims = {s.name: s for s in kernel.dims}
        self.visible: set[int] = set()
        self.defined: set[int] = set()
        self.ops: set[int] = set()
        self.runs = True  # False inside a loop or a `when` that never runs

    def run(self) -> None:
        self._header()
        scalars = self.kernel.scalar_values
        if [v.type for v in scalars] != [TileType(s.dtype) for s in self.kernel.scalars]:
            raise self._bad("the scalar values do not match the scalar parameters")
        for value in scalars:
            self._define(value, None)
        if self.kernel.body.args or self.kernel.body.yields:
            raise self._bad("the body takes no arguments and yields nothing")
        self._region(self.kernel.body)
        written = {op.attrs["tensor"] for op in walk(self.kernel.body) if op.opcode in ("store", "atomic_add")}
        for t in self.kernel.tensors:
            if t.role == "out" and t.name not in written:
                raise self._bad(
                    f"tensor {t.name} is declared Out but never written", fix=f"write it, e.g. {t.name}[...] = x"
                )

    # -- the header ---------------------------------------------------------------------------------------------------

    def _header(self) -> None:
        kernel = self.kernel
        if not 1 <= len(kernel.grid) <= 3:
            raise self._bad(f"a grid has 1 to 3 axes, got {len(kernel.grid)}")
        for what, names in (
            ("dim", [s.name for s in kernel.dims]),
            ("parameter", [t.name for t in kernel.tensors] + [s.name for s in kernel.scalars]),
        ):
            twice = sorted({n for n in names if names.count(n) > 1})
            if twice:
                raise self._bad(f"{what} {twice[0]} is declared twice")
        for s in kernel.dims:
            if s.divisible_by < 1 or s.min > s.max:
                raise self._bad(
                    f"dim {s.name} can have no value: divisible_by={s.divisible_by}, min={s.min}, max={s.max}",
                    fix="state a positive divisor and a minimum that is no larger than the maximum",
                )
        for axis, extent in enumerate(kernel.grid):
            self._dims_known(extent, f"grid axis {axis}")
            if extent.constant is not None and extent.constant < 1:
                raise self._bad(f"grid axis {axis} has extent {extent}", fix="launch at least one program an axis")
        for t in kernel.tensors:
            if t.role not in ROLES:
                raise self._bad(f"tensor {t.name} has role {t.role!r}", fix=f"one of {', '.join(ROLES)}")
            if t.strides is not None and len(t.strides) != t.rank:
                raise self._bad(f"tensor {t.name} has {t.rank} axes but {len(t.strides)} strides")
            for axis, extent in enumerate(t.shape):
                self._dims_known(extent, f"axis {axis} of tensor {t.name}")
                if extent.constant is not None and extent.constant < 0:
                    raise self._bad(f"axis {axis} of tensor {t.name} has extent {extent}")
            for axis, stride in enumerate(t.strides or ()):
                self._dims_known(stride, f"stride {axis} of tensor {t.name}")

    def _dims_known(self, expr: Expr, where: str, op: Op | None = None) -> None:
        for name, symbol in expr.symbols().items():
            known: Sym | None = self.dims.get(name)
            if known is None:
                names = ", ".join(sorted(self.dims)) or "none"
                raise self._bad(f"{where} uses the dim {name}, which the kernel does not have (it has: {names})", op)
            if known != symbol:
                raise self._bad(f"{where} uses the dim {name} with other facts than the kernel's", op)

    # -- regions and values -------------------------------------------------------------------------------------------

    def _region(self, region: Region) -> None:
        """Checks a region's ops in order; what it defines is not visible after it."""
        before = set(self.visible)
        for arg in region.args:
            self._define(arg, None)
        for op in region.ops:
            self._op(op)
        for v in region.yields:
            if id(v) not in self.visible:
                raise self._bad(f"a region yields {self._name(v)}, which is not visible at its end")
        self.visible = before

    def _define(self, value: Value, op: Op | None) -> None:
        if id(value) in self.defined:
            raise self._bad(f"{self._name(value)} is defined twice", op)
        if value.op is not op:
            raise self._bad(f"{self._name(value)} does not point to the op that defines it", op)
        self.defined.add(id(value))
        self.visible.add(id(value))

    def _op(self, op: Op) -> None:
        if op.opcode not in OPSET:
            raise self._bad(f"unknown op {op.opcode!r}", op)
        if id(op) in self.ops:
            raise self._bad("the same op stands in two places", op)
        self.ops.add(id(op))
        self._attributes(op)
        self._slots(op)
        for v in op.operands:
            if id(v) not in self.visible:
                late = id(v) not in self.defined
                raise self._bad(
                    f"uses {self._name(v)} " + ("before it is defined" if late else "outside the region it lives in"),
                    op,
                    fix=None if late else "return it from the loop body and carry it with init=",
                )
        self._shape_of_regions(op)
        self._regions(op)
        self._types(op)
        self._special(op)
        for v in op.results:
            self._define(v, op)

    def _attributes(self, op: Op) -> None:
        known = attributes_of(op.opcode)
        for name, value in op.attrs.items():
            if name not in known:
                names = ", ".join(known) or "none"
                raise self._bad(f"unknown attribute {name!r}", op, fix=f"{op.opcode} takes: {names}")
            if not _is_a(value, known[name]):
                raise self._bad(f"attribute {name} must be of kind {known[name].kind}, got {value!r}", op)
        for name, attr in known.items():
            if attr.required and name not in op.attrs:
                raise self._bad(f"attribute {name} is missing", op)

    def _slots(self, op: Op) -> None:
        """Each operand of a memory op is an index, the mask or the stored value, and nothing else."""
        if op.opcode not in MEMORY_OPS:
            if op.index:
                raise self._bad("only loads and stores have an index", op)
            return
        slots = [s for i in op.index for s in (i.start, i.end) if s is not None]
        slots += [op.attrs[s] for s in ("mask_slot", "value_slot") if op.attrs.get(s) is not None]
        if any(not 0 <= s < len(op.operands) for s in slots):
            raise self._bad(f"an operand slot is out of range: {slots} of {len(op.operands)} operands", op)
        if set(slots) != set(range(len(op.operands))):
            raise self._bad("an operand is neither an index, the mask nor the value", op)

    def _shape_of_regions(self, op: Op) -> None:
        wanted = 1 if op.opcode in ("loop", "when") else 0
        if op.opcode in ("reduce", "scan"):
            wanted = 0 if op.attrs.get("kind") is not None else 1
        if len(op.regions) != wanted:
            raise self._bad(f"has {len(op.regions)} regions, needs {wanted}", op)
        if op.opcode == "loop" and len(op.operands) < 2:
            raise self._bad("takes start, stop and the initial carries", op)
        if op.opcode == "when" and (op.regions[0].args or op.regions[0].yields or op.results):
            raise self._bad("a when takes no arguments and gives no values", op, fix="choose values with where()")

    def _regions(self, op: Op) -> None:
        if op.opcode in ("reduce", "scan") and op.regions:
            self._combine(op)
            return
        outer = self.runs
        self.runs = outer and not never_runs(op)
        for region in op.regions:
            self._region(region)
        self.runs = outer

    def _combine(self, op: Op) -> None:
        """A combine works on scalars and stands alone: a backend compiles it as a function of its arguments."""
        region = op.regions[0]
        outer, self.visible = self.visible, set()
        try:
            for inner in region.ops:
                if inner.opcode in MEMORY_OPS or inner.regions:
                    raise self._bad(f"a combine cannot contain {inner.opcode}", inner, fix="use scalar arithmetic only")
                if any(id(v) in outer for v in inner.operands):
                    raise self._bad(
                        "a combine uses a value from around it", inner, fix="use its arguments and plain numbers only"
                    )
            self._region(region)
        finally:
            self.visible = outer
        if any(v.shape != () for v in (*region.args, *region.yields)):
            raise self._bad("a combine takes and returns scalars", op)

    # -- one op -------------------------------------------------------------------------------------------------------

    def _types(self, op: Op) -> None:
        try:
            want = opset.infer(op, self.tensors)
        except VerifyError as error:
            raise self._bad(error.message.removeprefix(f"{op.opcode}: "), op, fix=error.fix) from None
        got = [v.type for v in op.results]
        if got != want:
            raise self._bad(
                f"gives ({', '.join(map(str, got))}), but its operands and attributes make it ({', '.join(map(str, want))})",
                op,
            )

    def _special(self, op: Op) -> None:
        if op.opcode == "dim":
            self._dims_known(op.attrs["expr"], "the expression", op)
        elif op.opcode == "program_id" and op.attrs["axis"] >= len(self.kernel.grid):
            raise self._bad(f"axis {op.attrs['axis']} of a grid of {len(self.kernel.grid)} axes", op)
        elif op.opcode == "const":
            self._constant(op)
        elif op.opcode in MEMORY_OPS:
            problem = check_index(op, self.tensors[op.attrs["tensor"]], self.runs)
            if problem:
                raise self._bad(problem[0], op, fix=problem[1])

    def _constant(self, op: Op) -> None:
        value, dtype = op.attrs["value"], op.attrs["dtype"]
        if dtype.is_float:
            right = isinstance(value, float)
        elif dtype.is_bool:
            right = isinstance(value, bool)
        else:
            low, high = integer_range(dtype)
            right = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        if not right:
            raise self._bad(f"{value!r} is no {dtype}", op)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _name(self, value: Value) -> str:
        return value_names(self.kernel).get(id(value), "a value that no op of the kernel defines")

    def _bad(self, reason: str, op: Op | None = None, fix: str | None = None) -> K3Error:
        if op is None:
            return VerifyError(f"kernel {self.kernel.name}: {reason}", where=self.kernel.source, fix=fix)
        text = op_lines(op, value_names(self.kernel))[0]
        return VerifyError(f"{op.opcode}: {reason}\n  op: {text}", where=op.loc or self.kernel.source, fix=fix)


def _is_a(value: Any, attr: Attr) -> bool:
    if value is None:
        return not attr.required and attr.default is None
    if attr.kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if attr.kind == "ints":
        return isinstance(value, tuple) and all(isinstance(n, int) for n in value)
    kinds: dict[str, type | tuple[type, ...]] = {
        "float": float,
        "bool": bool,
        "str": str,
        "dtype": DType,
        "expr": Expr,
        "number": (int, float),
    }
    return isinstance(value, kinds[attr.kind])
