"""The gradients of causal attention of prompts over their own keys, by PyTorch's autograd."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flashxla.bench import attention, cases, ceilings
from flashxla.bench.attention import AttentionProblem
from flashxla.bench.cases import AttentionCase, prompts
from flashxla.bench.topic import Peer, Run, Topic, Unavailable

_ON_GPU = functools.partial(AttentionCase, heads=(32, 8))
_8K = prompts(8192)

CASES = {
    "cpu": (
        AttentionCase("1 x 2048", prompts(2048)),
        AttentionCase("1 x 2048, heads of 64", prompts(2048), dim=64),
        AttentionCase("4 x 512", prompts(*[512] * 4)),
        AttentionCase("64 x 64", prompts(*[64] * 64)),
        AttentionCase("1 x 2048, 32 heads on 8", prompts(2048), heads=(32, 8)),
        AttentionCase("ragged, 8 of 64 to 2048", cases.RAGGED),
    ),
    "cuda": (
        _ON_GPU("1 x 8192", _8K),
        _ON_GPU("1 x 16384", prompts(16384)),
        _ON_GPU("4 x 2048", prompts(*[2048] * 4)),
        _ON_GPU("ragged 16k", prompts(8192, 4096, 2048, 1024, 512, 256, 128, 128)),
        _ON_GPU("1 x 8192, window 1024", _8K, window=1024),
        _ON_GPU("1 x 8192, heads of 64", _8K, dim=64),
        _ON_GPU("1 x 8192, heads of 100", _8K, dim=100),
        _ON_GPU("1 x 8192, heads of 192", _8K, dim=192),
        _ON_GPU("1 x 8192, heads of 256", _8K, dim=256),
        _ON_GPU("1 x 8192, 16 heads of 192, of values 128", _8K, heads=(16, 16), dim=192, v_dim=128),
        _ON_GPU("1 x 8192, deterministic", _8K, deterministic=True),
    ),
    "quick": (
        AttentionCase("2 x 32", prompts(32, 32), heads=(2, 2), dim=32),
        AttentionCase("ragged, 4 heads on 2", prompts(7, 33), heads=(4, 2), dim=32),
        AttentionCase("ragged, window 9", prompts(7, 33), heads=(4, 2), dim=32, window=9),
        AttentionCase("2 x 32, heads of 32, of values 16", prompts(32, 32), dim=32, v_dim=16),
        AttentionCase("2 x 32, deterministic", prompts(32, 32), dim=32, deterministic=True),
    ),
}


def _work(case: AttentionCase, dtype: torch.dtype) -> float:
    """Floating point operations: three products of keys' columns and two of values'."""
    dim, v_dim = case.dims
    return cases.multiplied_pairs(case) * (3 * dim + 2 * v_dim)


def _gradient_of_out(problem: AttentionProblem) -> torch.Tensor:
    """The same numbers for all contenders."""
    generator = torch.Generator().manual_seed(1)
    shape = (*problem.q.shape[:2], problem.v.shape[-1])
    return torch.randn(shape, generator=generator).to(problem.q)


def _sources(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.detach().clone().requires_grad_() for x in tensors)


@contextlib.contextmanager
def _as_asked(case: AttentionCase) -> Iterator[None]:
    """PyTorch's own attention is told so for all operations at once."""
    before = torch.are_deterministic_algorithms_enabled()
    if case.deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if case.deterministic:
            torch.use_deterministic_algorithms(before)


def _ours(problem: AttentionProblem) -> Run:
    q, k, v = sources = _sources(problem.q, problem.k, problem.v)
    out = attention.OURS.build(dataclasses.replace(problem, q=q, k=k, v=v)).call()
    grad = _gradient_of_out(problem)
    return Run(lambda: torch.autograd.grad(out, sources, grad, retain_graph=True), list)


def _padded(
    problem: AttentionProblem, forward: Callable[..., torch.Tensor], repeats: int = 1
) -> tuple[Callable[[], Any], Callable[[Any], list[torch.Tensor]]]:
    """The gradients of a function of padded q, k and v. repeats: how often it is given each KV head."""
    q, k, v = (attention.padded(problem, x) for x in (problem.q, problem.k, problem.v))
    q, k, v = sources = _sources(q, *(x.repeat_interleave(repeats, 1) for x in (k, v)))
    with _as_asked(problem.case):
        out = forward(q, k, v)
    grad = attention.padded(problem, _gradient_of_out(problem))

    def call() -> tuple[torch.Tensor, ...]:
        with _as_asked(problem.case):
            return torch.autograd.grad(out, sources, grad, retain_graph=True)

    def results(gradients: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        of_q, *of_keys = gradients
        summed = [x.unflatten(1, (-1, repeats)).sum(2) for x in of_keys]
        return [x for gradient in (of_q, *summed) for x in attention.unpadded(problem, gradient)]

    return call, results


def _sdpa(problem: AttentionProblem) -> Run:
    case = problem.case
    gqa = case.heads[0] != case.heads[1]
    mask = None if case.window is None else _band(case, problem.q.device)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)

    return _tried(lambda: Run(*_padded(problem, forward)))


def _band(case: AttentionCase, device: torch.device) -> torch.Tensor:
    """The keys that a causal window leaves, [longest, longest]."""
    assert case.window is not None
    longest = max(queries for queries, _ in case.lens)
    every = torch.ones(longest, longest, dtype=torch.bool, device=device)
    return every.tril() & every.triu(1 - case.window)


def _tried(build: Callable[[], Run]) -> Run:
    """A run, if PyTorch's kernel serves the case, and the memory holds what it needs: the first call says so."""
    try:
        run = build()
        run.call()
    except RuntimeError as error:
        raise Unavailable(str(error).strip().splitlines()[0]) from None
    return run


def _of_backend(problem: AttentionProblem, backend: SDPBackend, repeated: bool = False) -> Run:
    """By one of the kernels behind PyTorch's function. repeated: KV heads, outside the timing."""
    heads, kv_heads = problem.case.heads

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    return _tried(lambda: Run(*_padded(problem, forward, heads // kv_heads if repeated else 1)))


def _flash_varlen(problem: AttentionProblem) -> Run:
    """FlashAttention-2's ragged kernel as PyTorch has it; its causal mask is aligned as ours."""
    case = problem.case
    q, k, v = sources = _sources(problem.q, problem.k, problem.v)
    lens = [queries for queries, _ in case.lens]
    offsets = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=q.device)
    window = {} if case.window is None else {"window_size_left": case.window - 1, "window_size_right": 0}
    grad = _gradient_of_out(problem)

    def build() -> Run:
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, offsets, offsets, max(lens), max(lens), 0.0, True, False, **window
        )[0]
        return Run(lambda: torch.autograd.grad(out, sources, grad, retain_graph=True), list)

    return _tried(build)


def _sdpa_loop(problem: AttentionProblem) -> Run:
    lens = [queries for queries, _ in problem.case.lens]
    parts = []
    for q, k, v, grad in zip(
        *(x.split(lens) for x in (problem.q, problem.k, problem.v, _gradient_of_out(problem))), strict=True
    ):
        *heads_first, grad_first = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v, grad))
        q, k, v = sources = _sources(*heads_first)
        out = sdpa(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        parts.append((out, sources, grad_first))

    def call() -> list[tuple[torch.Tensor, ...]]:
        return [torch.autograd.grad(out, sources, grad, retain_graph=True) for out, sources, grad in parts]

    def results(gradients: Sequence[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        return [torch.cat([x[0].transpose(0, 1) for x in of]) for of in zip(*gradients, strict=True)]

    return Run(call, results)


def _is_even(case: AttentionCase, device: str) -> bool:
    """Whether the kernels behind PyTorch's function serve a case: nothing padded, no window."""
    return device == "cuda" and not case.ragged and case.window is None


_CUDNN = functools.partial(_of_backend, backend=SDPBackend.CUDNN_ATTENTION)

TOPIC = Topic(
    name="backward",
    unit="TFLOP/s",
    scale=1e12,
    cases=CASES,
    problem=attention.problem,
    work=_work,
    ceiling=ceilings.matmul,
    ours=Peer("flashxla", _ours),
    peers=(
        Peer("sdpa", _sdpa, serves=lambda case, device: device == "cpu" or _is_even(case, device)),
        Peer("sdpa cuDNN", _CUDNN, serves=_is_even),
        Peer(
            "sdpa cuDNN, KV heads repeated",
            functools.partial(_CUDNN, repeated=True),
            serves=lambda case, device: _is_even(case, device) and case.heads[0] != case.heads[1],
        ),
        Peer("sdpa FA2", functools.partial(_of_backend, backend=SDPBackend.FLASH_ATTENTION), serves=_is_even),
        Peer(
            "FA2 varlen",
            _flash_varlen,
            serves=lambda case, device: device == "cuda" and not _is_even(case, device),
        ),
        Peer(
            "sdpa, a call a sequence",
            _sdpa_loop,
            serves=lambda case, device: case.ragged and case.window is None,
        ),
    ),
    roundings=4.0,  # PyTorch rounds weights and the scores' gradients to 16 bits before it sums them up
)
