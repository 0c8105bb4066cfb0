"""The sections prefill, decode and mixed: our operations from PyTorch and from JAX, and the peers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import flashxla.torch as fx
from benchmarks import batch as batches
from benchmarks import compare, device, jax_programs, reference, shape_lists, shapes, timers
from benchmarks.batch import Batch
from benchmarks.compare import Contender, Prepared, Row, Work
from benchmarks.settings import Settings


def run(section: str, case: str, settings: Settings) -> Iterator[Row]:
    """A case's rows."""
    from benchmarks import peers

    shape = shape_lists.named(section, case, settings)
    batch = batches.build(shape, settings.device)
    work = None
    with_jax = shape_lists.in_every_front_end(section, case, settings)
    found = [Contender("flashxla", lambda: paged(batch), ours=True)]
    if section == "prefill" and shape.layout == "NHD" and shape.page == 16:
        found.append(Contender("flashxla, dense", lambda: _dense(batch), ours=True))
    if shape.plain and with_jax:
        found.append(Contender("flashxla in JAX", lambda: _in_jax(batch), ours=True))
    if section == "mixed":
        found += _in_parts(batch)
        if settings.peers and shape.plain:
            found.append(peers.flash_varlen(batch))
    else:
        if settings.peers:
            found += peers.of_attention(batch, with_jax)
        if section == "prefill":
            work = Work(shapes.flops(shape), "TFLOP/s", device.MATMUL)
        else:
            work = Work(shapes.kv_bytes(shape), "TB/s", device.COPY)
    yield from compare.run(case, shape.dtype, found, settings, work)


def prepared(
    batch: Batch,
    calls: Sequence[Callable[[], Any]],
    ours: bool,
    output: Callable[[Any], torch.Tensor] = lambda out: out,
    note: str = "",
) -> Prepared:
    """A call from PyTorch for each input set. output: [T, Hq, D] of what a call returns."""

    def check(result: Any) -> float:
        return reference.check(batch, output(result), ours)

    def timer() -> timers.Timer:
        timer = timers.of_torch(calls, batch.keys.device.type)
        if isinstance(timer, timers.GraphTimer):
            check(timer.last)  # a replay must compute the same
        return timer

    return Prepared(lambda: check(calls[0]()), timer, note)


def _arguments(batch: Batch) -> dict[str, Any]:
    """Of flash_attn_varlen_func on pages, those that do not differ between the sets."""
    shape = batch.shape
    longest = shape.width * shape.page if shape.table_width else max(keys for _, keys in shape.lens)
    return {
        "max_seqlen_q": max(new for new, _ in shape.lens),
        "cu_seqlens_q": batch.cu_q,
        "max_seqlen_k": longest,
        "seqused_k": batch.lens_k,
        "causal": True,
        "window_size": (-1, -1) if shape.window is None else (shape.window - 1, -1),
        "softcap": shape.softcap,
        "alibi_slopes": batch.slopes,
        "s_aux": batch.sinks,
        "return_softmax_lse": shape.lse,
        "batch_invariant": shape.batch_invariant,
        "num_seqs": batch.num_seqs,
        "layout": shape.layout,
    }


def paged_calls(batch: Batch) -> list[Callable[[], Any]]:
    """Our operation over the pages from PyTorch, on each input set."""
    shape = batch.shape
    call: functools.partial[Any]
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
            alibi_slopes=batch.slopes,
            s_aux=batch.sinks,
            return_softmax_lse=shape.lse,
            batch_invariant=shape.batch_invariant,
        )
        tables = "block_tables"
    else:
        key_cache, value_cache = batch.caches
        call = functools.partial(fx.flash_attn_varlen_func, k=key_cache, v=value_cache, **_arguments(batch))
        tables = "block_table"
    return [
        functools.partial(call, q, **{tables: table}) for q, table in zip(batch.q, batch.tables, strict=True)
    ]


def paged(batch: Batch) -> Prepared:
    """Our operation over the pages, from PyTorch."""
    return prepared(batch, paged_calls(batch), ours=True, output=_output(batch))


def _output(batch: Batch) -> Callable[[Any], torch.Tensor]:
    """Of what our operation returns."""
    return (lambda results: results[0]) if batch.shape.lse else lambda out: out


def _dense(batch: Batch) -> Prepared:
    """The same keys and values without pages."""
    same = _arguments(batch)
    del same["seqused_k"], same["layout"], same["num_seqs"]
    calls = [
        functools.partial(fx.flash_attn_varlen_func, q, k, v, cu_seqlens_k=batch.cu_k, **same)
        for q, (k, v) in zip(batch.q, batch.dense, strict=True)
    ]
    return prepared(batch, calls, ours=True, output=_output(batch))


def jax_inputs(batch: Batch) -> list[dict[str, Any]]:
    """The arrays of each set for `jax_call`."""
    same = {
        "k": batch.caches[0],
        "v": batch.caches[1],
        "cu_seqlens_q": batch.cu_q,
        "seqused_k": batch.lens_k,
        "num_seqs": batch.num_seqs,
    }
    arrays = {name: jax_programs.array(tensor) for name, tensor in same.items()}
    return [{**arrays, "block_table": jax_programs.array(table)} for table in batch.tables]


def jax_call(batch: Batch) -> Callable[[Any, Any], Any]:
    """(q, inputs) -> our operation's result, to be traced by JAX."""
    import flashxla.jax as fx_jax

    numbers = {name: value for name, value in _arguments(batch).items() if not torch.is_tensor(value)}
    return lambda q, inputs: fx_jax.flash_attn_varlen_func(q, **numbers, **inputs)


def _in_jax(batch: Batch) -> Prepared:
    """Over the pages, inside a jitted program."""
    queries = jax_programs.array(batch.q[0])
    return jax_programs.chain(batch, jax_call(batch), queries, jax_inputs(batch), ours=True)


def _in_parts(whole: Batch) -> list[Contender]:
    """The decode rows and the prompt in a call each: both, and either."""
    count = len(whole.shape.lens) - 1
    decode, prompt = batches.part(whole, 0, count), batches.part(whole, count, count + 1)

    def both() -> Prepared:
        pairs = zip(paged_calls(decode), paged_calls(prompt), strict=True)
        calls = [functools.partial(lambda a, b: [a(), b()], *pair) for pair in pairs]
        return prepared(whole, calls, ours=True, output=torch.cat)

    return [
        Contender("2 calls", both, ours=True),
        Contender("decode rows alone", lambda: paged(decode), ours=True),
        Contender("prompt alone", lambda: paged(prompt), ours=True),
    ]
