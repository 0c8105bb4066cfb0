"""What prefill and decode share: a ragged batch, our operation on it, and PyTorch's own attention."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flashxla.torch as fx
from flashxla.bench.cases import AttentionCase
from flashxla.bench.topic import Peer, Run


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """q [T, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv]: the sequences one after the other."""

    case: AttentionCase
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def sequences(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The part of each sequence, [L, H, D]."""
        which = 0 if tensor is self.q else 1
        return tensor.split([lens[which] for lens in self.case.lens])


def problem(case: AttentionCase, dtype: torch.dtype, device: torch.device) -> AttentionProblem:
    """Random tensors of a case."""

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(device, dtype)

    queries, keys = (sum(lens) for lens in zip(*case.lens, strict=True))
    (q_heads, k_heads), (dim, v_dim) = case.heads, case.dims
    return AttentionProblem(
        case, tensor(queries, q_heads, dim), tensor(keys, k_heads, dim), tensor(keys, k_heads, v_dim)
    )


def _ours(problem: AttentionProblem) -> Run:
    case = problem.case
    queries, keys = zip(*case.lens, strict=True)

    def offsets(lens: Sequence[int]) -> torch.Tensor:
        return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=problem.q.device)

    arguments: dict[str, Any]
    if case.page is None:
        k, v = problem.k, problem.v
        arguments = {"cu_seqlens_k": offsets(keys)}
    else:
        (k, v), table = _paged(problem, case.page)
        seqused = torch.tensor(keys, dtype=torch.int32, device=problem.q.device)
        arguments = {"seqused_k": seqused, "block_table": table}
    cu_seqlens_q = offsets(queries)
    if case.window is not None:
        arguments["window_size"] = (case.window - 1, 0)
    if case.deterministic:
        arguments["deterministic"] = True
    if case.batch_invariant:
        arguments["batch_invariant"] = True

    def call() -> torch.Tensor:
        out = fx.flash_attn_varlen_func(
            problem.q, k, v, max(queries), cu_seqlens_q, max(keys), causal=True, **arguments
        )
        assert isinstance(out, torch.Tensor)
        return out

    return Run(call, lambda out: [out])


def _paged(problem: AttentionProblem, page: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """K and V in pages [P, page, Hk, D] of shuffled order, and the block table."""
    counts = [-(-keys // page) for _, keys in problem.case.lens]
    order = torch.randperm(sum(counts))
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, pages in zip(table, order.split(counts), strict=True):
        row[: len(pages)] = pages
    caches = []
    for tensor in (problem.k, problem.v):
        cache = tensor.new_zeros(sum(counts), page, *tensor.shape[1:])
        for part, pages in zip(problem.sequences(tensor), order.split(counts), strict=True):
            padded = part.new_zeros(len(pages) * page, *part.shape[1:])
            padded[: len(part)] = part
            cache[pages.to(cache.device)] = padded.view(len(pages), page, *part.shape[1:])
        caches.append(cache)
    return caches, table.to(problem.q.device)


def padded(problem: AttentionProblem, tensor: torch.Tensor) -> torch.Tensor:
    """[S, H, longest, D]."""
    parts = torch.nn.utils.rnn.pad_sequence(list(problem.sequences(tensor)), batch_first=True)
    return parts.transpose(1, 2).contiguous()


def unpadded(problem: AttentionProblem, out: torch.Tensor) -> list[torch.Tensor]:
    """What `padded` gave, without the padding: [T, H, D], in a list."""
    lens = [queries for queries, _ in problem.case.lens]
    return [torch.cat([rows[:, :n].transpose(0, 1) for rows, n in zip(out, lens, strict=True)])]


def _mask(case: AttentionCase, device: torch.device) -> torch.Tensor | None:
    """Which keys are real, [S, 1, 1, longest]; causal rows never see the padding after them."""
    if case.causal or not case.ragged:
        return None
    keys = torch.tensor([keys for _, keys in case.lens], device=device)
    return (torch.arange(int(keys.max()), device=device) < keys[:, None])[:, None, None]


def _sdpa(problem: AttentionProblem) -> Run:
    q, k, v = (padded(problem, tensor) for tensor in (problem.q, problem.k, problem.v))
    mask = _mask(problem.case, q.device)
    causal = problem.case.causal
    gqa = problem.case.heads[0] != problem.case.heads[1]

    def call() -> torch.Tensor:
        return sdpa(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)

    return Run(call, lambda out: unpadded(problem, out))


def _sdpa_loop(problem: AttentionProblem) -> Run:
    def heads_first(tensor: torch.Tensor) -> list[torch.Tensor]:
        return [part.transpose(0, 1)[None].contiguous() for part in problem.sequences(tensor)]

    parts = list(zip(*map(heads_first, (problem.q, problem.k, problem.v)), strict=True))
    causal = problem.case.causal
    gqa = problem.case.heads[0] != problem.case.heads[1]

    def call() -> list[torch.Tensor]:
        return [sdpa(q, k, v, is_causal=causal, enable_gqa=gqa) for q, k, v in parts]

    return Run(call, lambda outs: [torch.cat([out[0].transpose(0, 1) for out in outs])])


def _sdpa_grouped(problem: AttentionProblem) -> Run:
    q, k, v = (padded(problem, tensor) for tensor in (problem.q, problem.k, problem.v))
    mask = _mask(problem.case, q.device)
    rows = q.view(q.shape[0], k.shape[1], -1, q.shape[3])  # the query heads of a KV head become its queries

    def call() -> torch.Tensor:
        return sdpa(rows, k, v, attn_mask=mask).view(*q.shape[:3], -1)

    return Run(call, lambda out: unpadded(problem, out))


OURS = Peer("flashxla", _ours)
SDPA = Peer("sdpa", _sdpa)
SDPA_LOOP = Peer("sdpa, a call a sequence", _sdpa_loop, serves=lambda case, device: case.ragged)
SDPA_GROUPED = Peer(
    "sdpa, heads as queries",
    _sdpa_grouped,
    serves=lambda case, device: case.heads[0] != case.heads[1] and not case.causal,
)
