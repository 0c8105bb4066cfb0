"""Continuous batching: transformers' paged cache, written in place and attended to where it is.

transformers' own update of the cache is kept out of torch.compile, because functionalization would copy the cache in
every layer; an operation that is declared to update its argument needs no copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import flashxla.torch as fx
from flashxla.transformers import paged_caches
from flashxla.transformers.arguments import Options
from flashxla.transformers.once import capturing, once
from flashxla.transformers.paged_caches import Layer


class Step(NamedTuple):
    """What transformers hands every layer in a step.

    cu_seq_lens_k and max_length_k are by layer type, if there are several. arguments: read_index and write_index among
    them, lists by layer type of the rows of each sequence's keys and of the new tokens' places.
    """

    cache: Any
    cu_seq_lens_q: torch.Tensor
    cu_seq_lens_k: Any
    max_length_q: Any
    max_length_k: Any
    arguments: dict[str, Any]

    def keys_of(self, layer: Layer) -> tuple[torch.Tensor, int]:
        """The offsets of the sequences' keys in a layer of this kind, and the longest."""
        offsets, longest = (
            x[layer.kind] if isinstance(x, dict) else x for x in (self.cu_seq_lens_k, self.max_length_k)
        )
        return offsets, longest


def attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step, options: Options
) -> torch.Tensor:
    """Write a layer's new keys and values, and attend to each sequence's. [1, heads, T, D] -> [1, T, Hq, Dv]."""
    if torch.compiler.is_compiling():
        step = step._replace(cu_seq_lens_q=_outside_cuda_graphs(step.cu_seq_lens_q))
    else:
        _refuse_cuda_graphs(query)
    layer = paged_caches.layer(step.cache, module.layer_idx, step.arguments)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    attend = _over_ring if layer.kind == paged_caches.SLIDING else _over_pages
    return attend(layer, query, key, value, step, options)[None]


def _refuse_cuda_graphs(x: torch.Tensor) -> None:
    if capturing(x):
        raise ValueError(
            'attn_implementation="flashxla": continuous batching with CUDA graphs, which transformers records by '
            "default on a GPU, has given wrong tokens; accepted: ContinuousBatchingConfig(use_cuda_graph=False)"
        )


@torch.library.custom_op("flashxla_transformers::outside_cuda_graphs", mutates_args=())
def _outside_cuda_graphs(x: torch.Tensor) -> torch.Tensor:
    """x, in a compiled program, which is not asked when it is compiled but when it runs."""
    _refuse_cuda_graphs(x)
    return x.clone()


_outside_cuda_graphs.register_fake(torch.empty_like)


def _over_pages(
    layer: Layer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: Step,
    options: Options,
) -> torch.Tensor:
    """Full attention, over the pages. Returns [T, Hq, Dv]."""
    offsets, longest = step.keys_of(layer)
    # Where nothing is in the cache yet, there is nothing to read: all keys are new ones.
    read = layer.read if layer.read.numel() else layer.write
    blocks, lengths, sequences = once(
        read,
        ("pages", longest, layer.size),
        lambda: _blocks(read, offsets, longest, layer),
    )
    return fx.ragged_paged_attention(
        query,
        key,
        value,
        layer.caches,
        lengths,
        blocks + layer.place,
        step.cu_seq_lens_q,
        sequences,
        layout=layer.layout,
        slot_mapping=layer.slots,
        max_seqlen_q=step.max_length_q,
        **options.ragged_paged(query.shape[-1]),
    )


def _over_ring(
    layer: Layer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: Step,
    options: Options,
) -> torch.Tensor:
    """Sliding attention: the last tokens lie in a ring, whose order no table of pages has. Returns [T, Hq, Dv]."""
    keys, values = key, value
    offsets, longest = step.keys_of(layer)
    if layer.read.numel():
        # Old tokens are taken from the ring before the new ones take their places.
        is_new = layer.read == layer.sentinel
        number = (is_new.cumsum(0) - 1).clamp_(min=0)
        keys, values = (
            torch.where(
                is_new[:, None, None], new.index_select(0, number), rows.index_select(0, layer.read + first)
            )
            for new, (rows, first) in ((key, layer.keys), (value, layer.values))
        )
    out = fx.flash_attn_varlen_func(
        query,
        keys,
        values,
        step.max_length_q,
        step.cu_seq_lens_q,
        longest,
        offsets,
        **options.flash_attn(),
    )
    if isinstance(layer.caches, tuple):
        key_cache, value_cache = layer.caches
        fx.reshape_and_cache_flash(key, value, key_cache, value_cache, layer.slots)
    else:
        fx.reshape_and_cache(key, value, layer.caches, layer.slots, layer.layout)
    return out


def _blocks(
    read: torch.Tensor, offsets: torch.Tensor, longest: int, layer: Layer
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first layer's pages of each sequence int32 [S, M], lengths int32 [S], and S as int32 [1]."""
    firsts = offsets[:-1, None] + layer.size * torch.arange(-(-longest // layer.size), device=read.device)
    pages = read[firsts.clamp_(max=read.shape[0] - 1)] // layer.step
    lengths = offsets.diff()
    return (
        pages.to(torch.int32),
        lengths.to(torch.int32),
        lengths.new_full((1,), lengths.shape[0], dtype=torch.int32),
    )
