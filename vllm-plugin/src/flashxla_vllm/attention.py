"""Attention of a layer: flashxla's write-and-attend on a cache of one array a layer.

Its shape is [pages, page size, KV heads, 2 * head size], keys before values in the last dimension. It is written in
place: each step donates it. A mesh splits its pages (data parallel) and its heads (tensor parallel).
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tpu_inference.layers.common.attention_backend import AttentionBackend
from tpu_inference.layers.common.attention_metadata import AttentionMetadata, SharedAttentionMetadata
from tpu_inference.layers.common.sharding import ShardingAxisName
from tpu_inference.utils import get_mesh_shape_product

import flashxla.jax as fx
from flashxla_vllm import xla_attention

LAYOUT = "packed_NHD"
# What a step's metadata has as padded_num_reqs, which is part of the program, where each sequence has one query.
DECODE = -2
_FP8_FORMATS = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


@dataclasses.dataclass(frozen=True)
class Mask:
    """What the layers of one kind share: scale, masks, and how the cache is kept."""

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    causal: bool = True
    write: bool = True
    max_seqlen_q: int | None = None


def attend(
    mask: Mask,
    kv_cache: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    alibi_slopes: jax.Array | None,
    context_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The new cache and the output, [tokens, heads, head size], on one device."""
    if os.environ.get("FLASHXLA_VLLM_ATTENTION") == "xla":
        _refuse_unless_plain(mask, kv_cache, sinks, alibi_slopes)
        return xla_attention.attend(
            mask.scale,
            kv_cache,
            query,
            key,
            value,
            context_lens,
            block_tables,
            query_start_loc,
            num_seqs,
        )
    fp8 = _FP8_FORMATS.get(str(kv_cache.dtype))
    options: dict[str, Any] = {
        "scale": mask.scale,
        "sliding_window": mask.sliding_window,
        "soft_cap": mask.soft_cap,
        "k_scale": mask.k_scale if fp8 else None,
        "v_scale": mask.v_scale if fp8 else None,
        "layout": LAYOUT,
        "kv_cache_dtype": fp8 or "auto",
        "causal": mask.causal,
        "alibi_slopes": alibi_slopes,
        "s_aux": sinks,
        "max_seqlen_q": mask.max_seqlen_q,
    }
    index = (context_lens, block_tables, query_start_loc, num_seqs)
    if not mask.write:  # the layer reads another layer's cache
        return kv_cache, fx.paged_attention(query, kv_cache, *index, **options)
    if not fp8:
        key, value = key.astype(kv_cache.dtype), value.astype(kv_cache.dtype)
    if query.dtype != key.dtype or query.shape[2] != value.shape[2]:
        out, kv_cache = fx.ragged_paged_attention(query, key, value, kv_cache, *index, **options)
        return kv_cache, out
    # XLA makes one kernel of this and the rotary embedding, which of three operands would be one for each.
    qkv = jnp.concatenate([query, key, value], axis=1)
    out, kv_cache = fx.ragged_paged_attention_qkvpacked(qkv, kv_cache, *index, **options)
    return kv_cache, out


def _refuse_unless_plain(mask: Mask, kv_cache: jax.Array, *others: jax.Array | None) -> None:
    plain = Mask(mask.scale, k_scale=mask.k_scale, v_scale=mask.v_scale, max_seqlen_q=mask.max_seqlen_q)
    if mask != plain or str(kv_cache.dtype) in _FP8_FORMATS or any(x is not None for x in others):
        raise NotImplementedError("FLASHXLA_VLLM_ATTENTION=xla, for comparison, has causal attention alone")


def attend_on_mesh(
    mesh: Mesh,
    mask: Mask,
    kv_cache: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    metadata: AttentionMetadata,
    shared: AttentionMetadata | SharedAttentionMetadata,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`attend`, each device on its own heads and sequences."""

    def on_device(*arrays: Any) -> tuple[jax.Array, jax.Array]:
        *before, context_lens, block_tables, query_start_loc, distribution = arrays
        tables = block_tables.reshape(context_lens.shape[0], -1)
        # distribution: the numbers of decoding sequences, of those and prefills, and of all.
        own = [*before, context_lens, tables, query_start_loc, distribution[2:3]]
        return attend(mask, *own)

    if shared.padded_num_reqs == DECODE:
        mask = dataclasses.replace(mask, max_seqlen_q=1)
    key, value = _a_head_for_each_device(mesh, key), _a_head_for_each_device(mesh, value)
    arguments = (
        kv_cache,
        query,
        key,
        value,
        sinks,
        alibi_slopes,
        shared.seq_lens,
        metadata.block_tables,
        shared.query_start_loc,
        shared.request_distribution,
    )
    if mesh.size == 1:
        return on_device(*arguments)
    sequences, heads = P(ShardingAxisName.ATTN_DATA), P(ShardingAxisName.ATTN_HEAD)
    tokens = P(ShardingAxisName.ATTN_DATA, ShardingAxisName.ATTN_HEAD, None)
    cache = P(ShardingAxisName.ATTN_DATA, None, ShardingAxisName.ATTN_HEAD, None)
    specs = (cache, tokens, tokens, tokens, heads, heads, sequences, sequences, sequences, sequences)
    in_specs = tuple(None if x is None else spec for x, spec in zip(arguments, specs, strict=True))
    sharded = jax.shard_map(
        on_device, mesh=mesh, in_specs=in_specs, out_specs=(cache, tokens), check_vma=False
    )
    return sharded(*arguments)


def _a_head_for_each_device(mesh: Mesh, x: jax.Array) -> jax.Array:
    """Where there are fewer KV heads than devices, each has a copy, as in the cache's shape."""
    devices = get_mesh_shape_product(mesh, ShardingAxisName.ATTN_HEAD)
    heads = x.shape[1]
    return x if heads >= devices else jnp.repeat(x, devices // heads, axis=1)


class FlashXlaBackend(AttentionBackend):
    """What tpu-inference's JAX models call, and what says the cache's shape to its runner."""

    name = "rpa"  # the default's: overrides.py puts this class in its place

    def get_kv_cache_shape(
        self, total_num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, kv_dtype: Any
    ) -> tuple[int, ...]:
        """The shape of one layer's cache on one device."""
        return (total_num_pages, page_size, num_kv_heads, 2 * head_dim)

    def attention(
        self,
        kv_cache: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        md: AttentionMetadata,
        shared_md: AttentionMetadata | SharedAttentionMetadata,
        mesh: Mesh,
        *,
        head_dim_original: int,
        sm_scale: float,
        attention_chunk_size: int | None,
        q_scale: float | None,
        k_scale: float | None,
        v_scale: float | None,
        sinks: jax.Array | None,
        update_kv_cache: bool,
        use_causal_mask: bool,
        attn_logits_soft_cap: float | None,
        decode_query_size: int,
    ) -> tuple[jax.Array, jax.Array]:
        """The new cache and the output."""
        if q_scale is not None:
            raise NotImplementedError(
                "flashxla-vllm: quantised queries are not supported; unset the query's scale"
            )
        mask = Mask(
            sm_scale,
            attention_chunk_size,
            attn_logits_soft_cap,
            k_scale,
            v_scale,
            use_causal_mask,
            update_kv_cache,
        )
        return attend_on_mesh(mesh, mask, kv_cache, q, k, v, md, shared_md, sinks)
