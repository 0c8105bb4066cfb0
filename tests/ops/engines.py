"""Which engine of the CUDA library serves a call: the library says so without a GPU too. And checks of a call."""

from __future__ import annotations

from typing import Any

import numpy as np

import flashxla
from flashxla import native
from tests import reference
from tests.batches import Arguments, Case, flash_attn_arguments, paged_attention_arguments
from tests.checks import DTYPES, Rounding, assert_attention, assert_same_bits
from tests.frontends import Frontend, TorchFrontend, has_arrays, map_arrays

ONE_TENSOR = ("interleaved", "packed_HND", "packed_NHD", "stacked")


def call_of(rng: Any, case: Case) -> tuple[str, Arguments]:
    """The operation that serves a case, and its arguments. Caches of one tensor are paged_attention's."""
    if case.layout in ONE_TENSOR:
        return "paged_attention", paged_attention_arguments(rng, case)
    return "flash_attn_varlen_func", flash_attn_arguments(rng, case)


def call_with_bound(rng: Any, case: Case) -> tuple[str, Arguments]:
    """A call that says how many queries a sequence has at most."""
    function, arguments = call_of(rng, case)
    arguments["max_seqlen_q"] = max(len_q for len_q, _ in case.lens)
    return function, arguments


def with_room(arguments: Arguments, case: Case, keys_of_heads: int = 2**17) -> Arguments:
    """The call with room for so many keys that it may read much, though it does not."""
    keys = keys_of_heads // case.heads[1]
    if case.page is None:
        more = [(0, keys), (0, 0), (0, 0)]
        return arguments | {name: np.pad(arguments[name], more, constant_values=np.nan) for name in "kv"}
    name = "block_table" if "block_table" in arguments else "block_tables"
    table = arguments[name]
    width = -(-keys // (case.page * len(table)))
    return arguments | {name: np.pad(table, [(0, 0), (0, width)], constant_values=-1)}


def served_by(frontend: Frontend, function: str, arguments: Arguments) -> tuple[str, str] | None:
    """The engines of few and of many queries; None where the CUDA library is not installed."""
    if not native.is_installed("cuda"):
        return None
    got = _explained(frontend, function, arguments)
    return got.few_queries.partition(":")[0], got.many_queries.partition(":")[0]


def serves_few(frontend: Frontend, function: str, arguments: Arguments) -> str | None:
    """What `explain` says of few queries, e.g. "swap: ..."; None where the CUDA library is not installed."""
    return _explained(frontend, function, arguments).few_queries if native.is_installed("cuda") else None


def serves_many(frontend: Frontend, function: str, arguments: Arguments) -> str | None:
    """The same of many queries."""
    return _explained(frontend, function, arguments).many_queries if native.is_installed("cuda") else None


def differentiated_by(frontend: Frontend, arguments: Arguments) -> str | None:
    """The engine of the gradients of flash_attn_varlen_func; None where the CUDA library is not installed."""
    if not native.is_installed("cuda"):
        return None
    got = _explained(frontend, "flash_attn_varlen_func", arguments).gradients
    assert got is not None
    (kernel,) = got.kernels
    return kernel.name


def _explained(frontend: Frontend, function: str, arguments: Arguments) -> flashxla.Explanation:
    assert isinstance(frontend, TorchFrontend)
    given = {k: map_arrays(frontend.tensor, v) if has_arrays(v) else v for k, v in arguments.items()}
    return flashxla.explain(getattr(frontend.fx, function), platform="cuda", **given)


def rounding_of_weights(frontend: Frontend, function: str, arguments: Arguments) -> Rounding | None:
    """What rounding the softmax's weights to e4m3 changes of each element of out at most; None if nothing does it.

    On a Hopper GPU products of e4m3 serve many queries where q, k and v are e4m3. A weight keeps 4 bits. So it is off
    by up to 2^-4 of itself or, if it is tiny, 2^-18 of the row's largest one.
    """
    queries = arguments["q"] if "q" in arguments else arguments["query"]
    cache = arguments["v"] if "v" in arguments else arguments["kv_cache"]
    values = cache[-1] if isinstance(cache, tuple) else cache
    if values.dtype == DTYPES["u8"]:
        values = values.view(reference.FP8_FORMATS[arguments["kv_cache_dtype"]])
    e4m3 = DTYPES["e4m3"]
    if frontend.device != "cuda" or {queries.dtype, values.dtype} != {e4m3}:
        return None
    magnitude = getattr(reference, function)(**arguments, positive_values=True)[0]
    largest = np.nanmax(np.abs(values.astype(np.float32)), initial=0.0) * _largest_scale(arguments)
    lengths = next(
        arguments[name] for name in ("context_lens", "seqused_k", "cu_seqlens_k") if name in arguments
    )
    out = magnitude * 2.0**-4 + largest * np.max(lengths, initial=0) * 2.0**-18
    return Rounding(out, queries.shape[-1])


def _largest_scale(arguments: Arguments) -> float:
    """What values are multiplied by, at most."""
    scales = [arguments[name] for name in ("v_descale", "v_scale") if arguments.get(name) is not None]
    return float(np.prod([np.max(scale, initial=0.0) for scale in scales]))


def check(frontend: Frontend, function: str, arguments: Arguments) -> tuple[Any, Any]:
    """Hold a call against the reference; returns its results."""
    out, lse = getattr(frontend, function)(**arguments)
    queries = arguments["query" if function == "paged_attention" else "q"]
    rounding = rounding_of_weights(frontend, function, arguments)
    unit = max(_largest_scale(arguments), 1.0)
    assert_attention(out, lse, getattr(reference, function)(**arguments), queries.dtype, rounding, unit)
    return out, lse


def check_twice(frontend: Frontend, function: str, arguments: Arguments) -> None:
    """Hold a call against the reference, and a second run of it against the first: the bits are the same."""
    out, lse = check(frontend, function, arguments)
    again, lse_again = getattr(frontend, function)(**arguments)
    assert_same_bits(again, out, "out of a second run")
    if lse is not None and lse_again is not None:
        assert_same_bits(lse_again, lse, "LSE of a second run")
