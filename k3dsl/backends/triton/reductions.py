"""Triton text of what mixes the elements of a tile: reductions, scans, selected slices and products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3dsl.backends.printing import Writer
from k3dsl.backends.triton.elementwise import HELPERS, TL_DTYPES, literal
from k3dsl.backends.triton.text import pow2
from k3dsl.ir.graph import Kernel as IRKernel
from k3dsl.ir.graph import Op, Region, Value
from k3dsl.ir.scalars import integer_range
from k3dsl.ir.types import DType, f32

if TYPE_CHECKING:
    from k3dsl.backends.triton.schedule import TritonSchedule

_COMBINE = {"prod": "_mul", "any": "_or", "all": "_and", "max": "_max", "min": "_min"}


def neutral(kind: str, dtype: DType) -> str:
    """The number that a reduction or scan of this kind leaves out of account."""
    if kind == "sum":
        return literal(0, dtype)
    if kind in ("prod", "all"):
        return literal(1, dtype)
    if kind == "any":
        return "False"
    if dtype.is_float:
        return '-float("inf")' if kind == "max" else 'float("inf")'
    return str(integer_range(dtype)[0 if kind == "max" else 1])


class ReductionPrinter(Writer):
    """The part of `printer.Printer` for these ops.

    Tiles are padded to powers of two, and padding holds anything. So lanes of padding are replaced by a neutral value
    along the axis that is reduced, scanned from its end, or multiplied over, unless they are known to be 0 already.
    Floats of 16 bits are reduced in fp32 and rounded once.
    """

    kernel: IRKernel
    schedule: TritonSchedule
    asm: bool
    tensor_memory: bool
    helpers: dict[str, str]
    text_of: dict[int, str]
    atomic: set[int]
    zero_padded: set[int]

    if TYPE_CHECKING:

        def __init__(self, kernel: IRKernel, schedule: TritonSchedule, asm: bool, tensor_memory: bool) -> None: ...
        def text(self, v: Value) -> str: ...
        def atom(self, v: Value) -> str: ...
        def bind(
            self,
            op: Op,
            text: str,
            *,
            atomic: bool = False,
            inline: bool = True,
            zero: bool = False,
            fallback: str = "t",
        ) -> None: ...
        def helper(self, name: str, text: str | None = None) -> str: ...
        def region(self, region: Region) -> None: ...

    def _axis_iota(self, shape: tuple[int, ...], axis: int) -> str:
        text = f"tl.arange(0, {pow2(shape[axis])})"
        if len(shape) == 1:
            return text
        return f"{text}[{', '.join(':' if k == axis else 'None' for k in range(len(shape)))}]"

    def _masked(self, v: Value, axis: int, fill: str | None = None) -> str:
        """The operand with padding along `axis` replaced by `fill`; None: by 0."""
        n = v.shape[axis]
        if pow2(n) == n or (fill is None and id(v) in self.zero_padded):
            return self.text(v)
        return f"tl.where({self._axis_iota(v.shape, axis)} < {n}, {self.text(v)}, {fill or literal(0, v.dtype)})"

    def _widened(self, v: Value, axis: int, kind: str, padding: bool) -> str:
        """The operand of a reduction or scan: masked, and in fp32 where it has fewer bits."""
        fill = None if kind == "sum" else neutral(kind, v.dtype)
        n = v.shape[axis]
        masked = padding and pow2(n) != n and not (fill is None and id(v) in self.zero_padded)
        if not v.dtype.is_float or v.dtype.bits >= f32.bits:
            return self._masked(v, axis, fill) if masked else self.text(v)
        return f"{self._masked(v, axis, fill) if masked else self.atom(v)}.to(tl.float32)"

    def _narrowed(self, text: str, dtype: DType) -> str:
        """Triton's reductions of narrow dtypes give 32 bits."""
        return f"{text}.to({TL_DTYPES[dtype.name]})" if dtype.bits < f32.bits and not dtype.is_bool else text

    def op_reduce(self, op: Op) -> None:
        axis, kind, keep = op.attrs["axis"], op.attrs.get("kind"), op.attrs.get("keepdim")
        if kind is None:
            self._combined(op, "tl.reduce")
            return
        x = self._widened(op.operands[0], axis, kind, padding=True)
        end = ", keep_dims=True)" if keep else ")"
        if kind == "sum":
            text = f"tl.sum({x}, axis={axis}{end}"
        elif kind in ("max", "min") and not op.result.dtype.is_float:
            text = f"tl.{kind}({x}, axis={axis}{end}"
        else:
            text = f"tl.reduce({x}, {axis}, {self.helper(_COMBINE[kind])}{end}"
        self.bind(op, self._narrowed(text, op.result.dtype), atomic=True)

    def op_argmax(self, op: Op) -> None:
        """The lowest position of the extreme; a NaN counts as the extreme, which tl.argmax leaves open."""
        v, axis = op.operands[0], op.attrs["axis"]
        x = self._masked(v, axis, neutral(op.opcode[3:], v.dtype))
        keep = ", keep_dims=True" if op.attrs.get("keepdim") else ""
        if not v.dtype.is_float:
            self.bind(op, f"tl.{op.opcode}({x}, axis={axis}, tie_break_left=True{keep})", atomic=True)
            return
        if v.dtype.bits < f32.bits:
            x = f"{x if x != self.text(v) else self.atom(v)}.to(tl.float32)"
        positions = f"tl.broadcast_to({self._axis_iota(v.shape, axis)}, {[pow2(n) for n in v.shape]})"
        name = self.name(op.result.name, op.opcode)
        best = self.name(f"{name}_value")
        combine = self.helper(f"_{op.opcode}")
        self.line(f"{best}, {name} = tl.reduce(({x}, {positions}), {axis}, {combine}{keep})", op.loc)
        self.text_of[id(op.result)] = name
        self.atomic.add(id(op.result))

    op_argmin = op_argmax

    def op_scan(self, op: Op) -> None:
        axis, kind, reverse = op.attrs["axis"], op.attrs.get("kind"), bool(op.attrs.get("reverse"))
        if kind is None:
            self._combined(op, "tl.associative_scan")
            return
        x = self._widened(op.operands[0], axis, kind, padding=reverse)
        end = ", reverse=True)" if reverse else ")"
        if kind in ("sum", "prod"):
            text = f"tl.cum{kind}({x}, axis={axis}{end}"
        else:
            text = f"tl.associative_scan({x}, {axis}, {self.helper(_COMBINE[kind])}{end}"
        self.bind(op, self._narrowed(text, op.result.dtype), atomic=True)

    def _combined(self, op: Op, call: str) -> None:
        """A reduction or scan with its own combine, printed as a module-level function."""
        axis, region = op.attrs["axis"], op.regions[0]
        name = self.name(f"_combine_{self.kernel.name}")
        inner = type(self)(IRKernel(name, [], [], [], (), region), self.schedule, self.asm, self.tensor_memory)
        for v in region.args:
            inner.text_of[id(v)] = inner.name(v.name, "x")
            inner.atomic.add(id(v))
        names = ", ".join(inner.text_of[id(v)] for v in region.args)
        inner.region(region)
        outs = ", ".join(inner.text(v) for v in region.yields)
        body = "\n".join([*inner.lines, f"    return {outs}"])
        self.helpers.update(inner.helpers)
        self.helper(name, f"\n@triton.jit\ndef {name}({names}):\n{body}\n")
        tiles = ", ".join(self.text(v) for v in op.operands)
        tiles = f"({tiles})" if len(op.operands) > 1 else tiles
        extra = ", reverse=True" if op.attrs.get("reverse") else ", keep_dims=True" if op.attrs.get("keepdim") else ""
        targets = [self.name(v.name) for v in op.results]
        self.line(f"{', '.join(targets)} = {call}({tiles}, {axis}, {name}{extra})", op.loc)
        for v, t in zip(op.results, targets, strict=True):
            self.text_of[id(v)] = t
            self.atomic.add(id(v))

    def op_select(self, op: Op) -> None:
        v, axis, position = op.operands[0], op.attrs["axis"], op.attrs["position"]
        dtype = v.dtype
        if v.shape[axis] == 1 and op.result.shape:
            self.bind(op, f"tl.reshape({self.text(v)}, {[pow2(n) for n in op.result.shape]})", atomic=True)
            return
        x = self.text(v)
        if dtype.is_bool:
            x = f"{self.atom(v)}.to(tl.int32)"
        elif dtype.is_float and dtype.bits == 8:
            x = f"{self.atom(v)}.to(tl.float32)"
        # -0.0 is the neutral element of an fp sum, so the select costs no addition
        zero = "-0.0" if dtype.is_float else "0"
        chosen = f"tl.where({self._axis_iota(v.shape, axis)} == {position}, {x}, {zero})"
        text = f"tl.sum({chosen}, axis={axis})"
        if dtype.is_bool:
            self.bind(op, f"{text} != 0")
            return
        narrow = dtype.bits < f32.bits and not (dtype.is_float and dtype.bits == 16)
        self.bind(op, f"{text}.to({TL_DTYPES[dtype.name]})" if narrow else text, atomic=True)

    def _factor(self, value: Value, axis: int) -> str:
        """A factor of a product, with its padding as zeros along the axis that is summed over."""
        text, source = self._masked(value, axis), value.op
        while source is not None and source.opcode in ("reshape", "permute"):
            source = source.operands[0].op
        reordered = source is not None and source is not value.op and source.opcode == "dequantize_mxfp4"
        return f"{self.helper('_opaque')}({text})" if reordered and self.tensor_memory else text

    def op_dot(self, op: Op) -> None:
        a, b = op.operands[0], op.operands[1]
        n = a.type.rank
        parts = [self._factor(a, n - 1), self._factor(b, n - 2)]
        if len(op.operands) == 3:
            parts.append(self.text(op.operands[2]))
        if a.dtype == f32:
            parts.append(f'input_precision="{op.attrs["precision"]}"')
        self.bind(op, f"tl.dot({', '.join(parts)})", atomic=True)


assert set(_COMBINE.values()) <= set(HELPERS)
