"""The C ABI's structs as ctypes sees them, made from a library's own description of them (flashxla_describe).

Nothing is stated a second time: names, kinds and order come from the headers that the library was compiled with, and
sizes and offsets are held against what its compiler made of them.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping
from typing import Any

_MEMBERS: dict[str, Any] = {"int64": ctypes.c_int64, "pointer": ctypes.c_void_p, "text": ctypes.c_char_p}
TENSORS = ("input", "result", "plan", "workspace")
_SCALARS: dict[str, Any] = {
    "integer": ctypes.c_int64,
    "layout": ctypes.c_int64,
    "dtype": ctypes.c_int64,
    "real": ctypes.c_double,
}


class LayoutMismatch(ImportError):
    """A library's structs are not laid out as this Python lays them out."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of an operation's arguments (csrc/include/flashxla/operation.h)."""

    name: str
    kind: str
    plan: str

    @property
    def is_tensor(self) -> bool:
        """Whether it is a flashxla_tensor."""
        return self.kind in TENSORS


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of a library: its fields by name, and the struct of its arguments."""

    name: str
    fields: Mapping[str, Field]
    arguments: type[ctypes.Structure]

    def of_kind(self, kind: str) -> tuple[str, ...]:
        """The names of the fields of a kind."""
        return tuple(field.name for field in self.fields.values() if field.kind == kind)


class Records:
    """The structs of a library.

    tensor, needs, context: flashxla_tensor, flashxla_needs, flashxla_context. operations: by name.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        self.platform: str = description["platform"]
        self.dtypes: dict[str, int] = description["dtypes"]
        self.layouts: dict[str, int] = description["layouts"]
        members = dict(_MEMBERS)
        records: dict[str, type[ctypes.Structure]] = {}
        for name, record in description["records"].items():
            fields = [
                (f["name"], members[f["type"]] * f["count"] if f["count"] > 1 else members[f["type"]])
                for f in record["fields"]
            ]
            members[name] = records[name] = _struct(name, fields, record)
        self.tensor, self.needs, self.context = (records[name] for name in ("tensor", "needs", "context"))
        self.operations = {
            name: self._operation(name, description["operations"][name]) for name in description["operations"]
        }

    def _operation(self, name: str, description: Mapping[str, Any]) -> Operation:
        types = {**dict.fromkeys(TENSORS, self.tensor), **_SCALARS}
        struct = _struct(
            f"{name}_args", [(f["name"], types[f["kind"]]) for f in description["fields"]], description
        )
        fields = {f["name"]: Field(f["name"], f["kind"], f["plan"]) for f in description["fields"]}
        return Operation(name, fields, struct)


def _struct(
    name: str, fields: list[tuple[str, Any]], description: Mapping[str, Any]
) -> type[ctypes.Structure]:
    """A struct of these fields. Raises LayoutMismatch unless it is laid out as described."""
    struct = type(f"flashxla_{name}", (ctypes.Structure,), {"_fields_": fields})
    got = {f"offset of {field}": getattr(struct, field).offset for field, _ in fields}
    got["size"] = ctypes.sizeof(struct)
    expected = {f"offset of {f['name']}": f["offset"] for f in description["fields"]}
    expected["size"] = description["size"]
    for what, value in expected.items():
        if got[what] != value:
            raise LayoutMismatch(
                f"flashxla_{name}: {what}: {value} in the library, {got[what]} in this Python's ctypes"
            )
    return struct
