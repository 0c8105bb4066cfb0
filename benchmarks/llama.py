"""The model of the section step, as plain numbers: what its steps in JAX and in PyTorch/XLA have in common."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks import device
from benchmarks.compare import Work
from benchmarks.settings import Settings

LAZY, OPENXLA = FRONTENDS = "flashxla in PyTorch/XLA, lazy", "flashxla in PyTorch/XLA, openxla"
TORCHTPU, TORCHAX = OF_TODAY = "flashxla in TorchTPU, compiled", "flashxla in torchax, jax_jit"
PAGE = 16
TOLERANCE = 3e-2
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes; those of Llama 3 8B."""

    layers: int = 32
    hidden: int = 4096
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    mlp: int = 14336
    vocab: int = 128256
    theta: float = 500000.0
    eps: float = 1e-5

    @property
    def widths(self) -> tuple[int, int]:
        """Of all query heads, and of all KV heads."""
        return self.heads[0] * self.dim, self.heads[1] * self.dim

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The weights of a layer but for its norms."""
        q, kv = self.widths
        return {
            "qkv": (self.hidden, q + 2 * kv),
            "out": (q, self.hidden),
            "gate_up": (self.hidden, 2 * self.mlp),
            "down": (self.mlp, self.hidden),
        }

    @property
    def weights_read(self) -> int:
        """Numbers that a step reads: all but the embedding, of which it takes a row a sequence."""
        layer = sum(rows * columns for rows, columns in self.matrices.values()) + 2 * self.hidden
        return self.layers * layer + self.hidden + self.hidden * self.vocab


def batches(settings: Settings) -> tuple[tuple[int, ...], int]:
    """Batches, keys of a sequence."""
    return ((1, 3), 40) if settings.quick else ((1, 16, 64), 2048)


def cases(settings: Settings) -> list[str]:
    """A batch each."""
    counts, keys = batches(settings)
    return [f"batch {count}, {keys} keys" for count in counts]


def batch_of(case: str, settings: Settings) -> tuple[int, int]:
    """Sequences and keys of each."""
    counts, keys = batches(settings)
    return counts[cases(settings).index(case)], keys


def config(settings: Settings) -> Config:
    """Of the model."""
    small = Config(layers=2, hidden=64, heads=(4, 2), dim=32, mlp=96, vocab=128)
    return small if settings.quick else Config()


def one_layer(settings: Settings) -> Config:
    """The model whose logits are compared before the whole one is timed."""
    return dataclasses.replace(config(settings), layers=1, vocab=512)


def work(settings: Settings, count: int, keys: int, reads_cache: bool = True) -> Work:
    """Bytes that a step must read: the weights, and the keys and values."""
    model = config(settings)
    numbers = model.weights_read
    if reads_cache:
        numbers += 2 * model.layers * count * keys * model.widths[1]
    return Work(numbers * _ITEM_BYTES[settings.dtype], "TB/s", device.COPY)


def batch(num_seqs: int, keys: int) -> dict[str, np.ndarray]:
    """Sequences of `keys` keys, the new token's among them, over shuffled pages."""
    width = -(-keys // PAGE)
    table = np.random.default_rng(0).permutation(num_seqs * width).reshape(num_seqs, width)
    last = keys - 1
    found = {
        "context_lens": np.full(num_seqs, keys),
        "tables": table,
        "slots": table[:, last // PAGE] * PAGE + last % PAGE,
        "starts": np.arange(num_seqs + 1),
        "num_seqs": np.full(1, num_seqs),
    }
    return {name: array.astype(np.int32) for name, array in found.items()}
