"""The process that measures a decode step in PyTorch/XLA: a JSON request as its argument, a row a line.

What a step costs the host under openxla: each tensor that it updates far more than each that it reads, as AOTAutograd
hands every update over by itself. Whether weights and caches are arguments or closed over makes no difference.
In lazy mode each operation that the step calls costs its tracing.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator

import torch
import torch_xla
from torch_xla.debug import metrics

from flashxla.bench.gpu import compare, profile, step_host, step_sizes, timers, xla_llama, xla_tracers
from flashxla.bench.gpu.compare import Contender, Prepared, Row
from flashxla.bench.gpu.llama import Config
from flashxla.bench.gpu.settings import Settings
from flashxla.bench.gpu.xla_check import logits_error
from flashxla.bench.gpu.xla_frontends import FRONTENDS, Frontend

_TRACERS = (xla_tracers.by_jax, xla_tracers.by_torch_xla)


def main() -> None:
    """Measure what the request names: {"settings": ..., "frontend": ..., "case": ...}."""
    request = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    # The rows have the standard output for themselves.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    for row in measure(FRONTENDS[request["frontend"]], request["case"], Settings(**request["settings"])):
        print(json.dumps(row), file=out, flush=True)


def _end_with_the_parent() -> None:
    """A process that hangs while nobody waits for it would keep the GPU's memory."""
    sys.stdin.read()
    os._exit(1)


def measure(frontend: Frontend, case: str, settings: Settings) -> Iterator[Row]:
    """The rows of a front end."""
    step = _Step(frontend, case, settings)
    count, keys = step_sizes.batch_of(case, settings)
    work = step_sizes.work(settings, count, keys)
    contender = Contender(frontend.name, step.prepare, ours=True, work=work)
    timed = False
    for row in compare.run(case, settings.dtype, [contender], settings):
        if "us" in row:
            timed = True
            row.update(tokens_per_second=count / row["us"] * 1e6, **step.facts())
        yield row
    if timed and settings.profile:
        yield {"begin": profile.title(frontend.name)}
        yield profile.row(case, settings.dtype, frontend.name, step.dispatch, 1, _wait, _TRACERS)


class _Step:
    """A step of the whole model."""

    def __init__(self, frontend: Frontend, case: str, settings: Settings) -> None:
        self._frontend, self._settings = frontend, settings
        self._count, self._keys = step_sizes.batch_of(case, settings)
        self._config = step_sizes.config(settings)

    def prepare(self) -> Prepared:
        """Makes the weights and compiles it."""
        settings, config = self._settings, self._config
        error = logits_error(self._frontend, settings)
        dtype, device = getattr(torch, settings.dtype), torch_xla.device()
        params = xla_llama.init(config, dtype, device, torch_xla.sync)
        batch = xla_llama.batch(self._count, self._keys)
        caches = xla_llama.caches(config, batch["tables"].numel(), dtype, device, torch_xla.sync)
        on_device = {name: tensor.to(device) for name, tensor in batch.items()}
        self._tokens = torch.zeros(self._count, dtype=torch.int32, device=device)
        torch_xla.sync(wait=True)
        self._step = self._frontend.ready(_decode)
        self._arguments = config, params, caches, on_device
        before = _count("CompileTime")
        start = time.perf_counter()
        for _ in range(2):  # a second program, if there is one, is not to be timed
            _wait(self.dispatch())
        self._facts = {
            "compile_seconds": time.perf_counter() - start,
            "compiled_programs": _count("CompileTime") - before,
        }
        print(f"  compiled in {self._facts['compile_seconds']:.0f} s", file=sys.stderr, flush=True)
        return Prepared(
            lambda: error,
            lambda: timers.ProgramTimer(self.dispatch, 1, 60e-3, _wait, "PyTorch/XLA program"),
        )

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
        programs = (_count("ExecuteTime") - before) / steps
        recompiled = _count("CompileTime") - compiled_before
        self._facts["compiled_programs"] += recompiled
        return {**self._facts, "programs_per_step": programs, **step_host.measure(self.dispatch, _wait)}


def _decode(
    config: Config,
    params: xla_llama.Params,
    caches: list[xla_llama.Cache],
    tokens: torch.Tensor,
    batch: xla_llama.Batch,
) -> torch.Tensor:
    """The next tokens."""
    logits = xla_llama.step(config, xla_llama.ours, params, caches, tokens, batch)
    return logits.argmax(dim=-1).to(torch.int32)


def _wait(tokens: torch.Tensor) -> None:
    """Until they are there: a few numbers cross to the host."""
    tokens.cpu()


def _count(metric: str) -> int:
    data = metrics.metric_data(metric)
    return 0 if data is None else int(data[0])


if __name__ == "__main__":
    main()
