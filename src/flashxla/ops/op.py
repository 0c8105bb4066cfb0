"""How an operation is declared, and what follows from a declaration.

A declaration (`Op`) names an operation's arguments, their dtypes and symbolic shapes, which of them it updates in
place, what it returns, and the operation that computes its gradients. `Op.resolve` holds a call against it: wrong
input raises a TypeError or ValueError that names the function, the argument, what it got and what it takes. Right
input gives a `Call`, the form that every front end lowers: which tensor is which field of the native operation
(csrc/include/flashxla), its scalars, its results, and which operands it updates.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from flashxla.ops.callers import caller
from flashxla.ops.messages import type_error, value_error
from flashxla.ops.parameters import Parameter, Result, Scalar, Tensor
from flashxla.ops.parts import Parallel
from flashxla.ops.shapes import Dims, Shape, describe, match, parse

Attribute = int | float | str


@dataclasses.dataclass(frozen=True)
class Aval:
    """A tensor without its data: shape and dtype name."""

    shape: Shape
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Call:
    """A valid call, ready to be lowered.

    operands: (argument, native field) of each tensor that it takes.
    results: (native field, aval) of each result that it computes.
    updates: the positions of the operands that it updates in place.
    attributes: the native scalars by field; layouts and dtypes by name.
    arguments, scalars: the op's own arguments, as they were given.
    dims, sizes: the symbolic shape of each tensor that was given, and what its symbols stand for.
    """

    op: Op
    operands: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, Aval], ...]
    updates: tuple[int, ...]
    attributes: tuple[tuple[str, Attribute], ...]
    arguments: tuple[tuple[str, Aval | None], ...]
    scalars: tuple[tuple[str, Any], ...]
    dims: Mapping[str, Dims] = dataclasses.field(compare=False)
    sizes: Mapping[str, Any] = dataclasses.field(compare=False)

    @functools.cached_property
    def operand_dims(self) -> tuple[Dims, ...]:
        """The symbolic shape of each operand."""
        return tuple(self.dims[name] for name, _ in self.operands)

    @functools.cached_property
    def result_dims(self) -> tuple[Dims, ...]:
        """The symbolic shape of each result, and then of each updated operand."""
        dims = {result.field: result.dims for result in self.op.results}
        results = tuple(
            parse(dims[field] or " ".join(map(str, aval.shape)) or "()") for field, aval in self.results
        )
        return results + tuple(self.operand_dims[i] for i in self.updates)

    def resized(self, sizes: Mapping[str, int]) -> Call:
        """The same call where some symbols stand for other sizes."""
        new = {**self.sizes, **sizes}
        arguments = {
            name: aval and Aval(tuple(d.size(new) for d in self.dims[name]), aval.dtype)
            for name, aval in self.arguments
        }
        return self.op.resolve(arguments, dict(self.scalars))

    @functools.cached_property
    def labels(self) -> dict[str, str]:
        """What the caller calls each operand, by native field."""
        given = {name for name, _ in self.operands}
        return {field: self.op.label(name, given.__contains__) for name, field in self.operands}

    @functools.cached_property
    def updated_fields(self) -> tuple[str, ...]:
        """The native fields of the operands that it updates."""
        return tuple(self.operands[i][1] for i in self.updates)

    @functools.cached_property
    def result_names(self) -> tuple[str, ...]:
        """What the op calls each result that it computes."""
        names = {result.field: result.name for result in self.op.results}
        return tuple(names[field] for field, _ in self.results)

    def requesting(self, results: Collection[str]) -> Call:
        """The same call, which also computes those of `results` that are computed on request."""
        asked = self.op.asks_for(results)
        if not asked:
            return self
        return self.op.resolve(dict(self.arguments), {**dict(self.scalars), **asked})

    def gradients(self, tensors: Mapping[str, Aval]) -> Call:
        """The call of its vjp's op, with what that takes of these tensors."""
        assert self.op.vjp is not None
        op, scalars = self.op.vjp.op, dict(self.scalars)
        return op.resolve(
            {t.name: tensors.get(t.name) for t in op.tensors}, {s.name: scalars[s.name] for s in op.scalars}
        )

    def user_message(self, message: str) -> str:
        """A native message in the caller's words: with the function, and its name for the field it starts with."""
        for field, label in self.labels.items():
            if message.startswith((f"{field}[", f"{field} ", f"{field}:")):
                message = label + message[len(field) :]
                break
        return f"{self.op.function}: {message}"


class Inputs:
    """A call's arguments while it is being checked; what a rule works with."""

    def __init__(self, op: Op, tensors: Mapping[str, Aval | None], scalars: Mapping[str, Any]) -> None:
        self.op = op
        self.tensors = dict(tensors)
        self.scalars = dict(scalars)
        self.sizes: dict[str, tuple[Any, str]] = {}
        self.dims: dict[str, Dims] = {}

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
        matched = match(aval.shape, dims, self.sizes, self.label(argument))
        if matched is None:
            raise self.value_error(argument, f"shape {list(aval.shape)}", describe(dims, self.sizes))
        self.dims[argument] = matched


@dataclasses.dataclass(frozen=True)
class Resolution:
    """What a rule adds to the generic checks.

    attributes: the native scalars. results: every result by name; those that the call does not ask for are dropped.
    unused: tensors that the call leaves out.
    """

    attributes: Mapping[str, Attribute]
    results: Mapping[str, Aval] = dataclasses.field(default_factory=dict)
    unused: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Vjp:
    """The gradients of an operation, which another operation computes.

    op: takes `grad_<result>` for results, residuals, and scalars of the same names; returns `grad_<argument>` for
        the arguments that have a gradient. A result whose gradient is optional may have none.
    residuals: the arguments and results that it takes. A result that is computed on request is requested.
    constants: arguments that the operation updates and through which no derivative goes, as through running
        statistics. A derivative through any other update is an error.
    why_not: the reason why a call with these tensors has no gradients, or "".
    """

    op: Op
    residuals: tuple[str, ...]
    constants: tuple[str, ...] = ()
    why_not: Callable[[Mapping[str, Aval | None]], str] = lambda tensors: ""

    @functools.cached_property
    def gradients(self) -> frozenset[str]:
        """The arguments that have a gradient."""
        return frozenset(r.name.removeprefix("grad_") for r in self.op.results)


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """The declaration of an operation.

    native: the operation of the native library that runs it (csrc/include/flashxla).
    rule: checks what the parameters cannot say, and gives the native scalars and the results. It calls
        `Inputs.check_dims` itself for tensors whose dims are "" (they depend on other arguments).
    results: what it returns beside its updates.
    public: the function that users call. It takes their arguments and returns those of the op, in order; its
        signature and docstring are those of every front end. None: the op has no function of its own.
    vjp: how it is differentiated. None: it has no backward pass.
    caller: of an op without a public function of its own, the one through which users call it.
    parallel: along what its work divides into parts that devices can do alone.
    """

    name: str
    native: str
    parameters: tuple[Parameter, ...]
    rule: Callable[[Inputs], Resolution]
    results: tuple[Result, ...] = ()
    public: Callable[..., tuple[Any, ...]] | None = None
    vjp: Vjp | None = None
    caller: str = ""
    parallel: tuple[Parallel, ...] = ()

    def __post_init__(self) -> None:
        if self.vjp is None:
            return
        taken = {t.name for t in self.vjp.op.tensors} - {f"grad_{r.name}" for r in self.results}
        known = {t.name for t in self.tensors if not t.updated} | {r.name for r in self.results}
        assert taken == set(self.vjp.residuals) <= known, f"{self.name}: residuals"
        assert set(self.vjp.constants) <= {t.name for t in self.updated}, f"{self.name}: constants"
        assert {s.name for s in self.vjp.op.scalars} <= {s.name for s in self.scalars}, (
            f"{self.name}: scalars"
        )

    @functools.cached_property
    def function(self) -> str:
        """The function that users call, which messages name."""
        return self.public.__name__ if self.public else self.caller or self.name

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
    def updated(self) -> tuple[Tensor, ...]:
        """The arguments that the op updates in place."""
        return tuple(t for t in self.tensors if t.updated)

    @functools.cached_property
    def updated_positions(self) -> tuple[int, ...]:
        """Where those are among the arguments."""
        return tuple(i for i, p in enumerate(self.parameters) if isinstance(p, Tensor) and p.updated)

    def asks_for(self, results: Collection[str]) -> dict[str, bool]:
        """The scalars that request those of `results` that are computed on request."""
        scalars = {s.name for s in self.scalars}
        return {r.when: True for r in self.results if r.when in scalars and r.name in results}

    @functools.cached_property
    def missing_derivative(self) -> str:
        """What messages say that there is none of, where an op has no vjp."""
        return "no second derivative" if self.caller else "no backward pass"

    def no_gradient(self, reason: str = "") -> str:
        """What messages say first where a gradient is asked for that there is none of."""
        return f"{self.asked}: {self.missing_derivative}" + (f" ({reason})" if reason else "")

    @property
    def asked(self) -> str:
        """The function that messages about gradients name: one that makes the call for users, or the op's own."""
        now = caller()
        return now.function if now else self.function

    def label(self, argument: str, is_given: Callable[[str], bool]) -> str:
        """What messages call an argument in a call that has the tensors for which `is_given` holds."""
        for tensor in self.tensors:
            if tensor.name == argument and tensor.pair and is_given(tensor.pair[1]):
                return tensor.pair[0]
        return argument

    def resolve(self, tensors: Mapping[str, Aval | None], scalars: Mapping[str, Any]) -> Call:
        """Check a call and resolve it. Raises TypeError and ValueError."""
        inputs = Inputs(self, tensors, scalars)
        for tensor in self.tensors:
            self._check_tensor(inputs, tensor)
        for scalar in self.scalars:
            inputs.scalars[scalar.name] = scalar.convert(self.function, inputs[scalar.name])
        values = tuple(inputs.scalars.items())  # before a rule fills in what depends on the shapes
        resolution = self.rule(inputs)
        given = [t for t in self.tensors if inputs[t.name] is not None and t.name not in resolution.unused]
        wanted = [r for r in self.results if r.is_wanted(inputs.__getitem__)]
        return Call(
            self,
            operands=tuple((t.name, t.field) for t in given),
            results=tuple((r.field, resolution.results[r.name]) for r in wanted),
            updates=tuple(i for i, t in enumerate(given) if t.updated),
            attributes=tuple(resolution.attributes.items()),
            arguments=tuple(inputs.tensors.items()),
            scalars=values,
            dims=inputs.dims,
            sizes={symbol: size for symbol, (size, _) in inputs.sizes.items()},
        )

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
