"""The masks of transformers' models, as the spans of tokens that are real.

transformers asks for the mask of a forward once, and hands what it gets to every layer. Windows the layers know by
themselves. What is left is whether the mask is causal, and padding: of each row of a batch, which queries and which
keys are tokens. As long as they lie together, four numbers a row say so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, create_causal_mask

from flashxla.transformers import statements
from flashxla.transformers.arguments import INSTEAD
from flashxla.transformers.once import capturing
from flashxla.transformers.statements import BIDIRECTIONAL, CAUSAL, PACKABLE, SEEN

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


# Whether a model can ask for a causal mask with a place for each query and key. In transformers 5.6 and before only a
# static cache does, which has no other use for it.
_MODELS_ASK = "allow_is_causal_skip" in inspect.signature(create_causal_mask).parameters


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
    allow_is_bidirectional_skip: bool | None = None,
    device: torch.device | str | None = None,
    **_: Any,
) -> torch.Tensor:
    """The mask of a forward: transformers' mask interface.

    Args:
        q_offset, kv_offset: the positions of the first query and of the first key. A static cache's q_offset is a
            tensor.
        mask_function: what transformers' other implementations evaluate for each query and key.
        attention_mask: bool [B, M], which of the positions up to the last query's are tokens; None is all.
        use_vmap, allow_is_causal_skip: whether mask_function has parts of the model's own, and whether it may be more
            than causal.
        allow_is_bidirectional_skip: None if the mask is a causal one.

    Returns:
        A statement (statements.py) of one of these:
        All queries and keys are tokens. If PACKABLE the positions say where sequences begin, else each row is one.
        Spans int32 [B, 4] of those that are tokens: the first query and the first after them, and the same of the keys.
        Where they may not lie together, bool [B, M'], which keys are tokens, of which the last q_length are the
        queries; for one query bool [B, kv_length], which keys it sees.

    Raises:
        ValueError: a mask that the operations cannot express.
    """
    plain = mask_function in (causal_mask_function, bidirectional_mask_function)
    skips = allow_is_bidirectional_skip
    if skips is None:
        skips = allow_is_causal_skip or not _MODELS_ASK
    if plain and q_length > 1 and not skips:
        # It asks for a tensor of queries and keys where none is needed, to add to it or to look into it.
        raise _cannot_express("a place for each query and key, with which it computes")
    if torch.compiler.is_compiling():
        # The compiler does not let a program look into functions that the program makes.
        if use_vmap or (attention_mask is not None and q_length > 1 and not allow_is_causal_skip):
            raise _cannot_express("more than padding")
        queries_are_keys = mask_function is not bidirectional_mask_function
        causal = queries_are_keys and allow_is_bidirectional_skip is None
    else:
        parts = _parts(mask_function)
        causal = causal_mask_function.__qualname__ in parts
        queries_are_keys = causal or not parts.isdisjoint(_WINDOWS)
    kind = CAUSAL if causal else BIDIRECTIONAL

    def spans_of(tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int32 [B, 2], which key is the first token and which the first after them."""
        found = _spans(tokens, q_length, q_offset - kv_offset, kv_length, queries_are_keys)
        return statements.with_spans(found, kind, q_length, kv_length)

    if attention_mask is None:
        # What a static cache holds behind the last query is no token. Encoders' keys all are.
        if not causal or (isinstance(q_offset, int) and kv_offset + kv_length <= q_offset + q_length):
            return statements.everything(PACKABLE if causal else kind, q_length, kv_length, device)
        end = torch.as_tensor(q_offset + q_length, device=device).to(torch.int32).reshape(1, 1)
        tokens = torch.cat([torch.zeros_like(end), end], dim=1).expand(batch_size, 2)
        return spans_of(tokens - kv_offset)
    can_read = reads_values(attention_mask)
    if causal and can_read:
        attention_mask = attention_mask[:, : int(q_offset) + q_length]
    # The last kv_length positions begin at kv_offset.
    attention_mask = attention_mask[:, -kv_length:]
    if not can_read:
        return statements.with_keys(attention_mask, kind, q_length)
    count = attention_mask.sum(1)
    first = attention_mask.int().argmax(1)
    end = torch.where(count > 0, attention_mask.shape[1] - attention_mask.flip(1).int().argmax(1), first)
    every, together = torch.stack([attention_mask.all(), (end - first == count).all()]).tolist()
    # Not for a static cache, not even when it is full: all of its steps are one program.
    if every and attention_mask.shape[1] >= kv_length and isinstance(q_offset, int):
        return statements.everything(kind, q_length, kv_length, device)
    if together:
        return spans_of(torch.stack([first, end], dim=1).to(torch.int32))
    if q_length > 1:
        return statements.with_keys(attention_mask, kind, q_length)
    seen = _seen(attention_mask, q_offset, kv_length, kv_offset, mask_function)
    return statements.with_keys(seen, SEEN, q_length)


def _seen(
    tokens: torch.Tensor,
    q_offset: int | torch.Tensor,
    kv_length: int,
    kv_offset: int,
    mask_function: Callable[..., Any],
) -> torch.Tensor:
    """The keys that one query sees, bool [B, kv_length]. tokens: bool [B, M'] of the first of them.

    Its shape is that of the keys: generate() has the mask of each step made outside of the program that it compiles
    for a static cache, and another shape would be another program.
    """
    rows, device = torch.arange(tokens.shape[0], device=tokens.device)[:, None], tokens.device
    keys = torch.arange(kv_offset, kv_offset + kv_length, device=device)
    place = torch.as_tensor(q_offset, device=device).reshape(1, 1)
    seen = torch.nn.functional.pad(tokens, (0, kv_length - tokens.shape[1]))
    return seen & mask_function(rows, 0, place, keys)


def reads_values(tensor: torch.Tensor) -> bool:
    """Whether a program may look at a tensor's values: not where it is compiled, which XLA's tensors always are."""
    if torch.compiler.is_compiling() or isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor):
        return False
    return tensor.device.type in ("cpu", "cuda") and not capturing(tensor)


def _spans(
    tokens: torch.Tensor,
    q_length: int,
    first_query: int | torch.Tensor,
    kv_length: int,
    queries_are_keys: bool,
) -> torch.Tensor:
    """Spans int32 [B, 4] of tokens [B, 2], which key is the first and which the first after them.

    first_query: which key it is.
    """
    keys = tokens.clamp(0, kv_length)
    queries = torch.zeros_like(tokens)
    queries[:, 1] = q_length
    if queries_are_keys:
        queries = (tokens - first_query).clamp(0, q_length).to(torch.int32)
    return torch.cat([queries, keys], dim=1)


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
        f"windows, padding and packed sequences. {INSTEAD}"
    )
