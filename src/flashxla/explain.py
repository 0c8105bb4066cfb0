"""Says which kernels serve a call, and what they need: `flashxla.explain`."""

from __future__ import annotations

import dataclasses
import importlib
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from flashxla import native, native_calls
from flashxla.native import Kernel, Spec
from flashxla.ops import OPS, functions
from flashxla.ops.op import Call
from flashxla.platforms import CPU, PLATFORMS


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What serves a call.

    kernels: which kernel does what of the call. plan_bytes: of what depends on the index tensors alone, which layers
    share in a JAX program. workspace_bytes: beside it. instruction_set: of a processor, "" on a GPU. gradients: what
    computes those of the call, None if it has none.

    parts: where a function makes calls of several operations, what serves each, in their order; else empty. kernels are
    then those of all, plan_bytes their sum, workspace_bytes the most that one needs, and each part has gradients of its
    own.
    """

    operation: str
    platform: str
    kernels: tuple[Kernel, ...]
    plan_bytes: int = 0
    workspace_bytes: int = 0
    instruction_set: str = ""
    gradients: Explanation | None = None
    parts: tuple[Explanation, ...] = ()

    def _of(self, *works: str) -> Kernel:
        """The kernel of the first of these works that there is."""
        return next((k for work in works for k in self.kernels if k.work == work), self.kernels[0])

    def _described(self, kernel: Kernel) -> str:
        return f"{kernel}, {self.instruction_set}" if self.instruction_set else str(kernel)

    @property
    def few_queries(self) -> str:
        """The kernel of sequences with few queries: decode."""
        return self._described(self._of("few queries", "all queries"))

    @property
    def many_queries(self) -> str:
        """The kernel of the other sequences: prefill. The same for an operation that makes no difference."""
        return self._described(self._of("many queries", "all queries"))

    @property
    def reason(self) -> str:
        """Why some work is not done by the fastest kernel for it; empty if all is."""
        return "; ".join(dict.fromkeys(k.reason for k in self.kernels if k.reason))

    def __str__(self) -> str:
        lines = [f"{self.operation} on {self.platform}"]
        if self.parts:
            return "\n".join([*lines, *(textwrap.indent(str(part), "  ") for part in self.parts)])
        for kernel in self.kernels:
            lines.append(f"  {kernel.work:<16} {self._described(kernel)}")
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
    may be shapes and dtypes (jax.ShapeDtypeStruct). platform: "cpu" or "cuda"; default: where the arrays are. Of a
    function that makes calls of several operations all are explained. Raises what the call itself would raise for
    wrong arguments.
    """
    if platform is not None and platform not in PLATFORMS:
        accepted = ", ".join(map(repr, PLATFORMS))
        raise ValueError(f"explain: platform: got {platform!r}; accepted: {accepted}")
    framework = _framework(operation, (*args, *kwargs.values()))
    function = _function(operation, framework)
    calls, found = (_torch_calls if framework == "torch" else _jax_calls)(function, args, kwargs)
    if not calls:
        raise ValueError(f"explain: operation: got {operation!r}, which calls no operation of flashxla")
    parts = tuple(_explain(call, operands, platform or found) for call, operands in calls)
    if len(parts) == 1:
        return parts[0]
    return Explanation(
        getattr(function, "__name__", str(function)),
        parts[0].platform,
        tuple(kernel for part in parts for kernel in part.kernels),
        sum(part.plan_bytes for part in parts),
        max(part.workspace_bytes for part in parts),
        parts[0].instruction_set,
        parts=parts,
    )


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
    if operation not in functions.__all__:
        accepted = ", ".join(functions.__all__)
        raise ValueError(f"explain: operation: got {operation!r}; accepted: {accepted}")
    return getattr(importlib.import_module(f"flashxla.{framework}"), operation)


# The calls of operations that a function makes, with their operands, and the platform where its arrays are.
_Calls = list[tuple[Call, Mapping[str, Spec]]]
_Found = tuple[_Calls, str]


def _jax_calls(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> _Found:
    import jax

    from flashxla import jax_calls

    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = {i: x for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")}

    def traced(arrays: dict[int, Any]) -> Any:
        args, kwargs = jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        return function(*args, **kwargs)

    with jax_calls.observe() as observed:
        jax.eval_shape(traced, arrays)
    calls: _Calls = []
    for call, avals in observed:
        fields = [field for _, field in call.operands]
        calls.append((call, {f: Spec(a.dtype, a.shape) for f, a in zip(fields, avals, strict=True)}))
    return calls, _jax_platform(list(arrays.values()))


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


def _torch_calls(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> _Found:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    from flashxla import torch_calls, torch_library

    calls: _Calls = []
    devices: list[str] = []

    class Observe(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            namespace, _, name = func._schema.name.partition("::")
            op = next((op for op in OPS if op.name == name), None)
            if namespace == "flashxla" and op is not None:
                values = torch_library.values_of(op, args)
                signature = torch_calls.signature(op, values)
                call = torch_calls.resolve(op, signature)
                calls.append((call, torch_calls.operand_specs(op, call, signature)))
                devices.append(values[0].device.type)
            return func(*args, **kwargs or {})

    # Of fake tensors nothing is computed, and what they are copies of is not updated.
    with FakeTensorMode() as fake:

        def fake_of(tensor: torch.Tensor) -> torch.Tensor:
            if type(tensor).__module__.startswith("torchax"):
                raise TypeError(
                    "explain: got tensors of torchax; accepted: PyTorch's own, JAX's arrays, jax.ShapeDtypeStruct"
                )
            return fake.from_tensor(tensor)

        args, kwargs = pytree.tree_map_only(torch.Tensor, fake_of, (args, kwargs))
        with Observe():
            function(*args, **kwargs)
    names = {p.torch_device: p.name for p in PLATFORMS.values()}
    return calls, names.get(devices[0], CPU.name) if devices else CPU.name
