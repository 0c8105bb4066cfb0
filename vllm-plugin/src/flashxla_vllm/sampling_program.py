"""What a batch is sampled by: JAX programs.

The order is vLLM's (vllm/v1/sample/sampler.py): allowed tokens, bad words, min tokens, logit bias, penalties; then
temperature, min-p, top-k, top-p; then a draw, of each row by a key of its own. What a program does not need is left out
of it by static arguments: a condition on the device would make the host wait for the step. Logits come in the dtype of
the model and are widened where they are read: float32 logits of 256 requests take 130 MB. They are returned only where
log probabilities are to be those that were drawn from.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flashxla_vllm.narrowing import MASKED, top_k_top_p

# What an entry does to the logit of its token.
ADD, ALLOW, STOP = range(3)
GREEDY_BELOW = 1e-5  # the temperature, as in vLLM
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
    restricted: Any  # int32 [rows], 1: only tokens of ALLOW entries are allowed
    structured: Any  # int32 [rows], 1: a grammar has masked logits; a stop token may be all that is left
    seeded: Any  # int32 [rows], 1: the row has a seed
    seed_high: Any  # uint32 [rows]
    seed_low: Any  # uint32 [rows]
    position: Any  # int32 [rows], of the token to be drawn, in the output


class Entries(NamedTuple):
    """Changes of single logits; padding has a row past the last."""

    row: Any  # int32 [entries]
    token: Any  # int32 [entries]
    kind: Any  # int32 [entries]
    value: Any  # float32 [entries], what ADD adds


_FLOATS = ("temperature", "top_p", "min_p", "repetition", "frequency", "presence", "value")
_UNSIGNED = ("seed_high", "seed_low")


def _dtype(name: str) -> Any:
    return np.float32 if name in _FLOATS else np.uint32 if name in _UNSIGNED else np.int32


def views(packed: np.ndarray, kind: Any) -> Any:
    """The Rows or Entries that lie in one array, which takes one copy to the device. packed: int32 [fields, length]"""
    return kind(*(packed[i].view(_dtype(name)) for i, name in enumerate(kind._fields)))


def _unpack(packed: jax.Array, kind: Any) -> Any:
    return kind(
        *(jax.lax.bitcast_convert_type(packed[i], _dtype(name)) for i, name in enumerate(kind._fields))
    )


@functools.partial(jax.jit, donate_argnums=(0,))
def set_row(seen: jax.Array, slot: jax.Array, row: jax.Array) -> jax.Array:
    """`seen` with one row replaced, in place. seen: uint16 [slots, vocabulary]; row: uint16 [vocabulary]."""
    return seen.at[slot].set(row)


@functools.partial(jax.jit, static_argnames=("mesh",))
def most_likely(logits: jax.Array, mesh: Mesh) -> jax.Array:
    """The next tokens of greedy requests. logits: [rows, vocabulary], on `mesh`; returns int32 [rows]"""
    tokens = jnp.argmax(logits, axis=-1)
    return jax.lax.with_sharding_constraint(tokens, NamedSharding(mesh, PartitionSpec()))


@functools.partial(jax.jit, static_argnames=("mesh", "data_axis", "narrowed", "keep"))
def draw(
    rng: jax.Array,
    logits: jax.Array,
    rows: jax.Array,
    mesh: Mesh,
    data_axis: str,
    narrowed: bool,
    keep: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """The next tokens by temperature, top-k and top-p, and the logits that they were drawn from.

    Args:
        rng: the step's key.
        logits: [rows, vocabulary]
        rows: packed Rows.
        mesh: of the logits, whose rows are spread over `data_axis`.
        data_axis: the name of that axis.
        narrowed: whether a row has a top-k or a top-p.
        keep: whether the logits are returned.

    Returns:
        int32 [rows]; float32 [rows, vocabulary] or None
    """
    logits = jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, PartitionSpec(data_axis, None)))
    tokens, kept = _draw(rng, logits.astype(jnp.float32), _unpack(rows, Rows), narrowed)
    tokens = jax.lax.with_sharding_constraint(tokens, NamedSharding(mesh, PartitionSpec()))
    return tokens, _for_logprobs(kept) if keep else None


@functools.partial(jax.jit, static_argnames=("mesh", "data_axis", "greedy", "keep"), donate_argnums=(0,))
def sample(
    seen: jax.Array,
    rng: jax.Array,
    logits: jax.Array,
    rows: jax.Array,
    entries: jax.Array,
    mesh: Mesh,
    data_axis: str,
    greedy: bool,
    keep: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """The next tokens by all parameters, the logits that they were drawn from, and `seen` with the new tokens counted.

    Args:
        seen: which tokens each request has, uint16 [slots, vocabulary]; updated in place.
        rng: the step's key, for rows without a seed.
        logits: [rows, vocabulary]
        rows: packed Rows, what each row asks for.
        entries: packed Entries, changes of single logits.
        mesh: of the logits, whose rows are spread over `data_axis`.
        data_axis: the name of that axis.
        greedy: whether all rows are.
        keep: whether the logits are returned.

    Returns:
        int32 [rows]; float32 [rows, vocabulary] or None; seen
    """
    asked = _unpack(rows, Rows)
    on_rows = NamedSharding(mesh, PartitionSpec(data_axis, None))
    everywhere = NamedSharding(mesh, PartitionSpec())
    logits = jax.lax.with_sharding_constraint(logits, on_rows).astype(jnp.float32)
    logits = _change_single_logits(logits, asked, _unpack(entries, Entries))
    known = _count(seen[asked.slot], asked.new_token)
    seen = jax.lax.with_sharding_constraint(seen.at[asked.slot].set(known), everywhere)
    logits = _penalise(logits, known, asked)
    if greedy:
        tokens = jnp.argmax(logits, axis=-1)
    else:
        tokens, logits = _draw(rng, logits, asked, narrowed=True)
    return jax.lax.with_sharding_constraint(tokens, everywhere), _for_logprobs(logits) if keep else None, seen


def _draw(rng: jax.Array, logits: jax.Array, rows: Rows, narrowed: bool) -> tuple[jax.Array, jax.Array]:
    greedy = rows.temperature < GREEDY_BELOW
    kept = logits / jnp.where(greedy, 1.0, rows.temperature)[:, None]
    if narrowed:
        # The ratio of two probabilities is the difference of their logits.
        least = jnp.max(kept, axis=-1, keepdims=True) + jnp.log(rows.min_p)[:, None]
        kept = top_k_top_p(jnp.where(kept < least, MASKED, kept), rows.top_k, rows.top_p)
    drawn = jnp.argmax(kept + _noise(rng, rows, kept.shape[1]), axis=-1)
    tokens = jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn)
    return tokens, jnp.where(greedy[:, None], logits, kept)


def _for_logprobs(kept: jax.Array) -> jax.Array:
    """What is left out has no probability at all, as in vLLM."""
    return jnp.where(kept == MASKED, -jnp.inf, kept)


def _change_single_logits(logits: jax.Array, rows: Rows, entries: Entries) -> jax.Array:
    count = logits.shape[0]

    def marked(kind: int) -> jax.Array:
        where = jnp.where(entries.kind == kind, entries.row, count)
        return jnp.zeros(logits.shape, bool).at[where, entries.token].set(True, mode="drop")

    logits = jnp.where((rows.restricted != 0)[:, None] & ~marked(ALLOW), -jnp.inf, logits)
    # Bad words are biases of -inf: order does not matter, except that a grammar's only way out must not be a bad word.
    added = jnp.where(entries.kind == ADD, entries.row, count)
    logits = logits.at[added, entries.token].add(entries.value, mode="drop")
    stops = marked(STOP)
    without_stops = jnp.where(stops, -jnp.inf, logits)
    nothing_left = jnp.all(without_stops == -jnp.inf, axis=-1) & (rows.structured != 0)
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


def _noise(rng: jax.Array, rows: Rows, vocabulary: int) -> jax.Array:
    """Gumbel noise; a seeded row's depends on its seed and the token's position alone."""
    seeds = jnp.stack([rows.seed_high, rows.seed_low], axis=1)
    unseeded = jax.random.bits(rng, seeds.shape, jnp.uint32)
    data = jnp.where((rows.seeded != 0)[:, None], seeds, unseeded)

    def of_row(key_data: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocabulary,))

    return jax.vmap(of_row)(data, rows.position)
