"""What a batch is sampled by when a request asks for more than temperature, top-k and top-p: one JAX program.

The order is vLLM's (vllm/v1/sample/sampler.py): allowed tokens, bad words, min tokens, logit bias, penalties; then
temperature, min-p, top-k, top-p; then a draw, of each row by a key of its own.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# What an entry does to the logit of its token.
ADD, ALLOW, STOP = range(3)
_GREEDY_BELOW = 1e-5  # the temperature, as in vLLM
_MASKED = -1e12  # tpu-inference's value of what top-k and top-p leave out
# A cell of `seen` is twice the count of a token in the output, plus one where the prompt has it.
_LARGEST_COUNT = jnp.iinfo(jnp.uint16).max - 1


class Rows(NamedTuple):
    """A value for each row of the logits; rows without a request have the values that change nothing."""

    temperature: Any  # float32 [rows], negative: greedy
    top_k: Any  # int32 [rows], 0 or less: all
    top_p: Any  # float32 [rows]
    min_p: Any  # float32 [rows]
    repetition: Any  # float32 [rows], 1: none
    frequency: Any  # float32 [rows]
    presence: Any  # float32 [rows]
    slot: Any  # int32 [rows], the row of `seen`
    new_token: Any  # int32 [rows], to be counted first; -1: none
    restricted: Any  # bool [rows], only tokens of ALLOW entries are allowed
    structured: Any  # bool [rows], a grammar has masked logits: a stop token may be all that is left
    seeded: Any  # bool [rows]
    seed: Any  # uint32 [rows, 2]
    position: Any  # int32 [rows], of the token to be drawn, in the output


class Entries(NamedTuple):
    """Changes of single logits; padding has a row past the last."""

    row: Any  # int32 [entries]
    token: Any  # int32 [entries]
    kind: Any  # int32 [entries]
    value: Any  # float32 [entries], what ADD adds


@functools.partial(jax.jit, donate_argnums=(0,))
def set_row(seen: jax.Array, slot: jax.Array, row: jax.Array) -> jax.Array:
    """`seen` with one row replaced, in place. seen: uint16 [slots, vocabulary]; row: uint16 [vocabulary]."""
    return seen.at[slot].set(row)


@functools.partial(jax.jit, static_argnames=("mesh", "data_axis"), donate_argnums=(0,))
def sample(
    seen: jax.Array,
    rng: jax.Array,
    logits: jax.Array,
    rows: Rows,
    entries: Entries,
    mesh: Mesh,
    data_axis: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The next tokens, the logits that they were drawn from, and `seen` with the new tokens counted.

    Args:
        seen: which tokens each request has, uint16 [slots, vocabulary]; updated in place.
        rng: the step's key, for rows without a seed.
        logits: float32 [rows, vocabulary]
        rows: what each row asks for.
        entries: changes of single logits.
        mesh: of the logits, whose rows are spread over `data_axis`.
        data_axis: the name of that axis.

    Returns:
        int32 [rows]; float32 [rows, vocabulary]; seen
    """
    on_rows = NamedSharding(mesh, PartitionSpec(data_axis, None))
    everywhere = NamedSharding(mesh, PartitionSpec())
    logits = jax.lax.with_sharding_constraint(logits, on_rows)
    logits = _change_single_logits(logits, rows, entries)
    known = _count(seen[rows.slot], rows.new_token)
    seen = jax.lax.with_sharding_constraint(seen.at[rows.slot].set(known), everywhere)
    logits = _penalise(logits, known, rows)
    greedy = rows.temperature < _GREEDY_BELOW
    best = jnp.argmax(logits, axis=-1)

    def draw() -> tuple[jax.Array, jax.Array]:
        kept = _narrow(logits, rows)
        drawn = jnp.argmax(kept + _noise(rng, rows, kept.shape[1]), axis=-1)
        return jnp.where(greedy, best, drawn), jnp.where(greedy[:, None], logits, kept)

    tokens, logits = jax.lax.cond(jnp.all(greedy), lambda: (best, logits), draw)
    return jax.lax.with_sharding_constraint(tokens, everywhere), logits, seen


def _change_single_logits(logits: jax.Array, rows: Rows, entries: Entries) -> jax.Array:
    count = logits.shape[0]

    def marked(kind: int) -> jax.Array:
        where = jnp.where(entries.kind == kind, entries.row, count)
        return jnp.zeros(logits.shape, bool).at[where, entries.token].set(True, mode="drop")

    logits = jnp.where(rows.restricted[:, None] & ~marked(ALLOW), -jnp.inf, logits)
    # Bad words are biases of -inf: order does not matter, except that a grammar's only way out must not be a bad word.
    added = jnp.where(entries.kind == ADD, entries.row, count)
    logits = logits.at[added, entries.token].add(entries.value, mode="drop")
    stops = marked(STOP)
    without_stops = jnp.where(stops, -jnp.inf, logits)
    nothing_left = jnp.all(without_stops == -jnp.inf, axis=-1) & rows.structured
    return jnp.where(nothing_left[:, None], logits, without_stops)


def _count(known: jax.Array, new_token: jax.Array) -> jax.Array:
    tokens = jax.lax.broadcasted_iota(jnp.int32, known.shape, 1)
    counted = (tokens == new_token[:, None]) & (known < _LARGEST_COUNT)
    return known + jnp.where(counted, jnp.uint16(2), jnp.uint16(0))


def _penalise(logits: jax.Array, known: jax.Array, rows: Rows) -> jax.Array:
    repetition = rows.repetition[:, None]
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(known > 0, scaled, logits)
    written = (known >> 1).astype(jnp.float32)
    return logits - rows.frequency[:, None] * written - rows.presence[:, None] * (written > 0)


def _narrow(logits: jax.Array, rows: Rows) -> jax.Array:
    from tpu_inference.layers.common.binary_search import topk_mask, topp_mask

    logits = logits / jnp.where(rows.temperature < _GREEDY_BELOW, 1.0, rows.temperature)[:, None]
    # The ratio of two probabilities is the difference of their logits.
    least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(rows.min_p)[:, None]
    logits = jnp.where(logits < least, _MASKED, logits)
    logits = jnp.where((rows.top_k > 0)[:, None], topk_mask(logits, rows.top_k, _MASKED), logits)
    return jnp.where((rows.top_p < 1.0)[:, None], topp_mask(logits, rows.top_p, _MASKED), logits)


def _noise(rng: jax.Array, rows: Rows, vocabulary: int) -> jax.Array:
    """Gumbel noise; a seeded row's depends on its seed and the token's position alone."""
    unseeded = jax.random.bits(rng, rows.seed.shape, jnp.uint32)
    data = jnp.where(rows.seeded[:, None], rows.seed, unseeded)

    def of_row(key_data: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocabulary,))

    return jax.vmap(of_row)(data, rows.position)
