"""Weights of vLLM's PyTorch models: from host memory to where their sharding wants them, or made there."""

from __future__ import annotations

import ctypes
import functools
import itertools
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torchax.ops.mappings import t2j_dtype
from tpu_inference.layers.common.process_weights.linear_weights import LinearWeights, process_linear_weights

# Dummy weights and arguments of at least so many elements are made on the device; smaller ones on the host.
LARGE = 1 << 20
# The range of vLLM's own dummy weights.
_DUMMY_LIMIT = 1e-3
_seeds = itertools.count()


def put(tensor: torch.Tensor, sharding: NamedSharding) -> jax.Array:
    """A host tensor's values at a sharding. The tensor's memory may be freed afterwards."""
    tensor = tensor.detach().contiguous()  # kept alive until the values have arrived
    view = _view(tensor)
    if sharding.mesh.devices.flat[0].platform == "cpu":  # where device_put would share the memory
        view = view.copy()
    sharding = _fitting(sharding, view.shape)
    if sharding.is_fully_addressable:
        return jax.block_until_ready(jax.device_put(view, sharding))
    # Some of its devices are other machines', which load the same tensor.
    return jax.block_until_ready(
        jax.make_array_from_callback(view.shape, sharding, lambda index: view[index])
    )


def dummy(tensor: torch.Tensor, sharding: NamedSharding) -> jax.Array:
    """Random values of the tensor's shape and dtype, made on the devices."""
    shape = tuple(tensor.shape)
    return _uniform(next(_seeds), shape, t2j_dtype(tensor.dtype), _fitting(sharding, shape))


def _fitting(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding, or a copy on each device where it cannot split the shape evenly."""
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "sharding"))
def _uniform(seed: jax.Array, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.Array:
    values = jax.random.uniform(jax.random.key(seed), shape, dtype, -_DUMMY_LIMIT, _DUMMY_LIMIT)
    return jax.lax.with_sharding_constraint(values, sharding)


def _view(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous tensor's memory. Not by tensor.numpy(), after which torch refuses to free it by resize_(0)."""
    dtype = np.dtype(t2j_dtype(tensor.dtype))
    if not tensor.numel():
        return np.empty(tensor.shape, dtype)
    memory = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    return np.frombuffer(memoryview(memory), dtype).reshape(tensor.shape)


@functools.partial(jax.jit, static_argnames=("fused", "output_sizes", "shards"))
def linear_weights(
    weight: jax.Array, bias: jax.Array | None, *, fused: bool, output_sizes: tuple[int, ...], shards: int
) -> LinearWeights:
    """The weights of a linear layer as its products want them. One program for all layers of a shape."""
    return process_linear_weights(
        LinearWeights(weight=weight, weight_scale=None, zero_point=None, bias=bias),
        fused=fused,
        output_sizes=list(output_sizes),
        reorder_size=shards,
    )
