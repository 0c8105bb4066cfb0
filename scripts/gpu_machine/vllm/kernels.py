"""kernels.py [--quick]: the GPU's kernels in a decode step and in a step of prompts, by time.

The model and the engine are those of `flashxla bench vllm`. Results: $OUT/kernels.txt, a table for each kind of step:
microseconds of a step, launches, the kernel.
"""

from __future__ import annotations

import collections
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
LINES = 45


def main(quick: bool) -> None:
    """Trace some steps of each batch, and of prompts alone."""
    from flashxla_vllm.bench import child, command, model

    folder = os.environ.get("START_FOLDER") or tempfile.mkdtemp(prefix="flashxla-start-")
    settings = (command._QUICK if quick else command._GPU) | {"quick": quick, "model": folder}
    model.write(Path(folder), quick)
    device = "cpu" if os.environ["JAX_PLATFORMS"] == "cpu" else "cuda"
    os.environ.update(command._environment(device, folder))
    llm, _ = child._engine(settings)
    out = Path(os.environ.get("OUT", tempfile.gettempdir())) / "kernels.txt"
    text = ""
    for batch in settings["batches"][1:]:
        text += f"== decode, batch {batch}\n" + table(*traced(llm.llm_engine, batch, settings, prompts=False))
    batch = 4 * settings["max_num_batched_tokens"] // settings["input"]
    text += f"== prompts, {settings['max_num_batched_tokens']} tokens\n"
    text += table(*traced(llm.llm_engine, batch, settings, prompts=True))
    out.write_text(text)
    print(text)


def traced(engine: Any, batch: int, settings: dict[str, Any], prompts: bool) -> tuple[Path, int]:
    """The folder of a trace, and of how many steps it is."""
    import jax
    from vllm import SamplingParams

    tokens = 1 if prompts else settings["output"]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    folder = Path(tempfile.mkdtemp())
    for traced_round in (False, True):
        for i in range(batch):
            prompt = [(7 * i + 13 * j) % 500 + 3 for j in range(settings["input"])]
            engine.add_request(f"{time.time()}-{i}", {"prompt_token_ids": prompt}, params)
        count = 0
        first, last = (0, 10**9) if prompts else (settings["output"] // 2, settings["output"] // 2 + 8)
        while engine.has_unfinished_requests():
            if traced_round and count == first:
                jax.profiler.start_trace(str(folder))
            engine.step()
            count += 1
            if traced_round and count == last:
                jax.profiler.stop_trace()
        if traced_round and prompts:
            jax.profiler.stop_trace()
    return folder, 4 if prompts else last - first


def table(folder: Path, steps: int) -> str:
    """Kernels by time."""
    import jax

    times: collections.Counter[str] = collections.Counter()
    launches: collections.Counter[str] = collections.Counter()
    (file,) = folder.rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines if "GPU:0" in plane.name else ():
            for event in line.events if line.name.startswith("Stream") else ():
                times[event.name] += event.duration_ns
                launches[event.name] += 1
    rows = [f"{sum(times.values()) / 1e3 / steps:10.1f} {sum(launches.values()) / steps:8.1f}  all"]
    for name, ns in times.most_common(LINES):
        rows.append(f"{ns / 1e3 / steps:10.1f} {launches[name] / steps:8.1f}  {name[:150]}")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main("--quick" in sys.argv)
