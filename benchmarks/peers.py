"""Attention of a batch by others: cuDNN, FlashAttention-2 and FlexAttention in PyTorch, cuDNN and Pallas in JAX."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks import attention, flex_attention, heads_first, jax_programs
from benchmarks.batch import Batch
from benchmarks.compare import Contender, Prepared

_PALLAS_SPLITS, _PALLAS_PAGES = 16, 8  # its defaults


def of_attention(batch: Batch, with_jax: bool) -> list[Contender]:
    """Those that serve a batch. with_jax: those in JAX, too."""
    shape = batch.shape
    if not shape.without_mask:
        return []
    if shape.masked:
        return _of_masks(batch)
    if max(shape.dims) > 256:
        return _of_large_heads(batch)
    decode = all(new == 1 for new, _ in shape.lens)
    # PyTorch's and JAX's causal mask is ours for whole prompts only.
    whole = all(new == keys for new, keys in shape.lens)
    found = []
    if whole or (decode and shape.uniform):
        found.append(Contender("torch SDPA cuDNN", lambda: _sdpa(batch, SDPBackend.CUDNN_ATTENTION)))
        found.append(Contender("torch SDPA FA2", lambda: _sdpa(batch, SDPBackend.FLASH_ATTENTION)))
    if not decode and not (whole and shape.uniform):
        found.append(flash_varlen(batch))
    if whole and shape.uniform and with_jax:
        found.append(Contender("jax.nn cuDNN", lambda: _jax_cudnn(batch)))
    if decode and with_jax:
        found.append(Contender("JAX Pallas paged_attention", lambda: _pallas(batch)))
    return found


def _of_masks(batch: Batch) -> list[Contender]:
    """Those that know a mask beside the causal one."""
    shape = batch.shape
    found = [Contender("torch FlexAttention", lambda: flex_attention.prepare(batch))] if shape.uniform else []
    if not shape.softcap and not shape.sinks:
        found.append(flash_varlen(batch))
    return found


def _of_large_heads(batch: Batch) -> list[Contender]:
    """Those that take heads above 256."""
    powers_of_two = all(dim & (dim - 1) == 0 for dim in batch.shape.dims)
    flex = Contender("torch FlexAttention", lambda: flex_attention.prepare(batch))
    return [flex] if powers_of_two and batch.shape.uniform else []


def flash_varlen(batch: Batch) -> Contender:
    """FlashAttention-2 on a ragged batch without pages."""
    return Contender("torch FA2 varlen, dense", lambda: _flash_varlen(batch))


def _sdpa(batch: Batch, backend: SDPBackend) -> Prepared:
    """One call for sequences that are alike, else a call for each."""
    shape = batch.shape
    causal = shape.lens[0][0] > 1
    sets: list[Sequence[tuple[torch.Tensor, ...]]] = heads_first.inputs(batch)

    def call(parts: Sequence[Any], gqa: bool) -> list[torch.Tensor]:
        with sdpa_kernel(backend):
            return [sdpa(q, k, v, is_causal=causal, enable_gqa=gqa) for q, k, v in parts]

    note = "enable_gqa"
    try:
        call(sets[0], True)
    except RuntimeError:
        note = "KV heads repeated outside the timing"
        repeats = shape.heads[0] // shape.heads[1]
        sets = [
            tuple((q, *(x.repeat_interleave(repeats, 1) for x in (k, v))) for q, k, v in parts)
            for parts in sets
        ]
    gqa = note == "enable_gqa"
    if len(sets[0]) > 1:
        note += f", {len(sets[0])} calls"
    calls = [functools.partial(call, parts, gqa) for parts in sets]
    return attention.prepared(batch, calls, ours=False, output=heads_first.output, note=note)


def _flash_varlen(batch: Batch) -> Prepared:
    """FlashAttention-2's ragged kernel; its causal mask is aligned as ours."""
    max_q = max(new for new, _ in batch.shape.lens)
    max_k = max(keys for _, keys in batch.shape.lens)
    window = batch.shape.window
    mask = {"alibi_slopes": batch.slopes, "window_size_left": None if window is None else window - 1}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, batch.cu_q, batch.cu_k, max_q, max_k, 0.0, True, False, **mask
        )

    calls = [functools.partial(call, q, k, v) for q, (k, v) in zip(batch.q, batch.dense, strict=True)]
    return attention.prepared(batch, calls, ours=False, output=lambda results: results[0])


def _jax_cudnn(batch: Batch) -> Prepared:
    import jax

    count = len(batch.shape.lens)

    def call(q: Any, keys_values: Any) -> Any:
        return jax.nn.dot_product_attention(q, *keys_values, is_causal=True, implementation="cudnn")

    def array(tokens: torch.Tensor) -> Any:
        return jax_programs.array(tokens.unflatten(0, (count, -1)))

    inputs = [(array(k), array(v)) for k, v in batch.dense]
    return jax_programs.chain(
        batch,
        call,
        array(batch.q[0]),
        inputs,
        ours=False,
        to_output=lambda out: out.reshape(batch.q[0].shape),
    )


def pallas_width(width: int) -> int:
    """A width of the block table that the kernel takes: whole splits of whole blocks of pages."""
    splits = _PALLAS_SPLITS
    block = splits * _PALLAS_PAGES
    unit = block if width > block else splits
    return math.ceil(width / unit) * unit


def _pallas(batch: Batch) -> Prepared:
    from jax.experimental.pallas.ops.gpu import paged_attention as pallas

    pages = [jax_programs.array(cache.permute(2, 0, 1, 3)) for cache in (batch.keys, batch.values)]
    missing = pallas_width(batch.shape.width) - batch.shape.width
    scale = batch.shape.dim**-0.5  # the kernel has none

    def call(q: Any, inputs: Any) -> Any:
        k_pages, v_pages, table, lens = inputs
        return pallas.paged_attention(q * scale, k_pages, v_pages, table, lens)

    inputs = [
        (
            *pages,
            jax_programs.array(torch.nn.functional.pad(table, (0, missing))),
            jax_programs.array(batch.lens_k),
        )
        for table in batch.tables
    ]
    return jax_programs.chain(
        batch, call, jax_programs.array(batch.q[0]), inputs, ours=False, note="K and V with the heads first"
    )
