"""Continuous batching: transformers' paged cache, written in place and attended to where it is.

transformers numbers a layer's tokens by rows of one flat tensor in which each page of keys is followed by its page of
values. That is the layout "stacked", [2, P, B, Hk, D], with strides. Its own update of the cache is kept out of
torch.compile, because functionalization would copy the cache in every layer; an operation that is declared to update
its argument needs no copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers

import flashxla.torch as fx
from flashxla.transformers.arguments import Options
from flashxla.transformers.once import once

_FULL, _SLIDING = "full_attention", "sliding_attention"
# What is used of transformers' cache and of its allocators.
_CACHE_ATTRIBUTES = ("cache_allocators", "layer_to_allocator")
_ALLOCATOR_ATTRIBUTES = (
    "cache_tensor",
    "index",
    "layer_indices",
    "layer_type",
    "sentinel_index",
    "tokens_per_page",
)


class Step(NamedTuple):
    """What transformers hands every layer in a step. The last three and the lists in arguments are by layer type.

    arguments: read_index and write_index among them, the rows of each sequence's keys and of the new tokens' places.
    """

    cache: Any
    cu_seq_lens_q: torch.Tensor
    cu_seq_lens_k: dict[str, torch.Tensor]
    max_length_q: int
    max_length_k: dict[str, int]
    arguments: dict[str, Any]


def attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step, options: Options
) -> torch.Tensor:
    """Write a layer's new keys and values, and attend to each sequence's. [1, heads, T, D] -> [1, T, Hq, Dv]."""
    allocator = _allocator(step.cache, module.layer_idx)
    place, size = allocator.layer_indices.index(module.layer_idx), allocator.tokens_per_page
    read, write = (step.arguments[name][allocator.index] for name in ("read_index", "write_index"))
    layer = _Layer(
        place,
        size,
        pages=_pages_of(step.cache, allocator),
        read=read,
        write=write,
        slots=(write // (2 * size) + place) * size + write % (2 * size),
        sentinel=allocator.sentinel_index,
    )
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    attend = _over_ring if allocator.layer_type == _SLIDING else _over_pages
    return attend(layer, query, key, value, step, options)[None]


class _Layer(NamedTuple):
    """Where a layer's keys and values are.

    place: its number among the layers of its type. size: the tokens of a page. pages: the whole cache, see _pages_of.
    read, write: rows of the sequences' keys, and of the new tokens' places. slots: the latter as slots. sentinel: the
    row that stands for a new token.
    """

    place: int
    size: int
    pages: torch.Tensor
    read: torch.Tensor
    write: torch.Tensor
    slots: torch.Tensor
    sentinel: int


def _allocator(cache: Any, layer: int) -> Any:
    missing = [name for name in _CACHE_ATTRIBUTES if not hasattr(cache, name)]
    if missing:
        raise _unknown(f"no {', '.join(missing)}")
    allocator = cache.layer_to_allocator[layer]
    missing = [name for name in _ALLOCATOR_ATTRIBUTES if not hasattr(allocator, name)]
    if missing:
        raise _unknown(f"allocators without {', '.join(missing)}")
    if allocator.layer_type not in (_FULL, _SLIDING):
        raise _unknown(f"layers of type {allocator.layer_type}")
    return allocator


def _unknown(got: str) -> ValueError:
    return ValueError(
        f'attn_implementation="flashxla": the paged cache of transformers {transformers.__version__} has {got}; '
        "accepted: continuous batching as in transformers 5.23, over layers of full and sliding attention"
    )


def _over_pages(
    layer: _Layer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: Step,
    options: Options,
) -> torch.Tensor:
    """Full attention, over the pages. Returns [T, Hq, Dv]."""
    offsets, longest, size = step.cu_seq_lens_k[_FULL], step.max_length_k[_FULL], layer.size
    # Where nothing is in the cache yet, there is nothing to read: all keys are new ones.
    read = layer.read if layer.read.numel() else layer.write
    blocks, lengths, sequences = once(
        read, ("pages", longest, size), lambda: _blocks(read, offsets, longest, size), first=layer.place == 0
    )
    return fx.ragged_paged_attention(
        query,
        key,
        value,
        layer.pages.transpose(0, 1),
        lengths,
        blocks + layer.place,
        step.cu_seq_lens_q,
        sequences,
        layout="stacked",
        slot_mapping=layer.slots,
        max_seqlen_q=step.max_length_q,
        **options.ragged_paged(query.shape[-1]),
    )


def _over_ring(
    layer: _Layer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: Step,
    options: Options,
) -> torch.Tensor:
    """Sliding attention: the last tokens lie in a ring, whose order no table of pages has. Returns [T, Hq, Dv]."""
    keys, values = key, value
    if layer.read.numel():
        # Old tokens are taken from the ring before the new ones take their places.
        is_new = layer.read == layer.sentinel
        number = (is_new.cumsum(0) - 1).clamp_(min=0)
        ring = layer.pages.view(-1, *key.shape[1:])
        first = 2 * layer.place * layer.size
        keys, values = (
            torch.where(is_new[:, None, None], new.index_select(0, number), ring.index_select(0, rows))
            for new, rows in ((key, layer.read + first), (value, layer.read + first + layer.size))
        )
    out = fx.flash_attn_varlen_func(
        query,
        keys,
        values,
        step.max_length_q,
        step.cu_seq_lens_q,
        step.max_length_k[_SLIDING],
        step.cu_seq_lens_k[_SLIDING],
        **options.flash_attn(),
    )
    fx.reshape_and_cache(key, value, layer.pages.transpose(0, 1), layer.slots, "stacked")
    return out


def _pages_of(cache: Any, allocator: Any) -> torch.Tensor:
    """The whole cache as [P, 2, B, Hk, D]; a page is a layer's part of a block.

    Each kind of layers has a view of it. A program is compiled with the first one's only, as it takes no two views of
    what it updates.
    """
    shape = allocator.cache_tensor.shape
    first = next(iter(cache.cache_allocators.values())).cache_tensor
    return first.view(-1, 2, allocator.tokens_per_page, *shape[-2:])


def _blocks(
    read: torch.Tensor, offsets: torch.Tensor, longest: int, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first layer's pages of each sequence int32 [S, M], lengths int32 [S], and S as int32 [1]."""
    firsts = offsets[:-1, None] + size * torch.arange(-(-longest // size), device=read.device)
    pages = read[firsts.clamp_(max=read.shape[0] - 1)] // (2 * size)
    lengths = offsets.diff()
    return (
        pages.to(torch.int32),
        lengths.to(torch.int32),
        lengths.new_full((1,), lengths.shape[0], dtype=torch.int32),
    )
