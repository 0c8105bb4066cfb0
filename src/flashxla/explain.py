"""Says which kernels serve a call, and what they need: `flashxla.explain`."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from flashxla import native, native_calls
from flashxla.native import Kernel, Spec
from flashxla.ops import OPS
from flashxla.ops.op import Call
from flashxla.platforms import CPU, PLATFORMS


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What serves a call.

    kernels: which kernel does what of the call. plan_bytes: of what depends on the index tensors alone, which layers
    share in a JAX program. workspace_bytes: beside it. instruction_set: of a processor, "" on a GPU. gradients: what
    computes those of the call, None if it has none.
    """

    operation: str
    platform: str
    kernels: tuple[Kernel, ...]
    plan_bytes: int = 0
    workspace_bytes: int = 0
    instruction_set: str = ""
    gradients: Explanation | None = None

    def _of(self, work: str) -> str:
        kernel = next((k for k in self.kernels if k.work == work), self.kernels[0])
        return f"{kernel}, {self.instruction_set}" if self.instruction_set else str(kernel)

    @property
    def few_queries(self) -> str:
        """The kernel of sequences with few queries: decode."""
        return self._of("few queries")

    @property
    def many_queries(self) -> str:
        """The kernel of the other sequences: prefill. The same for an operation that makes no difference."""
        return self._of("many queries")

    @property
    def reason(self) -> str:
        """Why some work is not done by the fastest kernel for it; empty if all is."""
        return "; ".join(dict.fromkeys(k.reason for k in self.kernels if k.reason))

    def __str__(self) -> str:
        lines = [f"{self.operation} on {self.platform}"]
        for kernel in self.kernels:
            lines.append(f"  {kernel.work:<16} {self._of(kernel.work)}")
            if kernel.reason:
                lines.append(f"  {'':<16} because: {kernel.reason}")
        if self.plan_bytes or self.workspace_bytes:
            lines.append(f"  {'plan':<16} {self.plan_bytes} bytes")
            lines.append(f"  {'workspace':<16} {self.workspace_bytes} bytes")
        if self.gradients:
            lines.append(str(self.gradients))
        return "\n".join(lines)


def explain(
    operation: str | Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any
) -> Explanation:
    """Say which kernels serve a call, without running it.

    operation: a function of flashxla.torch or flashxla.jax, or the name of one. args, kwargs: its arguments; arrays
    may be shapes and dtypes (jax.ShapeDtypeStruct). platform: "cpu" or "cuda"; default: where the arrays are.
    Raises what the call itself would raise for wrong arguments.
    """
    if platform is not None and platform not in PLATFORMS:
        accepted = ", ".join(map(repr, PLATFORMS))
        raise ValueError(f"explain: platform: got {platform!r}; accepted: {accepted}")
    if _framework(operation, (*args, *kwargs.values())) == "torch":
        call, operands, found = _torch_call(operation, args, kwargs)
    else:
        call, operands, found = _jax_call(operation, args, kwargs)
    return _explain(call, operands, platform or found)


def _explain(call: Call, operands: Mapping[str, Spec], platform: str) -> Explanation:
    needs = native_calls.planned_needs(call, platform, operands)
    instruction_set = native.library(platform).instruction_set if platform == CPU.name else ""
    return Explanation(
        call.op.function,
        platform,
        needs.kernels,
        needs.plan_bytes,
        needs.workspace_bytes,
        instruction_set,
        _gradients(call, operands, platform),
    )


def _gradients(call: Call, operands: Mapping[str, Spec], platform: str) -> Explanation | None:
    """Those through all of the call's results."""
    arguments = {name: aval for name, aval in call.arguments if aval is not None}
    if call.op.vjp is None or call.op.vjp.why_not(dict(call.arguments)):
        return None
    wanted = {f"grad_{name}": aval for name, (_, aval) in zip(call.result_names, call.results, strict=True)}
    requested = call.requesting(call.op.vjp.residuals)
    computed = {name: aval for name, (_, aval) in zip(requested.result_names, requested.results, strict=True)}
    backward = call.gradients(arguments | wanted | computed)
    given = {name: operands[field] for name, field in call.operands}  # with their strides
    made = {name: Spec(aval.dtype, aval.shape) for name, aval in (wanted | computed).items()}
    specs = {field: (given | made)[name] for name, field in backward.operands}
    found = _explain(backward, specs, platform)
    return dataclasses.replace(found, operation=f"gradients of {call.op.function}")


def _framework(operation: str | Callable[..., Any], values: tuple[Any, ...]) -> str:
    if callable(operation):
        return "torch" if operation.__module__.startswith("flashxla.torch") else "jax"
    flat = [x for value in values for x in (value if isinstance(value, (tuple, list)) else (value,))]
    return "torch" if any(type(x).__module__.startswith("torch") for x in flat) else "jax"


def _function(operation: str | Callable[..., Any], framework: str) -> Callable[..., Any]:
    if callable(operation):
        return operation
    module = importlib.import_module(f"flashxla.{framework}")
    operations = sorted(op.function for op in OPS if op.public)
    if operation not in operations:
        raise ValueError(f"explain: operation: got {operation!r}; accepted: {', '.join(operations)}")
    return getattr(module, operation)


def _no_operation(operation: str | Callable[..., Any]) -> ValueError:
    return ValueError(f"explain: operation: got {operation!r}, which calls no operation of flashxla")


_Found = tuple[Call, Mapping[str, Spec], str]


def _jax_call(operation: str | Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> _Found:
    import jax

    from flashxla import jax_calls

    function = _function(operation, "jax")
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = {i: x for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")}

    def traced(arrays: dict[int, Any]) -> Any:
        args, kwargs = jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        return function(*args, **kwargs)

    with jax_calls.observe() as calls:
        jax.eval_shape(traced, arrays)
    if not calls:
        raise _no_operation(operation)
    ((call, avals),) = calls
    fields = [field for _, field in call.operands]
    operands = {field: Spec(a.dtype, a.shape) for field, a in zip(fields, avals, strict=True)}
    return call, operands, _jax_platform(list(arrays.values()))


def _jax_platform(arrays: list[Any]) -> str:
    import jax

    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            found = next(iter(array.devices())).platform
            break
    else:
        found = jax.default_backend()
    names = {name: p.name for p in PLATFORMS.values() for name in (p.jax_backend, p.jax_lowering)}
    return names.get(found, CPU.name)


def _torch_call(operation: str | Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> _Found:
    from torch.utils._python_dispatch import TorchDispatchMode

    from flashxla import torch_calls, torch_library

    function = _function(operation, "torch")
    found: list[_Found] = []

    class Stop(Exception):
        pass

    class Observe(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            namespace, _, name = func._schema.name.partition("::")
            op = next((op for op in OPS if op.name == name), None)
            if namespace != "flashxla" or op is None:
                return func(*args, **kwargs or {})
            values = torch_library.values_of(op, args)
            signature = torch_calls.signature(op, values)
            call = torch_calls.resolve(op, signature)
            device = values[0].device.type
            operands = torch_calls.operand_specs(op, call, signature)
            names = {p.torch_device: p.name for p in PLATFORMS.values()}
            found.append((call, operands, names.get(device, CPU.name)))
            raise Stop

    try:
        with Observe():
            function(*args, **kwargs)
    except Stop:
        return found[0]
    raise _no_operation(operation)
