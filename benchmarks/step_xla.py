"""The section step in PyTorch/XLA, a front end of it in a process.

What a step costs the host under openxla: each tensor that it updates far more than each that it reads, as AOTAutograd
hands every update over by itself. Whether weights and caches are arguments or closed over makes no difference.
In lazy mode each operation that the step calls costs its tracing.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_xla
from torch_xla.core import xla_model
from torch_xla.debug import metrics

from benchmarks import compare, llama, llama_torch, profile, timers
from benchmarks.compare import Contender, Prepared, Row, WrongResult
from benchmarks.settings import Settings

_TRACERS = (profile.by_jax, profile.by_torch_xla)

Step = Callable[..., Any]


def run(frontend: str, case: str, settings: Settings) -> Iterator[Row]:
    """The rows of a front end."""
    step = _Step(frontend, case, settings)
    count, keys = llama.batch_of(case, settings)
    contender = Contender(frontend, step.prepare, ours=True, work=llama.work(settings, count, keys))
    timed = False
    with torch.no_grad():
        for row in compare.run(case, settings.dtype, [contender], settings):
            if "us" in row:
                timed = True
                row.update(tokens_per_second=count / row["us"] * 1e6, **step.facts())
            yield row
        if timed and settings.profile:
            yield {"begin": [profile.title(frontend), False]}
            yield profile.row(case, settings, frontend, step.dispatch, 1, _wait, _TRACERS)


def ready(frontend: str, step: Step) -> Step:
    """A step that returns when its program has been handed to the device: traced once, or each time in lazy mode."""
    if frontend == llama.OPENXLA:
        return torch.compile(step, backend="openxla", dynamic=False, fullgraph=True)

    def lazy(*args: Any) -> Any:
        result = step(*args)
        torch_xla.sync()
        return result

    return lazy


class _Step:
    """A step of the whole model."""

    def __init__(self, frontend: str, case: str, settings: Settings) -> None:
        self._frontend, self._settings = frontend, settings
        self._count, self._keys = llama.batch_of(case, settings)

    def prepare(self) -> Prepared:
        """Makes the weights and compiles it."""
        settings, config = self._settings, llama.config(self._settings)
        error = _logits_error(self._frontend, settings)
        params, caches, batch = _on_device(config, self._count, self._keys, settings)
        self._tokens = torch.zeros(self._count, dtype=torch.int32, device=torch_xla.device())
        torch_xla.sync(wait=True)
        self._step = ready(self._frontend, _decode)
        self._arguments = config, params, caches, batch
        before = _count("CompileTime")
        start = time.perf_counter()
        for _ in range(2):  # a second program, if there is one, is not to be timed
            _wait(self.dispatch())
        # As serving engines do: else Python's garbage collector looks at all of PyTorch's objects again and again.
        gc.collect()
        gc.freeze()
        self._facts = {
            "compile_seconds": time.perf_counter() - start,
            "compiled_programs": _count("CompileTime") - before,
        }
        print(f"  compiled in {self._facts['compile_seconds']:.0f} s", file=sys.stderr, flush=True)

        def timer() -> timers.Timer:
            return timers.ProgramTimer(self.dispatch, 1, 60e-3, _wait, "PyTorch/XLA program")

        return Prepared(lambda: error, timer)

    def dispatch(self) -> torch.Tensor:
        """One step on the last one's tokens and caches; the lengths stay."""
        config, params, caches, batch = self._arguments
        self._tokens = self._step(config, params, caches, self._tokens, batch)
        return self._tokens

    def facts(self) -> Row:
        """What the host does for a step, and how many programs it runs."""
        steps = 10
        before, compiled_before = _count("ExecuteTime"), _count("CompileTime")
        for _ in range(steps):
            last = self.dispatch()
        _wait(last)
        xla_model.wait_device_ops()  # a program is counted a little after its results are there
        programs = (_count("ExecuteTime") - before) / steps
        self._facts["compiled_programs"] += _count("CompileTime") - compiled_before
        return {**self._facts, "programs_per_step": programs, **timers.host_time(self.dispatch, _wait)}


def _on_device(config: llama.Config, count: int, keys: int, settings: Settings) -> tuple[Any, Any, Any]:
    """Weights, caches and the batch."""
    dtype, device = getattr(torch, settings.dtype), torch_xla.device()
    batch = {name: torch.from_numpy(x).to(device) for name, x in llama.batch(count, keys).items()}
    params = llama_torch.init(config, dtype, device, torch_xla.sync)
    caches = llama_torch.caches(config, batch["tables"].numel(), dtype, device, torch_xla.sync)
    return params, caches, batch


def _decode(config: Any, params: Any, caches: Any, tokens: torch.Tensor, batch: Any) -> torch.Tensor:
    """The next tokens."""
    logits = llama_torch.step(config, llama_torch.ours, params, caches, tokens, batch)
    return logits.argmax(dim=-1).to(torch.int32)


def _wait(tokens: torch.Tensor) -> None:
    """Until they are there: a few numbers cross to the host."""
    tokens.cpu()


def _count(metric: str) -> int:
    data = metrics.metric_data(metric)
    return 0 if data is None else int(data[0])


def _logits_error(frontend: str, settings: Settings) -> float:
    """Of one layer against PyTorch on the CPU in float32: the logits', or if larger that of the caches' new tokens."""
    counts, keys = llama.batches(settings)
    config = llama.one_layer(settings)
    params, caches, batch = _on_device(config, counts[1], keys, settings)
    tokens = torch.arange(counts[1], dtype=torch.int32, device=torch_xla.device())
    torch_xla.sync(wait=True)
    # Before the step, which writes into the caches.
    exact_params, exact_caches, *exact = (_exact(x) for x in (params, caches, tokens, batch))
    right = llama_torch.step(config, llama_torch.gather, exact_params, exact_caches, *exact)
    got = ready(frontend, llama_torch.step)(config, llama_torch.ours, params, caches, tokens, batch)
    slots = llama.batch(counts[1], keys)["slots"]
    pairs = [(got.cpu(), right)]
    for cache, exact_cache in zip(caches[0], exact_caches[0], strict=True):
        pairs.append((cache.cpu().flatten(0, 1)[slots], exact_cache.flatten(0, 1)[slots]))
    torch._dynamo.reset()  # the timed step's guards are to be its own alone
    errors = [float((got.float() - right).norm() / right.norm()) for got, right in pairs]
    if not all(error <= llama.TOLERANCE for error in errors):
        raise WrongResult(
            f"wrong result: relative errors {errors} of the logits, the keys, the values of one layer"
        )
    return max(errors)


def _exact(value: Any) -> Any:
    """The same numbers on the CPU, in float32."""
    if isinstance(value, torch.Tensor):
        return value.cpu().float() if value.is_floating_point() else value.cpu()
    if isinstance(value, dict):
        return {name: _exact(one) for name, one in value.items()}
    return type(value)(_exact(one) for one in value)
