"""Decodes a few steps through a front end: where the caches lie before and after each, and how right the results are.

A step is, for each layer, a cache write and attention on the new cache, with the result of the layer before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

HEADS, HEAD_SIZE, BLOCK_SIZE, SEQUENCES = 2, 64, 16, 3


class Sizes(NamedTuple):
    """How much is decoded."""

    layers: int
    steps: int
    blocks: int

    @property
    def cache(self) -> tuple[int, ...]:
        """The shape of a layer's keys, or values."""
        return self.blocks, BLOCK_SIZE, HEADS, HEAD_SIZE


class Decoded(NamedTuple):
    """largest_error: against the same steps in plain PyTorch on the CPU, for that against float64 of NumPy, for JAX
    against JAX without jit."""

    device: str
    pointers_stay: bool
    largest_error: float


def decode(frontend: str, sizes: Sizes) -> Decoded:
    """Decode through a front end, one of FRONTENDS."""
    return FRONTENDS[frontend](sizes)


def _step(fx: Any, key: Any, value: Any, query: Any, caches: Any, slots: Any, meta: Any) -> Any:
    context_lens, block_tables, query_start_loc, num_seqs = meta
    new_caches = []
    for key_cache, value_cache in caches:
        written = fx.reshape_and_cache_flash(query[:, :HEADS] + key, value, key_cache, value_cache, slots)
        new_caches.append(written or (key_cache, value_cache))
        query = fx.paged_attention(
            query, new_caches[-1], context_lens, block_tables, query_start_loc, num_seqs, HEAD_SIZE**-0.5
        )
    return query, new_caches


def _inputs(blocks: int, step: int) -> tuple[Any, ...]:
    import numpy as np

    random = np.random.default_rng(step)
    key, value = random.standard_normal((2, SEQUENCES, HEADS, HEAD_SIZE), dtype=np.float32)
    query = random.standard_normal((SEQUENCES, 2 * HEADS, HEAD_SIZE), dtype=np.float32)
    tables = (np.arange(SEQUENCES) * (blocks // SEQUENCES)).astype(np.int32)
    slots = tables * BLOCK_SIZE + step
    lengths = np.full((SEQUENCES,), step + 1, np.int32)
    starts = np.arange(SEQUENCES + 1, dtype=np.int32)
    return key, value, query, slots, (lengths, tables[:, None], starts, np.array([SEQUENCES], np.int32))


# PyTorch


def _decode_torch(
    sizes: Sizes, device: Any, compiled: Callable[[Any], Any], pointers: Callable[[Sequence[Any]], list[int]]
) -> tuple[bool, float]:
    """Whether pointers stayed, and the largest error.

    compiled: makes of a step's function what is called. pointers: where tensors lie, once all work is done.
    """
    expected, _ = _torch_steps(sizes, "cpu", lambda step: step, lambda tensors: [])
    got, seen = _torch_steps(sizes, device, compiled, pointers)
    error = max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True))
    return all(p == seen[0] for p in seen), error


def _torch_steps(
    sizes: Sizes, device: Any, compiled: Any, pointers: Any
) -> tuple[list[Any], list[list[int]]]:
    import torch

    import flashxla.torch as fx

    step_fn = compiled(lambda *args: _step(fx, *args)[0])
    caches = [tuple(torch.zeros(sizes.cache, device=device) for _ in range(2)) for _ in range(sizes.layers)]
    flat = [cache for pair in caches for cache in pair]
    outputs, seen = [], [pointers(flat)]
    for step in range(sizes.steps):
        key, value, query, slots, meta = _inputs(sizes.blocks, step)
        tensors = [torch.from_numpy(a).to(device) for a in (key, value, query, slots, *meta)]
        out = step_fn(*tensors[:3], caches, tensors[3], tensors[4:])
        seen.append(pointers(flat))
        outputs.append(out.cpu())
    return outputs, seen


def _torch_cpu(sizes: Sizes) -> Decoded:
    import numpy as np

    got, seen = _torch_steps(sizes, "cpu", lambda step: step, lambda tensors: [x.data_ptr() for x in tensors])
    expected = _numpy_steps(sizes)
    error = max(float(np.abs(a.numpy() - b).max()) for a, b in zip(got, expected, strict=True))
    return Decoded("cpu", all(p == seen[0] for p in seen), error)


def _numpy_steps(sizes: Sizes) -> list[Any]:
    """The same steps without a paged cache: each layer's keys and values are a list of those of each step."""
    import numpy as np

    held: list[tuple[list[Any], list[Any]]] = [([], []) for _ in range(sizes.layers)]
    outputs = []
    for step in range(sizes.steps):
        key, value, query = (x.astype(np.float64) for x in _inputs(sizes.blocks, step)[:3])
        for keys, values in held:
            keys.append(query[:, :HEADS] + key)
            values.append(value)
            # Two heads of queries share one of keys.
            k, v = (np.stack(x).repeat(2, axis=2) for x in (keys, values))
            weights = np.exp(np.einsum("shd,tshd->sht", query, k) * HEAD_SIZE**-0.5)
            query = np.einsum("sht,tshd->shd", weights / weights.sum(-1, keepdims=True), v)
        outputs.append(query)
    return outputs


def _torch_cuda(sizes: Sizes) -> Decoded:
    import torch

    def pointers(tensors: Sequence[Any]) -> list[int]:
        torch.cuda.synchronize()
        return [x.data_ptr() for x in tensors]

    return Decoded(torch.cuda.get_device_name(), *_decode_torch(sizes, "cuda", lambda step: step, pointers))


def _lazy(sizes: Sizes) -> Decoded:
    return _torch_xla(sizes, lambda step: step)


def _openxla(sizes: Sizes) -> Decoded:
    import torch

    return _torch_xla(sizes, lambda step: torch.compile(step, backend="openxla"))


def _torch_xla(sizes: Sizes, compiled: Callable[[Any], Any]) -> Decoded:
    import torch_xla

    def pointers(tensors: Sequence[Any]) -> list[int]:
        torch_xla.sync(wait=True)
        return [torch_xla._XLAC._unsafe_buffer_pointer(x) for x in tensors]

    found = _decode_torch(sizes, torch_xla.device(), compiled, pointers)
    return Decoded(str(torch_xla._XLAC._xla_get_devices()[0]), *found)


def _torchtpu(sizes: Sizes) -> Decoded:
    return _torch_tpu(sizes, lambda step: step)


def _torchtpu_compiled(sizes: Sizes) -> Decoded:
    import torch

    return _torch_tpu(sizes, lambda step: torch.compile(step, backend="tpu"))


def _torch_tpu(sizes: Sizes, compiled: Callable[[Any], Any]) -> Decoded:
    import flashxla
    from flashxla.xla import torch_tpu

    if os.environ["PJRT_DEVICE"] == "CPU":
        flashxla.use_cpu()
    else:
        flashxla.use_gpu()
    from flashxla.xla.torch_tpu_memory import addresses

    platform = torch_tpu.platform()
    assert platform is not None
    return Decoded(f"tpu:0 ({platform.name})", *_decode_torch(sizes, torch_tpu.DEVICE, compiled, addresses))


def _torchax(sizes: Sizes) -> Decoded:
    import jax
    import torchax

    import flashxla.torchax

    flashxla.torchax.register()

    def pointers(tensors: Sequence[Any]) -> list[int]:
        return [x.jax().unsafe_buffer_pointer() for x in jax.block_until_ready(tensors)]

    with torchax.default_env():
        return Decoded(
            f"jax on {jax.devices()[0]}", *_decode_torch(sizes, "jax", lambda step: step, pointers)
        )


# JAX


def _jax(sizes: Sizes) -> Decoded:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import flashxla.jax as fx

    def step(*args: Any) -> Any:
        return _step(fx, *args)

    def caches() -> Any:
        return [(jnp.zeros(sizes.cache), jnp.zeros(sizes.cache)) for _ in range(sizes.layers)]

    def pointers(caches: Any) -> list[int]:
        return [x.unsafe_buffer_pointer() for pair in caches for x in pair]

    donated, plain, error = caches(), caches(), 0.0
    compiled = jax.jit(step, donate_argnums=3)
    start, stay = pointers(donated), True
    for i in range(sizes.steps):
        key, value, query, slots, meta = _inputs(sizes.blocks, i)
        out, donated = compiled(key, value, query, donated, slots, meta)
        expected, plain = step(key, value, query, plain, slots, meta)
        stay &= pointers(donated) == start
        error = max(error, float(np.abs(out - expected).max()))
    return Decoded(str(jax.devices()[0]), stay, error)


FRONTENDS: dict[str, Callable[[Sizes], Decoded]] = {
    "lazy": _lazy,
    "openxla": _openxla,
    "jax": _jax,
    "torchtpu": _torchtpu,
    "torchtpu_compiled": _torchtpu_compiled,
    "torchax": _torchax,
    "torch_cpu": _torch_cpu,
    "torch_cuda": _torch_cuda,
}
# Those that compile a step to one program.
OF_ONE_PROGRAM = ("lazy", "openxla", "jax", "torchtpu_compiled")
