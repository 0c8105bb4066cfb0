"""Says which kernels serve a call, and what they need: `flashxla.explain`."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from flashxla import cuda_attention, native
from flashxla.native import CTensor
from flashxla.ops import OPS
from flashxla.ops.attention import ATTENTION
from flashxla.ops.cache_format import DTYPE_CODES
from flashxla.ops.op import Call


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What serves a call.

    few_queries, many_queries: the kernels of sequences with few queries (decode) and of the others (prefill); the
        same for an operation that makes no difference.
    reason: why many_queries is not the fastest there is; empty if it is.
    plan_bytes: of the work lists, which layers share in a JAX program. workspace_bytes: beside them.
    """

    operation: str
    platform: str
    few_queries: str
    many_queries: str
    reason: str = ""
    plan_bytes: int = 0
    workspace_bytes: int = 0

    def __str__(self) -> str:
        lines = [f"{self.operation} on {self.platform}"]
        if self.few_queries == self.many_queries:
            lines.append(f"  kernels       {self.many_queries}")
        else:
            lines.append(f"  few queries   {self.few_queries}")
            lines.append(f"  many queries  {self.many_queries}")
        if self.reason:
            lines.append(f"  because       {self.reason}")
        if self.plan_bytes or self.workspace_bytes:
            lines.append(f"  plan          {self.plan_bytes} bytes")
            lines.append(f"  workspace     {self.workspace_bytes} bytes")
        return "\n".join(lines)


def explain(
    operation: str | Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any
) -> Explanation:
    """Say which kernels serve a call, without running it.

    operation: a function of flashxla.torch or flashxla.jax, or the name of one. args, kwargs: its arguments; arrays
    may be shapes and dtypes (jax.ShapeDtypeStruct). platform: "cpu" or "cuda"; default: where the arrays are.
    Raises what the call itself would raise for wrong arguments.
    """
    if platform not in (None, "cpu", "cuda"):
        raise ValueError(f"explain: platform: got {platform!r}; accepted: 'cpu', 'cuda'")
    if _framework(operation, (*args, *kwargs.values())) == "torch":
        call, operands, found = _torch_call(operation, args, kwargs)
    else:
        call, operands, found = _jax_call(operation, args, kwargs)
    return _explain(call, operands, platform or found)


def _explain(call: Call, operands: Mapping[str, CTensor], platform: str) -> Explanation:
    library = native.library(platform)
    if platform == "cpu":
        kernels = f"{library.instruction_set} kernels"
        if call.native is not ATTENTION:
            return Explanation(call.op.name, platform, kernels, kernels)
        few, many = (f"{how}, {kernels}" for how in ("keys divided among threads", "tiles of rows"))
        return Explanation(call.op.name, platform, few, many)
    if call.native is not ATTENTION:
        return Explanation(call.op.name, platform, call.native.name, call.native.name)
    needs = cuda_attention.needs(call, operands)
    return Explanation(
        call.op.name,
        platform,
        needs.few_queries,
        needs.many_queries,
        needs.reason,
        4 * needs.plan_words,
        needs.bytes_with_a_plan,
    )


def _framework(operation: str | Callable[..., Any], values: tuple[Any, ...]) -> str:
    if callable(operation):
        return "torch" if operation.__module__.startswith("flashxla.torch") else "jax"
    flat = [x for value in values for x in (value if isinstance(value, (tuple, list)) else (value,))]
    return "torch" if any(type(x).__module__.startswith("torch") for x in flat) else "jax"


def _function(operation: str | Callable[..., Any], framework: str) -> Callable[..., Any]:
    if callable(operation):
        return operation
    module = importlib.import_module(f"flashxla.{framework}")
    operations = sorted(op.function for op in OPS)
    if operation not in operations:
        raise ValueError(f"explain: operation: got {operation!r}; accepted: {', '.join(operations)}")
    return getattr(module, operation)


def _no_operation(operation: str | Callable[..., Any]) -> ValueError:
    return ValueError(f"explain: operation: got {operation!r}, which calls no operation of flashxla")


_Found = tuple[Call, Mapping[str, CTensor], str]


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
    slots = [slot for _, slot in call.operands]
    operands = {slot: CTensor.of(DTYPE_CODES[a.dtype], a.shape) for slot, a in zip(slots, avals, strict=True)}
    return call, operands, _jax_platform(list(arrays.values()))


def _jax_platform(arrays: list[Any]) -> str:
    import jax

    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            return "cuda" if next(iter(array.devices())).platform in ("gpu", "cuda") else "cpu"
    return "cuda" if jax.default_backend() == "gpu" else "cpu"


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
            operands = torch_calls.operand_tensors(op, call, signature)
            found.append((call, operands, "cuda" if device == "cuda" else "cpu"))
            raise Stop

    try:
        with Observe():
            function(*args, **kwargs)
    except Stop:
        return found[0]
    raise _no_operation(operation)
