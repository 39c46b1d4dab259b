"""Deep copies of kernels, so that a pass may rewrite in place without touching the caller's IR."""

from __future__ import annotations

from k3dsl.ir.graph import Kernel, Op, Region, Value


def copy_kernel(kernel: Kernel) -> Kernel:
    """A kernel with fresh values, ops and regions; names, locations and attributes are kept."""
    values: dict[int, Value] = {}
    scalars = [_copy_value(v, values) for v in kernel.scalar_values]
    body = copy_region(kernel.body, values)
    return Kernel(
        kernel.name,
        list(kernel.tensors),
        list(kernel.scalars),
        list(kernel.dims),
        kernel.grid,
        body,
        scalars,
        kernel.source,
    )


def copy_region(region: Region, values: dict[int, Value]) -> Region:
    """Copies a region. `values` maps id(old value) to the new one and is extended; values not in it are kept as they are."""
    out = Region([_copy_value(v, values) for v in region.args])
    for op in region.ops:
        made = Op(
            op.opcode,
            [values.get(id(v), v) for v in op.operands],
            [v.type for v in op.results],
            dict(op.attrs),
            [copy_region(inner, values) for inner in op.regions],
            op.index,
            op.loc,
        )
        for old, new in zip(op.results, made.results, strict=True):
            new.name = old.name
            values[id(old)] = new
        out.ops.append(made)
    out.yields = [values.get(id(v), v) for v in region.yields]
    return out


def _copy_value(value: Value, values: dict[int, Value]) -> Value:
    new = Value(value.type, None, value.name)
    values[id(value)] = new
    return new
