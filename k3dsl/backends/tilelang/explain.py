"""Where every tile of a kernel lives and why, as a page of text: `k3dsl show OP --stage placement`."""

from __future__ import annotations

from k3dsl.backends.tilelang.buffers import Recorder, shared_in_use
from k3dsl.backends.tilelang.dots import DotPlan
from k3dsl.backends.tilelang.legality import check
from k3dsl.backends.tilelang.placement import Placement
from k3dsl.backends.tilelang.prepare import prepared
from k3dsl.backends.tilelang.schedule import TileLangSchedule
from k3dsl.ir.graph import Kernel, Region, Value
from k3dsl.targets import Target


def explain(kernel: Kernel, schedule: TileLangSchedule, target: Target) -> str:
    """A line for each tile, product, pipelined loop and for shared memory; or the reasons why there is no placement."""
    reasons = check(kernel, schedule, target)
    if any(r.code in ("target", "op", "name") for r in reasons):
        return "\n".join(f"refused: {r}" for r in reasons)
    expanded = prepared(kernel)
    placement = Placement(expanded, schedule, target)
    printer = Recorder(expanded, placement)
    text = printer.module(kernel.name, "")
    lines = [f"placement of {kernel.name} for {target.name}: {_threads(schedule, placement)}", ""]
    lines += ["tiles", *_aligned(_tiles(expanded.body, placement, printer))]
    if placement.dots:
        lines += ["", "products (M x N x K)", *_aligned([_product(plan) for plan in placement.dots.values()])]
    buffers = {b.name: b for b in printer.buffers()}
    for loop in placement.pipelines():
        loads, depth = placement.hoisted[id(loop)], placement.stages(loop)
        tiles = [(buffers[printer.shared[id(o.result)]], o.attrs["tensor"]) for o in loads]
        lines += ["", f"loop {loop.attrs['label']}: {depth} stages of {sum(b.bytes for b, _ in tiles) // depth} bytes"]
        lines += _aligned([(b.name, f"from {tensor}", str(b.bytes // depth)) for b, tensor in tiles])
    live = sum(b.bytes for b in shared_in_use(text, list(buffers.values())))
    declared = sum(b.bytes for b in buffers.values() if b.kind == "shared")
    allowed = f"a program may have {target.shared_per_block}"
    lines += ["", f"shared memory: at least {live} bytes at a time, of {declared} declared; {allowed}"]
    lines += [f"refused: {r}" for r in reasons]
    return "\n".join(lines)


def _product(plan: DotPlan) -> tuple[str, ...]:
    m, n = plan.op.result.shape[-2:]
    divided = (
        f"policy {plan.policy}, {plan.warps[0]} x {plan.warps[1]} warps" if plan.matrix else "no matrix instruction"
    )
    notes = ["left operand in registers"] if plan.a_fragment else []
    notes += [plan.why] if plan.why else []
    size = f"{m} x {n} x {plan.op.operands[0].shape[-1]}"
    return plan.name, size, plan.form, divided, "; ".join(notes), plan.op.loc or ""


def _threads(schedule: TileLangSchedule, placement: Placement) -> str:
    return f"{schedule.threads} threads" + (" and a warp group that copies" if placement.specialised() else "")


def _tiles(region: Region, placement: Placement, printer: Recorder) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for op in region.ops:
        if op.opcode not in ("reduce", "scan"):
            for inner in op.regions:
                rows += [_row(v, "carry", op.loc, placement, printer) for v in inner.args if v.shape]
                rows += _tiles(inner, placement, printer)
        rows += [_row(v, op.opcode, op.loc, placement, printer) for v in op.results if v.shape]
    return rows


def _row(v: Value, what: str, loc: str | None, placement: Placement, printer: Recorder) -> tuple[str, ...]:
    home = placement.of(v)
    names = [printer.fragments.get(id(placement.buffer(v)), "") if home.fragment else ""]
    names.append(printer.shared.get(id(v), "") if home.shared else "")
    name = ", ".join(n for n in names if n) or v.name or what
    return name, what, str(v.type), home.kind, home.why, loc or ""


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return ["  none"]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
