"""The masks of transformers' models, as the spans of tokens that are real.

transformers asks for the mask of a forward once, and hands what it gets to every layer. Causal masks and windows the
operations know by themselves. What is left is padding: of each row of a batch, which queries and which keys are
tokens. As long as they lie together, four numbers a row say so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

# A mask of spans is int32 [B, 1, 1, 4]: the first query that is a token and the first after them, and the same of the
# keys. It has four dimensions because transformers hands on such masks as they are.
SPANS_SHAPE = (1, 1, 4)
# A mask of which all are tokens, but that was given: int32 [1, 1, 1, 0]. Its rows are a sequence each.
_WHOLE_ROWS_SHAPE = (1, 1, 1, 0)

_WINDOWS = {
    "sliding_window_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
}
_EXPRESSIBLE = {
    causal_mask_function.__qualname__,
    bidirectional_mask_function.__qualname__,
    *_WINDOWS,
    # interface.attention finds them by the positions.
    "packed_sequence_mask_function.<locals>.inner_mask",
    # transformers refuses sequences longer than a chunk itself, and one chunk is causal.
    "chunked_overlay.<locals>.inner_mask",
}
_COMBINED = {
    "and_masks.<locals>.and_mask": "mask_functions",
    "remap_positions_for_packed_sequence.<locals>.inner_mask": "mask_function",
}


def spans(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    device: torch.device | str | None = None,
    **_: Any,
) -> torch.Tensor | None:
    """The mask of a forward: transformers' mask interface.

    Args:
        q_offset, kv_offset: the positions of the first query and of the first key. A static cache's q_offset is a
            tensor.
        mask_function: what transformers' other implementations evaluate for each query and key.
        attention_mask: bool [B, M], which of the positions up to the last query's are tokens; None is all.
        use_vmap, allow_is_causal_skip: whether mask_function has parts of the model's own, and whether it may be more
            than causal.

    Returns:
        None: all queries and keys are tokens, and the positions say whether rows are packed. int32 [1, 1, 1, 0]: all
        are tokens, and each row is one sequence. int32 [B, 1, 1, 4]: the spans of those that are tokens. Where they may
        not lie together, bool [B, M'], which keys are, of which the last q_length are the queries; for one query bool
        [B, 1, 1, kv_length], which keys it sees.

    Raises:
        ValueError: a mask that the operations cannot express.
    """
    if torch.compiler.is_compiling():
        # The compiler does not let a program look into functions that the program makes.
        if use_vmap or (attention_mask is not None and q_length > 1 and not allow_is_causal_skip):
            raise _cannot_express("more than padding")
        causal = queries_are_keys = mask_function is not bidirectional_mask_function
    else:
        parts = _parts(mask_function)
        causal = causal_mask_function.__qualname__ in parts
        queries_are_keys = causal or not parts.isdisjoint(_WINDOWS)
    if attention_mask is None:
        # What a static cache holds behind the last query is no token. Encoders' keys all are.
        if not causal or (isinstance(q_offset, int) and kv_offset + kv_length <= q_offset + q_length):
            return None
        end = torch.as_tensor(q_offset + q_length, device=device).to(torch.int32).reshape(1, 1)
        tokens = torch.cat([torch.zeros_like(end), end], dim=1).expand(batch_size, 2)
        return _spans(tokens - kv_offset, q_length, q_offset - kv_offset, kv_length, queries_are_keys)
    can_read = reads_values(attention_mask)
    if causal and can_read:
        attention_mask = attention_mask[:, : int(q_offset) + q_length]
    # The last kv_length positions begin at kv_offset. A mask that generate() has asked for comes a second time.
    attention_mask = attention_mask[:, -kv_length:]
    if not can_read:
        return attention_mask
    count = attention_mask.sum(1)
    first = attention_mask.int().argmax(1)
    end = torch.where(count > 0, attention_mask.shape[1] - attention_mask.flip(1).int().argmax(1), first)
    every, together = torch.stack([attention_mask.all(), (end - first == count).all()]).tolist()
    # Not for a static cache, not even when it is full: all of its steps are one program.
    if every and attention_mask.shape[1] >= kv_length and isinstance(q_offset, int):
        is_whole = causal and q_length == kv_length > 1
        return torch.empty(_WHOLE_ROWS_SHAPE, dtype=torch.int32, device=device) if is_whole else None
    if not together:
        return (
            attention_mask
            if q_length > 1
            else _seen(attention_mask, q_offset, kv_length, kv_offset, mask_function)
        )
    tokens = torch.stack([first, end], dim=1).to(torch.int32)
    return _spans(tokens, q_length, q_offset - kv_offset, kv_length, queries_are_keys)


def _seen(
    tokens: torch.Tensor,
    q_offset: int | torch.Tensor,
    kv_length: int,
    kv_offset: int,
    mask_function: Callable[..., Any],
) -> torch.Tensor:
    """The keys that one query sees, bool [B, 1, 1, kv_length]. tokens: bool [B, M'] of the first of them.

    Its shape is that of the keys: generate() has the mask of each step made outside of the program that it compiles
    for a static cache, and another shape would be another program.
    """
    rows, device = torch.arange(tokens.shape[0], device=tokens.device)[:, None], tokens.device
    keys = torch.arange(kv_offset, kv_offset + kv_length, device=device)
    place = torch.as_tensor(q_offset, device=device).reshape(1, 1)
    seen = torch.nn.functional.pad(tokens, (0, kv_length - tokens.shape[1]))
    return (seen & mask_function(rows, 0, place, keys))[:, None, None]


def is_whole_rows(mask: torch.Tensor) -> bool:
    """Whether a mask says that each row is one sequence, all of tokens."""
    return mask.shape == _WHOLE_ROWS_SHAPE


def is_seen(mask: torch.Tensor, queries: int, keys: int) -> bool:
    """Whether a mask says which keys one query sees."""
    return mask.dtype == torch.bool and queries == 1 and mask.shape[1:] == (1, 1, keys)


def reads_values(tensor: torch.Tensor) -> bool:
    """Whether a program may look at a tensor's values: not where it is compiled, which XLA's tensors always are."""
    if torch.compiler.is_compiling() or isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor):
        return False
    is_recorded = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    return tensor.device.type in ("cpu", "cuda") and not is_recorded


def is_spans(mask: torch.Tensor) -> bool:
    """Whether a mask is one of spans."""
    return mask.dtype == torch.int32 and mask.shape[1:] == SPANS_SHAPE


def _spans(
    tokens: torch.Tensor,
    q_length: int,
    first_query: int | torch.Tensor,
    kv_length: int,
    queries_are_keys: bool,
) -> torch.Tensor:
    """tokens: int32 [B, 2], which key is the first token and which the first after them. first_query: which key."""
    keys = tokens.clamp(0, kv_length)
    queries = torch.zeros_like(tokens)
    queries[:, 1] = q_length
    if queries_are_keys:
        queries = (tokens - first_query).clamp(0, q_length).to(torch.int32)
    return torch.cat([queries, keys], dim=1)[:, None, None]


def _parts(function: Callable[..., Any]) -> set[str]:
    """The names of the functions that a mask function is the conjunction of. Raises ValueError for any other."""
    name = function.__qualname__
    if name in _EXPRESSIBLE:
        return {name}
    if name in _COMBINED:
        inner = inspect.getclosurevars(function).nonlocals[_COMBINED[name]]
        return set().union(*[_parts(part) for part in (inner if isinstance(inner, tuple) else (inner,))])
    raise _cannot_express(name)


def _cannot_express(what: str) -> ValueError:
    return ValueError(
        f'attn_implementation="flashxla": the model asks for a mask with {what}; accepted: causal masks, sliding '
        'windows, padding and packed sequences. Load the model with attn_implementation="sdpa"'
    )
