"""Writing new keys and values into a paged cache, in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import flashxla.torch as fx
from flashxla.bench import cases, ceilings
from flashxla.bench.cases import WriteCase
from flashxla.bench.topic import Peer, Run, Topic


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


def _ours(p: WriteProblem) -> Run:
    caches = p.key_cache.clone(), p.value_cache.clone()
    return Run(lambda: fx.reshape_and_cache_flash(p.key, p.value, *caches, p.slots), lambda _: caches)


def _by(write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]) -> Callable[[WriteProblem], Run]:
    """write(cache [slots, H, D], slots, tokens): one of PyTorch's own functions."""

    def build(p: WriteProblem) -> Run:
        caches = p.key_cache.clone(), p.value_cache.clone()
        keys, values = (cache.flatten(0, 1) for cache in caches)

        def call() -> None:
            write(keys, p.slots, p.key)
            write(values, p.slots, p.value)

        return Run(call, lambda _: caches)

    return build


_index_copy = _by(lambda cache, slots, tokens: cache.index_copy_(0, slots, tokens))
_index_put = _by(lambda cache, slots, tokens: cache.index_put_((slots,), tokens))


def _jax_scatter(p: WriteProblem) -> Run:
    import jax
    import jax.numpy as jnp

    def write(keys: Any, values: Any, slots: Any, key: Any, value: Any) -> tuple[Any, Any]:
        return keys.at[slots].set(key), values.at[slots].set(value)

    program = jax.jit(write, donate_argnums=(0, 1))
    slots, key, value = (jax.dlpack.from_dlpack(tensor) for tensor in (p.slots.int(), p.key, p.value))
    # Copies, since JAX cannot give away memory that is not its own.
    state = tuple(
        jnp.copy(jax.dlpack.from_dlpack(cache.flatten(0, 1))) for cache in (p.key_cache, p.value_cache)
    )

    def call() -> None:
        nonlocal state
        state = jax.block_until_ready(program(*state, slots, key, value))

    def results(_: None) -> list[torch.Tensor]:
        return [torch.from_dlpack(cache).view(p.key_cache.shape) for cache in state]

    return Run(call, results)


TOPIC = Topic(
    name="kv_write",
    unit="GB/s",
    scale=1e9,
    cases=cases.KV_WRITE,
    problem=_problem,
    work=cases.write_work,
    ceiling=ceilings.copy,
    ours=Peer("flashxla", _ours),
    peers=(
        Peer("torch index_copy_", _index_copy),
        Peer("torch index_put_", _index_put),
        Peer("jax donated scatter", _jax_scatter, serves=lambda case, device: device == "cpu"),
    ),
)
