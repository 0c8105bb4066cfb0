"""Training a Llama of transformers: PyTorch's own device beside TorchTPU. `python -m benchmarks.train_llama`.

The same random weights and batches, AdamW with clipped gradients, each contender in a process of its own. Exits with
1 where a loss differs by more than 1% from PyTorch's, or where flashxla's operation or its gradient was not called.
Eager that is how scaled_dot_product_attention runs on TorchTPU. Compiled, transformers gives that a mask, so there
the model has flashxla's attention by name.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import llama, supervisor
from benchmarks.settings import Settings
from flashxla import output_file
from flashxla.bench import machine

TORCH, EAGER, COMPILED = "PyTorch, eager", "TorchTPU, eager", "TorchTPU, compiled"
CONTENDERS = (TORCH, COMPILED, EAGER)
DTYPES = ("float32", "bfloat16")
TOLERANCE = 0.01
OPERATIONS = ("flash_attn_varlen", "flash_attn_varlen_backward")


@dataclasses.dataclass(frozen=True)
class Work:
    """What each contender does."""

    device: str
    dtype: str  # bfloat16: under autocast
    layers: int = 12
    width: int = 768
    heads: int = 12
    kv_heads: int = 4
    feed_forward: int = 2048
    vocabulary: int = 32000
    batch: int = 8
    tokens: int = 512
    steps: int = 50
    learning_rate: float = 3e-4
    limit: float = 1200.0  # seconds: who takes longer hangs

    @classmethod
    def quick(cls, device: str, dtype: str) -> Work:
        """Tiny: does everything run?"""
        return cls(device, dtype, 2, 64, 4, 2, 128, 256, 4, 16, 4, 1e-3, limit=90.0)


def model(work: Work, attention: str) -> Any:
    """On the CPU, the same weights each time."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=work.vocabulary,
        hidden_size=work.width,
        intermediate_size=work.feed_forward,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=work.kv_heads,
        tie_word_embeddings=False,
        max_position_embeddings=work.tokens,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def measure(name: str, work: Work) -> dict[str, Any]:
    """Losses and seconds of a contender's steps, in this process."""
    device, calls = _start(name, work)
    torch.set_float32_matmul_precision("highest")
    compiled = name == COMPILED
    llama_model = model(work, "flashxla" if compiled else "sdpa")
    parameters = list(llama_model.to(device).train().parameters())
    # capturable: the number of steps is on the device, too, as compiled graphs need it.
    optimizer = torch.optim.AdamW(parameters, lr=work.learning_rate, capturable=compiled)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    forward: Any = llama_model
    if compiled:
        forward, update = (torch.compile(f, backend="tpu", dynamic=False) for f in (llama_model, update))
    generator = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    for _ in range(work.steps):
        # A part of the vocabulary: that is soon learned, so the losses fall.
        ids = torch.randint(work.vocabulary // 4, (work.batch, work.tokens), generator=generator).to(device)
        begun = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=work.dtype == "bfloat16"):
            loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        update()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begun)
        print(f"  {name}: loss {losses[-1]:.4f}, {seconds[-1] * 1e3:.1f} ms", file=sys.stderr, flush=True)
    return {
        "parameters": sum(x.numel() for x in parameters),
        "losses": losses,
        "first_step_seconds": seconds[0],
        "seconds": statistics.median(seconds[work.steps // 2 :]),
        "samples": seconds,
        "calls": dict(calls),
    }


def _start(name: str, work: Work) -> tuple[str, Counter[str]]:
    """The device's name; what of flashxla is called from now on (compiled: recorded in a graph)."""
    calls: Counter[str] = Counter()
    if name == TORCH:
        return work.device, calls
    import flashxla

    if work.device == "cuda":
        flashxla.use_gpu()
    else:
        flashxla.use_cpu()
    import flashxla.transformers
    from flashxla.xla.torch_tpu_calls import Program

    flashxla.transformers.enable()
    run: Any = Program.run

    def counted(program: Any, values: Any) -> Any:
        calls[program.call.op.name] += 1
        return run(program, values)

    Program.run = counted  # type: ignore[assignment, method-assign]
    return "tpu", calls


def compare(work: Work, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each contender's results and how far its losses are from the first one's, or {"failed": why}."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        found[name] = row = _in_process(name, work)
        right = found[names[0]]
        if "failed" not in row and "failed" not in right:
            pairs = zip(row["losses"], right["losses"], strict=True)
            row["difference"] = max(abs(a / b - 1) for a, b in pairs)
            row["ratio"] = row["seconds"] / right["seconds"]
        yield name, row


def is_right(name: str, row: dict[str, Any]) -> bool:
    """Whether a contender's losses are PyTorch's, by flashxla's operations."""
    called = name == TORCH or all(row.get("calls", {}).get(op) for op in OPERATIONS)
    return called and row.get("difference", 1.0) <= TOLERANCE


def _in_process(name: str, work: Work) -> dict[str, Any]:
    frontend = "" if name == TORCH else llama.TORCHTPU
    request = json.dumps({"name": name, "work": dataclasses.asdict(work)})
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "benchmarks.train_llama", "--contender", request],
            env=supervisor.environment(os.environ, Settings(device=work.device), frontend),
            stdout=subprocess.PIPE,
            text=True,
            timeout=work.limit,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"the process took longer than {work.limit:g} s"}
    lines = ended.stdout.splitlines()
    if ended.returncode or not lines:
        return {"failed": f"the process ended with {ended.returncode}"}
    row: dict[str, Any] = json.loads(lines[-1])
    return row


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS[1:], default=list(CONTENDERS[1:]))
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does everything run?")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        request = json.loads(options.contender)
        print(json.dumps(measure(request["name"], Work(**request["work"]))))
        return 0
    report: dict[str, Any] = {
        "machine": machine.facts(),
        "versions": machine.versions(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "results": {},
    }
    right = True
    print(
        f"{'dtype':<10}{'':<22}{'step':>10}{'ratio':>8}{'first step':>12}{'last loss':>11}{'difference':>12}"
    )
    for dtype in options.dtypes:
        work = Work.quick(options.device, dtype) if options.quick else Work(options.device, dtype)
        rows: dict[str, Any] = {}
        report["results"][dtype] = {"work": dataclasses.asdict(work), "rows": rows}
        for name, row in compare(work, [TORCH, *options.contenders]):
            rows[name] = row
            right = right and is_right(name, row)
            print(f"{dtype:<10}{name:<22}{_cells(row)}", flush=True)
            if options.json:
                output_file.write_json(options.json, report)
    return int(not right)


def _cells(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"  {row['failed']}"
    return (
        f"{row['seconds'] * 1e3:>7.1f} ms{row.get('ratio', float('nan')):>8.2f}{row['first_step_seconds']:>10.1f} s"
        f"{row['losses'][-1]:>11.4f}{row.get('difference', float('nan')):>12.1e}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
