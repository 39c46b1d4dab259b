"""Reads the text that `k3dsl.ir.printer` prints back into the same IR."""

from __future__ import annotations

import json
import re
from typing import Any

from k3dsl.errors import ParseError
from k3dsl.ir.attributes import Attr, attributes_of, defaults_of
from k3dsl.ir.graph import MEMORY_OPS, Index, Kernel, Op, Region, ScalarParam, TensorParam, Value
from k3dsl.ir.opset import OPSET
from k3dsl.ir.printer import constant_name
from k3dsl.ir.symbols import Expr, Sym, parse_expr
from k3dsl.ir.tokens import Cursor, Line, split_lines, unexpected
from k3dsl.ir.types import DTYPES, DType, TileType, i32


def parse_kernel(text: str) -> Kernel:
    """The kernel that `print_kernel` printed. Comments of the form `# file:line` become the ops' locations.

    Raises ParseError with the line's number and what was expected. What parses need not verify: call `verify` for that.
    """
    return _Parser(text).kernel()


class _Parser:
    def __init__(self, text: str) -> None:
        self.lines = split_lines(text)
        self.at = 0
        self.values: dict[str, Value] = {}
        self.dims: dict[str, Sym] = {}
        self.tensors: list[TensorParam] = []
        self.scalars: list[ScalarParam] = []
        self.scalar_values: list[Value] = []

    def kernel(self) -> Kernel:
        head = self._next("'kernel NAME'")
        if not head.text.startswith("kernel ") or head.indent:
            raise unexpected(head, "'kernel NAME'", head.text)
        while True:
            line = self._next("'grid (...)'")
            keyword, _, rest = line.text.partition(" ")
            if keyword == "grid":
                grid = tuple(self._expr(line, part) for part in _comma_parts(_inside(line, rest, "(", ")")))
                break
            if keyword == "dim":
                self._dim(line, rest)
            elif keyword == "scalar":
                self._scalar(line, rest)
            elif keyword in ("in", "out", "inout"):
                self._tensor(line, keyword, rest)
            else:
                raise unexpected(line, "dim, in, out, inout, scalar or grid", keyword)
        body = Region()
        self._block(body, line.indent)
        if self.at < len(self.lines):
            raise unexpected(self.lines[self.at], "an op at the kernel's indentation", self.lines[self.at].text)
        return Kernel(
            head.text[len("kernel ") :],
            self.tensors,
            self.scalars,
            list(self.dims.values()),
            grid,
            body,
            self.scalar_values,
            head.loc,
        )

    def _next(self, expected: str) -> Line:
        if self.at >= len(self.lines):
            last = self.lines[-1].number if self.lines else 1
            raise ParseError(f"expected {expected}, found the end of the text", where=f"line {last}")
        self.at += 1
        return self.lines[self.at - 1]

    def _dim(self, line: Line, rest: str) -> None:
        name, _, facts = rest.partition(":")
        given: dict[str, int] = {}
        for fact in facts.split():
            key, _, number = fact.partition("=")
            if key not in ("divisible_by", "min", "max") or not re.fullmatch(r"-?\d+", number):
                raise unexpected(line, "divisible_by=N, min=N or max=N", fact)
            given[key] = int(number)
        self.dims[name.strip()] = Sym(name.strip(), **given)

    def _scalar(self, line: Line, rest: str) -> None:
        match = re.fullmatch(r"(\w+): (\w+) as (%\w+)", rest)
        if not match:
            raise unexpected(line, "'scalar NAME: DTYPE as %NAME'", rest)
        dtype = _dtype(line, match.group(2))
        self.scalars.append(ScalarParam(match.group(1), dtype))
        self.scalar_values.append(self._define(line, match.group(3), TileType(dtype)))

    def _tensor(self, line: Line, role: str, rest: str) -> None:
        match = re.fullmatch(r"(\w+): (\w+)\[(.*?)\](?: strides=\((.*)\))?", rest)
        if not match:
            raise unexpected(line, "'NAME: DTYPE[EXTENTS]'", rest)
        name, dtype, shape, strides = match.groups()
        self.tensors.append(
            TensorParam(
                name,
                _dtype(line, dtype),
                tuple(self._expr(line, part) for part in _comma_parts(shape)),
                role,
                None if strides is None else tuple(self._expr(line, part) for part in _comma_parts(strides)),
            )
        )

    def _expr(self, line: Line, text: str) -> Expr:
        try:
            return parse_expr(text, self.dims)
        except ParseError as error:
            raise ParseError(error.message, where=f"line {line.number}", fix=error.fix) from None

    def _define(self, line: Line, name: str, type: TileType, value: Value | None = None) -> Value:
        if name in self.values:
            raise ParseError(f"{name} is defined twice", where=f"line {line.number}")
        made = value or Value(type)
        if not name[1:].isdigit():
            made.name = name[1:]
        self.values[name] = made
        return made

    def _block(self, region: Region, indent: int) -> None:
        """Reads the lines of one region up to a smaller indentation; a `yield` ends it."""
        while self.at < len(self.lines) and self.lines[self.at].indent == indent:
            line = self._next("an op")
            if line.text == "pass":
                continue
            if line.text == "yield" or line.text.startswith("yield "):
                cursor = Cursor(line, line.text[len("yield") :])
                region.yields = self._operands(cursor)
                cursor.finish()
                return
            region.ops.append(_OpReader(self, line).read())

    def _operands(self, cursor: Cursor) -> list[Value]:
        found: list[Value] = []
        while cursor.kind == "value":
            found.append(self.value(cursor))
            if not cursor.accept(","):
                break
        return found

    def value(self, cursor: Cursor) -> Value:
        name = cursor.take("value", "a value, %name")
        if name not in self.values:
            raise ParseError(f"{name} is not defined above", where=f"line {cursor.line.number}")
        return self.values[name]


class _OpReader:
    """Reads one op: its line, and the indented block of its region."""

    def __init__(self, parser: _Parser, line: Line) -> None:
        self.parser = parser
        self.line = line

    def read(self) -> Op:
        line = self.line
        results, text = self._results()
        opcode = text.split(maxsplit=1)[0].rstrip(":")
        if opcode not in OPSET:
            raise unexpected(line, "an opcode", opcode)
        op = Op(opcode, [], [t for _, t in results], defaults_of(opcode), loc=line.loc)
        for (name, type), value in zip(results, op.results, strict=True):
            self.parser._define(line, name, type, value)
        rest = text[len(opcode) :]
        if opcode == "dim":
            op.attrs["expr"] = self.parser._expr(line, rest.strip())
            return op
        cursor = Cursor(line, rest)
        if opcode == "const":
            self._const(op, cursor)
        elif opcode in MEMORY_OPS:
            self._access(op, cursor)
        elif opcode == "loop":
            self._loop(op, cursor)
        else:
            op.operands = self.parser._operands(cursor)
            self._attrs(op, cursor)
            if cursor.accept("combine"):
                op.regions = [self._combine(cursor)]
            elif opcode == "when":
                op.regions = [Region()]
        if op.regions:
            cursor.expect(":")
            cursor.finish()
            self._body(op.regions[0])
        cursor.finish()
        if opcode in ("cast", "broadcast", "reshape") and op.results:
            key = "dtype" if opcode == "cast" else "shape"
            op.attrs[key] = op.result.dtype if opcode == "cast" else op.result.shape
        if opcode == "const" and op.result.name == constant_name(op.result):
            op.result.name = None
        return op

    def _results(self) -> tuple[list[tuple[str, TileType]], str]:
        """The names and types left of '=', and the text right of it."""
        results: list[tuple[str, TileType]] = []
        text = self.line.text
        while text.startswith("%"):
            match = re.match(r"(%\w+): (\w+)(?:\[([\d,]*)\])?(, | = )", text)
            if not match:
                raise unexpected(self.line, "'%name: type = op'", text)
            name, dtype, extents, after = match.groups()
            shape = tuple(int(n) for n in extents.split(",") if n) if extents else ()
            results.append((name, TileType(_dtype(self.line, dtype), shape)))
            text = text[match.end() :]
            if after == " = ":
                break
        return results, text or "?"

    def _const(self, op: Op, cursor: Cursor) -> None:
        text = cursor.text
        cursor.at += 1
        if not op.results:
            raise unexpected(self.line, "'%name: type = const VALUE'", self.line.text)
        dtype = op.result.dtype
        try:
            if dtype.is_bool:
                op.attrs["value"] = {"true": True, "false": False}[text or ""]
            else:
                op.attrs["value"] = float(text or "") if dtype.is_float else int(text or "")
        except (KeyError, ValueError):
            raise unexpected(self.line, f"a constant of type {dtype}", text) from None
        op.attrs["dtype"], op.attrs["shape"] = dtype, op.result.shape

    def _attrs(self, op: Op, cursor: Cursor) -> None:
        """name=value pairs, up to the end or a tail such as carry(...)."""
        known = attributes_of(op.opcode)
        while cursor.kind == "word" and cursor.text not in ("carry", "combine"):
            name = cursor.take("word", "an attribute")
            if name not in known or known[name].implied:
                names = ", ".join(n for n, a in known.items() if not a.implied) or "none"
                raise unexpected(self.line, f"an attribute of {op.opcode} ({names})", name)
            cursor.expect("=")
            op.attrs[name] = self._attr_value(known[name], cursor)
        for name, attr in known.items():
            if attr.required and not attr.implied and name not in op.attrs:
                raise unexpected(self.line, f"{name}=... of {op.opcode}", cursor.text)

    def _attr_value(self, attr: Attr, cursor: Cursor) -> Any:
        if attr.kind == "ints":
            cursor.expect("(")
            items: list[int] = []
            while not cursor.accept(")"):
                items.append(int(cursor.take("number", "an integer")))
                cursor.accept(",")
            return tuple(items)
        text = cursor.text or ""
        cursor.at += 1
        try:
            if attr.kind == "int":
                return int(text)
            if attr.kind == "float":
                return float(text)
            if attr.kind == "bool":
                return {"true": True, "false": False}[text]
            return json.loads(text) if text.startswith('"') else text
        except (KeyError, ValueError):
            raise unexpected(self.line, f"a value of kind {attr.kind}", text) from None

    def _access(self, op: Op, cursor: Cursor) -> None:
        op.attrs["tensor"] = cursor.take("word", "a tensor's name")
        cursor.expect("[")
        tensor = next((t for t in self.parser.tensors if t.name == op.attrs["tensor"]), None)
        index: list[Index] = []
        while not cursor.accept("]"):
            extent = tensor.shape[len(index)].constant if tensor and len(index) < tensor.rank else None
            index.append(self._index(op, cursor, extent))
            if cursor.text != "]":
                cursor.expect(",")
        op.index = tuple(index)
        stored = None
        if op.opcode != "load":
            cursor.expect("=")
            stored = self.parser.value(cursor)
        if cursor.accept("mask"):
            cursor.expect("=")
            op.attrs["mask_slot"] = self._operand(op, cursor)
        if stored is not None:
            op.attrs["value_slot"] = len(op.operands)
            op.operands.append(stored)
        self._attrs(op, cursor)

    def _operand(self, op: Op, cursor: Cursor) -> int:
        op.operands.append(self.parser.value(cursor))
        return len(op.operands) - 1

    def _index(self, op: Op, cursor: Cursor, extent: int | None) -> Index:
        if cursor.accept(":"):
            return Index("full", (extent if extent is not None else 0,))
        if not cursor.accept("span"):
            slot = self._operand(op, cursor)
            shape = op.operands[slot].shape
            return Index("tile" if shape else "scalar", shape, slot)
        cursor.expect("(")
        start = self._operand(op, cursor)
        cursor.expect(",")
        if cursor.text == "(":
            shape = self._attr_value(Attr("ints"), cursor)
        else:
            shape = (int(cursor.take("number", "the span's size")),)
        end = None
        if cursor.accept(","):
            cursor.expect("end")
            cursor.expect("=")
            end = self._operand(op, cursor)
        cursor.expect(")")
        return Index("span", shape, start, end)

    def _loop(self, op: Op, cursor: Cursor) -> None:
        index = cursor.take("value", "the index, %name")
        cursor.expect("in")
        start = self.parser.value(cursor)
        cursor.expect("..")
        op.operands = [start, self.parser.value(cursor)]
        self._attrs(op, cursor)
        region = Region([self.parser._define(self.line, index, TileType(i32))])
        if cursor.accept("carry"):
            cursor.expect("(")
            while not cursor.accept(")"):
                name = cursor.take("value", "a carry, %name")
                cursor.expect("=")
                op.operands.append(self.parser.value(cursor))
                region.args.append(self.parser._define(self.line, name, op.operands[-1].type))
                cursor.accept(",")
        op.regions = [region]

    def _combine(self, cursor: Cursor) -> Region:
        region = Region()
        cursor.expect("(")
        while not cursor.accept(")"):
            name = cursor.take("value", "an argument, %name")
            cursor.expect(":")
            dtype = _dtype(self.line, cursor.take("word", "a dtype"))
            region.args.append(self.parser._define(self.line, name, TileType(dtype)))
            cursor.accept(",")
        return region

    def _body(self, region: Region) -> None:
        parser = self.parser
        if parser.at >= len(parser.lines) or parser.lines[parser.at].indent <= self.line.indent:
            raise unexpected(self.line, "an indented block below", "none")
        parser._block(region, parser.lines[parser.at].indent)


def _dtype(line: Line, name: str) -> DType:
    if name not in DTYPES:
        raise unexpected(line, f"a dtype ({', '.join(DTYPES)})", name)
    return DTYPES[name]


def _inside(line: Line, text: str, left: str, right: str) -> str:
    if not text.startswith(left) or not text.endswith(right):
        raise unexpected(line, f"{left}...{right}", text)
    return text[1:-1]


def _comma_parts(text: str) -> list[str]:
    """Splits at commas outside of parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [p.strip() for p in parts if p.strip()]
