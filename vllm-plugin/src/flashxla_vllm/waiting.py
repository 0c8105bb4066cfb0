"""Arguments that wait on the host for the programs they are for, while the KV cache's memory is free.

A program is compiled from its arguments' shapes; their values are needed when it first runs, beside the cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class _OnHost:
    values: np.ndarray
    sharding: Any


def lasting_arrays() -> dict[int, jax.Array]:
    """The arrays of now, such as weights, by identity. Holding them keeps their identities from new ones."""
    return {id(array): array for array in jax.live_arrays()}


def to_host(runner: Any, tasks: list[Any], lasting: Container[int]) -> list[Any]:
    """tpu-inference's warm-up tasks, with no arrays on the device but those that last."""

    def moved(leaf: Any) -> Any:
        newcomer = isinstance(leaf, jax.Array) and id(leaf) not in lasting
        if (
            not newcomer
            or not leaf.is_fully_addressable
            or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
        ):
            return leaf
        return _OnHost(np.array(leaf), leaf.sharding)

    waiting = []
    for name, function, args, kwargs, handler in tasks:
        for i, argument in enumerate(args):
            if argument is runner.kv_caches:
                # The model's own handler holds the arrays that it was given.
                args = (*args[:i], None, *args[i + 1 :])
                handler = functools.partial(_run_model, runner, i)
        waiting.append((name, function, *jax.tree.map(moved, (args, kwargs)), handler))
    return waiting


def to_device(tasks: list[Any]) -> list[Any]:
    """The tasks with their arrays where they were."""

    def back(leaf: Any) -> Any:
        return jax.device_put(leaf.values, leaf.sharding) if isinstance(leaf, _OnHost) else leaf

    return [
        (name, function, *jax.tree.map(back, (args, kwargs)), handler)
        for name, function, args, kwargs, handler in tasks
    ]


def _run_model(runner: Any, position: int, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a step of the model, which takes the caches in this position and returns them first."""
    out = function(*args[:position], runner.kv_caches, *args[position + 1 :], **kwargs)
    runner.kv_caches = out[0]
    return out
