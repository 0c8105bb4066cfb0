"""transformers' attention interface: what every layer of a model calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import flashxla.torch as fx
from flashxla.transformers import continuous_batching, rows, statements
from flashxla.transformers.arguments import INSTEAD, Options, options_of
from flashxla.transformers.once import once
from flashxla.transformers.rows import Batch
from flashxla.transformers.statements import BIDIRECTIONAL, PACKABLE, SEEN


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cache: Any = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: Any = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """A layer's attention.

    Args:
        module: the layer.
        query, key, value: [B, Hq, Sq, D], [B, Hk, Sk, D] and [B, Hk, Sk, Dv].
        attention_mask: see masks.spans.
        cache: a PagedAttentionCache in continuous batching.
        position_ids: [B, Sq]; without a mask, a position that is not larger than the one before it begins a
            sequence, if attention is causal.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: the sequences of a packed batch, if they are known.
        arguments: see arguments.Options.

    Returns:
        [B, Sq, Hq, Dv], and None in place of the weights.

    Raises:
        ValueError: what the operations cannot express.
    """
    options = options_of(module, arguments)
    query, key, value = _autocast(query, key, value)
    if cache is not None and cu_seq_lens_q is not None:
        # transformers 5.6 has the names of the operation here.
        longest_q, longest_k = (
            arguments.get(name) if length is None else length
            for name, length in (("max_seqlen_q", max_length_q), ("max_seqlen_k", max_length_k))
        )
        paged = continuous_batching.Step(cache, cu_seq_lens_q, cu_seq_lens_k, longest_q, longest_k, arguments)
        # No mask is asked for here: what generates token by token is causal, unless the layer says otherwise.
        options = dataclasses.replace(options, causal=options.causal is not False)
        return continuous_batching.attention(module, query, key, value, paged, options), None
    batch = Batch(query.shape[0], query.shape[2], key.shape[2])
    spans, tokens, packable = None, None, False
    if attention_mask is not None and statements.is_statement(attention_mask, batch.queries):
        kind = _kind(module, attention_mask, batch)
        if kind == SEEN:
            return _seen(query, key, value, statements.keys_in(attention_mask), options), None
        # What the model asked for decides, as in eager attention, which knows nothing else.
        options = dataclasses.replace(options, causal=kind != BIDIRECTIONAL)
        packable = kind == PACKABLE
        if statements.is_of_tokens(attention_mask):
            tokens = statements.keys_in(attention_mask)
        else:
            spans = statements.spans_in(attention_mask)
    elif attention_mask is not None and attention_mask.dim() != 2:
        return _seen(query, key, value, _seen_keys(module, attention_mask, batch), options), None
    elif options.causal is None:
        raise ValueError(
            f'attn_implementation="flashxla": {type(module).__name__} says nothing of is_causal, and got no mask that '
            f"does; accepted: one of them. {INSTEAD}"
        )
    else:
        tokens, packable = attention_mask, attention_mask is None and options.causal
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None and None not in (max_length_q, max_length_k):
        offsets, longest = (cu_seq_lens_q, cu_seq_lens_k), (int(max_length_q), int(max_length_k))
        out = _packed(query, key, value, offsets, longest, options)
    elif tokens is not None:
        out = _padded(query, key, value, tokens, options)
    elif (
        packable
        and batch.queries == batch.keys > 1
        and position_ids is not None
        and (found := rows.packed(position_ids, batch.rows, batch.keys))
    ):
        starts, length = found
        out = _packed(query, key, value, (starts, starts), (length, length), options)
    else:
        out = _rows(query, key, value, spans, options)
    return out.reshape(batch.rows, batch.queries, *out.shape[-2:]), None


def _kind(module: torch.nn.Module, statement: torch.Tensor, batch: Batch) -> int:
    """Of our own mask. Raises ValueError if it is not of this call's keys."""
    if not statements.fits(statement, batch.keys):
        raise ValueError(
            f'attn_implementation="flashxla": {type(module).__name__} attends to {batch.keys} keys, and asked for a '
            f"mask of {statement.shape[3]}; accepted: as many. {INSTEAD}"
        )
    return statements.kind_of(statement)


def _seen_keys(module: torch.nn.Module, mask: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Of a caller's mask: which keys the only query sees, bool [B, M]. Raises ValueError if it does not say that."""
    shapes = [(rows, 1, 1, batch.keys) for rows in (batch.rows, 1)]
    if batch.queries != 1 or mask.dtype != torch.bool or mask.shape not in shapes:
        raise ValueError(
            f'attn_implementation="flashxla": {type(module).__name__} got a mask {list(mask.shape)} of {mask.dtype} '
            f"for {batch.queries} queries and {batch.keys} keys; accepted: None, [batch, keys], which says what is "
            f"padding, or for one query bool [batch, 1, 1, keys]. {INSTEAD}"
        )
    # A copy: a view would keep alive what `once` finds it by.
    make = lambda: mask[:, 0, 0].expand(batch.rows, -1).clone()  # noqa: E731
    return once(mask, ("seen", batch.rows), make, of_caller=True)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As PyTorch's own attention does under autocast."""
    device = tensors[0].device.type
    if not _has_autocast(device) or not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)


@torch.compiler.assume_constant_result
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    options: Options,
) -> torch.Tensor:
    """Sequences one after the other. Returns [T, Hq, Dv]."""
    return fx.flash_attn_varlen_func(
        _flat(query),
        _flat(key),
        _flat(value),
        longest[0],
        offsets[0].to(torch.int32),
        longest[1],
        offsets[1].to(torch.int32),
        **options.flash_attn(),
    )


def _padded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tokens: torch.Tensor, options: Options
) -> torch.Tensor:
    """tokens: bool [B, M], which of the first keys are. Returns [B, Sq, Hq, Dv]."""
    # Tokens that may not lie together, as flash-attention's own unpadding has it.
    key, value = (x[:, :, : tokens.shape[1]] for x in (key, value))
    order_q, order_k, spans = rows.together(tokens, query.shape[2])
    query, key, value = (
        x.take_along_dim(order[:, None, :, None], dim=2)
        for x, order in ((query, order_q), (key, order_k), (value, order_k))
    )
    if options.sliding_window is None:
        out = _rows(query, key, value, spans, options)
    else:
        out = _windowed(query, key, value, tokens, options)
    out = out.reshape(query.shape[0], query.shape[2], *out.shape[-2:])
    return out.take_along_dim(order_q.argsort(dim=1)[:, :, None, None], dim=1)


def _seen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, options: Options
) -> torch.Tensor:
    """One query of each row, and the keys that it sees, bool [B, M]. Returns [B, 1, Hq, Dv]."""
    order, spans = rows.seen(keys)
    key, value = (x.take_along_dim(order[:, None, :, None], dim=2) for x in (key, value))
    # The mask has the window in it, and what comes after the query.
    options = dataclasses.replace(options, sliding_window=None, causal=False)
    return _rows(query, key, value, spans, options)[:, None]


def _windowed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tokens: torch.Tensor, options: Options
) -> torch.Tensor:
    """A window of places of which not all are tokens. Returns [B * Sq, Hq, Dv]."""
    arguments = options.flash_attn()
    queries, side = query.shape[2], arguments["window_size"][0]
    sides = (side, 0 if options.causal else side)
    at = rows.windowed(tokens, queries, sides)
    arguments |= {"max_seqlen_q": queries, "max_seqlen_k": key.shape[2]}
    if sides[1]:  # each query is a sequence of its own
        arguments |= {"max_seqlen_q": 1, "window_size": (-1, -1)}
    return fx.flash_attn_varlen_func(_flat(query), _flat(key), _flat(value), **at._asdict(), **arguments)


def _rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: torch.Tensor | None, options: Options
) -> torch.Tensor:
    """One sequence a row. Returns [B * Sq, Hq, Dv]."""
    batch = Batch(query.shape[0], query.shape[2], key.shape[2])
    arguments = {**options.flash_attn(), "max_seqlen_q": batch.queries, "max_seqlen_k": batch.keys}
    if _needs_gradients(query, key, value) or _lies_flat(key, batch):
        at = rows.dense(batch, spans, query.device)
        return fx.flash_attn_varlen_func(_flat(query), _flat(key), _flat(value), **at._asdict(), **arguments)
    # A cache's keys where they are: each row is a page.
    pages = rows.paged(batch, spans, query.device)
    return fx.flash_attn_varlen_func(_flat(query), key, value, layout="HND", **pages._asdict(), **arguments)


def _needs_gradients(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _lies_flat(key: torch.Tensor, batch: Batch) -> bool:
    """Whether keys [B, Hk, Sk, D] are tokens one after the other in memory, as a projection makes them."""
    if key.device.type in ("cpu", "cuda"):
        return key.transpose(1, 2).is_contiguous()
    # XLA decides how its tensors lie; a cache has more keys than there are queries.
    return batch.queries == batch.keys


def _flat(x: torch.Tensor) -> torch.Tensor:
    """[B, H, S, D] to [B * S, H, D]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])
