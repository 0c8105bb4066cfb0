"""Symbolic shapes: "P B 2*Hk D" against (8, 16, 4, 128).

A dimension is a symbol, a number, a multiple of a symbol ("2*Hk") or a symbol plus a number ("S+1").
Alternatives are separated by "|"; an alternative of no dimensions is written "()".
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

Shape = tuple[Any, ...]  # of int, or of torch.SymInt under torch.compile
Sizes = dict[str, tuple[Any, str]]  # symbol -> its size and the argument that gave it

_DIMENSION = re.compile(r"(?:(?P<number>\d+)|(?:(?P<factor>\d+)\*)?(?P<symbol>[A-Z]\w*)(?:\+(?P<plus>\d+))?)")


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One dimension of a symbolic shape: `factor` * `symbol` + `plus`; a number is `plus` alone."""

    symbol: str
    factor: int = 1
    plus: int = 0

    def size(self, sizes: Mapping[str, Any]) -> Any:
        """Its size, of the sizes of the symbols."""
        return self.factor * sizes[self.symbol] + self.plus if self.symbol else self.plus


Dims = tuple[Dimension, ...]


@functools.cache
def parse(alternative: str) -> Dims:
    """The dimensions of one alternative."""
    found = []
    for dim in alternative.split():
        m = _DIMENSION.fullmatch(dim)
        assert m or dim == "()", dim
        if m and m["number"]:
            found.append(Dimension("", 0, int(m["number"])))
        elif m:
            found.append(Dimension(m["symbol"], int(m["factor"] or 1), int(m["plus"] or 0)))
    return tuple(found)


def match(shape: Shape, dims: str, sizes: Sizes, argument: str) -> Dims | None:
    """Bind `shape` to `dims`, adding new symbols to `sizes`. Returns the alternative that it has, if any."""
    for alternative in dims.split("|"):
        bound = dict(sizes)
        parsed = parse(alternative)
        if _match_one(shape, parsed, bound, argument):
            sizes.update(bound)
            return parsed
    return None


def describe(dims: str, sizes: Sizes) -> str:
    """The accepted shapes in words, with the sizes that other arguments have fixed."""
    alternatives = ["[" + ", ".join(d for d in a.split() if d != "()") + "]" for a in dims.split("|")]
    symbols = dict.fromkeys(
        m["symbol"] for d in dims.split() if (m := _DIMENSION.fullmatch(d)) and m["symbol"]
    )
    known = [f"{s} = {sizes[s][0]} by {sizes[s][1]}" for s in symbols if s in sizes]
    return " or ".join(alternatives) + (f" with {', '.join(known)}" if known else "")


def _match_one(shape: Shape, dims: Dims, sizes: Sizes, argument: str) -> bool:
    if len(shape) != len(dims):
        return False
    for size, dim in zip(shape, dims, strict=True):
        if not dim.symbol:
            if size != dim.plus:
                return False
            continue
        if size < dim.plus or (size - dim.plus) % dim.factor != 0:
            return False
        value = (size - dim.plus) // dim.factor
        if dim.symbol not in sizes:
            sizes[dim.symbol] = (value, argument)
        elif sizes[dim.symbol][0] != value:
            return False
    return True
