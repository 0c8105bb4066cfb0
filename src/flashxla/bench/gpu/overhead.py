"""The section overhead: what the operations cost inside a jitted program beyond their kernels."""

from __future__ import annotations

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
    _, few, many = counts = (1, 2, 4) if settings.quick else (1, 32, 128)
    programs = [_Program(batch, count, plan_each=False) for count in counts]
    programs += [_Program(batch, count, plan_each=True) for count in (few, many)]
    found = [Contender(program.name, program.prepare, ours=True) for program in programs]
    found.append(Contender(_KERNELS, lambda: pairs.in_torch(batch, 1), ours=True))
    us = {}
    for row in compare.run(case, batch.shape.dtype, found, settings):
        if "us" in row:
            us[row["contender"]] = row["us"]
        yield row
    yield from _derived(case, batch.shape.dtype, us, few, many)
    if settings.profile:
        yield {"begin": "profile"}
        for program in programs:
            if program.name in us:
                yield profile.row(case, batch.shape.dtype, program.name, program.dispatch, program.count)


def _derived(case: str, dtype: str, us: dict[str, float], few: int, many: int) -> Iterator[Row]:
    """Beyond the same kernels: the whole program's time, and what its later pairs add."""
    if not {_name(few, True), _name(many, True), _KERNELS} <= set(us):
        return
    kernels, short, long = us[_KERNELS], us[_name(few, True)], us[_name(many, True)]
    slope = (long * many - short * few) / (many - few)
    for name, value in (
        (f"overhead a pair, {few} in a program", short - kernels),
        (f"overhead of each pair from {few} to {many}", slope - kernels),
    ):
        yield {"case": case, "dtype": dtype, "contender": name, "us": value, "derived": True}


def _name(count: int, plan_each: bool) -> str:
    return f"flashxla in JAX, {count} in a program" + (", a plan each" if plan_each else "")


class _Program:
    """A jitted program of `count` pairs, each one's results the next one's queries; the caches are donated.

    plan_each: the lengths are other arrays for each pair, so that XLA cannot see that one plan serves all: then
    it runs the kernels that PyTorch runs, which plans at each call.
    """

    def __init__(self, batch: Batch, count: int, plan_each: bool) -> None:
        self._batch, self.count, self._plan_each = batch, count, plan_each
        self.name = _name(count, plan_each)

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
            "starts": batch.cu_q,
            "num_seqs": batch.num_seqs,
        }
        self._inputs = {name: jax_programs.array(tensor) for name, tensor in same.items()}
        lens = jax_programs.array(batch.lens_k)
        self._lens = [jnp.copy(lens) if self._plan_each else lens for _ in range(self.count)]
        self._q = jax_programs.array(batch.q[0])
        # JAX copies memory that is not its own when it is donated.
        self._caches = tuple(jnp.copy(jax_programs.array(x)) for x in (batch.keys, batch.values))
        scale = batch.shape.dim**-0.5

        def program(caches: Any, q: Any, all_lens: Any, x: Any) -> Any:
            keys, values = caches
            for lens in all_lens:
                keys, values = fx_jax.reshape_and_cache_flash(x["key"], x["value"], keys, values, x["slots"])
                q = fx_jax.paged_attention(
                    q, (keys, values), lens, x["table"], x["starts"], x["num_seqs"], scale
                )
            return (keys, values), q

        # Compiled for as many pairs as there are arrays of lengths.
        self._run = jax.jit(program, donate_argnums=0)

        def check() -> float:
            self._caches, out = self._run(self._caches, self._q, self._lens[:1], self._inputs)
            return reference.check(batch, jax_programs.tensor(out), ours=True)

        return Prepared(check, lambda: timers.ProgramTimer(self.dispatch, self.count))

    def dispatch(self) -> Any:
        """Once; returns what to wait for."""
        self._caches, out = self._run(self._caches, self._q, self._lens, self._inputs)
        return out
