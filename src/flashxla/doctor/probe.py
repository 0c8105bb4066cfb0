"""Decodes a few steps through a front end and reports what happened to the caches, as JSON.

"torch_cuda" is eager PyTorch on a GPU, which compiles nothing: its proof is pointers and values.

Run in a process of its own (`python -m flashxla.doctor.probe lazy`): XLA reads the flag that makes it dump its
programs only once, and a crash stays contained. `run` starts that process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashxla.doctor import hlo

FRONTENDS = ("lazy", "openxla", "jax")
HEADS, HEAD_SIZE, BLOCK_SIZE, SEQUENCES = 2, 64, 16, 3


@dataclasses.dataclass(frozen=True)
class Probe:
    """What a front end did with its caches.

    largest_error: against the same steps in plain PyTorch or, where that is missing, JAX without jit.
    targets: the custom calls of the step's program.
    """

    frontend: str
    device: str
    pointers_stay: bool
    largest_error: float
    cache_bytes: int
    cache_copies: list[str]
    temp_bytes: int
    programs: int
    targets: list[str]

    @property
    def in_place(self) -> bool:
        """Whether the writes were in place, and right."""
        return self.pointers_stay and not self.cache_copies and self.largest_error < 1e-5


def run(
    frontend: str,
    layers: int = 3,
    steps: int = 3,
    blocks: int = 64,
    pjrt_device: str | None = None,
    timeout: float = 300,
) -> Probe:
    """Probe a front end in a process of its own. Raises RuntimeError with its output if that fails.

    pjrt_device: where PyTorch/XLA runs, "CPU" or "CUDA"; by default where PJRT_DEVICE says, else "CPU".
    """
    with tempfile.TemporaryDirectory(prefix="flashxla-") as dump:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text"
        command = [sys.executable, "-m", "flashxla.doctor.probe", frontend]
        command += [f"--layers={layers}", f"--steps={steps}", f"--blocks={blocks}", f"--dump={dump}"]
        environment = {**os.environ, "XLA_FLAGS": flags.strip()}
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        environment["PJRT_DEVICE"] = pjrt_device or environment.get("PJRT_DEVICE", "CPU")
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    if done.returncode != 0:
        raise RuntimeError(f"the {frontend} probe failed:\n{done.stdout}\n{done.stderr}")
    return Probe(**json.loads(done.stdout.splitlines()[-1]))


# The steps: `layers` times a cache write and attention on the new cache, each layer fed by the one before.


def _step(fx: Any, key: Any, value: Any, query: Any, caches: Any, slots: Any, meta: Any) -> Any:
    context_lens, block_tables, query_start_loc, num_seqs = meta
    new_caches = []
    for key_cache, value_cache in caches:
        written = fx.reshape_and_cache_flash(query[:, :HEADS] + key, value, key_cache, value_cache, slots)
        new_caches.append(written or (key_cache, value_cache))
        query = fx.paged_attention(
            query, new_caches[-1], context_lens, block_tables, query_start_loc, num_seqs, HEAD_SIZE**-0.5
        )
    return query, new_caches


def _inputs(blocks: int, step: int) -> tuple[Any, ...]:
    import numpy as np

    random = np.random.default_rng(step)
    key, value = random.standard_normal((2, SEQUENCES, HEADS, HEAD_SIZE), dtype=np.float32)
    query = random.standard_normal((SEQUENCES, 2 * HEADS, HEAD_SIZE), dtype=np.float32)
    tables = (np.arange(SEQUENCES) * (blocks // SEQUENCES)).astype(np.int32)
    slots = tables * BLOCK_SIZE + step
    lengths = np.full((SEQUENCES,), step + 1, np.int32)
    starts = np.arange(SEQUENCES + 1, dtype=np.int32)
    return key, value, query, slots, (lengths, tables[:, None], starts, np.array([SEQUENCES], np.int32))


def _torch_steps(layers: int, steps: int, blocks: int, device: Any, step_fn: Callable, sync: Callable) -> Any:
    import torch

    shape = (blocks, BLOCK_SIZE, HEADS, HEAD_SIZE)
    caches = [tuple(torch.zeros(shape, device=device) for _ in range(2)) for _ in range(layers)]
    sync()
    pointers, outputs = [_pointers(caches)], []
    for step in range(steps):
        key, value, query, slots, meta = _inputs(blocks, step)
        tensors = [torch.from_numpy(a).to(device) for a in (key, value, query, slots, *meta)]
        out = step_fn(*tensors[:3], caches, tensors[3], tensors[4:])
        sync()
        pointers.append(_pointers(caches))
        outputs.append(out.cpu())
    return outputs, pointers


def _pointers(caches: Any) -> list[int]:
    tensors = [t for pair in caches for t in pair]
    if tensors[0].device.type != "xla":
        return [t.data_ptr() for t in tensors]
    import torch_xla

    return [torch_xla._XLAC._unsafe_buffer_pointer(t) for t in tensors]


def _probe_torch_xla(frontend: str, layers: int, steps: int, blocks: int) -> tuple[str, bool, float]:
    import torch
    import torch_xla

    import flashxla.torch as fx

    def step(*args: Any) -> Any:
        return _step(fx, *args)[0]

    def sync() -> None:
        torch_xla.sync(wait=True)

    expected, _ = _torch_steps(layers, steps, blocks, "cpu", step, lambda: None)
    step_fn = torch.compile(step, backend="openxla") if frontend == "openxla" else step
    got, pointers = _torch_steps(layers, steps, blocks, torch_xla.device(), step_fn, sync)
    error = max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True))
    return str(torch_xla._XLAC._xla_get_devices()[0]), all(p == pointers[0] for p in pointers), error


def _probe_torch_cuda(layers: int, steps: int, blocks: int) -> tuple[str, bool, float]:
    import torch

    import flashxla.torch as fx

    def step(*args: Any) -> Any:
        return _step(fx, *args)[0]

    expected, _ = _torch_steps(layers, steps, blocks, "cpu", step, lambda: None)
    got, pointers = _torch_steps(layers, steps, blocks, "cuda", step, torch.cuda.synchronize)
    error = max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True))
    return torch.cuda.get_device_name(), all(p == pointers[0] for p in pointers), error


def _probe_jax(layers: int, steps: int, blocks: int) -> tuple[str, bool, float]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import flashxla.jax as fx

    def step(*args: Any) -> Any:
        return _step(fx, *args)

    def caches() -> Any:
        shape = (blocks, BLOCK_SIZE, HEADS, HEAD_SIZE)
        return [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(layers)]

    def pointers(caches: Any) -> list[int]:
        return [x.unsafe_buffer_pointer() for pair in caches for x in pair]

    donated, plain, error = caches(), caches(), 0.0
    compiled = jax.jit(step, donate_argnums=3)
    start, stay = pointers(donated), True
    for i in range(steps):
        key, value, query, slots, meta = _inputs(blocks, i)
        out, donated = compiled(key, value, query, donated, slots, meta)
        expected, plain = step(key, value, query, plain, slots, meta)
        stay &= pointers(donated) == start
        error = max(error, float(np.abs(out - expected).max()))
    return str(jax.devices()[0]), stay, error


def main() -> None:
    """Run one probe in this process and print it as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("frontend", choices=(*FRONTENDS, "torch_cuda"))
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--dump", type=Path, required=True)
    args = parser.parse_args()
    sizes = (args.layers, args.steps, args.blocks)
    if args.frontend == "jax":
        device, stay, error = _probe_jax(*sizes)
    elif args.frontend == "torch_cuda":
        device, stay, error = _probe_torch_cuda(*sizes)
    else:
        device, stay, error = _probe_torch_xla(args.frontend, *sizes)
    cache_bytes = args.blocks * BLOCK_SIZE * HEADS * HEAD_SIZE * 4
    # The step is the program with every layer's write; JAX without jit compiles each call by itself too.
    programs = [
        p for p in hlo.dumped_programs(args.dump) if p.targets().count("flashxla_kv_cache") == args.layers
    ]
    if not programs and args.frontend in FRONTENDS:
        raise RuntimeError("XLA dumped no program with the cache writes")
    probe = Probe(
        frontend=args.frontend,
        device=device,
        pointers_stay=stay,
        largest_error=error,
        cache_bytes=cache_bytes,
        cache_copies=[copy for p in programs for copy in p.copies(at_least=cache_bytes)],
        temp_bytes=max((p.temp_bytes for p in programs), default=0),
        programs=len(programs),
        targets=programs[0].targets() if programs else [],
    )
    print(json.dumps(dataclasses.asdict(probe)))


if __name__ == "__main__":
    main()
