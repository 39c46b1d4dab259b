"""Tensor access as TileLang text: element numbers and guards of one element, or the block of a structured copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from k3dsl.backends.tilelang.text import atom, dim_text, scaled, total
from k3dsl.ir.graph import Index, Kernel, Op, TensorParam, Value
from k3dsl.passes.affine import IndexAnalysis
from k3dsl.targets import Target


@dataclass
class Axis:
    """One axis of the tensor: how it is indexed, the first tile axis it fills, and how many it fills."""

    number: int
    index: Index
    first: int
    rank: int


class Access:
    """One memory op: what it touches, and whether a structured copy can do it."""

    def __init__(self, op: Op, kernel: Kernel, analysis: IndexAnalysis) -> None:
        self.op, self.kernel, self.analysis = op, kernel, analysis
        self.tensor: TensorParam = kernel.tensor(op.attrs["tensor"])
        self.axes: list[Axis] = []
        position, gathered = 0, None
        for number, index in enumerate(op.index):
            if index.kind == "tile":
                if gathered is None:
                    gathered, first, rank = position, position, len(index.shape)
                else:
                    first, rank = gathered, 0
            else:
                first = position
                rank = {"scalar": 0, "full": 1, "span": len(index.shape)}[index.kind]
            self.axes.append(Axis(number, index, first, rank))
            position += rank
        self.rank = position

    # ---- one element -------------------------------------------------------------------------------------------------

    def element(
        self,
        at: list[str],
        scalar: Callable[[Value], str],
        tile: Callable[[Value, list[str]], str],
        extents: Callable[[int], int],
    ) -> tuple[list[str], list[str]]:
        """Indices of the tensor for the tile's element `at`, and the guards it needs.

        scalar, tile: text of an operand and of its element. extents: the loop's extent over a tile axis of this length.
        """
        where: list[str] = []
        guards: list[str] = []
        for axis in self.axes:
            index = axis.index
            if index.kind == "tile":
                v = self.op.operands[_slot(index.start)]
                where.append(tile(v, at[axis.first : axis.first + len(v.shape)]))
                continue
            lanes = self._lanes(axis, at)
            for k in range(axis.rank):
                n = index.shape[k]
                if extents(n) > n and not at[axis.first + k].isdigit():
                    guards.append(f"{at[axis.first + k]} < {n}")
            start = "0" if index.start is None else scalar(self.op.operands[index.start])
            position = total(start, lanes)
            where.append(position)
            if self._guarded(axis):
                guards.append(f"{position} < {scalar(self.op.operands[_slot(index.end)])}")
        slot = self.op.attrs.get("mask_slot")
        if slot is not None:
            guards.append(tile(self.op.operands[slot], at))
        return where, guards

    def _lanes(self, axis: Axis, at: list[str]) -> str:
        terms: list[str] = []
        step = 1
        for k in reversed(range(axis.rank)):
            terms.append(scaled(at[axis.first + k], step))
            step *= axis.index.shape[k]
        return total(*reversed(terms))

    def _guarded(self, axis: Axis) -> bool:
        index = axis.index
        return index.kind == "span" and index.end is not None and not self.analysis.span_in_bounds(self.op, axis.number)

    # ---- structured copies -------------------------------------------------------------------------------------------

    def aligned(self) -> bool:
        """True when every row of the tensor provably starts at a multiple of 16 bytes and elements are contiguous."""
        strides = self.tensor.stride_exprs()
        size = self.tensor.dtype.bytes
        return strides[-1].constant == 1 and all((s.divisor() * size) % 16 == 0 for s in strides[:-1])

    def copy_reason(self, target: Target, clipping: bool, patched: bool = False) -> str | None:
        """Why a structured copy cannot do this access, or None.

        clipping: whether the copy may run over the tensor's end, where hardware reads 0 and writes nothing. patched:
        whether what it reads past the span's own end is replaced afterwards, see `past_end`.
        """
        if self.op.opcode == "atomic_add":
            return "an atomic add goes element by element"
        if any(a.index.kind == "tile" for a in self.axes):
            return "a gather or scatter goes element by element"
        if self.op.attrs.get("mask_slot") is not None:
            return "it has a mask"
        if self.tensor.dtype.is_bool:
            return "bools go element by element"
        for axis in self.axes:
            if axis.index.kind == "span" and sum(n != 1 for n in axis.index.shape) > 1:
                return "a span is laid out over several axes"
        for axis in self.axes:
            if not self._guarded(axis):
                continue
            why = self._clip_reason(axis, target, patched)
            if not clipping or why is not None:
                return why or "rows past the end need a guard"
        return None

    def _clip_reason(self, axis: Axis, target: Target, patched: bool) -> str | None:
        """Why hardware bounds checks do not do for a span with an end."""
        if self.op.attrs.get("other", 0.0) and not patched:
            return "rows past the end do not read as 0"
        if target.vendor != "nvidia" or not isinstance(target.arch, int) or target.arch < 90:
            return "the target's copies have no bounds checks of their own"
        end = self.op.operands[_slot(axis.index.end)]
        if self.analysis.affine(end) != self.tensor.shape[axis.number] and not patched:
            return "the span's end is not the tensor's"
        if not self.aligned():
            return "rows of the tensor are not known to start at multiples of 16 bytes"
        if self.width() * self.tensor.dtype.bytes % 16:
            return "rows of the block are no multiple of 16 bytes"
        return None

    def past_end(self, at: list[str], scalar: Callable[[Value], str]) -> list[str]:
        """Conditions under which a copy with `patched` has read the element `at` right."""
        guards: list[str] = []
        for axis in self.axes:
            if not self._guarded(axis):
                continue
            end = self.op.operands[_slot(axis.index.end)]
            if self.op.attrs.get("other", 0.0) or self.analysis.affine(end) != self.tensor.shape[axis.number]:
                position = total(scalar(self.op.operands[_slot(axis.index.start)]), self._lanes(axis, at))
                guards.append(f"{position} < {scalar(end)}")
        return guards

    def width(self) -> int:
        """Elements of the block along the tensor's last axis."""
        n = 1
        for extent in self.axes[-1].index.shape:
            n *= extent
        return n

    def vectors(self) -> bool:
        """True when every row of the block is a number of whole 16 bytes at multiples of 16 bytes."""
        index, size = self.axes[-1].index, self.tensor.dtype.bytes
        if not self.aligned() or self.axes[-1].rank == 0 or self.width() * size % 16:
            return False
        return index.start is None or self.analysis.proved_divisor(self.op.operands[index.start]) * size % 16 == 0

    def uses_tma(self, target: Target) -> bool:
        """True when a structured copy to or from a shared tile is one for the tensor memory accelerator."""
        if target.vendor != "nvidia" or not isinstance(target.arch, int) or target.arch < 90 or not self.aligned():
            return False
        return self.axes[-1].rank > 0 and self.width() * self.tensor.dtype.bytes % 16 == 0 and self.tensor.rank <= 5

    def block(self, scalar: Callable[[Value], str]) -> str:
        """The region of the tensor that a structured copy moves."""
        keys: list[str] = []
        for axis in self.axes:
            index = axis.index
            start = "0" if index.start is None else scalar(self.op.operands[index.start])
            n = 1
            for extent in index.shape:
                n *= extent
            if axis.rank == 0 or n == 1:
                keys.append(start)
            else:
                keys.append(f"{start}:{total(start, str(n))}")
        return f"{self.tensor.name}[{', '.join(keys)}]"


def strides_text(tensor: TensorParam) -> str:
    """The strides of a tensor that is not contiguous."""
    return ", ".join(dim_text(e) for e in tensor.stride_exprs())


def shape_text(tensor: TensorParam) -> str:
    """The shape as a tuple's inside."""
    texts = [dim_text(e) for e in tensor.shape]
    return ", ".join(texts) + ("," if len(texts) == 1 else "")


def _slot(slot: int | None) -> int:
    assert slot is not None
    return slot


__all__ = ["Access", "Axis", "atom", "shape_text", "strides_text"]
