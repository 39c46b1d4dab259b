"""The attributes of each opcode: type and default. The printer, the parser and the verifier read the same table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3dsl.ir.opset import APPROXIMATE, OPSET


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED: Any = _Required()


@dataclass(frozen=True)
class Attr:
    """One attribute. kind: 'int', 'float', 'bool', 'str', 'ints', 'dtype', 'expr' or 'number'.

    An attribute equal to its default is not printed, and the parser restores it. `implied` ones are printed as part of
    the op's own syntax or of its result type, not as name=value.
    """

    kind: str
    default: Any = REQUIRED
    implied: bool = False

    @property
    def required(self) -> bool:
        return self.default is REQUIRED


_ACCESS = {
    "tensor": Attr("str", implied=True),
    "mask_slot": Attr("int", None, implied=True),
    "contiguity": Attr("int", None),
}
_REDUCTION = {"axis": Attr("int"), "keepdim": Attr("bool", False)}

_TABLE: dict[str, dict[str, Attr]] = {
    "program_id": {"axis": Attr("int")},
    "dim": {"expr": Attr("expr", implied=True)},
    "const": {
        "value": Attr("number", implied=True),
        "dtype": Attr("dtype", implied=True),
        "shape": Attr("ints", (), implied=True),
    },
    "iota": {"size": Attr("int")},
    "cast": {"dtype": Attr("dtype", implied=True)},
    "broadcast": {"shape": Attr("ints", implied=True)},
    "reshape": {"shape": Attr("ints", implied=True)},
    "permute": {"axes": Attr("ints")},
    "reduce": {"kind": Attr("str", None), **_REDUCTION},
    "argmax": _REDUCTION,
    "argmin": _REDUCTION,
    "scan": {"kind": Attr("str", None), "axis": Attr("int"), "reverse": Attr("bool", False)},
    "select": {"axis": Attr("int"), "position": Attr("int")},
    "dot": {"precision": Attr("str")},
    "unit_lower_inverse": {"method": Attr("str"), "precision": Attr("str")},
    "load": {**_ACCESS, "other": Attr("float", 0.0), "order": Attr("ints", None)},
    "store": {**_ACCESS, "value_slot": Attr("int", implied=True)},
    "atomic_add": {**_ACCESS, "value_slot": Attr("int", implied=True)},
    "loop": {"step": Attr("int", 1), "reverse": Attr("bool", False), "label": Attr("str", None)},
    "assume": {"divisible_by": Attr("int", 1), "min": Attr("int", None), "max": Attr("int", None)},
}
for _opcode in APPROXIMATE:
    _TABLE[_opcode] = {"approx": Attr("bool", False)}
for _opcode in ("exp", "exp2"):
    _TABLE[_opcode] = {**_TABLE[_opcode], "bound": Attr("float", None)}


def attributes_of(opcode: str) -> dict[str, Attr]:
    """The attributes an opcode takes, by name; empty for one that takes none or is unknown."""
    return _TABLE.get(opcode, {})


def defaults_of(opcode: str) -> dict[str, Any]:
    """The values of the attributes that an op of this kind may leave out."""
    return {name: attr.default for name, attr in attributes_of(opcode).items() if not attr.required}


assert set(_TABLE) <= set(OPSET)
