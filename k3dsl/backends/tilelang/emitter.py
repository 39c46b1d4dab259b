"""What all parts of the printer share: lines, names, loops, and the text of a value's element at given indices."""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from contextlib import contextmanager

from k3dsl.backends.printing import INFIX, Writer
from k3dsl.backends.tilelang.access import Access
from k3dsl.backends.tilelang.elementwise import CALLS, MAY_OVERFLOW, cast_text, function_text, minmax, negated, widened
from k3dsl.backends.tilelang.placement import Placement
from k3dsl.backends.tilelang.text import all_of, atom, literal, opened, scaled, tl_dtype, total
from k3dsl.backends.tilelang.uses import unit_free
from k3dsl.errors import LegalityError
from k3dsl.ir.graph import Kernel, Op, Value
from k3dsl.ir.opset import COMPARE, MXFP4_GROUP
from k3dsl.ir.types import DType, f32, i1, i32

RESERVED = frozenset({"tl", "tilelang", "PRELUDE", "float", "range", *keyword.kwlist})
"""Names that mean something else in a generated module. Names of parameters cannot be changed, so legality refuses them."""
LOOP_NAMES = ("i", "j", "k", "l", "m", "n")
"""Names of the variables of loops over elements, where they are free."""


class Emitter(Writer):
    """State of one printing, and the rules for the text of an element."""

    def __init__(self, kernel: Kernel, placement: Placement) -> None:
        self.kernel = kernel
        super().__init__(RESERVED, depth=0)
        self.placement = placement
        self.schedule = placement.schedule
        self.target = placement.target
        self.analysis = placement.analysis
        self.allocations: list[str] = []
        taken = {kernel.name, *(t.name for t in kernel.tensors), *(d.name for d in kernel.dims)}
        taken.update(s.name for s in kernel.scalars)
        self.loop_names = [n for n in (*LOOP_NAMES, *(f"{n}{k}" for k in (1, 2) for n in LOOP_NAMES)) if n not in taken]
        self.serial_name = next(n for n in ("r", "r1", "r2", "r3") if n not in taken)
        self.used.update(self.loop_names, [self.serial_name])
        self.text_of: dict[int, str] = {}
        self.fragments: dict[int, str] = {}
        self.shared: dict[int, str] = {}
        self.stored_as: dict[int, DType] = {}
        self.loop_variables: list[str] = []
        self.inlined_scalars = 0

    # ---- lines and names ---------------------------------------------------------------------------------------------

    @contextmanager
    def indented(self) -> Iterator[None]:
        self.depth += 1
        before = len(self.lines)
        yield
        if len(self.lines) == before:
            self.line("pass")
        self.depth -= 1

    @contextmanager
    def over(
        self, shape: tuple[int, ...], loc: str | None = None, order: list[int] | None = None
    ) -> Iterator[list[str]]:
        """A parallel loop over the elements of a tile; gives the index of each axis, '0' where the extent is 1.

        order: which axes vary slowest to fastest; all of them in order when not given.
        """
        axes = [a for a in (order or range(len(shape))) if shape[a] != 1]
        at = ["0"] * len(shape)
        for name, axis in zip(self.loop_names, axes, strict=False):
            at[axis] = name
        names = [at[a] for a in axes] or [self.loop_names[0]]
        extents = [str(self.placement.extent(shape[a])) for a in axes] or ["1"]
        self.line(f"for {', '.join(names)} in tl.Parallel({', '.join(extents)}):", loc)
        self.loop_variables += names
        with self.indented():
            yield at
        del self.loop_variables[len(self.loop_variables) - len(names) :]

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def storage(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the buffer that holds a tile of this shape."""
        return tuple(self.placement.extent(n) for n in unit_free(shape)) or (1,)

    def allocate(self, kind: str, wish: str, shape: tuple[int, ...], dtype: DType) -> str:
        """A new buffer for a tile; kind: 'fragment' or 'shared'. Bools are kept as integers."""
        name = self.name(wish)
        stored = i32 if dtype.is_bool else dtype
        sizes = self.storage(shape)
        text = ", ".join(map(str, sizes)) + ("," if len(sizes) == 1 else "")
        self.allocations.append(f"{name} = tl.alloc_{kind}(({text}), {tl_dtype(stored)})")
        return name

    def fragment(self, v: Value, fallback: str, dtype: DType | None = None) -> str:
        """The fragment that holds v, made on first use; values that share a buffer get the same one."""
        root = self.placement.buffer(v)
        if id(root) not in self.fragments:
            self.fragments[id(root)] = self.allocate(
                "fragment", v.name or root.name or fallback, v.shape, dtype or v.dtype
            )
        if dtype is not None:
            self.stored_as[id(v)] = dtype
        return self.fragments[id(root)]

    def shared_tile(self, v: Value, fallback: str, dtype: DType | None = None) -> str:
        """The shared tile that holds v, made on first use."""
        if id(v) not in self.shared:
            self.shared[id(v)] = self.allocate("shared", f"{v.name or fallback}_shared", v.shape, dtype or v.dtype)
        if dtype is not None:
            self.stored_as[id(v)] = dtype
        return self.shared[id(v)]

    def buffer_at(self, name: str, shape: tuple[int, ...], at: list[str]) -> str:
        """One element of a buffer that holds a tile of this shape."""
        kept = [opened(text) for n, text in zip(shape, at, strict=True) if n != 1] or ["0"]
        return f"{name}[{', '.join(kept)}]"

    def _kept(self, v: Value, at: list[str]) -> str:
        """One element of a value that is in a buffer, as the value's dtype."""
        home = self.placement.of(v)
        kept = [text for n, text in zip(v.shape, at, strict=True) if n != 1]
        plain = all(t in self.loop_variables for t in kept) and len(set(kept)) == len(kept)
        if home.fragment and (plain or not home.shared):
            name = self.fragments[id(self.placement.buffer(v))]
        else:
            name = self.shared[id(v)]
        text = self.buffer_at(name, v.shape, at)
        load = v.op if v.op is not None and v.op.opcode == "load" else None
        if load is not None and self.placement.patched(load) and not self.placement.patched_in_place(load):
            guard = all_of(Access(load, self.kernel, self.analysis).past_end(at, self.scalar))
            text = f"tl.if_then_else({guard}, {text}, {literal(load.attrs.get('other', 0.0), v.dtype)})"
        if v.dtype.is_bool:
            return f"{text} != 0"
        return cast_text(text, self.stored_as.get(id(v), v.dtype), v.dtype)

    # ---- the text of an element --------------------------------------------------------------------------------------

    def scalar(self, v: Value) -> str:
        return self.text_of[id(v)]

    def at(self, v: Value, at: list[str]) -> str:
        """Text of one element of a tile (or of a scalar, for no indices)."""
        if not v.shape:
            return self.scalar(v)
        if self.placement.of(v).kind != "inline":
            return self._kept(v, at)
        op = v.op
        assert op is not None
        return self.computed(op, at)

    def computed(self, op: Op, at: list[str]) -> str:
        """Text that computes one element of an op's result from its operands."""
        code, v = op.opcode, op.result
        if code == "const":
            return literal(op.attrs["value"], v.dtype)
        if code == "iota":
            return at[0]
        if code in ("broadcast", "reshape", "permute", "select"):
            return self.at(op.operands[0], self.reindexed(op, at))
        if code == "load":
            return self.loaded(op, at)
        if code == "dequantize_mxfp4":
            return self._dequantized(op, at)
        return self.applied(op, [self.at(o, at) for o in op.operands])

    def reindexed(self, op: Op, at: list[str]) -> list[str]:
        """The operand's indices for an element of a shape op's result."""
        shape = op.operands[0].shape
        if op.opcode == "broadcast":
            return ["0" if n == 1 else at[k] for k, n in enumerate(shape)]
        if op.opcode == "permute":
            out = ["0"] * len(shape)
            for k, axis in enumerate(op.attrs["axes"]):
                out[axis] = at[k]
            return out
        if op.opcode == "select":
            axis = op.attrs["axis"]
            return [*at[:axis], str(op.attrs["position"]), *at[axis:]]
        return regrouped(op.result.shape, shape, at)

    def loaded(self, op: Op, at: list[str]) -> str:
        """One element read from its tensor, with its guard."""
        access = Access(op, self.kernel, self.analysis)
        where, guards = access.element(at, self.scalar, self.at, self.placement.extent)
        dtype = op.result.dtype
        text = f"{access.tensor.name}[{', '.join(map(opened, where))}]"
        if guards:
            text = f"tl.if_then_else({all_of(guards)}, {text}, {literal(op.attrs.get('other', 0.0), dtype)})"
        return f"{text} != 0" if dtype.is_bool else text

    def _dequantized(self, op: Op, at: list[str]) -> str:
        """One element of packed codes times its group's scale; see prelude."""
        packed, scale = op.operands
        last = atom(at[-1])
        byte = self.at(packed, [*at[:-1], f"({last} // 2)"])
        power = self.at(scale, [*at[:-1], f"({last} // {MXFP4_GROUP})"])
        args = f"{opened(byte)}, {opened(power)}, {last} % 2"
        return f'tl.cast(tl.call_pure_extern("float32", "k3dsl::mxfp4", {args}), tl.bfloat16)'

    def applied(self, op: Op, args: list[str]) -> str:
        """An elementwise op on the texts of its operands."""
        code, dtype = op.opcode, op.operands[0].dtype
        if code == "cast":
            return cast_text(args[0], dtype, op.result.dtype)
        if code == "where":
            return f"tl.if_then_else({opened(args[0])}, {opened(args[1])}, {opened(args[2])})"
        if code == "assume":
            return args[0]
        wide = widened(code, dtype)
        computed = f32 if wide else dtype
        if code in MAY_OVERFLOW and dtype.is_int and dtype.bits < 32:
            wide, computed = True, i32  # C computes in int, and would not wrap its result
        if wide:
            args = [f"tl.cast({opened(a)}, {tl_dtype(computed)})" for a in args]
        args = [atom(a) for a in args]
        if code in CALLS:
            text = function_text(code, args[0], computed, bool(op.attrs.get("approx")))
        elif code in ("min", "max"):
            text = minmax(code, args[0], args[1])
        elif code == "neg":
            text = f"-{args[0]}"
        elif code == "abs":
            text = f"tl.abs({opened(args[0])})"
        elif code == "not":
            text = negated(args[0]) if dtype.is_bool else f"~{args[0]}"
        elif code in ("and", "or") and dtype.is_bool:
            text = f"tl.{'And' if code == 'and' else 'Or'}({opened(args[0])}, {opened(args[1])})"
        elif code == "xor" and dtype.is_bool:
            text = f"tl.cast({opened(args[0])}, tl.int32) != tl.cast({opened(args[1])}, tl.int32)"
        elif code in ("eq", "ne") and dtype.is_float and args[0] == args[1]:  # TVM would know the answer
            text = f"tl.isnan({opened(args[0])})"
            text = text if code == "ne" else negated(text)
        elif code in COMPARE and dtype == i1:
            text = f"tl.cast({opened(args[0])}, tl.int32) {INFIX[code]} tl.cast({opened(args[1])}, tl.int32)"
        elif code in INFIX:
            text = f"{args[0]} {INFIX[code]} {args[1]}"
        else:
            raise LegalityError(f"the TileLang backend does not know op {code!r}", where=op.loc)
        if wide and code not in COMPARE:  # floats are rounded once, integers keep their lowest bits
            return f"tl.cast({text}, {tl_dtype(dtype)})"
        return text


def regrouped(outer: tuple[int, ...], inner: tuple[int, ...], at: list[str]) -> list[str]:
    """Indices into a tile of shape `inner` for element `at` of the same elements as `outer`, in row-major order.

    Axes are matched in the smallest groups of equal size, so that untouched axes keep plain indices.
    """
    out: list[str] = []
    a = [(n, t) for n, t in zip(outer, at, strict=True) if n != 1]
    b = [n for n in inner if n != 1]
    found: list[str] = []
    x = y = 0
    while x < len(a) or y < len(b):
        left, right, i, j = a[x][0], b[y], x + 1, y + 1
        while left != right:
            if left < right:
                left, i = left * a[i][0], i + 1
            else:
                right, j = right * b[j], j + 1
        if i - x == 1 and j - y == 1:
            found.append(a[x][1])
        else:
            found += _split(_joined(a[x:i]), b[y:j])
        x, y = i, j
    kept = iter(found)
    for n in inner:
        out.append("0" if n == 1 else next(kept))
    return out


def _joined(axes: list[tuple[int, str]]) -> str:
    terms: list[str] = []
    step = 1
    for n, text in reversed(axes):
        terms.append(scaled(text, step))
        step *= n
    return total(*reversed(terms))


def _split(linear: str, extents: list[int]) -> list[str]:
    if len(extents) == 1:
        return [linear]
    out: list[str] = []
    step = 1
    for n in extents:
        step *= n
    base = atom(linear)
    for k, n in enumerate(extents):
        step //= n
        text = base if step == 1 else f"{base} // {step}"
        out.append(f"({text})" if k == 0 else f"({atom(text)} % {n})" if step != 1 else f"({base} % {n})")
    return out
