"""backward.py TABLE...: how fast gradients of attention are, beside a matrix product of PyTorch.

time: calls of several head sizes, beside cuDNN, us and TFLOP/s. ab: a line of them, to be compared with another
library's. train: the kernels of a training step of benchmarks.train_step, by time, of flashxla and of cuDNN.
"""

from __future__ import annotations

import collections
import tempfile
from collections.abc import Callable
from statistics import median

from tables import print_chosen

LINES = 30
# Heads, KV heads, head size, sequences, tokens.
SHAPES = (
    (32, 8, 128, 1, 8192),
    (32, 8, 128, 1, 16384),
    (32, 8, 128, 4, 2048),
    (32, 8, 64, 1, 8192),
    (32, 8, 64, 4, 2048),
    (16, 16, 64, 2, 4096),
    (32, 8, 96, 1, 8192),
    (16, 8, 256, 1, 8192),
    (16, 8, 192, 1, 8192),
)


def milliseconds(function: Callable[[], object], calls: int = 5, rounds: int = 5) -> float:
    """The median time of a call; each takes the GPU longer than the host."""
    import torch

    for _ in range(2):
        function()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return median(times)


def gradients(shape: tuple[int, ...], deterministic: bool = False) -> Callable[[], object]:
    """The backward pass of causal attention over alike sequences."""
    import torch

    import flashxla.torch as fx

    heads, kv_heads, dim, sequences, tokens = shape
    q, k, v, grad_out = (
        torch.randn(sequences * tokens, n, dim, device="cuda", dtype=torch.bfloat16, requires_grad=i < 3)
        for i, n in enumerate((heads, kv_heads, kv_heads, heads))
    )
    bounds = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * tokens
    out = fx.flash_attn_varlen_func(
        q, k, v, tokens, bounds, tokens, bounds, causal=True, deterministic=deterministic
    )
    return lambda: torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)


def cudnn(shape: tuple[int, ...]) -> Callable[[], object]:
    """The same by cuDNN, with the keys' own heads."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads, kv_heads, dim, sequences, tokens = shape
    q, k, v, grad_out = (
        torch.randn(sequences, n, tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=i < 3)
        for i, n in enumerate((heads, kv_heads, kv_heads, heads))
    )
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return lambda: torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)


def rate(shape: tuple[int, ...], ms: float) -> float:
    """TFLOP/s: five products of half of the scores."""
    heads, _, dim, sequences, tokens = shape
    return 5 * heads * dim * sequences * tokens**2 / ms / 1e9


def table_time() -> None:
    """Each shape, and cuDNN in turn."""
    import torch

    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for shape in SHAPES:
        calls = {"flashxla": gradients(shape), "deterministic": gradients(shape, deterministic=True)}
        try:
            calls["cuDNN"] = cudnn(shape)
        except RuntimeError as error:
            print(f"{shape} cuDNN: {str(error)[:80]}")
        times: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
        for _ in range(3):
            for name, function in calls.items():
                times[name].append(milliseconds(function))
        ceiling = 2 * 8192**3 / milliseconds(lambda: x @ y) / 1e9
        each = ", ".join(
            f"{name} {median(ms):.3f} ms {rate(shape, median(ms)):.0f}" for name, ms in times.items()
        )
        print(f"{shape} {each} TFLOP/s; ceiling {ceiling:.0f}", flush=True)


def table_ab() -> None:
    """TFLOP/s of each shape."""
    print(
        ", ".join(f"{shape} {rate(shape, milliseconds(gradients(shape))):.0f}" for shape in SHAPES), "TFLOP/s"
    )


def table_train() -> None:
    """Microseconds of a step, launches, the kernel."""
    import jax

    from benchmarks import timeline
    from benchmarks.train_step import CASES, Model, flashxla, padded

    model, lens = Model(), CASES["1 x 8192"]
    weights = model.weights()
    x = jax.random.normal(jax.random.key(1), (sum(lens), model.width), jax.numpy.bfloat16)
    for name, attend in {"flashxla": flashxla(lens), "cuDNN": padded(lens, "cudnn")}.items():
        step = jax.jit(jax.value_and_grad(lambda w, x, attend=attend: model.loss(w, x, attend)))
        jax.block_until_ready([step(weights, x) for _ in range(3)])
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready([step(weights, x) for _ in range(3)])
            rows = timeline.kernels(timeline.read(folder), 3)
        print(
            f"== {name}\n{sum(row['us'] for row in rows):10.1f} {sum(row['launches'] for row in rows):8.1f}  all"
        )
        for row in rows[:LINES]:
            print(f"{row['us']:10.1f} {row['launches']:8.1f}  {row['name'][:130]}", flush=True)


TABLES = {"time": table_time, "ab": table_ab, "train": table_train}


if __name__ == "__main__":
    print_chosen(TABLES, __doc__)
