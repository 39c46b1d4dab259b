"""Prints IR as a readable Triton module: one function, all static values as literals, origin lines as comments."""

from __future__ import annotations

import keyword
import re

from k3dsl.backends.printing import Writer
from k3dsl.backends.triton.access import AccessPrinter, dim_text, exceeds
from k3dsl.backends.triton.elementwise import HELPERS, TL_DTYPES, call_text, infix, literal, minmax, needs_f32
from k3dsl.backends.triton.reductions import ReductionPrinter
from k3dsl.backends.triton.schedule import TritonSchedule
from k3dsl.backends.triton.text import atom, opened, pow2
from k3dsl.errors import LegalityError
from k3dsl.ir.graph import Kernel, Op, Region, Value, walk
from k3dsl.ir.opset import BINARY, BITWISE, COMPARE, MXFP4_GROUP, UNARY_FLOAT
from k3dsl.ir.scalars import clamped
from k3dsl.ir.types import f32

MAX_INLINE = 88
RESERVED = frozenset({"tl", "triton", "float", *HELPERS, *keyword.kwlist})
"""Names that mean something else in a generated module. Names of parameters cannot be changed, so legality refuses them."""
ELEMENTWISE = frozenset({*COMPARE, *BITWISE, *BINARY, "where"})


class Printer(ReductionPrinter):
    """State of one printing: names in use, indentation, helpers needed."""

    def __init__(self, kernel: Kernel, schedule: TritonSchedule, asm: bool, tensor_memory: bool = False) -> None:
        """asm: inline PTX may be used. tensor_memory: products read their factors from tensor memory (tcgen05)."""
        Writer.__init__(self, RESERVED, depth=1)
        self.kernel = kernel
        self.schedule = schedule
        self.asm = asm
        self.tensor_memory = asm and tensor_memory
        self.helpers: dict[str, str] = {}
        self.text_of: dict[int, str] = {}
        self.atomic: set[int] = set()
        self.zero_padded: set[int] = set()
        self.uses: dict[int, int] = {}
        self.home: dict[int, Region] = {}
        self.user_region: dict[int, set[int]] = {}
        self.users: dict[int, list[Op]] = {}
        self.yields: set[int] = set()
        self.shared: dict[str, str] = {}
        self.prologue: list[str] = []
        self.descriptors: dict[tuple[str, tuple[int, ...]], str] = {}
        self._count(kernel.body)
        self._count_through_broadcasts(kernel.body)

    # ---- bookkeeping -------------------------------------------------------------------------------------------------

    def _count(self, region: Region) -> None:
        for v in region.args:
            self.home[id(v)] = region
        for op in region.ops:
            for v in op.operands:
                self.uses[id(v)] = self.uses.get(id(v), 0) + 1
                self.user_region.setdefault(id(v), set()).add(id(region))
                self.users.setdefault(id(v), []).append(op)
            for v in op.results:
                self.home[id(v)] = region
            for inner in op.regions:
                self._count(inner)
        several = len(region.yields) > 1
        for v in region.yields:
            # of several yielded values each gets a name, so that all exist before the first carry changes
            self.yields.add(id(v))
            self.uses[id(v)] = self.uses.get(id(v), 0) + (2 if several else 1)
            self.user_region.setdefault(id(v), set()).add(id(region))

    def _count_through_broadcasts(self, region: Region) -> None:
        """A broadcast that is absorbed by its users stands for its operand in each of them."""
        for op in reversed(list(walk(region))):
            if op.opcode == "broadcast":
                v = op.operands[0]
                self.uses[id(v)] += max(0, self.uses.get(id(op.result), 0) - 1)
                self.user_region[id(v)] |= self.user_region.get(id(op.result), set())

    def text(self, v: Value) -> str:
        return self.text_of[id(v)]

    def atom(self, v: Value) -> str:
        t = self.text_of[id(v)]
        return t if id(v) in self.atomic else atom(t)

    def bind(
        self, op: Op, text: str, *, atomic: bool = False, inline: bool = True, zero: bool = False, fallback: str = "t"
    ) -> None:
        """Gives an op's result its text: inlined where it is used once nearby and short, else a named variable."""
        v = op.result
        if zero:
            self.zero_padded.add(id(v))
        once = self.uses.get(id(v), 0) == 1 and self.user_region.get(id(v), set()) == {id(self.home[id(v)])}
        if inline and once and v.name is None and len(text) <= MAX_INLINE:
            self.text_of[id(v)] = text
            if atomic:
                self.atomic.add(id(v))
            return
        name = self.name(v.name, fallback)
        self.line(f"{name} = {text}", op.loc)
        self.text_of[id(v)] = name
        self.atomic.add(id(v))

    def alias(self, op: Op, of: Value) -> None:
        v = op.result
        self.text_of[id(v)] = self.text_of[id(of)]
        if id(of) in self.atomic:
            self.atomic.add(id(v))

    # ---- module ------------------------------------------------------------------------------------------------------

    def module(self, name: str, header: str) -> str:
        """The whole module. Runtime dims that the body never reads are no arguments: see `arguments`."""
        tensors, scalars = [t.name for t in self.kernel.tensors], [s.name for s in self.kernel.scalars]
        self.used.update([*tensors, *scalars, *(s.name for s in self.kernel.dims)])
        for s, v in zip(scalars, self.kernel.scalar_values, strict=True):
            self.text_of[id(v)] = s
            self.atomic.add(id(v))
        self._descriptors()
        self.region(self.kernel.body)
        lines = self.prologue + self.lines or ["    return"]
        words = set(re.findall(r"\w+", "\n".join(lines)))
        self.arguments: list[str] = [*tensors, *(s.name for s in self.kernel.dims if s.name in words), *scalars]
        signature = f"def {name}({', '.join(self.arguments)}):"
        if len(signature) > 118:
            signature = f"def {name}(\n    {', '.join(self.arguments)},\n):"
        parts = [f'"""{header}"""\n\nimport triton\nimport triton.language as tl\n', *self.helpers.values()]
        return "\n".join(parts) + f"\n\n@triton.jit\n{signature}\n" + "\n".join(lines) + "\n"

    def share(self, text: str, wish: str) -> str:
        """A variable at the top of the function for text that depends on no traced value."""
        if text not in self.shared:
            self.shared[text] = self.name(wish)
            self.prologue.append(f"    {self.shared[text]} = {text}")
        return self.shared[text]

    def helper(self, name: str, text: str | None = None) -> str:
        self.helpers.setdefault(name, text if text is not None else HELPERS[name])
        return name

    def _descriptors(self) -> None:
        wanted = set(self.schedule.descriptors)
        for op in walk(self.kernel.body):
            if op.index and op.attrs["tensor"] in wanted:
                tensor = self.kernel.tensor(op.attrs["tensor"])
                access = AccessPrinter(op, tensor, self.kernel)
                reason = access.descriptor_reason()
                if reason is not None:
                    raise LegalityError(f"{tensor.name} cannot use a tensor descriptor: {reason}", where=op.loc)
                block, _ = access.descriptor_block()
                if (tensor.name, block) in self.descriptors:
                    continue
                name = self.name(f"{tensor.name}_desc")
                self.descriptors[tensor.name, block] = name
                shape = ", ".join(dim_text(e) for e in tensor.shape)
                strides = ", ".join(dim_text(e, wide=exceeds(e)) for e in tensor.stride_exprs())
                self.line(
                    f"{name} = tl.make_tensor_descriptor({tensor.name}, [{shape}], [{strides}], {list(block)})", op.loc
                )

    # ---- regions -----------------------------------------------------------------------------------------------------

    def region(self, region: Region) -> None:
        for op in region.ops:
            method = getattr(self, f"op_{op.opcode}", None)
            if method is not None:
                method(op)
            else:
                self.elementwise(op)

    # ---- elementwise -------------------------------------------------------------------------------------------------

    def _operand(self, v: Value, op: Op) -> str:
        """An operand of an elementwise op; a broadcast needs no text where Triton broadcasts by itself."""
        if v.op is not None and v.op.opcode == "broadcast" and _absorbs(op):
            return self.atom(v.op.operands[0])
        return self.atom(v)

    def elementwise(self, op: Op) -> None:
        code = op.opcode
        dtype = op.operands[0].dtype
        args = [self._operand(v, op) for v in op.operands]
        bare = [_bare(v) or (_literal(v) and _absorbs(op)) for v in op.operands]
        if all(bare):  # Triton would compute with Python's numbers
            args[0], bare[0] = self.held(op.operands[0]), False
        narrow = needs_f32(code, dtype)
        if narrow:
            args = [a if number else f"{a}.to(tl.float32)" for a, number in zip(args, bare, strict=True)]
        atomic = False
        if code in UNARY_FLOAT:
            source = op.operands[0].op
            if code == "exp2" and self.asm and dtype == f32 and source is not None and source.opcode == "neg":
                text, atomic = f"{self.helper('_exp2_neg')}({self.text(source.operands[0])})", True
            else:
                computed = f32 if narrow else dtype
                text, atomic = call_text(code, args[0], computed, bool(op.attrs.get("approx")), self.asm)
                for name in HELPERS:
                    if f"{name}(" in text:
                        self.helper(name)
        elif code in ("min", "max"):
            text, atomic = minmax(code, f32 if narrow else dtype, opened(args[0]), opened(args[1])), True
        elif code == "neg":
            text = f"-{args[0]}"
        elif code == "abs":
            text, atomic = f"tl.abs({opened(args[0])})", True
        elif code == "not":
            text = f"~{args[0]}" if not dtype.is_bool else f"{args[0]} == 0"
        else:
            symbol = infix(code)
            if symbol is None:
                raise LegalityError(f"the Triton backend does not know op {code!r}", where=op.loc)
            text = f"{args[0]} {symbol} {args[1]}"
        if narrow and code not in COMPARE:
            text, atomic = f"{text if atomic else atom(text)}.to({TL_DTYPES[dtype.name]})", True
        self.bind(op, text, atomic=atomic, zero=self._keeps_zero(op))

    def held(self, v: Value) -> str:
        """The value as a Triton tensor, where a bare number would not do."""
        return f"tl.full([], {self.text(v)}, {TL_DTYPES[v.dtype.name]})" if _bare(v) else self.text(v)

    def _keeps_zero(self, op: Op) -> bool:
        """True when padding that is 0 in every operand is 0 in the result."""
        return op.opcode in ("neg", "abs", "mul", "add", "sub", "min", "max") and all(
            id(v) in self.zero_padded for v in op.operands
        )

    def op_where(self, op: Op) -> None:
        c, a, b = (opened(self._operand(v, op)) for v in op.operands)
        dtype = op.result.dtype
        if all(_literal(v) for v in op.operands[1:]) and dtype.name not in ("f32", "i32"):
            a = f"tl.full([], {a}, {TL_DTYPES[dtype.name]})"
        self.bind(op, f"tl.where({c}, {a}, {b})", atomic=True)

    def op_cast(self, op: Op) -> None:
        v, dtype = op.operands[0], op.attrs["dtype"]
        if dtype.is_bool:
            self.bind(op, f"{self.atom(v)} != 0")
            return
        text = self.held(v) if _bare(v) else self.atom(v)
        if (ends := clamped(v.dtype, dtype)) is not None:
            low, high = ends
            inner = f"{text}.to(tl.float32)" if v.dtype.bits == 8 else text
            text = f"tl.minimum(tl.maximum({inner}.to(tl.int32), {low}), {high}).to({TL_DTYPES[dtype.name]})"
            self.bind(op, text, atomic=True, zero=id(v) in self.zero_padded)
            return
        if 8 in (dtype.bits, v.dtype.bits) and f32 not in (dtype, v.dtype) and (dtype.is_float or v.dtype.is_float):
            text = f"{text}.to(tl.float32)"  # the one dtype that 8-bit floats and integers convert to and from
        text = f"{text}.to({TL_DTYPES[dtype.name]})"
        self.bind(op, text, atomic=True, zero=id(v) in self.zero_padded)

    # ---- constants and shapes ----------------------------------------------------------------------------------------

    def op_const(self, op: Op) -> None:
        v = op.result
        text = literal(op.attrs["value"], v.dtype)
        if v.shape:
            self.bind(op, f"tl.full({[pow2(n) for n in v.shape]}, {text}, {TL_DTYPES[v.dtype.name]})", atomic=True)
            return
        self.text_of[id(v)] = text if not text.startswith("-") else f"({text})"
        self.atomic.add(id(v))

    def op_program_id(self, op: Op) -> None:
        self.bind(op, f"tl.program_id({op.attrs['axis']})", atomic=True)

    def op_dim(self, op: Op) -> None:
        expr = op.attrs["expr"]
        text = dim_text(expr, wide=op.result.dtype.bits == 64)
        if text.isidentifier():
            self.text_of[id(op.result)] = text
            self.atomic.add(id(op.result))
        else:
            self.bind(op, text)

    def op_iota(self, op: Op) -> None:
        self.bind(op, f"tl.arange(0, {pow2(op.attrs['size'])})", atomic=True)

    def op_assume(self, op: Op) -> None:
        v = op.operands[0]
        n = op.attrs["divisible_by"]
        if n > 1 and not _bare(v):
            self.bind(op, f"tl.multiple_of({self.text(v)}, {n})", atomic=True)
        else:
            self.bind(op, self.text(v), atomic=id(v) in self.atomic)

    def op_broadcast(self, op: Op) -> None:
        v, shape = op.operands[0], op.result.shape
        if all(self._absorbed(op.result, u) for u in self.users.get(id(op.result), [])) and not self.yielded(op.result):
            self.alias(op, v)
            return
        padded = [pow2(n) for n in shape]
        if v.shape == ():
            self.bind(op, f"tl.full({padded}, {self.text(v)}, {TL_DTYPES[v.dtype.name]})", atomic=True)
        else:
            self.bind(op, f"tl.broadcast_to({self.text(v)}, {padded})", atomic=True)

    def yielded(self, v: Value) -> bool:
        return id(v) in self.yields

    def _absorbed(self, v: Value, user: Op) -> bool:
        """True when `user` can take the broadcast's operand in its place."""
        if user.opcode in ("store", "atomic_add"):
            assert v.op is not None
            return v.op.operands[0].shape == () and user.operands[user.attrs["value_slot"]] is v
        return _absorbs(user)

    def op_reshape(self, op: Op) -> None:
        v, shape = op.operands[0], op.result.shape
        a, b = [n for n in v.shape if n != 1], [n for n in shape if n != 1]
        if a != b and any(pow2(n) != n for n in a + b):
            raise LegalityError(
                f"reshape {v.type} to {list(shape)}: the Triton backend pads extents to powers of two, so it cannot "
                "regroup an axis that is not one",
                where=op.loc,
                fix="use extents that are powers of two",
            )
        zero = id(v) in self.zero_padded
        if a == b and len(shape) > len(v.shape) and v.shape:
            keys, k = [], 0
            for n in shape:
                if k < len(v.shape) and v.shape[k] == n:
                    keys.append(":")
                    k += 1
                else:
                    keys.append("None")
            if k == len(v.shape):
                self.bind(op, f"{self.atom(v)}[{', '.join(keys)}]", atomic=True, zero=zero)
                return
        padded = [pow2(n) for n in shape]
        if v.shape == ():
            self.bind(op, f"tl.full({padded}, {self.text(v)}, {TL_DTYPES[v.dtype.name]})", atomic=True)
        elif shape == ():
            self.bind(op, f"tl.sum(tl.reshape({self.text(v)}, [{v.type.size}]), 0)", atomic=True)
        else:
            self.bind(op, f"tl.reshape({self.text(v)}, {padded})", atomic=True, zero=zero)

    def op_permute(self, op: Op) -> None:
        v, axes = op.operands[0], op.attrs["axes"]
        zero = id(v) in self.zero_padded
        if tuple(axes) == (1, 0):
            self.bind(op, f"tl.trans({self.text(v)})", atomic=True, zero=zero)
        else:
            self.bind(op, f"tl.permute({self.text(v)}, {tuple(axes)})", atomic=True, zero=zero)

    def op_dequantize_mxfp4(self, op: Op) -> None:
        packed, scale = op.operands
        lead = [pow2(n) for n in packed.shape[:-1]]
        groups = pow2(scale.shape[-1])
        full = [*lead, groups * MXFP4_GROUP]
        low, high, power = self.name("low"), self.name("high"), self.name("power")
        values = self.helper("_e2m1_bf16" if self.asm else "_e2m1")
        self.line(f"{low}, {high} = {values}({self.text(packed)})", op.loc)
        factor = f"{self.helper('_e8m0')}({self.text(scale)})" + (".to(tl.bfloat16)" if self.asm else "")
        spread = f"tl.broadcast_to(tl.reshape({factor}, {[*lead, groups, 1]}), {[*lead, groups, MXFP4_GROUP]})"
        self.line(f"{power} = tl.reshape({spread}, {full})")
        # the product comes last: of a reshape that goes straight into a dot, Triton 3.9 cannot lay some out in shared memory
        text = f"tl.reshape(tl.join({low}, {high}), {full}) * {power}"
        text = text if self.asm else f"({text}).to(tl.bfloat16)"
        zero = {id(packed), id(scale)} <= self.zero_padded
        self.bind(op, text, atomic=not self.asm, zero=zero)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _access(self, op: Op) -> AccessPrinter:
        tensor = self.kernel.tensor(op.attrs["tensor"])
        return AccessPrinter(op, tensor, self.kernel, lambda slot: self.text(op.operands[slot]), self.share)

    def _mask_text(self, masks: list[str]) -> str:
        return " & ".join(masks) if len(masks) > 1 else opened(masks[0])

    def op_load(self, op: Op) -> None:
        access = self._access(op)
        other = op.attrs.get("other", 0.0)
        dtype = op.result.dtype
        if access.tensor.name in self.schedule.descriptors:
            block, corner = access.descriptor_block()
            name = self.descriptors[access.tensor.name, block]
            text = f"{name}.load([{', '.join(corner)}])"
            shape = [pow2(n) for n in access.shape]
            if list(block) != shape:
                text = f"tl.reshape({text}, {shape})" if shape else f"tl.sum(tl.reshape({text}, [1]), 0)"
            masks = access.masks(tensor_bounds_checked=not other)
            if masks:
                text = f"tl.where({self._mask_text(masks)}, {text}, {literal(other, dtype)})"
            self.bind(op, text, atomic=True, inline=False, zero=not other, fallback=f"{access.tensor.name}_tile")
            return
        masks = access.masks()
        text = f"tl.load({access.pointer()}"
        if masks:
            text += f", mask={self._mask_text(masks)}, other={literal(other, dtype)}"
        text += ")"
        if dtype.is_bool:
            text = f"{text} != 0"
        if access.permuted:
            inverse = tuple(access.order.index(k) for k in range(access.rank))
            text = f"tl.permute({text}, {inverse})"
        suffix = "tile" if access.rank else "value"
        self.bind(
            op, text, atomic=not dtype.is_bool, inline=False, zero=not other, fallback=f"{access.tensor.name}_{suffix}"
        )

    def op_store(self, op: Op) -> None:
        access = self._access(op)
        v = op.operands[op.attrs["value_slot"]]
        value = self.text(v)
        if access.tensor.name in self.schedule.descriptors:
            block, corner = access.descriptor_block()
            name = self.descriptors[access.tensor.name, block]
            source = v.op.operands[0] if v.op is not None and v.op.opcode == "broadcast" else v
            if source.shape == () and value == self.text(source):  # a number for the whole block
                value = f"tl.full({list(block)}, {value}, {TL_DTYPES[v.dtype.name]})"
            elif list(block) != [pow2(n) for n in access.shape]:
                value = f"tl.reshape({value}, {list(block)})"
            self.line(f"{name}.store([{', '.join(corner)}], {value})", op.loc)
            return
        masks = access.masks()
        mask = f", mask={self._mask_text(masks)}" if masks else ""
        call = "tl.store" if op.opcode == "store" else "tl.atomic_add"
        order = ', sem="relaxed"' if op.opcode == "atomic_add" else ""
        self.line(f"{call}({access.pointer()}, {value}{mask}{order})", op.loc)

    op_atomic_add = op_store

    # ---- control -----------------------------------------------------------------------------------------------------

    def op_loop(self, op: Op) -> None:
        region = op.regions[0]
        index, carries = region.args[0], region.args[1:]
        names = [self.name(v.name, "carry") for v in carries]
        for name, v, initial in zip(names, carries, op.operands[2:], strict=True):
            self.line(f"{name} = {self.held(initial)}", op.loc)
            self.text_of[id(v)] = name
            self.atomic.add(id(v))
        start, stop, step = self.text(op.operands[0]), self.text(op.operands[1]), op.attrs["step"]
        label = op.attrs.get("label")
        stages = self.schedule.stages.get(label, 1) if label else 1
        i = self.name(index.name, "i")
        if op.attrs.get("reverse"):
            # Triton runs forwards only
            trips = atom(stop) if start == "0" else f"{atom(stop)} - {atom(start)}"
            if step > 1:
                trips = f"({trips} + {step - 1}) // {step}"
            if not trips.isalnum():
                trips, text = self.name(f"{i}_trips"), trips
                self.line(f"{trips} = {text}", op.loc)
            back = self.name(f"{i}_back")
            self.line(f"for {back} in tl.range(0, {trips}, num_stages={stages}):", op.loc)
            self.depth += 1
            at = f"{trips} - 1 - {back}" if step == 1 else f"({trips} - 1 - {back}) * {step}"
            self.line(f"{i} = {at}" if start == "0" else f"{i} = {atom(start)} + ({at})")
        else:
            by = f", {step}" if step != 1 else ""
            self.line(f"for {i} in tl.range({start}, {stop}{by}, num_stages={stages}):", op.loc)
            self.depth += 1
        self.text_of[id(index)] = i
        self.atomic.add(id(index))
        before = len(self.lines)
        self.region(region)
        self._yield(region, names, carries)
        if len(self.lines) == before:
            self.line("pass")
        self.depth -= 1
        for v, name in zip(op.results, names, strict=True):
            self.text_of[id(v)] = name
            self.atomic.add(id(v))

    def _yield(self, region: Region, names: list[str], carries: list[Value]) -> None:
        texts = [self.held(v) for v in region.yields]
        if len(names) > 1:
            # all new values exist before the first carry changes
            for k, (v, text) in enumerate(zip(region.yields, texts, strict=True)):
                if any(v is c for c in carries) and text != names[k]:
                    temporary = self.name(f"{text}_old")
                    self.line(f"{temporary} = {text}")
                    texts[k] = temporary
        for name, text in zip(names, texts, strict=True):
            if name != text:
                self.line(f"{name} = {text}")

    def op_when(self, op: Op) -> None:
        region = op.regions[0]
        self.line(f"if {self.text(op.operands[0])}:", op.loc)
        self.depth += 1
        before = len(self.lines)
        self.region(region)
        if len(self.lines) == before:
            self.line("pass")
        self.depth -= 1


def _bare(v: Value) -> bool:
    """True when the value is printed as a bare number."""
    return v.op is not None and v.op.opcode == "const" and v.shape == ()


def _literal(v: Value) -> bool:
    """True when the value is a number, or one number everywhere."""
    return _bare(v.op.operands[0] if v.op is not None and v.op.opcode == "broadcast" else v)


def _absorbs(op: Op) -> bool:
    """True when Triton's own broadcasting of the op's operands gives the result's shape."""
    if op.opcode not in ELEMENTWISE or not op.result.shape:
        return False
    joint = [1] * len(op.result.shape)
    for v in op.operands:
        shape = v.op.operands[0].shape if v.op is not None and v.op.opcode == "broadcast" else v.shape
        joint = [max(a, b) for a, b in zip(joint, shape, strict=True)] if shape else joint
    return tuple(joint) == op.result.shape and not all(_literal(v) for v in op.operands)
