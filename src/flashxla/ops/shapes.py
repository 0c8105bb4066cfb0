"""Symbolic shapes: "P B 2*Hk D" against (8, 16, 4, 128).

A dimension is a symbol, a number, a multiple of a symbol ("2*Hk") or a symbol plus a number ("S+1").
Alternatives are separated by "|"; an alternative of no dimensions is written "()".
"""

from __future__ import annotations

import re
from typing import Any

Shape = tuple[Any, ...]  # of int, or of torch.SymInt under torch.compile
Sizes = dict[str, tuple[Any, str]]  # symbol -> its size and the argument that gave it

_DIMENSION = re.compile(r"(?:(?P<number>\d+)|(?:(?P<factor>\d+)\*)?(?P<symbol>[A-Z]\w*)(?:\+(?P<plus>\d+))?)")


def match(shape: Shape, dims: str, sizes: Sizes, argument: str) -> str | None:
    """Bind `shape` to `dims`, adding new symbols to `sizes`. Returns None, or what would be accepted."""
    for alternative in dims.split("|"):
        bound = dict(sizes)
        if _match_one(shape, alternative.split(), bound, argument):
            sizes.update(bound)
            return None
    return describe(dims, sizes)


def describe(dims: str, sizes: Sizes) -> str:
    """The accepted shapes in words, with the sizes that other arguments have fixed."""
    alternatives = ["[" + ", ".join(d for d in a.split() if d != "()") + "]" for a in dims.split("|")]
    symbols = dict.fromkeys(
        m["symbol"] for d in dims.split() if (m := _DIMENSION.fullmatch(d)) and m["symbol"]
    )
    known = [f"{s} = {sizes[s][0]} by {sizes[s][1]}" for s in symbols if s in sizes]
    return " or ".join(alternatives) + (f" with {', '.join(known)}" if known else "")


def _match_one(shape: Shape, dims: list[str], sizes: Sizes, argument: str) -> bool:
    dims = [d for d in dims if d != "()"]
    if len(shape) != len(dims):
        return False
    for size, dim in zip(shape, dims, strict=True):
        m = _DIMENSION.fullmatch(dim)
        assert m, dim
        if m["number"]:
            if size != int(m["number"]):
                return False
            continue
        plus, factor = int(m["plus"] or 0), int(m["factor"] or 1)
        if size < plus or (size - plus) % factor != 0:
            return False
        value = (size - plus) // factor
        if m["symbol"] not in sizes:
            sizes[m["symbol"]] = (value, argument)
        elif sizes[m["symbol"]][0] != value:
            return False
    return True
