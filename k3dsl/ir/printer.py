"""Prints a kernel as text that reads like the language. `k3dsl.ir.parser` reads it back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from k3dsl.ir.attributes import attributes_of
from k3dsl.ir.graph import MEMORY_OPS, Kernel, Op, Region, TensorParam, Value
from k3dsl.ir.symbols import INT32_MAX, Expr, Sym
from k3dsl.ir.types import DType

_WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]*\Z")


def print_kernel(kernel: Kernel, *, locations: bool = False, positional: bool = False) -> str:
    """The kernel as text, ending in a newline.

    locations: end each line with the user's file:line as a comment. positional: name values by position alone and sort
    the dims, so that the text depends on what the kernel computes and not on what the user called things.
    """
    names = value_names(kernel, positional=positional)
    lines = [f"kernel {kernel.name}" + _comment(kernel.source if locations else None)]
    lines += [f"  {_dim_text(s)}" for s in (sorted(kernel.dims, key=lambda s: s.name) if positional else kernel.dims)]
    lines += [f"  {tensor_text(t)}" for t in kernel.tensors]
    for param, value in zip(kernel.scalars, kernel.scalar_values, strict=True):
        lines.append(f"  scalar {param.name}: {param.dtype} as {names[id(value)]}")
    lines.append(f"  grid ({', '.join(map(str, kernel.grid))})")
    lines.append("")
    lines += _region_lines(kernel.body, names, "  ", locations)
    return "\n".join(lines).rstrip("\n") + "\n"


def value_names(kernel: Kernel, *, positional: bool = False) -> dict[int, str]:
    """The printed name (%x) of each value, by id(value).

    A value is called what the user called it, with _2, _3, ... when the name is taken; a nameless integer constant is
    %c64, any other nameless value %0, %1, ... in order of appearance.
    """
    names: dict[int, str] = {}
    taken: set[str] = set()
    count = 0
    for value in _values(kernel):
        base = None if positional else value.name or constant_name(value)
        if base is None:
            names[id(value)] = f"%{count}"
            count += 1
            continue
        name, n = base, 2
        while name in taken:
            name, n = f"{base}_{n}", n + 1
        taken.add(name)
        names[id(value)] = f"%{name}"
    return names


def op_lines(op: Op, names: dict[int, str], indent: str = "", locations: bool = False) -> list[str]:
    """An op as text: one line, then its regions indented."""
    region = op.regions[0] if op.regions else None
    lines = [indent + _head(op, names) + (":" if region else "") + _comment(op.loc if locations else None)]
    if region is not None:
        lines += _region_lines(region, names, indent + "  ", locations, always_yield=op.opcode != "when")
    return lines


def tensor_text(tensor: TensorParam) -> str:
    """A tensor parameter: role name: dtype[shape], and its strides when it is not contiguous."""
    text = f"{tensor.role} {tensor.name}: {tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
    if tensor.strides is not None:
        text += f" strides=({', '.join(map(str, tensor.strides))})"
    return text


def _values(kernel: Kernel) -> Iterable[Value]:
    yield from kernel.scalar_values
    yield from _region_values(kernel.body)


def _region_values(region: Region) -> Iterable[Value]:
    yield from region.args
    for op in region.ops:
        yield from op.results
        for inner in op.regions:
            yield from _region_values(inner)


def constant_name(value: Value) -> str | None:
    """What a nameless integer constant is called: c64, c_minus_1."""
    op = value.op
    if op is None or op.opcode != "const" or value.shape != () or not value.dtype.is_int:
        return None
    n = op.attrs["value"]
    return f"c{n}" if n >= 0 else f"c_minus_{-n}"


def _comment(loc: str | None) -> str:
    return f"  # {loc}" if loc else ""


def _dim_text(dim: Sym) -> str:
    facts = [
        f"{key}={value}"
        for key, value, default in (
            ("divisible_by", dim.divisible_by, 1),
            ("min", dim.min, 0),
            ("max", dim.max, INT32_MAX),
        )
        if value != default
    ]
    return f"dim {dim.name}" + (": " + " ".join(facts) if facts else "")


def _region_lines(
    region: Region, names: dict[int, str], indent: str, locations: bool, always_yield: bool = False
) -> list[str]:
    lines = [line for op in region.ops for line in op_lines(op, names, indent, locations)]
    if region.yields or always_yield:
        lines.append(f"{indent}yield {', '.join(_name(v, names) for v in region.yields)}".rstrip())
    elif not lines:
        lines.append(f"{indent}pass")
    return lines


def _name(value: Value, names: dict[int, str]) -> str:
    return names.get(id(value), "%<undefined>")


def _typed(value: Value, names: dict[int, str]) -> str:
    return f"{_name(value, names)}: {value.type}"


def _head(op: Op, names: dict[int, str]) -> str:
    results = ", ".join(_typed(v, names) for v in op.results)
    return (
        (f"{results} = " if results else "") + " ".join(filter(None, (_call(op, names), _attrs(op)))) + _tail(op, names)
    )


def _call(op: Op, names: dict[int, str]) -> str:
    if op.opcode == "const":
        return f"const {attr_text(op.attrs.get('value'))}"
    if op.opcode == "dim":
        return f"dim {op.attrs.get('expr')}"
    if op.opcode in MEMORY_OPS:
        return _access(op, names)
    operands = [_name(v, names) for v in op.operands]
    if op.opcode == "loop" and len(operands) >= 2 and op.regions:
        index = _name(op.regions[0].args[0], names) if op.regions[0].args else "%<none>"
        return f"loop {index} in {operands[0]} .. {operands[1]}"
    return f"{op.opcode} {', '.join(operands)}".rstrip()


def _tail(op: Op, names: dict[int, str]) -> str:
    """What follows the attributes: the carries of a loop, the arguments of a combine."""
    if not op.regions or op.opcode == "when":
        return ""
    args = op.regions[0].args
    if op.opcode == "loop":
        pairs = [f"{_name(a, names)} = {_name(v, names)}" for a, v in zip(args[1:], op.operands[2:])]  # noqa: B905
        return f" carry({', '.join(pairs)})" if pairs else ""
    return f" combine({', '.join(_typed(a, names) for a in args)})"


def _access(op: Op, names: dict[int, str]) -> str:
    def operand(slot: int | None) -> str:
        return _name(op.operands[slot], names) if slot is not None and slot < len(op.operands) else "%<none>"

    parts: list[str] = []
    for index in op.index:
        if index.kind == "full":
            parts.append(":")
        elif index.kind == "span":
            size = str(index.shape[0]) if len(index.shape) == 1 else f"({', '.join(map(str, index.shape))})"
            end = f", end={operand(index.end)}" if index.end is not None else ""
            parts.append(f"span({operand(index.start)}, {size}{end})")
        else:
            parts.append(operand(index.start))
    text = f"{op.opcode} {op.attrs.get('tensor')}[{', '.join(parts)}]"
    if op.opcode != "load":
        text += f" = {operand(op.attrs.get('value_slot'))}"
    if op.attrs.get("mask_slot") is not None:
        text += f" mask={operand(op.attrs['mask_slot'])}"
    return text


def _attrs(op: Op) -> str:
    known = attributes_of(op.opcode)
    parts: list[str] = []
    for key in sorted(op.attrs):
        value, attr = op.attrs[key], known.get(key)
        if value is None or (attr is not None and (attr.implied or (not attr.required and value == attr.default))):
            continue
        parts.append(f"{key}={attr_text(value)}")
    return " ".join(parts)


def attr_text(value: Any) -> str:
    """An attribute's value as text: 1, 1.0, true, bf16, word, "any string", (1, 0)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (DType, Expr, int)):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(str, value))})"
    if isinstance(value, str) and _WORD.match(value):
        return value
    return json.dumps(value, default=str)
