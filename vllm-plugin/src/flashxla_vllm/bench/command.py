"""What `flashxla bench vllm` runs: each part in a process of its own, one after the other."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from flashxla import output_file
from flashxla.bench import machine
from flashxla_vllm.bench import child, model, report, serving

_GPU: dict[str, Any] = {
    "input": 512,
    "output": 128,
    "requests": [64, 256],
    "batches": [1, 64, 256],
    "rates": [4.0, 16.0, 32.0],
    "seconds": 10,
    "repeats": 3,
    "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": None,
}
_QUICK: dict[str, Any] = {
    "input": 24,
    "output": 16,
    "requests": [4],
    "batches": [1, 4],
    "rates": [4.0],
    "seconds": 2,
    "repeats": 1,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 64 << 20,
}
# The engines by name, and the environment that chooses each.
OURS, XLA = "flashxla", "pure XLA"
PARTS = {OURS: ("steps", "offline", "serving"), XLA: ("steps",)}
_ENGINES: dict[str, dict[str, str]] = {OURS: {}, XLA: {"FLASHXLA_VLLM_ATTENTION": "xla"}}


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write the files that were asked for. Returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="flashxla-bench-vllm-") as folder:
        settings = (_QUICK if args.quick else _GPU) | {"quick": args.quick, "model": folder}
        content: dict[str, Any] = {
            "command": " ".join(
                ["flashxla bench vllm", *(f"--{x}" for x in ("peers", "quick") if getattr(args, x))]
            ),
            "machine": machine.facts(),
            "versions": machine.versions()
            | {name: metadata.version(name) for name in ("vllm", "tpu-inference")},
            "settings": {name: value for name, value in settings.items() if name != "model"},
            "engines": {},
        }
        _measure(content, settings, args)
    print(report.tables(content))
    if args.plot:
        report.plot(content, args.plot)
    return 0


def _measure(content: dict[str, Any], settings: dict[str, Any], args: argparse.Namespace) -> None:
    """Fill in what is measured. The file is written after each part: a run takes minutes."""
    folder = settings["model"]
    environment = _environment(args.device, folder)
    work = model.write(Path(folder), args.quick)
    ceilings = content["ceilings"] = _child("ceilings", settings, environment)
    for name in (OURS, XLA) if args.peers else (OURS,):
        chosen = environment | _ENGINES[name]
        results: dict[str, Any] = {}
        content["engines"][name] = results
        for part in PARTS[name]:
            if part == "serving":
                results[part] = serving.measure(settings, chosen, f"{folder}/server.log")
            else:
                results[part] = _child(part, settings, chosen)
            report.add_shares(results, settings, work, ceilings)
            if args.json:
                output_file.write_json(args.json, content)


def _environment(device: str, folder: str) -> dict[str, str]:
    return {
        "JAX_PLATFORMS": "cpu" if device == "cpu" else "cuda,cpu",
        # The first engine finds nothing compiled; the later ones start warm.
        "VLLM_XLA_CACHE_PATH": f"{folder}/compiled",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _child(part: str, settings: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "flashxla_vllm.bench.child", json.dumps(settings | {"part": part})]
    ended = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(
            f"{part}: exit code {ended.returncode}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        )
    return child.read_result(ended.stdout)
