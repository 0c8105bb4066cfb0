"""Where transformers' paged cache has a layer's keys and values, and how its tokens are numbered.

transformers 5.23 numbers a layer's tokens by rows of one flat tensor in which each page of keys is followed by its page
of values. That is the layout "stacked", [2, P, B, Hk, D], with strides. Transformers 5.6 has a tensor for each layer's
keys, and one for its values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers

FULL, SLIDING = "full_attention", "sliding_attention"
# What is used of transformers' cache and of its allocators: of 5.23, and of 5.6.
_CACHE_ATTRIBUTES = ("cache_allocators", "layer_to_allocator")
_ALLOCATOR_ATTRIBUTES = (
    "cache_tensor",
    "index",
    "layer_indices",
    "layer_type",
    "sentinel_index",
    "tokens_per_page",
)
_EARLIER_ATTRIBUTES = (
    "block_size",
    "key_cache",
    "layer_index_to_group_indices",
    "sentinel_index",
    "sliding_windows",
    "value_cache",
)


class Layer(NamedTuple):
    """Where a layer's keys and values are.

    kind: FULL or SLIDING. caches, layout: as the operations take them. size: the tokens of a page. step: the rows of
    transformers' numbering from a page to the next. place: the number of the layer's first page.
    read, write: rows of the sequences' keys, and of the new tokens' places. slots: the latter as slots. sentinel: the
    row that stands for a new token. keys, values: tensors [rows, Hk, D], and which row is the layer's first.
    """

    kind: str
    caches: Any
    layout: str
    size: int
    step: int
    place: int
    read: torch.Tensor
    write: torch.Tensor
    slots: torch.Tensor
    sentinel: int
    keys: tuple[torch.Tensor, int]
    values: tuple[torch.Tensor, int]


def layer(cache: Any, number: int, arguments: dict[str, Any]) -> Layer:
    """The layer of this number. arguments: what it was called with, read_index and write_index among it.

    Raises ValueError for a cache of another kind.
    """
    if all(hasattr(cache, name) for name in _EARLIER_ATTRIBUTES):
        return _earlier_layer(cache, number, arguments)
    allocator = _allocator(cache, number)
    place, size = allocator.layer_indices.index(number), allocator.tokens_per_page
    read, write = (arguments[name][allocator.index] for name in ("read_index", "write_index"))
    pages = _pages_of(cache, allocator)
    rows, first = pages.view(-1, *pages.shape[-2:]), 2 * place * size
    return Layer(
        allocator.layer_type,
        pages.transpose(0, 1),
        "stacked",
        size,
        step=2 * size,
        place=place,
        read=read,
        write=write,
        slots=(write // (2 * size) + place) * size + write % (2 * size),
        sentinel=allocator.sentinel_index,
        keys=(rows, first),
        values=(rows, first + size),
    )


def _earlier_layer(cache: Any, number: int, arguments: dict[str, Any]) -> Layer:
    """As in transformers 5.6."""
    group, place = cache.layer_index_to_group_indices[number]
    read, write = (arguments[name][group] for name in ("read_index", "write_index"))
    keys, values = cache.key_cache[place], cache.value_cache[place]
    size = cache.block_size
    return Layer(
        # Its word for no window.
        FULL if cache.sliding_windows[number] == 1 else SLIDING,
        tuple(x.view(-1, size, *x.shape[1:]) for x in (keys, values)),
        "NHD",
        size,
        step=size,
        place=0,
        read=read,
        write=write,
        slots=write,
        sentinel=cache.sentinel_index,
        keys=(keys, 0),
        values=(values, 0),
    )


def _allocator(cache: Any, number: int) -> Any:
    missing = [name for name in _CACHE_ATTRIBUTES if not hasattr(cache, name)]
    if missing:
        raise _unknown(f"no {', '.join(missing)}")
    allocator = cache.layer_to_allocator[number]
    missing = [name for name in _ALLOCATOR_ATTRIBUTES if not hasattr(allocator, name)]
    if missing:
        raise _unknown(f"allocators without {', '.join(missing)}")
    if allocator.layer_type not in (FULL, SLIDING):
        raise _unknown(f"layers of type {allocator.layer_type}")
    return allocator


def _unknown(got: str) -> ValueError:
    return ValueError(
        f'attn_implementation="flashxla": the paged cache of transformers {transformers.__version__} has {got}; '
        "accepted: continuous batching as in transformers 5.6 or 5.23, over layers of full and sliding attention"
    )


def _pages_of(cache: Any, allocator: Any) -> torch.Tensor:
    """The whole cache as [P, 2, B, Hk, D]; a page is a layer's part of a block.

    Each kind of layers has a view of it. A program is compiled with the first one's only, as it takes no two views of
    what it updates.
    """
    shape = allocator.cache_tensor.shape
    first = next(iter(cache.cache_allocators.values())).cache_tensor
    return first.view(-1, 2, allocator.tokens_per_page, *shape[-2:])
