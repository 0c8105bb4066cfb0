"""The section overhead: what the operations cost inside a jitted program beyond their kernels.

A pair is what a layer of a model calls: the cache write, then the attention of one new token of each sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import flashxla.torch as fx
from benchmarks import attention, compare, jax_programs, profile, reference, shape_lists, timers
from benchmarks import batch as batches
from benchmarks.batch import Batch
from benchmarks.compare import Contender, Prepared, Row
from benchmarks.settings import Settings

_KERNELS = "kernels alone (from PyTorch, a plan each)"


def run(section: str, case: str, settings: Settings) -> Iterator[Row]:
    """Microseconds a pair: jitted programs of several lengths, and the kernels alone."""
    batch = batches.build(shape_lists.named(section, case, settings), settings.device)
    _, few, many = counts = (1, 2, 4) if settings.quick else (1, 32, 128)
    programs = [_Program(batch, count, plan_each=False) for count in counts]
    programs += [_Program(batch, count, plan_each=True) for count in (few, many)]
    found = [Contender(program.name, program.prepare, ours=True) for program in programs]
    found.append(Contender(_KERNELS, lambda: in_torch(batch, 1), ours=True))
    us = {}
    for row in compare.run(case, batch.shape.dtype, found, settings):
        if "us" in row:
            us[row["contender"]] = row["us"]
        yield row
    for name, value in _beyond_the_kernels(us, few, many).items():
        yield compare.derived(case, settings, name, value)
    (pair,) = _pairs(batch, 1)
    wait = torch.cuda.synchronize if settings.device == "cuda" else lambda: None
    host = timers.host_time(pair, lambda _: wait(), steps=100)
    yield compare.derived(case, settings, "host time of an eager pair", host["host_us"])
    for program in programs if settings.profile else ():
        if program.name in us:
            yield {"begin": [profile.title(program.name), False]}
            yield profile.row(case, settings, program.name, program.dispatch, program.count)


def _beyond_the_kernels(us: dict[str, float], few: int, many: int) -> dict[str, float]:
    """Of a whole program with a plan each, and of its later pairs."""
    if not {_name(few, True), _name(many, True), _KERNELS} <= set(us):
        return {}
    kernels, short, long = us[_KERNELS], us[_name(few, True)], us[_name(many, True)]
    slope = (long * many - short * few) / (many - few)
    return {
        f"overhead a pair, {few} in a program": short - kernels,
        f"overhead of each pair from {few} to {many}": slope - kernels,
    }


def _name(count: int, plan_each: bool) -> str:
    return f"flashxla in JAX, {count} in a program" + (", a plan each" if plan_each else "")


def _newest(batch: Batch, which: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and slots of each sequence's newest token. The cache holds it: writing it changes nothing."""
    page = batch.shape.page
    last = batch.lens_k.long() - 1
    blocks = batch.tables[which].gather(1, (last // page)[:, None])[:, 0].long()
    slots = blocks * page + last % page
    return batches.rows(batch.keys, slots), batches.rows(batch.values, slots), slots


def in_torch(batch: Batch, sets: int) -> Prepared:
    """The pair from PyTorch, on the first `sets` input sets."""
    return attention.prepared(batch, _pairs(batch, sets), ours=True)


def _pairs(batch: Batch, sets: int) -> list[Callable[[], Any]]:

    def pair(key: Any, value: Any, slots: Any, attend: Callable[[], Any]) -> Any:
        fx.reshape_and_cache_flash(key, value, batch.keys, batch.values, slots)
        return attend()

    attends = attention.paged_calls(batch)[:sets]
    return [functools.partial(pair, *_newest(batch, i), attend) for i, attend in enumerate(attends)]


class _Program:
    """A jitted program of `count` pairs, each one's results the next one's queries; the caches are donated.

    plan_each: the lengths are other arrays for each pair, so that XLA cannot see that one plan serves all: then
    it runs the kernels that PyTorch runs, which plans at each call.
    """

    def __init__(self, batch: Batch, count: int, plan_each: bool) -> None:
        self._batch, self.count, self._plan_each = batch, count, plan_each
        self.name = _name(count, plan_each)

    def prepare(self) -> Prepared:
        """Puts the arrays where the program wants them."""
        import jax.numpy as jnp

        key, value, slots = _newest(self._batch, 0)
        self._new = [jax_programs.array(tensor) for tensor in (key, value, slots.int())]
        self._inputs = attention.jax_inputs(self._batch)[0]
        # JAX copies memory that is not its own when it is donated.
        self._caches = tuple(jnp.copy(self._inputs.pop(name)) for name in ("k", "v"))
        lens = self._inputs.pop("seqused_k")
        self._lens = [jnp.copy(lens) for _ in range(self.count if self._plan_each else 1)]
        self._q = jax_programs.array(self._batch.q[0])
        self._run = self._compiled(self.count)

        def check() -> float:
            out = self._results(self._compiled(1))
            return reference.check(self._batch, jax_programs.tensor(out), ours=True)

        return Prepared(check, lambda: timers.ProgramTimer(self.dispatch, self.count))

    def _compiled(self, count: int) -> Callable[..., Any]:
        import jax

        import flashxla.jax as fx_jax

        attend = attention.jax_call(self._batch)

        def program(caches: Any, q: Any, all_lens: Any, new: Any, inputs: Any) -> Any:
            key, value, slots = new
            k, v = caches
            for i in range(count):
                k, v = fx_jax.reshape_and_cache_flash(key, value, k, v, slots)
                # With one array of lengths, all pairs have that one.
                lens = all_lens[i % len(all_lens)]
                q = attend(q, {**inputs, "k": k, "v": v, "seqused_k": lens})
            return (k, v), q

        return jax.jit(program, donate_argnums=0)

    def _results(self, run: Callable[..., Any]) -> Any:
        self._caches, out = run(self._caches, self._q, self._lens, self._new, self._inputs)
        return out

    def dispatch(self) -> Any:
        """Once; returns what to wait for."""
        return self._results(self._run)
