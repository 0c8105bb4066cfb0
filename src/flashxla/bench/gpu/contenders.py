"""Attention of a batch: our operations from PyTorch and from JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import flashxla.torch as fx
from flashxla.bench.gpu import jax_programs, reference, timers
from flashxla.bench.gpu.batch import Batch
from flashxla.bench.gpu.compare import Contender, Prepared

OURS = "flashxla"


def from_torch(
    batch: Batch,
    calls: Sequence[Callable[[], Any]],
    ours: bool,
    output: Callable[[Any], torch.Tensor] = lambda out: out,
    note: str = "",
) -> Prepared:
    """A call for each input set. output: [T, Hq, D] of what a call returns."""

    def check(result: Any) -> float:
        return reference.check(batch, output(result), ours)

    def timer() -> timers.Timer:
        timer = timers.of_torch(calls, batch.keys.device.type)
        if isinstance(timer, timers.GraphTimer):
            check(timer.last)  # a replay must compute the same
        return timer

    return Prepared(lambda: check(calls[0]()), timer, note)


def arguments(batch: Batch) -> dict[str, Any]:
    """Of flash_attn_varlen_func on pages, those that do not differ between the sets."""
    shape = batch.shape
    return {
        "max_seqlen_q": max(new for new, _ in shape.lens),
        "cu_seqlens_q": batch.cu_q,
        "max_seqlen_k": shape.width * shape.page
        if shape.table_width
        else max(keys for _, keys in shape.lens),
        "seqused_k": batch.lens_k,
        "causal": True,
        "window_size": (-1, -1) if shape.window is None else (shape.window - 1, -1),
        "softcap": shape.softcap,
        "num_seqs": batch.num_seqs,
        "layout": shape.layout,
    }


def paged_calls(batch: Batch) -> list[Callable[[], Any]]:
    """Our operation over the pages, on each input set."""
    shape = batch.shape
    if shape.layout == "interleaved":
        call = functools.partial(
            fx.paged_attention,
            kv_cache=batch.caches[0],
            context_lens=batch.lens_k,
            query_start_loc=batch.cu_q,
            num_seqs=batch.num_seqs,
            scale=shape.dim**-0.5,
            sliding_window=shape.window,
            soft_cap=shape.softcap or None,
        )
        return [
            functools.partial(call, q, block_tables=table)
            for q, table in zip(batch.q, batch.tables, strict=True)
        ]
    key_cache, value_cache = batch.caches
    same = arguments(batch)
    return [
        functools.partial(fx.flash_attn_varlen_func, q, key_cache, value_cache, block_table=table, **same)
        for q, table in zip(batch.q, batch.tables, strict=True)
    ]


def _paged(batch: Batch) -> Prepared:
    return from_torch(batch, paged_calls(batch), ours=True)


def _in_parts(whole: Batch, parts: Sequence[Batch]) -> Prepared:
    pairs = zip(*(paged_calls(part) for part in parts), strict=True)

    def call(pair: Sequence[Callable[[], Any]]) -> list[torch.Tensor]:
        return [one() for one in pair]

    calls = [functools.partial(call, pair) for pair in pairs]
    return from_torch(whole, calls, ours=True, output=lambda outs: torch.cat(outs))


def _dense(batch: Batch) -> Prepared:
    same = arguments(batch)
    del same["seqused_k"], same["layout"], same["num_seqs"]
    calls = [
        functools.partial(fx.flash_attn_varlen_func, q, k, v, cu_seqlens_k=batch.cu_k, **same)
        for q, (k, v) in zip(batch.q, batch.dense, strict=True)
    ]
    return from_torch(batch, calls, ours=True)


def _jax(batch: Batch) -> Prepared:
    import flashxla.jax as fx_jax

    def call(q: Any, inputs: Any) -> Any:
        key_cache, value_cache, table, cu_q, lens_k, num_seqs = inputs
        same = arguments(batch) | {"cu_seqlens_q": cu_q, "seqused_k": lens_k, "num_seqs": num_seqs}
        return fx_jax.flash_attn_varlen_func(q, key_cache, value_cache, block_table=table, **same)

    common = [jax_programs.array(t) for t in (*batch.caches, batch.cu_q, batch.lens_k, batch.num_seqs)]
    key_cache, value_cache, cu_q, lens_k, num_seqs = common
    inputs = [
        (key_cache, value_cache, jax_programs.array(table), cu_q, lens_k, num_seqs) for table in batch.tables
    ]
    queries = jax_programs.array(batch.q[0])
    return jax_programs.chain(batch, call, queries, inputs, ours=True)


def paged(batch: Batch) -> Contender:
    """Over the pages, from PyTorch."""
    return Contender(OURS, lambda: _paged(batch), ours=True)


def in_parts(whole: Batch, parts: Sequence[Batch]) -> Contender:
    """A call for each part of a batch."""
    return Contender(f"{len(parts)} calls", lambda: _in_parts(whole, parts), ours=True)


def dense(batch: Batch) -> Contender:
    """The same keys and values without pages."""
    return Contender(f"{OURS}, dense", lambda: _dense(batch), ours=True)


def in_jax(batch: Batch) -> Contender:
    """Over the pages, inside a jitted program."""
    return Contender(f"{OURS} in JAX", lambda: _jax(batch), ours=True)
