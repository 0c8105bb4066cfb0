"""The section overhead: what the operations cost inside a jitted program beyond their kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from flashxla.bench.gpu import batch as batches
from flashxla.bench.gpu import compare, jax_programs, pairs, profile, reference, shapes, timers
from flashxla.bench.gpu.batch import Batch
from flashxla.bench.gpu.compare import Contender, Prepared, Row
from flashxla.bench.gpu.settings import Settings
from flashxla.bench.gpu.shapes import Shape

_KERNELS = "kernels alone (from PyTorch, a plan each)"


def _shape(settings: Settings) -> Shape:
    if settings.quick:
        return Shape(
            "cache write + decode 1 x 40", shapes.newest(40), heads=(4, 2), dim=64, dtype=settings.dtype
        )
    return Shape("cache write + decode 1 x 1k", shapes.newest(1024), dtype=settings.dtype)


def cases(section: str, settings: Settings) -> list[str]:
    """One."""
    return [_shape(settings).name]


def run(section: str, case: str, settings: Settings) -> Iterator[Row]:
    """Microseconds a pair: jitted programs of several lengths, and the kernels alone."""
    batch = batches.build(_shape(settings), settings.device)
    counts = (1, 2, 4) if settings.quick else (1, 32, 128)
    programs = {f"flashxla in JAX, {count} in a program": _Program(batch, count) for count in counts}
    found = [Contender(name, program.prepare, ours=True) for name, program in programs.items()]
    found.append(Contender(_KERNELS, lambda: pairs.in_torch(batch, 1), ours=True))
    us = {}
    for row in compare.run(case, batch.shape.dtype, found, settings):
        if "us" in row:
            us[row["contender"]] = row["us"]
        yield row
    yield from _derived(case, batch.shape.dtype, us, counts)
    if settings.profile:
        yield {"begin": "profile"}
        for name, program in programs.items():
            yield profile.row(case, batch.shape.dtype, name, program.dispatch, program.count)


def _derived(case: str, dtype: str, us: dict[str, float], counts: tuple[int, ...]) -> Iterator[Row]:
    times = [us.get(f"flashxla in JAX, {count} in a program") for count in counts]
    kernels = us.get(_KERNELS)
    _, few, many = times
    if few is None or many is None or kernels is None:
        return
    slope = (many * counts[2] - few * counts[1]) / (counts[2] - counts[1])
    for name, value in (
        (f"overhead a pair, {counts[1]} in a program", few - kernels),
        (f"each pair from {counts[1]} to {counts[2]}", slope),
        ("overhead of each of those", slope - kernels),
    ):
        yield {"case": case, "dtype": dtype, "contender": name, "us": value, "derived": True}


class _Program:
    """A jitted program of `count` pairs, each one's results the next one's queries; the caches are donated."""

    def __init__(self, batch: Batch, count: int) -> None:
        self._batch, self.count = batch, count

    def prepare(self) -> Prepared:
        """Compiles it."""
        import jax
        import jax.numpy as jnp

        import flashxla.jax as fx_jax

        batch = self._batch
        new = pairs.newest(batch, 0)
        same = {
            "key": new.key,
            "value": new.value,
            "slots": new.slots.int(),
            "table": batch.tables[0],
            "lens": batch.lens_k,
            "starts": batch.cu_q,
            "num_seqs": batch.num_seqs,
        }
        self._inputs = {name: jax_programs.array(tensor) for name, tensor in same.items()}
        self._q = jax_programs.array(batch.q[0])
        # JAX copies memory that is not its own when it is donated.
        self._caches = tuple(jnp.copy(jax_programs.array(x)) for x in (batch.keys, batch.values))
        scale = batch.shape.dim**-0.5

        def program(count: int, caches: Any, q: Any, x: Any) -> Any:
            keys, values = caches
            for _ in range(count):
                keys, values = fx_jax.reshape_and_cache_flash(x["key"], x["value"], keys, values, x["slots"])
                q = fx_jax.paged_attention(
                    q, (keys, values), x["lens"], x["table"], x["starts"], x["num_seqs"], scale
                )
            return (keys, values), q

        def jitted(count: int) -> Any:
            return jax.jit(functools.partial(program, count), donate_argnums=0)

        self._run = jitted(self.count)
        one = jitted(1)

        def check() -> float:
            self._caches, out = one(self._caches, self._q, self._inputs)
            return reference.check(batch, jax_programs.tensor(out), ours=True)

        return Prepared(check, lambda: timers.ProgramTimer(self.dispatch, self.count))

    def dispatch(self) -> Any:
        """Once; returns what to wait for."""
        self._caches, out = self._run(self._caches, self._q, self._inputs)
        return out
