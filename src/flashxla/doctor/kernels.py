"""Runs every kind of kernel and holds it against float64: each dtype, for few queries and for many.

Run in a process of its own (`python -m flashxla.doctor.kernels jax cpu`): a kernel that crashes stays contained.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

import flashxla

HEADS, KV_HEADS, HEAD_SIZE, PAGE = 8, 2, 64, 16
# (dtype of the queries, dtype of keys and values)
DTYPES = (
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float32", "float8_e4m3fn"),
    ("bfloat16", "float8_e4m3fn"),
    ("float16", "float8_e5m2"),
    ("float8_e4m3fn", "float8_e4m3fn"),
)
# Queries and keys of each sequence.
BATCHES = {"decode": ((1, 1), (1, 300), (1, 77)), "prefill": ((130, 200), (1, 20), (64, 64))}
# Of the largest result, for values of unit size: products of 16 bits round each weight and the result.
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


class Framework(Protocol):
    """What runs the operations."""

    fx: Any

    def array(self, values: np.ndarray, dtype: str) -> Any:
        """An array of the framework where it is tested."""
        ...

    def values(self, array: Any) -> np.ndarray:
        """What an array holds, as float64."""
        ...


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kind of call: which kernels serve it, and how far its result is from float64, as a share of what it may be."""

    call: str
    kernels: str
    error: float

    @property
    def ok(self) -> bool:
        """Whether it is right; NaN is not."""
        return self.error <= 1.0


def run(framework: str, device: str, timeout: float = 300) -> list[Kernel]:
    """Test the kernels in a process of its own. Raises RuntimeError with its output if that fails.

    framework: "jax" or "torch"; device: "cpu" or "cuda".
    """
    command = [sys.executable, "-m", "flashxla.doctor.kernels", framework, device]
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"the kernels of {framework} on {device} failed:\n{done.stdout}\n{done.stderr}")
    return [Kernel(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def check(framework: Framework, device: str) -> Iterator[Kernel]:
    """Test every kind of call."""
    for name, batch in BATCHES.items():
        for q_dtype, kv_dtype in DTYPES:
            of_keys = "" if kv_dtype == q_dtype else f" on {kv_dtype} keys"
            yield _check(framework, device, f"{name}, {q_dtype}{of_keys}", batch, q_dtype, kv_dtype)


def _check(
    framework: Framework,
    device: str,
    call: str,
    batch: tuple[tuple[int, int], ...],
    q_dtype: str,
    kv_dtype: str,
) -> Kernel:
    random = np.random.default_rng(len(call))
    len_q, len_k = np.array(batch).T
    pages = -(-len_k // PAGE)
    shape = (int(pages.sum()) + 1, PAGE, KV_HEADS, HEAD_SIZE)
    table = np.zeros((len(batch), pages.max()), np.int32)
    shuffled = iter(random.permutation(shape[0]).tolist())
    for s, count in enumerate(pages):
        table[s, :count] = [next(shuffled) for _ in range(count)]
    query = framework.array(random.standard_normal((int(len_q.sum()), HEADS, HEAD_SIZE)), q_dtype)
    caches = tuple(framework.array(random.standard_normal(shape), kv_dtype) for _ in "kv")
    index = (len_k, table, np.cumsum([0, *len_q]), np.array([len(batch)]))
    arguments = (query, caches, *(framework.array(x, "int32") for x in index), HEAD_SIZE**-0.5)
    served = flashxla.explain(framework.fx.paged_attention, *arguments, platform=device)
    kernels = served.few_queries if call.startswith("decode") else served.many_queries
    out = framework.values(framework.fx.paged_attention(*arguments))
    keys, values = map(framework.values, caches)
    expected = _reference(framework.values(query), keys, values, table, batch)
    tolerance = TOLERANCE[q_dtype if q_dtype in TOLERANCE else "bfloat16"] * np.abs(expected).max()
    return Kernel(call, kernels, float(np.abs(out - expected).max() / tolerance))


def _reference(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    table: np.ndarray,
    batch: tuple[tuple[int, int], ...],
) -> np.ndarray:
    """Causal attention in float64."""
    out, start = np.zeros_like(query), 0
    for pages, (len_q, len_k) in zip(table, batch, strict=True):
        k, v = (cache[pages].reshape(-1, KV_HEADS, HEAD_SIZE)[:len_k] for cache in (keys, values))
        seen = np.arange(len_k) <= np.arange(len_q)[:, None] + len_k - len_q
        for head in range(HEADS):
            of = head * KV_HEADS // HEADS
            scores = query[start : start + len_q, head] @ k[:, of].T * HEAD_SIZE**-0.5
            weights = np.where(seen, np.exp(scores - scores.max(axis=1, keepdims=True)), 0.0)
            out[start : start + len_q, head] = weights @ v[:, of] / weights.sum(axis=1, keepdims=True)
        start += len_q
    return out


class Jax:
    """JAX on a device."""

    def __init__(self, device: str) -> None:
        import jax
        import jax.numpy as jnp

        import flashxla.jax as fx

        self.fx: Any = fx
        self._jnp, self._jax = jnp, jax
        self._device = jax.devices({"cpu": "cpu", "cuda": "gpu"}[device])[0]

    def array(self, values: np.ndarray, dtype: str) -> Any:
        """An array of the framework where it is tested."""
        # Rounded twice, as PyTorch's are: what is held against float64 is what the array holds.
        return self._jax.device_put(self._jnp.asarray(values.astype(np.float32)).astype(dtype), self._device)

    def values(self, array: Any) -> np.ndarray:
        """What an array holds, as float64."""
        return np.asarray(array.astype("float32")).astype(np.float64)


class Torch:
    """Plain PyTorch on a device."""

    def __init__(self, device: str) -> None:
        import torch

        import flashxla.torch as fx

        self.fx: Any = fx
        self._torch, self._device = torch, device

    def array(self, values: np.ndarray, dtype: str) -> Any:
        """An array of the framework where it is tested."""
        tensor = self._torch.from_numpy(values.astype(np.float32))
        return tensor.to(getattr(self._torch, dtype)).to(self._device)

    def values(self, array: Any) -> np.ndarray:
        """What an array holds, as float64."""
        return array.float().cpu().numpy().astype(np.float64)


def main(framework: str, device: str) -> None:
    """Test the kernels in this process and print them as JSON."""
    frameworks: dict[str, type[Jax] | type[Torch]] = {"jax": Jax, "torch": Torch}
    made = frameworks[framework](device)
    print(json.dumps([dataclasses.asdict(kernel) for kernel in check(made, device)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
