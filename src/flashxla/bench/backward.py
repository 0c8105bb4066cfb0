"""The gradients of causal attention of prompts over their own keys, by PyTorch's autograd."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flashxla.bench import attention, ceilings, prefill
from flashxla.bench.attention import AttentionCase, AttentionProblem
from flashxla.bench.topic import Peer, Run, Topic

CASES = {
    "cpu": (
        AttentionCase("1 x 2048", prefill.prompts(2048)),
        AttentionCase("1 x 2048, heads of 64", prefill.prompts(2048), dim=64),
        AttentionCase("4 x 512", prefill.prompts(*[512] * 4)),
        AttentionCase("64 x 64", prefill.prompts(*[64] * 64)),
        AttentionCase("1 x 2048, 32 heads on 8", prefill.prompts(2048), heads=(32, 8)),
        AttentionCase("ragged, 8 of 64 to 2048", prefill.RAGGED),
    ),
    "cuda": (),
    "quick": (
        AttentionCase("2 x 32", prefill.prompts(32, 32), heads=(2, 2), dim=32),
        AttentionCase("ragged, 4 heads on 2", prefill.prompts(7, 33), heads=(4, 2), dim=32),
    ),
}


def _work(case: AttentionCase, dtype: torch.dtype) -> float:
    """Floating point operations: five products, over the keys that causality leaves."""
    return 2.5 * prefill.work(case, dtype)


def _gradient_of_out(problem: AttentionProblem) -> torch.Tensor:
    """The same numbers for all contenders."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(problem.q.shape, generator=generator).to(problem.q)


def _sources(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.detach().clone().requires_grad_() for x in tensors)


def _ours(problem: AttentionProblem) -> Run:
    q, k, v = sources = _sources(problem.q, problem.k, problem.v)
    out = attention.OURS.build(dataclasses.replace(problem, q=q, k=k, v=v)).call()
    grad = _gradient_of_out(problem)
    return Run(lambda: torch.autograd.grad(out, sources, grad, retain_graph=True), list)


def _sdpa(problem: AttentionProblem) -> Run:
    padded = (attention.padded(problem, x) for x in (problem.q, problem.k, problem.v))
    q, k, v = sources = _sources(*padded)
    out = sdpa(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    grad = attention.padded(problem, _gradient_of_out(problem))

    def results(gradients: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        return [x for gradient in gradients for x in attention.unpadded(problem, gradient)]

    return Run(lambda: torch.autograd.grad(out, sources, grad, retain_graph=True), results)


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

    def results(gradients: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        return [torch.cat([x[0].transpose(0, 1) for x in of]) for of in zip(*gradients, strict=True)]

    return Run(call, results)


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
        Peer("sdpa", _sdpa),
        Peer("sdpa, a call a sequence", _sdpa_loop, serves=lambda case, device: case.ragged),
    ),
    roundings=4.0,  # PyTorch rounds weights and the scores' gradients to 16 bits before it sums them up
)
