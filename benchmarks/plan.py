"""The section plan: whether it pays that the layers of a program share one plan.

A jitted program of attention layers over the same index tensors. XLA merges the plans of calls whose index tensors
are the same, so that one plan serves all. Where each layer has its own copy of the lengths, it cannot, and each
layer plans for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import attention, compare, jax_programs, reference, shape_lists, timers
from benchmarks import batch as batches
from benchmarks.batch import Batch
from benchmarks.compare import Contender, Prepared, Row
from benchmarks.settings import Settings

SHARED, EACH = "one plan for all layers", "a plan for each layer"
LAYERS = 32
_CACHES = 4  # that the layers take in turn: one alone might stay in the GPU's own cache


def run(section: str, case: str, settings: Settings) -> Iterator[Row]:
    """Microseconds a layer."""
    batch = batches.build(shape_lists.named(section, case, settings), settings.device)
    layers = 4 if settings.quick else LAYERS
    found = [
        Contender(SHARED, lambda: _program(batch, layers, plan_each=False), ours=True),
        Contender(EACH, lambda: _program(batch, layers, plan_each=True), ours=True),
    ]
    yield from compare.run(case, batch.shape.dtype, found, settings)


def _program(batch: Batch, layers: int, plan_each: bool) -> Prepared:
    import jax
    import jax.numpy as jnp

    inputs = attention.jax_inputs(batch)[0]
    k, v, lens = (inputs.pop(name) for name in ("k", "v", "seqused_k"))
    queries = jax_programs.array(batch.q[0])
    caches = [(jnp.copy(k), jnp.copy(v)) for _ in range(_CACHES)]
    attend = attention.jax_call(batch)

    def program(q: Any, caches: Any, all_lens: Any, inputs: Any) -> Any:
        for layer in range(layers):
            k, v = caches[layer % _CACHES]
            # With one array of lengths, all layers have that one.
            lens = all_lens[layer % len(all_lens)]
            q = q + attend(q, {**inputs, "k": k, "v": v, "seqused_k": lens})
        return q

    all_lens = [jnp.copy(lens) for _ in range(layers if plan_each else 1)]
    compiled = jax.jit(program).lower(queries, caches, all_lens, inputs).compile()
    calls = (compiled.as_text() or "").count("custom_call_target=")

    def check() -> float:
        out = jax.jit(attend)(queries, {**inputs, "k": k, "v": v, "seqused_k": lens})
        return reference.check(batch, jax_programs.tensor(out), ours=True)

    def timer() -> timers.Timer:
        return timers.ProgramTimer(lambda: compiled(queries, caches, all_lens, inputs), layers)

    return Prepared(check, timer, f"{layers} layers, {calls} custom calls")
