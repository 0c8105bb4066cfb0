"""What operations take and return: tensors, scalars, results."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np

from flashxla.ops.messages import type_error

FLOATS = ("float32", "float16", "bfloat16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
REQUIRED = object()  # the default of a scalar that a call must name

# What a scalar of each declared type may be given as. NumPy's numbers are registered as numbers, its bool is not.
_SCALAR_TYPES: dict[type, tuple[type, ...]] = {
    int: (numbers.Integral,),
    float: (numbers.Real,),
    bool: (numbers.Integral, np.bool_),
    str: (str,),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor argument.

    dims: its symbolic shape, alternatives separated by "|", or "" for one that the rule checks.
    field: what the native operation calls it.
    updated: the operation updates it in place.
    number: a Python number is taken too, as a float32 tensor of one element.
    pair: (name, argument): what messages call it in a call that has that argument too. The two are a pair there,
        which a functional front end returns as one if the operation updates them.
    """

    name: str
    dims: str
    dtypes: tuple[str, ...]
    field: str
    optional: bool = False
    updated: bool = False
    number: bool = False
    pair: tuple[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class Scalar:
    """An argument that is part of the compiled program: an int, float, bool or str."""

    name: str
    type: type
    default: Any = REQUIRED

    @property
    def required(self) -> bool:
        """Whether a call must name it."""
        return self.default is REQUIRED

    def convert(self, function: str, value: Any) -> Any:
        """A value given for it as its own type. Raises TypeError, which names `function`."""
        if type(value) is self.type or (value is None and self.default is None):
            return value
        # Symbolic numbers of torch.compile stay: making an int of one would bind the program to its value.
        if hasattr(value, "node"):
            return value
        if not isinstance(value, _SCALAR_TYPES[self.type]):
            or_none = " or None" if self.default is None else ""
            raise type_error(
                function, self.name, f"{value!r} ({type(value).__name__})", f"{self.type.__name__}{or_none}"
            )
        return self.type(value)


Parameter = Tensor | Scalar


@dataclasses.dataclass(frozen=True)
class Result:
    """A tensor that an operation returns.

    field: what the native operation calls it.
    when: the scalar argument that asks for it, or the optional tensor with which it is computed; "": always.
    dims: its symbolic shape, in the symbols of the arguments.
    sums_over: the symbol, not among its dims, over which it is a sum. Devices that have parts of that add theirs up.
    """

    name: str
    field: str
    when: str = ""
    dims: str = ""
    sums_over: str = ""

    def is_wanted(self, arguments: Callable[[str], Any]) -> bool:
        """Whether a call with these arguments, by name, computes it."""
        return not self.when or arguments(self.when) not in (None, False)
