"""The section step in PyTorch on XLA, a front end of it in a process.

What a step costs the host under openxla: each tensor that it updates far more than each that it reads, as AOTAutograd
hands every update over by itself. Whether weights and caches are arguments or closed over makes no difference.
In lazy mode each operation that the step calls costs its tracing.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import compare, llama, llama_torch, profile, step_frontends, timers
from benchmarks.compare import Contender, Prepared, Row, WrongResult
from benchmarks.settings import Settings
from benchmarks.step_frontends import Frontend

EAGER_ADD, EAGER_OURS = "x + 1", "a layer's write and attention"


def run(name: str, case: str, settings: Settings) -> Iterator[Row]:
    """The rows of a front end."""
    frontend = step_frontends.start(name, settings)
    step = _Step(frontend, case, settings)
    count, keys = llama.batch_of(case, settings)
    contender = Contender(name, step.prepare, ours=True, work=llama.work(settings, count, keys))
    timed = False
    with torch.no_grad():
        for row in compare.run(case, settings.dtype, [contender], settings):
            if "us" in row:
                timed = True
                row.update(tokens_per_second=count / row["us"] * 1e6, **step.facts())
            yield row
        if timed and settings.profile:
            yield {"begin": [profile.title(name), False]}
            yield profile.row(case, settings, name, step.dispatch, 1, frontend.wait, frontend.tracers)


class _Step:
    """A step of the whole model."""

    def __init__(self, frontend: Frontend, case: str, settings: Settings) -> None:
        self._frontend, self._settings = frontend, settings
        self._count, self._keys = llama.batch_of(case, settings)

    def prepare(self) -> Prepared:
        """Makes the weights and compiles it."""
        settings, config = self._settings, llama.config(self._settings)
        frontend = self._frontend
        error = _logits_error(frontend, settings)
        params, caches, batch = _on_device(frontend, config, self._count, self._keys, settings)
        self._tokens = torch.zeros(self._count, dtype=torch.int32, device=frontend.device)
        frontend.sync()
        self._step = frontend.ready(functools.partial(_decode, config))
        self._arguments = params, caches, batch
        before = frontend.compiled()
        start = time.perf_counter()
        for _ in range(2):  # a second program, if there is one, is not to be timed
            frontend.wait(self.dispatch())
        # As serving engines do: else Python's garbage collector looks at all of PyTorch's objects again and again.
        gc.collect()
        gc.freeze()
        self._facts = {
            "compile_seconds": time.perf_counter() - start,
            "compiled_programs": frontend.compiled() - before,
        }
        print(f"  compiled in {self._facts['compile_seconds']:.0f} s", file=sys.stderr, flush=True)

        def timer() -> timers.Timer:
            return timers.ProgramTimer(self.dispatch, 1, 60e-3, frontend.wait, frontend.program)

        return Prepared(lambda: error, timer)

    def dispatch(self) -> torch.Tensor:
        """One step on the last one's tokens and caches; the lengths stay."""
        params, caches, batch = self._arguments
        self._tokens = self._step(params, caches, self._tokens, batch)
        return self._tokens

    def facts(self) -> Row:
        """What the host does for a step, and how many programs it runs."""
        steps, frontend = 10, self._frontend

        def run() -> None:
            for _ in range(steps):
                last = self.dispatch()
            frontend.wait(last)

        before = frontend.compiled()
        programs = frontend.executions(run) / steps
        self._facts["compiled_programs"] += frontend.compiled() - before
        return {
            **self._facts,
            "programs_per_step": programs,
            **timers.host_time(self.dispatch, frontend.wait),
            **({"eager_us": self._eager()} if frontend.has_eager else {}),
        }

    def _eager(self) -> dict[str, float]:
        """Microseconds of the host for an operation that is called by itself: PyTorch's, and flashxla's of a layer."""
        _, caches, batch = self._arguments
        config, frontend = llama.config(self._settings), self._frontend
        dtype = getattr(torch, self._settings.dtype)
        heads = config.heads[0] + 2 * config.heads[1]
        qkv = torch.randn(self._count, heads, config.dim, dtype=dtype, device=frontend.device)
        calls = {
            EAGER_ADD: lambda: qkv + 1,
            EAGER_OURS: lambda: llama_torch.ours(config, qkv, caches[0], batch),
        }
        return {name: timers.host_time(call, frontend.wait)["host_us"] for name, call in calls.items()}


def _on_device(
    frontend: Frontend, config: llama.Config, count: int, keys: int, settings: Settings
) -> tuple[Any, Any, Any]:
    """Weights, caches and the batch."""
    dtype, device = getattr(torch, settings.dtype), frontend.device
    batch = {name: torch.from_numpy(x).to(device) for name, x in llama.batch(count, keys).items()}
    params = llama_torch.init(config, dtype, device, frontend.sync)
    caches = llama_torch.caches(config, batch["tables"].numel(), dtype, device, frontend.sync)
    return params, caches, batch


def _decode(config: Any, params: Any, caches: Any, tokens: torch.Tensor, batch: Any) -> torch.Tensor:
    """The next tokens."""
    logits = llama_torch.step(config, llama_torch.ours, params, caches, tokens, batch)
    return logits.argmax(dim=-1).to(torch.int32)


def _logits_error(frontend: Frontend, settings: Settings) -> float:
    """Of one layer against PyTorch on the CPU in float32: the logits', or if larger that of the caches' new tokens."""
    counts, keys = llama.batches(settings)
    config = llama.one_layer(settings)
    params, caches, batch = _on_device(frontend, config, counts[1], keys, settings)
    tokens = torch.arange(counts[1], dtype=torch.int32, device=frontend.device)
    frontend.sync()
    # Before the step, which writes into the caches.
    exact_params, exact_caches, *exact = (_exact(frontend, x) for x in (params, caches, tokens, batch))
    right = llama_torch.step(config, llama_torch.gather, exact_params, exact_caches, *exact)
    step = frontend.ready(functools.partial(llama_torch.step, config, llama_torch.ours))
    got = frontend.cpu(step(params, caches, tokens, batch))
    slots = llama.batch(counts[1], keys)["slots"]
    pairs = [(got, right)]
    for cache, exact_cache in zip(frontend.cpu(caches[0]), exact_caches[0], strict=True):
        pairs.append((cache.flatten(0, 1)[slots], exact_cache.flatten(0, 1)[slots]))
    torch._dynamo.reset()  # the timed step's guards are to be its own alone
    errors = [float((got.float() - right).norm() / right.norm()) for got, right in pairs]
    if not all(error <= llama.TOLERANCE for error in errors):
        raise WrongResult(
            f"wrong result: relative errors {errors} of the logits, the keys, the values of one layer"
        )
    return max(errors)


def _exact(frontend: Frontend, value: Any) -> Any:
    """The same numbers on the CPU, in float32."""
    if isinstance(value, torch.Tensor):
        x = frontend.cpu(value)
        return x.float() if x.is_floating_point() else x
    if isinstance(value, dict):
        return {name: _exact(frontend, one) for name, one in value.items()}
    return type(value)(_exact(frontend, one) for one in value)
