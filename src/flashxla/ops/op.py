"""How an operation is declared, and what follows from a declaration.

A declaration (`Op`) names an operation's arguments, their dtypes and symbolic shapes, and which of them it
updates in place. `Op.resolve` holds a call against it: wrong input raises a TypeError or ValueError that names
the operation, the argument, what it got and what it takes; right input gives a `Call`, the form that every
front end lowers: operands and results of a native operation, its attributes, and which result is which operand.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from flashxla.ops.shapes import Shape, match

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


def value_error(function: str, argument: str, got: object, accepted: str) -> ValueError:
    """A ValueError in the one form that all messages have."""
    return ValueError(f"{function}: {argument}: got {got}; accepted: {accepted}")


def type_error(function: str, argument: str, got: object, accepted: str) -> TypeError:
    """A TypeError in the one form that all messages have."""
    return TypeError(f"{function}: {argument}: got {got}; accepted: {accepted}")


@dataclasses.dataclass(frozen=True)
class Aval:
    """A tensor without its data: shape and dtype name."""

    shape: Shape
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Native:
    """A function of the C ABI: the fields of its argument struct, in their order (csrc/include/flashxla)."""

    name: str
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    integers: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """The name of its XLA custom call target."""
        return f"flashxla_{self.name}"

    def ffi_attributes(
        self,
        op: str,
        operands: Mapping[str, str],
        results: Collection[str],
        scalars: Mapping[str, int | float],
    ) -> dict[str, int | float | str]:
        """The attributes of a custom call: native scalars, which tensors are present, names for messages.

        operands: what the op calls each present input.
        """
        return {
            "op": op,
            "arguments": ",".join(operands.get(slot, "") for slot in self.inputs),
            "operands": sum(1 << bit for bit, slot in enumerate(self.inputs) if slot in operands),
            "results": sum(1 << bit for bit, slot in enumerate(self.results) if slot in results),
            **scalars,
        }


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor argument.

    dims: its symbolic shape, alternatives separated by "|", or "" for one that the rule checks.
    slot: the field of the native struct that it fills.
    named_beside: (name, argument): what messages call it in a call that has that argument too.
    """

    name: str
    dims: str
    dtypes: tuple[str, ...]
    slot: str
    optional: bool = False
    mutated: bool = False
    named_beside: tuple[str, str] | None = None


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
class Call:
    """A valid call, ready to be lowered.

    operands: (argument, native field) of each present tensor, in the native order.
    results: the avals of the native results that it computes: the first ones, in the native order.
    aliases: (result, operand) of each result that is an operand's buffer.
    attributes: the native scalars by name.
    """

    op: Op
    operands: tuple[tuple[str, str], ...]
    results: tuple[Aval, ...]
    aliases: tuple[tuple[int, int], ...]
    attributes: tuple[tuple[str, int | float], ...]

    @property
    def native(self) -> Native:
        """The native function that runs it."""
        return self.op.native

    @functools.cached_property
    def labels(self) -> dict[str, str]:
        """What the caller calls each operand, by native field."""
        given = {name for name, _ in self.operands}
        return {slot: self.op.label(name, given.__contains__) for name, slot in self.operands}

    def user_message(self, message: str) -> str:
        """A native message in the caller's words: with the function, and its name for the field it starts with."""
        for slot, label in self.labels.items():
            if message.startswith((f"{slot}[", f"{slot} ", f"{slot}:")):
                message = label + message[len(slot) :]
                break
        return f"{self.op.function}: {message}"

    @property
    def ffi_attributes(self) -> dict[str, int | float | str]:
        """The attributes of the custom call."""
        results = self.native.results[: len(self.results)]
        return self.native.ffi_attributes(self.op.function, self.labels, results, dict(self.attributes))


class Inputs:
    """A call's arguments while it is being checked; what a rule works with."""

    def __init__(self, op: Op, tensors: Mapping[str, Aval | None], scalars: Mapping[str, Any]) -> None:
        self.op = op
        self.tensors = dict(tensors)
        self.scalars = dict(scalars)
        self.sizes: dict[str, tuple[Any, str]] = {}

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name] if name in self.tensors else self.scalars[name]

    def size(self, symbol: str) -> Any:
        """The size that a symbol of the declared shapes stands for in this call."""
        return self.sizes[symbol][0]

    def label(self, argument: str) -> str:
        """What the caller calls an argument."""
        return self.op.label(argument, lambda other: self.tensors[other] is not None)

    def value_error(self, argument: str, got: object, accepted: str) -> ValueError:
        """A ValueError about one of the arguments."""
        return value_error(self.op.function, self.label(argument), got, accepted)

    def type_error(self, argument: str, got: object, accepted: str) -> TypeError:
        """A TypeError about one of the arguments."""
        return type_error(self.op.function, self.label(argument), got, accepted)

    def choice(self, argument: str, accepted: tuple[str, ...]) -> str:
        """A string argument that must be one of `accepted`."""
        if self[argument] not in accepted:
            raise self.value_error(argument, repr(self[argument]), ", ".join(map(repr, accepted)))
        return self[argument]

    def check_dims(self, argument: str, dims: str) -> None:
        """Hold a tensor's shape against symbolic dims, binding the symbols that are new."""
        aval = self.tensors[argument]
        if aval is None:
            return
        problem = match(aval.shape, dims, self.sizes, self.label(argument))
        if problem:
            raise self.value_error(argument, f"shape {list(aval.shape)}", problem)


@dataclasses.dataclass(frozen=True)
class Resolution:
    """What a rule adds to the generic checks: native attributes, results, and tensors it leaves out."""

    attributes: Mapping[str, int | float]
    results: tuple[Aval, ...]
    unused: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """The declaration of an operation.

    rule: checks what the argument table cannot say and resolves the native attributes and results. It calls
        `Inputs.check_dims` itself for tensors whose dims are "" (they depend on other arguments).
    result_names: what the op returns; empty for an op that only updates its mutated arguments.
    public_name: the function that users call, where it is not called as the op is.
    """

    name: str
    native: Native
    parameters: tuple[Parameter, ...]
    rule: Callable[[Inputs], Resolution]
    result_names: tuple[str, ...] = ()
    public_name: str = ""

    @functools.cached_property
    def function(self) -> str:
        """The function that users call, which messages name."""
        return self.public_name or self.name

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The arguments' names, in order."""
        return tuple(p.name for p in self.parameters)

    @functools.cached_property
    def defaults(self) -> tuple[Any, ...]:
        """Their defaults: None for every tensor, `REQUIRED` for a scalar without one."""
        return tuple(None if isinstance(p, Tensor) else p.default for p in self.parameters)

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensor arguments, in order."""
        return tuple(p for p in self.parameters if isinstance(p, Tensor))

    @functools.cached_property
    def is_tensor(self) -> tuple[bool, ...]:
        """Of each argument, whether it is a tensor."""
        return tuple(isinstance(p, Tensor) for p in self.parameters)

    @functools.cached_property
    def scalars(self) -> tuple[Scalar, ...]:
        """The other arguments, in order."""
        return tuple(p for p in self.parameters if isinstance(p, Scalar))

    @functools.cached_property
    def mutated(self) -> tuple[Tensor, ...]:
        """The arguments that the op updates in place."""
        return tuple(t for t in self.tensors if t.mutated)

    def label(self, argument: str, is_given: Callable[[str], bool]) -> str:
        """What messages call an argument in a call that has the tensors for which `is_given` holds."""
        for tensor in self.tensors:
            if tensor.name == argument and tensor.named_beside and is_given(tensor.named_beside[1]):
                return tensor.named_beside[0]
        return argument

    def resolve(self, tensors: Mapping[str, Aval | None], scalars: Mapping[str, Any]) -> Call:
        """Check a call and resolve it. Raises TypeError and ValueError."""
        inputs = Inputs(self, tensors, scalars)
        for tensor in self.tensors:
            self._check_tensor(inputs, tensor)
        for scalar in self.scalars:
            self._check_scalar(inputs, scalar)
        resolution = self.rule(inputs)

        slots = {t.slot: t for t in self.tensors}
        operands: list[tuple[str, str]] = []
        aliases: list[tuple[int, int]] = []
        for slot in self.native.inputs:
            if slot not in slots or slots[slot].name in resolution.unused or inputs[slots[slot].name] is None:
                continue
            tensor = slots[slot]
            if tensor.mutated:
                aliases.append((self.native.results.index(slot), len(operands)))
            operands.append((tensor.name, slot))
        attributes = tuple(resolution.attributes.items())
        return Call(self, tuple(operands), resolution.results, tuple(aliases), attributes)

    def _check_tensor(self, inputs: Inputs, tensor: Tensor) -> None:
        aval = inputs[tensor.name]
        if aval is None:
            if not tensor.optional:
                raise inputs.type_error(tensor.name, "None", f"a tensor of {', '.join(tensor.dtypes)}")
            return
        if aval.dtype not in tensor.dtypes:
            raise inputs.type_error(tensor.name, f"dtype {aval.dtype}", ", ".join(tensor.dtypes))
        if tensor.dims:
            inputs.check_dims(tensor.name, tensor.dims)

    def _check_scalar(self, inputs: Inputs, scalar: Scalar) -> None:
        inputs.scalars[scalar.name] = scalar.convert(self.function, inputs[scalar.name])
