"""Functions of other libraries over a KV cache, as calls of ours, for every front end.

Such a function takes the arguments of the other library's function of its name and returns a `Form`: what a front end
does to make the call. It uses arithmetic, indexing and reshape() of tensors, which all frameworks have, and what
`Frontend` has beside.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

from flashxla.ops.arguments import window_sides
from flashxla.ops.cache_format import PAIR_DIMS, of_values
from flashxla.ops.flash_attn_forms import Offsets, Window, called_by, check_dtype, dtype_of, shape_of
from flashxla.ops.messages import type_error, value_error
from flashxla.ops.parameters import FLOATS, FP8


@dataclasses.dataclass(frozen=True)
class Frontend:
    """What a form needs of a front end.

    tensors: those of a call, by the names that its messages have for them, as the front end's own tensors; None stays.
    Raises TypeError and ValueError where one is none, or is not on the device of the first. tensor_of: offsets as an
    int32 tensor where another tensor is. concatenate: tensors behind one another, along the last dimension. cast: a
    tensor as another dtype. float32: that dtype. attend: flash_attn_varlen_func. check: raises what that would raise,
    where a call that raises may have changed its arguments before. write: reshape_and_cache_flash on a pair of caches;
    returns them as they are then. returned: what a call with these results that updates these caches returns.
    """

    tensors: Callable[[str, dict[str, Any]], list[Any]]
    tensor_of: Callable[[Offsets, Any], Any]
    concatenate: Callable[[Sequence[Any]], Any]
    cast: Callable[[Any, Any], Any]
    float32: Any
    attend: Callable[..., Any]
    check: Callable[..., None]
    write: Callable[[Any, Any, tuple[Any, Any], Any, str], tuple[Any, Any]]
    returned: Callable[[tuple[Any, ...], tuple[Any, Any]], Any]


Form = Callable[[Frontend], Any]


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Any = None,
    batch_invariant: bool = False,
) -> Form:
    """Write new keys and values into a cache, and attend to it: reshape_and_cache_flash and flash_attn_varlen_func.

    Args:
        q: [B, Sq, Hq, D].
        k_cache, v_cache: [Bc, Sc, Hk, D] and [Bc, Sc, Hk, Dv], or with block_table pages [P, page size, Hk, D] and
            [P, page size, Hk, Dv]; updated in place if k and v are given.
        k, v: [B, Sk, Hk, D] and [B, Sk, Hk, Dv], new keys and values, that go behind those in the cache. One that has
            no place there is not written.
        rotary_cos, rotary_sin: [positions, R / 2], of any floating type; at least as many positions as the cache has
            places for a sequence's keys. The first R elements of each head of q and k are turned, in float32, and
            rounded to the type of q and k; k's by its place in the cache, whatever cache_leftpad is, q's also where
            causal or a window is given, else all by that of the first new key.
        cache_seqlens: int32 [B] or a number, how many keys the cache holds of each sequence before the new ones; None
            is Sc, without k and v.
        cache_batch_idx: int32 [B], the cache's rows of the sequences; None is 0, 1, 2 and so on. Not with block_table.
        cache_leftpad: int32 [B], how many first keys to mask.
        block_table: int32 [B, M], the pages of each sequence. Also page_table.
        rotary_interleaved: elements 0 and 1, 2 and 3 and so on are turned together; else i and i + R / 2.
        alibi_slopes: float32 [Hq] or [B, Hq].
        num_splits: taken and not used: the kernels decide.
        return_softmax_lse: also return the LSE. Also return_lse.
        s_aux: [Hq] attention sinks. Also learnable_sink.
        softmax_scale, causal, window_size, softcap, batch_invariant: as flash_attn_varlen_func.

    Returns:
        out [B, Sq, Hq, Dv]; with return_softmax_lse (out, LSE float32 [B, Hq, Sq]). In JAX, where k and v are given,
        the new (k_cache, v_cache) behind them.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes, arguments that do not go together.

    Semantics of flash-attention's flash_attn_with_kvcache.
    """
    function = "flash_attn_with_kvcache"
    batch, len_q, _, head = shape_of(function, "q", q, "B Sq Hq D")
    dims = "Bc Sc Hk D" if block_table is None else "P page_size Hk D"
    sizes = dict(zip(dims.split(), shape_of(function, "k_cache", k_cache, dims, D=head), strict=True))
    *_, head_v = shape_of(function, "v_cache", v_cache, of_values(dims), **sizes)
    blocks, size, kv_heads, _ = sizes.values()
    room = size
    if block_table is not None:
        room = size * shape_of(function, "block_table", block_table, "B M", B=batch)[1]
        if cache_batch_idx is not None:
            raise value_error(
                function, "cache_batch_idx", "a tensor beside block_table", "None: pages have no rows"
            )
    if (k is None) != (v is None):
        raise type_error(function, "v" if v is None else "k", "None", "k and v, or neither")
    if k is not None and cache_seqlens is None:
        raise type_error(function, "cache_seqlens", "None", "where k and v go: int32 [B] or a number")
    if (rotary_cos is None) != (rotary_sin is None):
        missing = "rotary_sin" if rotary_sin is None else "rotary_cos"
        raise type_error(function, missing, "None", "rotary_cos and rotary_sin, or neither")
    if rotary_cos is not None and k is None:
        raise value_error(function, "rotary_cos", "a tensor without k and v", "None: nothing is written")
    is_number = isinstance(cache_seqlens, numbers.Integral)
    if cache_seqlens is not None and not is_number:
        shape_of(function, "cache_seqlens", cache_seqlens, "B", " or a whole number", B=batch)
    for name, tensor in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if tensor is not None:
            shape_of(function, name, tensor, "B", B=batch)
    new = 0
    if k is not None:
        new = shape_of(function, "k", k, "B Sk Hk D", B=batch, Hk=kv_heads, D=head)[1]
        shape_of(function, "v", v, "B Sk Hk Dv", B=batch, Sk=new, Hk=kv_heads, Dv=head_v)
    if rotary_cos is not None:
        _check_rotary(function, rotary_cos, rotary_sin, head, room)
    sides = window_sides(function, window_size)

    def call(frontend: Frontend) -> Any:
        given = {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "k": k,
            "v": v,
            "rotary_cos": rotary_cos,
            "rotary_sin": rotary_sin,
            "cache_seqlens": None if is_number else cache_seqlens,
            "cache_batch_idx": cache_batch_idx,
            "cache_leftpad": cache_leftpad,
            "block_table": block_table,
        }
        tensors = frontend.tensors(function, given)
        query, keys, values, key, value, cos, sin, *indices = tensors
        for name, tensor in zip(list(given)[-len(indices) :], indices, strict=True):
            if tensor is not None:
                check_dtype(function, name, tensor, ("int32",))
        check_dtype(function, "k_cache", keys, (*FLOATS, *FP8))
        for name, tensor in (("v_cache", values), ("k", key), ("v", value)):
            if tensor is not None and tensor.dtype != keys.dtype:
                accepted = f"{dtype_of(keys)}, the dtype of k_cache"
                raise type_error(function, name, f"dtype {dtype_of(tensor)}", accepted)
        held, batch_idx, leftpad, table = indices

        rows, first = (
            frontend.tensor_of(Offsets(count, 1), query)[:-1] for count in (batch, max(len_q, new))
        )
        if table is None:
            table = (rows if batch_idx is None else batch_idx).reshape(batch, 1)
        if held is None:
            held = rows * 0 + (cache_seqlens if is_number else size)
        if key is not None:
            positions = held[:, None] + first[None]  # of the longer of q and k
            if cos is not None:
                turn = functools.partial(_turn, frontend, cos, sin, rotary_interleaved)
                moving = causal or sides != (-1, -1)
                query = turn(
                    query, positions[:, :len_q] if moving else held[:, None] + first[None, :len_q] * 0
                )
                key = turn(key, positions[:, :new])
        arguments = {
            "q": query.reshape(batch * len_q, *query.shape[2:]),
            "cu_seqlens_q": frontend.tensor_of(Offsets(batch, len_q), query),
            "max_seqlen_q": len_q,
            "max_seqlen_k": table.shape[1] * size,
            "seqused_k": held + new,
            "block_table": table,
            "leftpad_k": leftpad,
            "softmax_scale": softmax_scale,
            "causal": causal,
            "window_size": sides,
            "softcap": softcap,
            "alibi_slopes": alibi_slopes,
            "s_aux": s_aux,
            "batch_invariant": batch_invariant,
            "return_softmax_lse": return_softmax_lse,
        }
        names = _OF_ATTENTION | ({} if block_table is not None else {"block_table": "cache_batch_idx"})
        caches = keys, values
        if key is not None:
            names["seqused_k"] = "(cache_seqlens + Sk)"
            # Before anything is written.
            called_by(function, names, frontend.check, k=keys, v=values, **arguments)
            positions = positions[:, :new]
            page = positions // max(size, 1)
            within = (positions >= 0) & (page < table.shape[1])
            found = table[rows[:, None], page.clip(0, max(table.shape[1] - 1, 0))]
            slots = _slots(found, positions, within, blocks, size)
            key, value = (x.reshape(batch * new, *x.shape[2:]) for x in (key, value))
            caches = frontend.write(key, value, caches, slots.reshape(-1), "NHD")
        results = called_by(function, names, frontend.attend, k=caches[0], v=caches[1], **arguments)
        out, *lse = results if return_softmax_lse else (results,)
        shaped = (
            out.reshape(batch, len_q, *out.shape[1:]),
            *(x.reshape(x.shape[0], batch, len_q).swapaxes(0, 1) for x in lse),
        )
        if key is not None:
            return frontend.returned(shaped, caches)
        return shaped if lse else shaped[0]

    return call


def append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any = None,
    kv_layout: str = "NHD",
) -> Form:
    """Write new keys and values into the pages of their sequences: reshape_and_cache_flash.

    Args:
        append_key, append_value: [T, Hk, D] and [T, Hk, Dv].
        batch_indices, positions: int32 or int64 [T], the sequence of each token and its position there. A token of a
            sequence that does not exist is not written.
        paged_kv_cache: (keys, values) by kv_layout, updated in place.
        kv_indices: int32 or int64 [pages in use], the pages of all sequences, one sequence after the other. Nothing is
            written to a page that does not exist.
        kv_indptr: int32 or int64 [B + 1], offsets of the sequences in kv_indices. A position behind a sequence's pages
            is not written.
        kv_last_page_len: taken and not used: positions says it.
        kv_layout: "NHD" [P, page size, Hk, D] or "HND" [P, Hk, page size, D].

    Returns:
        Nothing in PyTorch; (keys, values) in JAX.

    Raises:
        TypeError, ValueError: wrong dtypes or shapes.

    Semantics of FlashInfer's append_paged_kv_cache.
    """
    function = "append_paged_kv_cache"
    tokens, heads, head = shape_of(function, "append_key", append_key, "T Hk D")
    head_v = shape_of(function, "append_value", append_value, "T Hk Dv", T=tokens, Hk=heads)[2]
    for name, tensor in (("batch_indices", batch_indices), ("positions", positions)):
        shape_of(function, name, tensor, "T", T=tokens)
    (pages,) = shape_of(function, "kv_indices", kv_indices, "pages")
    sequences = shape_of(function, "kv_indptr", kv_indptr, "B+1")[0] - 1
    if sequences < 0:
        raise value_error(function, "kv_indptr", "shape [0]", "[B+1]")
    if not isinstance(paged_kv_cache, (tuple, list)) or len(paged_kv_cache) != 2:
        got = f"{type(paged_kv_cache).__name__}"
        raise type_error(function, "paged_kv_cache", got, "a pair (keys, values)")
    if kv_layout not in PAIR_DIMS:
        raise value_error(function, "kv_layout", repr(kv_layout), ", ".join(map(repr, PAIR_DIMS)))
    key_cache, value_cache = paged_kv_cache
    dims = PAIR_DIMS[kv_layout]
    shape = shape_of(function, "paged_kv_cache[0]", key_cache, dims, Hk=heads, D=head)
    sizes = dict(zip(dims.split(), shape, strict=True))
    shape_of(function, "paged_kv_cache[1]", value_cache, of_values(dims), **{**sizes, "Dv": head_v})
    blocks, size = sizes["P"], sizes["B"]

    def call(frontend: Frontend) -> Any:
        given = {
            "append_key": append_key,
            "append_value": append_value,
            "paged_kv_cache[0]": key_cache,
            "paged_kv_cache[1]": value_cache,
            "batch_indices": batch_indices,
            "positions": positions,
            "kv_indices": kv_indices,
            "kv_indptr": kv_indptr,
        }
        key, value, keys, values, *tensors = frontend.tensors(function, given)
        for name, tensor in zip(list(given)[-len(tensors) :], tensors, strict=True):
            check_dtype(function, name, tensor, ("int32", "int64"))
        check_dtype(function, "paged_kv_cache[0]", keys, (*FLOATS, *FP8))
        batch, places, indices, indptr = tensors
        slots = places * 0 - 1
        if sequences > 0 and pages > 0:  # else there is nothing to index
            sequence = batch.clip(0, sequences - 1)
            place = indptr[sequence] + places // max(size, 1)
            within = (batch >= 0) & (batch < sequences) & (places >= 0)
            within = within & (place >= 0) & (place < indptr[sequence + 1]) & (place < pages)
            slots = _slots(indices[place.clip(0, pages - 1)], places, within, blocks, size)
        caches = called_by(
            function, _OF_APPENDING, frontend.write, key, value, (keys, values), slots, kv_layout
        )
        return frontend.returned((), caches)

    return call


# What the functions call the arguments of those that they call, where it is something else.
_OF_ATTENTION = {
    "k": "k_cache",
    "v": "v_cache",
    "cu_seqlens_q": "q",
    "seqused_k": "cache_seqlens",
    "leftpad_k": "cache_leftpad",
}
_OF_APPENDING = {
    "key": "append_key",
    "value": "append_value",
    "key_cache": "paged_kv_cache[0]",
    "value_cache": "paged_kv_cache[1]",
}


def _slots(page: Any, positions: Any, has_place: Any, blocks: int, size: int) -> Any:
    """Slots of positions in their pages; -1 where there is no place, or no such page among so many blocks."""
    # The product of a page that does not exist may wrap around to a slot that does. Pages of no places are none.
    has_place = has_place & (page >= 0) & (page < (blocks if size > 0 else 0))
    return (page * size + positions % max(size, 1) + 1) * has_place - 1


def _check_rotary(function: str, cos: Any, sin: Any, head: int, room: int) -> None:
    """room: how many keys of a sequence the cache has places for."""
    positions, half = shape_of(function, "rotary_cos", cos, "positions R/2")
    shape_of(function, "rotary_sin", sin, "positions R/2", positions=positions, **{"R/2": half})
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_dtype(function, name, table, (*FLOATS, "float64"))
    got = f"shape [{positions}, {half}]"
    if positions < room:
        accepted = f"[positions, R/2] with at least {room} positions: the cache has places for so many keys"
        raise value_error(function, "rotary_cos", got, accepted)
    if half > head // 2:
        accepted = f"[positions, R/2] with R/2 of at most {head // 2}: half of a head of {head}"
        raise value_error(function, "rotary_cos", got, accepted)


def _turn(frontend: Frontend, cos: Any, sin: Any, interleaved: bool, x: Any, positions: Any) -> Any:
    """Rotary embedding of [B, S, H, D] at positions [B, S], computed in float32; a position behind the last is that."""
    at = positions.clip(0, cos.shape[0] - 1)
    cos, sin = (frontend.cast(table[at][:, :, None], frontend.float32) for table in (cos, sin))
    half, dtype = cos.shape[-1], x.dtype
    x = frontend.cast(x, frontend.float32)
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    parts = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        parts = tuple(part[..., None] for part in parts)
    together = frontend.concatenate(parts).reshape(turned.shape)
    return frontend.cast(frontend.concatenate([together, rest]), dtype)


def in_front_end(form: Callable[..., Form], frontend: Frontend, module: str) -> Callable[..., Any]:
    """A form as a function of a front end's module."""

    @functools.wraps(form)
    def function(*args: Any, **kwargs: Any) -> Any:
        return form(*args, **kwargs)(frontend)

    function.__module__ = module
    return function


KV_CACHE_FORMS = (flash_attn_with_kvcache, append_paged_kv_cache)
