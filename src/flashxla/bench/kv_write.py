"""Writing new keys and values into a paged cache, in place."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import torch

import flashxla.torch as fx
from flashxla.bench import ceilings
from flashxla.bench.topic import Peer, Run, Topic


@dataclasses.dataclass(frozen=True)
class WriteCase:
    """`tokens` new tokens to shuffled slots of a cache of `blocks` pages."""

    name: str
    tokens: int
    blocks: int
    heads: int = 8
    dim: int = 128
    page: int = 16


CASES = (WriteCase("64 tokens", 64, 1024), WriteCase("8192 tokens", 8192, 1024))
QUICK_CASES = (WriteCase("5 tokens", 5, 4, heads=2, dim=16),)


@dataclasses.dataclass(frozen=True)
class WriteProblem:
    """The new tokens [T, H, D], their slots [T], and caches [P, B, H, D] to copy for each contender."""

    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor


def _problem(case: WriteCase, dtype: torch.dtype, device: torch.device) -> WriteProblem:
    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, case.heads, case.dim).to(device, dtype)

    slots = torch.randperm(case.blocks * case.page)[: case.tokens].to(device)
    return WriteProblem(
        key=tensor(case.tokens),
        value=tensor(case.tokens),
        slots=slots,
        key_cache=tensor(case.blocks, case.page),
        value_cache=tensor(case.blocks, case.page),
    )


def _work(case: WriteCase, dtype: torch.dtype) -> float:
    """Bytes of the new keys and values, read and written."""
    return 4.0 * case.tokens * case.heads * case.dim * dtype.itemsize


def _ours(p: WriteProblem) -> Run:
    caches = p.key_cache.clone(), p.value_cache.clone()
    return Run(
        lambda: fx.reshape_and_cache_flash(p.key, p.value, *caches, p.slots),
        lambda _: caches,
    )


def _index_copy(p: WriteProblem) -> Run:
    caches = p.key_cache.clone(), p.value_cache.clone()
    keys, values = (cache.flatten(0, 1) for cache in caches)

    def call() -> None:
        keys.index_copy_(0, p.slots, p.key)
        values.index_copy_(0, p.slots, p.value)

    return Run(call, lambda _: caches)


def _index_put(p: WriteProblem) -> Run:
    caches = p.key_cache.clone(), p.value_cache.clone()
    keys, values = (cache.flatten(0, 1) for cache in caches)

    def call() -> None:
        keys.index_put_((p.slots,), p.key)
        values.index_put_((p.slots,), p.value)

    return Run(call, lambda _: caches)


def _jax_scatter(p: WriteProblem) -> Run:
    import jax
    import jax.numpy as jnp

    device = jax.devices("cpu" if p.key.device.type == "cpu" else "gpu")[0]

    def array(tensor: torch.Tensor) -> Any:
        numpy = tensor.cpu().float().numpy() if tensor.is_floating_point() else tensor.cpu().int().numpy()
        name = str(tensor.dtype).removeprefix("torch.") if tensor.is_floating_point() else "int32"
        return jax.device_put(jnp.array(numpy).astype(name), device)

    def write(keys: Any, values: Any, slots: Any, key: Any, value: Any) -> tuple[Any, Any]:
        return keys.at[slots].set(key), values.at[slots].set(value)

    program = jax.jit(write, donate_argnums=(0, 1))
    state = tuple(array(cache.flatten(0, 1)) for cache in (p.key_cache, p.value_cache))
    slots, key, value = (array(tensor) for tensor in (p.slots, p.key, p.value))

    def call() -> None:
        nonlocal state
        state = jax.block_until_ready(program(*state, slots, key, value))

    def results(_: None) -> list[torch.Tensor]:
        arrays = (torch.from_numpy(jax.device_get(cache.astype("float32")).copy()) for cache in state)
        return [a.to(p.key_cache).view(p.key_cache.shape) for a in arrays]

    return Run(call, results)


def _no_jax() -> str | None:
    return None if importlib.util.find_spec("jaxlib") else "jax is not installed"


TOPIC = Topic(
    name="kv_write",
    unit="GB/s",
    scale=1e9,
    cases=CASES,
    quick_cases=QUICK_CASES,
    problem=_problem,
    work=_work,
    ceiling=ceilings.copy,
    ours=Peer("flashxla", _ours),
    peers=(
        Peer("torch index_copy_", _index_copy),
        Peer("torch index_put_", _index_put),
        Peer("jax donated scatter", _jax_scatter, missing=_no_jax),
    ),
)
