"""Which loops are pipelined, and how deep: the schedule's wish, where TileLang's pipelining is right."""

from __future__ import annotations

from k3dsl.backends.tilelang.access import Access
from k3dsl.backends.tilelang.schedule import TileLangSchedule
from k3dsl.ir.graph import Kernel, Op, Region, walk
from k3dsl.passes.affine import IndexAnalysis
from k3dsl.targets import Target


def depths(
    kernel: Kernel, schedule: TileLangSchedule, target: Target, analysis: IndexAnalysis
) -> tuple[dict[int, int], Op | None]:
    """Pipeline depth of every loop, by id of its op (1 is a plain loop), and the loop whose copies get their own warps.

    A loop that may run no step is pipelined only where a warp group of its own copies: TileLang's other form always runs
    its last step. One loop of a program gets that warp group; pipelined loops beside it would index their slots wrongly.
    """
    found: dict[int, int] = {}
    split: Op | None = None
    for loop, holders in _loops(kernel.body, []):
        depth = schedule.stages.get(loop.attrs.get("label") or "", 1)
        start = analysis.affine(loop.operands[0])
        trips = analysis.affine(loop.operands[1]) - start
        once = trips.constant is not None and trips.constant <= 1
        # slots and barrier phases go by the loop's index, as if it started at 0
        plain = (
            depth == 1
            or once
            or start.constant != 0
            or bool(loop.attrs.get("reverse"))
            or loop.attrs.get("step", 1) > 1
        )
        if plain or split is not None or not all(_closed(holder) for holder in holders):
            found[id(loop)] = 1
            continue
        if schedule.warp_specialize and _by_tma(loop, kernel, target, analysis):
            split = loop
        found[id(loop)] = depth if split is loop or analysis.proves_nonnegative(trips - 1) else 1
    return found, split


def _loops(region: Region, holders: list[Region]) -> list[tuple[Op, list[Region]]]:
    """Every loop in program order, with the branches around it."""
    out: list[tuple[Op, list[Region]]] = []
    for op in region.ops:
        if op.opcode == "loop":
            out.append((op, holders))
            out += _loops(op.regions[0], holders)
        elif op.opcode == "when":
            out += _loops(op.regions[0], [*holders, op.regions[0]])
    return out


def _by_tma(loop: Op, kernel: Kernel, target: Target, analysis: IndexAnalysis) -> bool:
    """True when every copy that runs ahead is one for the tensor memory accelerator, and there is one."""
    copies = [Access(op, kernel, analysis) for op in loop.regions[0].ops if op.opcode == "load" and op.result.shape]
    copies = [a for a in copies if a.tensor.role == "in" and a.copy_reason(target, clipping=True, patched=True) is None]
    return bool(copies) and all(a.uses_tma(target) for a in copies)


def _closed(branch: Region) -> bool:
    """True when no tile from outside is used in the branch: TileLang would move its computation into it."""
    made = {id(v) for op in walk(branch) for v in op.results}
    made |= {id(v) for op in walk(branch) for inner in op.regions for v in inner.args}
    return all(id(v) in made for op in walk(branch) for v in op.operands if v.shape)
