"""The sizes of the section step: what every front end measures."""

from __future__ import annotations

from flashxla.bench.gpu import ceilings
from flashxla.bench.gpu.compare import Work
from flashxla.bench.gpu.llama import Config
from flashxla.bench.gpu.settings import Settings

TOLERANCE = 3e-2
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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


def work(settings: Settings, count: int, keys: int, reads_cache: bool = True) -> Work:
    """Bytes that a step must read: the weights, and the keys and values."""
    model = config(settings)
    numbers = model.weights_read
    if reads_cache:
        numbers += 2 * model.layers * count * keys * model.widths[1]
    return Work(numbers * _ITEM_BYTES[settings.dtype], "TB/s", ceilings.COPY)
