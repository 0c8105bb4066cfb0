"""How an operation's work divides among devices.

An operation declares the symbols of its shapes along which it divides (`Parallel`): heads, for attention. Given how
the tensors of a call lie on the devices, `divide` chooses what part of each symbol a device works on, and `kept` says
of a tensor's dimension whether it can stay where it is. Nothing here knows a framework.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from flashxla.ops.shapes import Dimension, Dims

# Of each device the number of the equal part that it has, in the order of a tensor's elements; all 0: the whole.
Parts = tuple[int, ...]

# What the symbols of shapes stand for, in words.
MEANINGS = {
    "B": "the tokens of a page",
    "D": "head size",
    "Dv": "head size",
    "H": "heads",
    "Hk": "KV heads",
    "Hq": "query heads",
    "Hqkv": "heads of queries, keys and values",
    "M": "the pages of a sequence",
    "N": "tokens",
    "P": "pages",
    "S": "sequences",
    "T": "tokens",
    "Tk": "tokens",
}


@dataclasses.dataclass(frozen=True)
class Parallel:
    """A size along which the work divides into parts that have nothing to do with each other.

    symbol: of the size. finer: of a multiple of it, whose parts belong to the parts of `symbol` in order, as query
    heads belong to KV heads. Devices that have one of `symbol` may have it in common, and parts of `finer` each.
    """

    symbol: str
    finer: str = ""

    @property
    def symbols(self) -> tuple[str, ...]:
        """All that it divides."""
        return (self.symbol, self.finer) if self.finer else (self.symbol,)


@dataclasses.dataclass(frozen=True)
class Placed:
    """A tensor on several devices: its symbolic shape, its size in bytes, and how each dimension is divided."""

    dims: Dims
    nbytes: int
    parts: tuple[Parts, ...]

    def along(self, symbol: str) -> Iterator[Parts]:
        """How its dimensions of a symbol are divided."""
        return (
            p for dim, p in zip(self.dims, self.parts, strict=True) if dim.symbol == symbol and not dim.plus
        )


def ways(parts: Parts) -> int:
    """In how many parts a dimension is."""
    return max(parts, default=0) + 1


def divide(
    parallels: Sequence[Parallel],
    sizes: Mapping[str, int],
    tensors: Sequence[Placed],
    devices: int,
    possible: Callable[[Parts], bool] = lambda parts: True,
) -> dict[str, Parts]:
    """The part of each parallel symbol that each device works on.

    The largest tensor that is divided along a symbol decides, because it is the dearest to move: a cache before the
    queries. possible: whether the front end can say a division.
    """
    whole: Parts = (0,) * devices
    largest = sorted(tensors, key=lambda t: -t.nbytes)
    chosen: dict[str, Parts] = {}
    others: list[Parts] = []
    for parallel in parallels:
        chosen[parallel.symbol] = whole
        for candidate in _candidates(largest, parallel.symbols):
            parts = _coarsened(candidate, sizes[parallel.symbol])
            if ways(parts) > 1 and possible(parts) and _is_balanced([*others, parts]):
                chosen[parallel.symbol] = parts
                break
        coarse = finest = chosen[parallel.symbol]
        if parallel.finer and sizes[parallel.symbol] == ways(coarse):
            for parts in _candidates(largest, [parallel.finer]):
                fits = sizes[parallel.finer] % ways(parts) == 0 and refines(parts, coarse)
                if fits and possible(parts) and _is_balanced([*others, parts]):
                    finest = parts
                    break
        if parallel.finer:
            chosen[parallel.finer] = finest
        others.append(finest)
    return chosen


def _candidates(tensors: Sequence[Placed], symbols: Sequence[str]) -> Iterator[Parts]:
    return (p for symbol in symbols for t in tensors for p in t.along(symbol) if ways(p) > 1)


def _coarsened(parts: Parts, size: int) -> Parts:
    """A division in as many of the same parts as a size has in common with it."""
    each = ways(parts) // math.gcd(ways(parts), size)
    return tuple(part // each for part in parts)


def refines(parts: Parts, coarse: Parts) -> bool:
    """Whether each device's part lies inside the part that it has of a coarser division."""
    each, rest = divmod(ways(parts), ways(coarse))
    return not rest and all(p // each == c for p, c in zip(parts, coarse, strict=True))


def _is_balanced(divisions: Sequence[Parts]) -> bool:
    """Whether every combination of their parts is on the same number of devices."""
    counts = collections.Counter(zip(*divisions, strict=True))
    return len(counts) == math.prod(map(ways, divisions)) and len(set(counts.values())) == 1


def parts_of(dim: Dimension, chosen: Mapping[str, Parts], devices: int) -> Parts:
    """How a dimension is divided where a call is divided like this."""
    return chosen.get(dim.symbol, (0,) * devices) if not dim.plus else (0,) * devices


def kept(given: Parts, wanted: Parts) -> bool:
    """Whether every device has what it needs of a dimension."""
    return refines(wanted, given)


def groups(parts: Parts, within: Parts) -> list[list[int]]:
    """The devices that share a part of `within` and have different parts of `parts`: those that add up a sum.

    Devices that have the same part of both have the same summand; each group has one device for each summand.
    """
    by_part: dict[int, dict[int, list[int]]] = {}
    for device, (fine, coarse) in enumerate(zip(parts, within, strict=True)):
        by_part.setdefault(coarse, {}).setdefault(fine, []).append(device)
    return [list(group) for fine in by_part.values() for group in zip(*fine.values(), strict=True)]


def local_sizes(chosen: Mapping[str, Parts], sizes: Mapping[str, int]) -> dict[str, int]:
    """What the symbols stand for on one device."""
    return {symbol: sizes[symbol] // ways(parts) for symbol, parts in chosen.items()}
