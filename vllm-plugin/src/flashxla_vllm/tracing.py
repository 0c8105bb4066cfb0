"""One trace for all layers of vLLM's PyTorch models.

torchax runs a model's Python once for each program, layer by layer: most of the time that a warm start takes.
Products with weights, norms, activations and rotary embeddings are pure functions of their tensors and settings: each
is traced by jax.jit on its first call, and the other layers use that trace. Norms differ from vLLM's in one rounding.
Norms and rotary embeddings are written so that XLA makes few kernels of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torchax.interop import jax_view, torch_view
from torchax.tensor import Tensor
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

NORMS = (RMSNorm, GemmaRMSNorm)
PURE = (*NORMS, SiluAndMul, GeluAndMul, RotaryEmbeddingBase)
_SETTINGS = (bool, int, float, str, type(None), torch.dtype, torch.device)
# What every module has and no result depends on.
_OF_MODULES = {*torch.nn.Module().__dict__, "_forward_method", "_enforce_enable"}
_programs: dict[Any, Callable[..., Any]] = {}


def forward(op: CustomOp, *args: Any, **kwargs: Any) -> Any:
    """op(*args, **kwargs), traced once for all ops of the same class and settings."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    settings = _settings(op)
    constants = tuple(None if isinstance(x, Tensor) else x for x in leaves)
    if settings is None or not all(isinstance(x, _SETTINGS) for x in constants):
        return op._forward_method(*args, **kwargs)
    key = (settings, structure, constants)
    program = _programs.get(key)
    if program is None:
        program = _programs[key] = _program(op, structure, constants)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    state = {**dict(op.named_parameters()), **dict(op.named_buffers())}
    return torch_view(program(jax_view(state), jax_view(tensors)))


def linear(
    apply: Callable[..., Any],
    method: Any,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    einsum_str: str | None = None,
) -> jax.Array:
    """apply(method, x, weight, bias, einsum_str), traced once for all layers of the same shapes and shardings."""
    config = method.linear_config
    sizes = tuple(config.output_sizes)
    key = (
        apply,
        config.weight_sharding,
        config.mesh,
        config.defer_all_reduce,
        sizes,
        config.n_shards,
        einsum_str,
    )
    program = _programs.get(key)
    if program is None:
        program = _programs[key] = jax.jit(lambda x, weight, bias: apply(method, x, weight, bias, einsum_str))
    out: jax.Array = program(x, weight, bias)
    return out


def norm(op: CustomOp, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """A norm of x, or of x + residual, with that sum.

    vLLM adds in float32, and rounds the sum for the next layer. XLA sees that the rounded sum is widened again, leaves
    out both, and has the float32 sums of all layers go through memory. Rounding before the norm, as transformers does,
    is half of that; the barrier keeps XLA from leaving it out.

    The barrier behind the norm keeps the product with its weight there. XLA moves that into the matrix product that
    follows, and where cuBLAS then does the matrix product, it is a kernel of its own.
    """
    if residual is None:
        return _in_memory(op._forward_method(x))
    if x.dtype == torch.float32:
        return op._forward_method(x, residual)
    total = _in_memory(x + residual)
    return _in_memory(op._forward_method(total)), total


def _in_memory(x: torch.Tensor) -> torch.Tensor:
    return torch_view(jax.lax.optimization_barrier(jax_view(x)))


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of halves (x1, x2): (x1 * cos - x2 * sin, x2 * cos + x1 * sin).

    In this form XLA reads x as it writes the result. Of two halves that are put together it makes a slower kernel.

    Args:
        x: [tokens, heads, size]
        cos, sin: [tokens, size / 2]
    """
    cos, sin = (y[:, None, None].astype(x.dtype) for y in (cos, sin))
    halves = x.reshape(*x.shape[:2], 2, -1)
    signs = jnp.array([[-1], [1]], x.dtype)
    return (halves * cos + halves[:, :, ::-1] * (sin * signs)).reshape(x.shape)


class _Call(torch.nn.Module):
    """What functional_call can call of an op: its forward_native and the like, below `forward`."""

    def __init__(self, op: CustomOp) -> None:
        super().__init__()
        self.op = op

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.op, NORMS):
            return norm(self.op, *args, **kwargs)
        return self.op._forward_method(*args, **kwargs)


def _program(op: CustomOp, structure: Any, constants: tuple[Any, ...]) -> Callable[..., Any]:
    def run(state: dict[str, jax.Array], tensors: list[jax.Array]) -> Any:
        rest = iter(torch_view(tensors))
        args, kwargs = jax.tree.unflatten(structure, [next(rest) if x is None else x for x in constants])
        weights = {f"op.{name}": value for name, value in torch_view(state).items()}
        return jax_view(torch.func.functional_call(_Call(op), weights, args, kwargs))

    return jax.jit(run)


def _settings(op: CustomOp) -> Any:
    """The settings of the op and its parts, in a form that can be compared; None if there are some of another kind."""
    settings: list[Any] = []
    for part in op.modules():
        settings.append(type(part))
        for name, value in part.__dict__.items():
            if name in _OF_MODULES:
                continue
            value = tuple(value) if isinstance(value, list | tuple) else (value,)
            if not all(isinstance(x, _SETTINGS) for x in value):
                return None
            settings.append((name, value))
    return tuple(settings)
