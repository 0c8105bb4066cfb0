"""FlashAttention's other functions: other forms of the arguments of flash_attn_varlen_func, for every front end.

A form takes the arguments of FlashAttention's function of its name and returns a `Form`: the call of
flash_attn_varlen_func that is meant, which the front end makes. It uses nothing of a tensor but its shape, reshape()
and indexing, which all frameworks have.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

from flashxla.ops.messages import in_words_of, is_about, type_error, value_error

Window = tuple[int, int] | None
# What functions call flash_attn_varlen_func's arguments, where it is something else.
_OF_KV = {"k": "kv", "v": "kv"}
_OF_QKV = {"q": "qkv", "k": "qkv", "v": "qkv"}
SAME_LENGTHS = {name: "cu_seqlens" for name in ("cu_seqlens_q", "cu_seqlens_k")} | {
    name: "max_seqlen" for name in ("max_seqlen_q", "max_seqlen_k")
}


@dataclasses.dataclass(frozen=True)
class Offsets:
    """Those of sequences of one length: 0, length, 2 * length and so on. Front ends make tensors of them."""

    sequences: int
    length: int


class Options(NamedTuple):
    """What all forms have beside their tensors and lengths."""

    dropout_p: Any
    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    alibi_slopes: Any
    deterministic: Any
    return_attn_probs: Any
    s_aux: Any
    batch_invariant: Any


@dataclasses.dataclass(frozen=True)
class Form:
    """A call of one of these functions.

    arguments: of flash_attn_varlen_func. names: what this function calls them, where it is something else. dense:
    (sequences, length) where tensors and results are dense.
    """

    function: str
    arguments: dict[str, Any]
    names: dict[str, str]
    dense: tuple[int, int] | None

    def call(self, attention: Callable[..., Any], tensor_of: Callable[[Offsets, Any], Any]) -> Any:
        """Make the call. attention: flash_attn_varlen_func. tensor_of: offsets as a tensor where q is."""
        q = self.arguments["q"]
        given = {k: tensor_of(v, q) if isinstance(v, Offsets) else v for k, v in self.arguments.items()}
        results = called_by(self.function, self.names, attention, **given)
        if not self.arguments["return_softmax_lse"]:
            return self._out(results)
        out, lse = results
        if self.dense:
            lse = lse.reshape(lse.shape[0], *self.dense).swapaxes(0, 1)
        return self._out(out), lse, None

    def _out(self, out: Any) -> Any:
        return out.reshape(*self.dense, *out.shape[1:]) if self.dense else out


# The operations that functions make calls of.
_CALLED = ("flash_attn_varlen_func", "reshape_and_cache_flash")


def called_by(
    function: str, names: dict[str, str], called: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A call that a function makes. Errors about its arguments name the function, and what it calls them."""
    try:
        return called(*args, **kwargs)
    except (TypeError, ValueError) as error:
        if not any(is_about(error, other) for other in _CALLED):
            raise
        raise in_words_of(error, function, names) from error


def _form(
    function: str,
    tensors: tuple[Any, Any, Any],
    queries: tuple[Any, int],
    keys: tuple[Any, int],
    options: Options,
    names: dict[str, str],
    dense: tuple[int, int] | None = None,
) -> Form:
    """tensors: q, k and v of all sequences. queries, keys: their offsets, and the longest sequence."""
    if not isinstance(options.dropout_p, numbers.Real) or options.dropout_p != 0:
        raise value_error(function, "dropout_p", options.dropout_p, "0.0: attention here has no dropout")
    arguments = {
        **dict(zip("qkv", tensors, strict=True)),
        "cu_seqlens_q": queries[0],
        "max_seqlen_q": queries[1],
        "cu_seqlens_k": keys[0],
        "max_seqlen_k": keys[1],
        "softmax_scale": options.softmax_scale,
        "causal": options.causal,
        "window_size": options.window_size,
        "softcap": options.softcap,
        "alibi_slopes": options.alibi_slopes,
        "s_aux": options.s_aux,
        "deterministic": options.deterministic,
        "batch_invariant": options.batch_invariant,
        "return_softmax_lse": bool(options.return_attn_probs),
    }
    return Form(function, arguments, names, dense)


def _dense(
    function: str, q: Any, k: Any, v: Any, options: Options, names: dict[str, str] | None = None
) -> Form:
    """q [B, Sq, Hq, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv]."""
    batch, len_q, *_ = shape_of(function, "q", q, "B Sq Hq D")
    _, len_k, *_ = shape_of(function, "k", k, "B Sk Hk D", B=batch)
    shape_of(function, "v", v, "B Sk Hk Dv", B=batch, Sk=len_k)
    # Not -1: of no elements PyTorch cannot say how many tokens there are.
    q, k, v = (x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in (q, k, v))
    queries, keys = ((Offsets(batch, length), length) for length in (len_q, len_k))
    return _form(function, (q, k, v), queries, keys, options, names or {}, dense=(batch, len_q))


def shape_of(
    function: str, name: str, tensor: Any, dims: str, also: str = "", /, **sizes: int
) -> tuple[int, ...]:
    """The shape of a tensor of these dims, some of which have a size. Raises TypeError and ValueError.

    also: what the message says is accepted in its place.
    """
    if hasattr(tensor, "shape"):
        shape, wanted = tuple(tensor.shape), dims.split()
        if len(shape) == len(wanted) and all(
            [
                size == (int(dim) if dim.isdigit() else sizes.get(dim, size))
                for size, dim in zip(shape, wanted, strict=True)
            ]
        ):
            return shape
    # Of a call that is right nothing is written: torch.compile's symbols would have to be numbers for that.
    accepted = f"[{', '.join(str(sizes.get(dim, dim)) for dim in dims.split())}]{also}"
    if not hasattr(tensor, "shape"):
        raise type_error(function, name, f"{tensor!r} ({type(tensor).__name__})", f"a tensor {accepted}")
    raise value_error(function, name, f"shape {list(tensor.shape)}", accepted)


def dtype_of(tensor: Any) -> str:
    """The name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def check_dtype(function: str, name: str, tensor: Any, accepted: tuple[str, ...]) -> None:
    """Raises TypeError where a tensor's dtype is none of these."""
    if dtype_of(tensor) not in accepted:
        raise type_error(function, name, f"dtype {dtype_of(tensor)}", ", ".join(accepted))


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Any = None,
    batch_invariant: bool = False,
) -> Any:
    """flash_attn_varlen_func for sequences of one length.

    Args:
        q: [B, Sq, Hq, D].
        k, v: [B, Sk, Hk, D] and [B, Sk, Hk, Dv].
        dropout_p: 0.
        alibi_slopes: float32 [Hq] or [B, Hq].
        return_attn_probs: also return the LSE, and None in place of the probabilities.
        s_aux: [Hq] attention sinks, with gradients. Also learnable_sink.
        softmax_scale, causal, window_size, softcap, deterministic, batch_invariant: as flash_attn_varlen_func.

    Returns:
        out [B, Sq, Hq, Dv]; with return_attn_probs (out, LSE float32 [B, Hq, Sq], None).

    Raises:
        TypeError, ValueError: wrong dtypes or shapes, dropout.

    Semantics of flash-attention's flash_attn_func, with attention sinks beside.
    """
    options = Options(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux,
        batch_invariant,
    )
    return _dense("flash_attn_func", q, k, v, options)


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Any = None,
    batch_invariant: bool = False,
) -> Any:
    """flash_attn_func with keys and values in one tensor.

    Args:
        q: [B, Sq, Hq, D].
        kv: [B, Sk, 2, Hk, D].

    The other arguments, the results and the errors are those of flash_attn_func.
    """
    name = "flash_attn_kvpacked_func"
    shape_of(name, "kv", kv, "B Sk 2 Hk D")
    options = Options(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux,
        batch_invariant,
    )
    return _dense(name, q, kv[:, :, 0], kv[:, :, 1], options, _OF_KV)


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Any = None,
    batch_invariant: bool = False,
) -> Any:
    """flash_attn_func with queries, keys and values in one tensor.

    Args:
        qkv: [B, S, 3, H, D].

    The other arguments, the results and the errors are those of flash_attn_func.
    """
    name = "flash_attn_qkvpacked_func"
    shape_of(name, "qkv", qkv, "B S 3 H D")
    options = Options(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux,
        batch_invariant,
    )
    return _dense(name, qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], options, _OF_QKV)


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Any = None,
    batch_invariant: bool = False,
) -> Any:
    """flash_attn_varlen_func with keys and values in one tensor.

    Args:
        q: [T, Hq, D].
        kv: [Tk, 2, Hk, D].
        cu_seqlens_q, cu_seqlens_k: int32 [S+1].
        alibi_slopes: float32 [Hq] or [S, Hq].

    Returns:
        out [T, Hq, D]; with return_attn_probs (out, LSE float32 [Hq, T], None).

    The other arguments and the errors are those of flash_attn_func.
    """
    name = "flash_attn_varlen_kvpacked_func"
    shape_of(name, "kv", kv, "Tk 2 Hk D")
    options = Options(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux,
        batch_invariant,
    )
    return _form(
        name,
        (q, kv[:, 0], kv[:, 1]),
        (cu_seqlens_q, max_seqlen_q),
        (cu_seqlens_k, max_seqlen_k),
        options,
        _OF_KV,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Any = None,
    batch_invariant: bool = False,
) -> Any:
    """flash_attn_varlen_func with queries, keys and values in one tensor.

    Args:
        qkv: [T, 3, H, D].
        cu_seqlens: int32 [S+1].
        alibi_slopes: float32 [H] or [S, H].

    Returns:
        out [T, H, D]; with return_attn_probs (out, LSE float32 [H, T], None).

    The other arguments and the errors are those of flash_attn_func.
    """
    name = "flash_attn_varlen_qkvpacked_func"
    shape_of(name, "qkv", qkv, "T 3 H D")
    options = Options(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux,
        batch_invariant,
    )
    return _form(
        name,
        (qkv[:, 0], qkv[:, 1], qkv[:, 2]),
        (cu_seqlens, max_seqlen),
        (cu_seqlens, max_seqlen),
        options,
        _OF_QKV | SAME_LENGTHS,
    )


FORMS = (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
