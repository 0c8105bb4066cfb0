"""Attention in float64 for a few rows of a batch: what every contender is held against before it is timed."""

from __future__ import annotations

import torch

from benchmarks.batch import Batch
from benchmarks.compare import WrongResult

# Of a head of a row, relative to its norm. A contender may round the softmax weights to its type; Pallas
# adds up partial results in bfloat16. With queries of fp8 the weights may be, too: they keep 4 bits.
TOLERANCE = {"float32": 5e-3, "float16": 2e-2, "bfloat16": 2e-2, "fp8_e4m3": 1e-1}
PEER_TOLERANCE = {"float32": 5e-3, "float16": 1e-1, "bfloat16": 1e-1}


def check(batch: Batch, out: torch.Tensor, ours: bool) -> float:
    """The largest relative error of set 0 over the rows that are looked at. Raises WrongResult."""
    shape = batch.shape
    limit = TOLERANCE[shape.query_dtype] if ours else PEER_TOLERANCE[shape.dtype]
    start, worst = 0, 0.0
    firsts = []
    for new, _ in shape.lens:
        firsts.append(start)
        start += new
    for sequence in _sequences(batch):
        new, _ = shape.lens[sequence]
        rows = sorted({0, new // 2, min(127, new - 1), min(128, new - 1), new - 1})
        expected = _rows(batch, sequence, firsts[sequence], rows)
        got = out[[firsts[sequence] + row for row in rows]].double()
        error = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
        # A NaN must not pass for a small error.
        largest = float(torch.nan_to_num(error, nan=float("inf")).max())
        if not largest <= limit:
            raise WrongResult(f"wrong result: relative error {largest:.2g} in sequence {sequence}")
        worst = max(worst, largest)
    if ours and bool((out[start:] != 0).any()):
        raise WrongResult("wrong result: padded rows are not 0")
    return worst


def _sequences(batch: Batch) -> list[int]:
    lens = batch.shape.lens
    by_keys = sorted(range(len(lens)), key=lambda i: lens[i])
    return sorted({0, len(lens) // 2, len(lens) - 1, by_keys[0], by_keys[-1]})


def _rows(batch: Batch, sequence: int, first: int, rows: list[int]) -> torch.Tensor:
    """The right results of some rows of a sequence, float64 [rows, Hq, D]."""
    shape = batch.shape
    new, num_keys = shape.lens[sequence]
    k, v = (tensor.double() for tensor in batch.dense_of(0, sequence))
    # Row by row: not every PyTorch indexes float8.
    q = torch.stack([batch.q[0][first + row].double() for row in rows])
    q = q.view(len(rows), shape.heads[1], -1, shape.dim)  # the query heads of each KV head
    scores = torch.einsum("rhgd,khd->rhgk", q, k) * shape.dim**-0.5
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    positions = torch.tensor(rows, device=k.device) + num_keys - new
    distance = positions[:, None] - torch.arange(num_keys, device=k.device)
    if batch.slopes is not None:
        penalty = batch.slopes.double().view(1, shape.heads[1], -1, 1) * distance[:, None, None].abs()
        scores = scores - penalty
    hidden = distance < 0
    if shape.window is not None:
        hidden |= distance >= shape.window
    scores.masked_fill_(hidden[:, None, None], -torch.inf)
    if batch.sinks is not None:  # a score without a value
        sinks = batch.sinks.double().view(1, shape.heads[1], -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., :num_keys]
    return torch.einsum("rhgk,khd->rhgd", weights, v).flatten(1, 2)
