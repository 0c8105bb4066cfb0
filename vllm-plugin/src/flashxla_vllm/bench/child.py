"""One engine in a process of its own: python -m flashxla_vllm.bench.child SETTINGS prints its results as JSON."""

from __future__ import annotations

import time

_STARTED = time.perf_counter()  # before the imports that a start waits for

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from typing import Any  # noqa: E402

_RESULT = "flashxla-bench-result: "


def options(settings: dict[str, Any]) -> dict[str, Any]:
    """The engine's arguments, as `vllm serve` and LLM take them."""
    chosen = {
        "model": settings["model"],
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": settings["input"] + settings["output"] + 8,
        "max_num_seqs": max(settings["batches"]),
        "max_num_batched_tokens": settings["max_num_batched_tokens"],
        "enable_prefix_caching": False,
        "seed": 0,
    }
    memory = settings["kv_cache_memory_bytes"]
    return chosen | ({"kv_cache_memory_bytes": memory} if memory else {"gpu_memory_utilization": 0.9})


def read_result(output: str) -> dict[str, Any]:
    """What a child printed."""
    lines = [line for line in output.splitlines() if line.startswith(_RESULT)]
    return json.loads(lines[-1].removeprefix(_RESULT))


def main() -> None:
    """Measure the part that the settings name."""
    settings = json.loads(sys.argv[1])
    result = {"ceilings": ceilings, "offline": offline, "steps": steps}[settings["part"]](settings)
    print(_RESULT + json.dumps(result), flush=True)


def ceilings(settings: dict[str, Any]) -> dict[str, float]:
    """The machine's rates: of a large product of matrices, operations a second; of a copy, bytes read and written."""
    import jax
    import jax.numpy as jnp

    size, length = (256, 1 << 20) if settings["quick"] else (8192, 1 << 30)
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    source = jnp.ones(length, jnp.int32)
    return {
        "matmul": 2 * size**3 / _seconds(jax.jit(jnp.matmul), a, b),
        "copy": 2 * source.nbytes / _seconds(jax.jit(lambda x: x + 1), source),
    }


def _seconds(function: Any, *arguments: Any, count: int = 10, rounds: int = 5) -> float:
    """Of one call, in the best round: a machine's first rounds may be slow."""
    function(*arguments).block_until_ready()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            out = function(*arguments)
        out.block_until_ready()
        best = min(best, (time.perf_counter() - start) / count)
    return best


def _engine(settings: dict[str, Any]) -> tuple[Any, dict[str, float]]:
    """An engine, and how long it took to its first token, in seconds."""
    from vllm import LLM, SamplingParams

    imported = time.perf_counter()
    llm = LLM(**options(settings))
    prompt = {"prompt_token_ids": [5] * settings["input"]}
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    end = time.perf_counter()
    return llm, {"imports": imported - _STARTED, "engine to first token": end - imported}


def offline(settings: dict[str, Any]) -> dict[str, Any]:
    """LLM.generate of the tokens of vLLM's random prompts, the engine in its own process as by default."""
    from vllm import SamplingParams
    from vllm.benchmarks.datasets import RandomDataset

    llm, startup = _engine(settings)
    params = SamplingParams(temperature=0, max_tokens=settings["output"], ignore_eos=True)
    cases = []
    for count in settings["requests"]:
        times = []
        for repeat in range(settings["repeats"] + 1):  # the first warms up
            prompts = RandomDataset(random_seed=repeat).sample(
                llm.get_tokenizer(), count, input_len=settings["input"], output_len=settings["output"]
            )
            tokens = [{"prompt_token_ids": llm.get_tokenizer().encode(p.prompt)} for p in prompts]
            start = time.perf_counter()
            outputs = llm.generate(tokens, params, use_tqdm=False)
            times.append(time.perf_counter() - start)
        assert all(len(o.prompt_token_ids) == settings["input"] for o in outputs)
        written = sum(len(o.outputs[0].token_ids) for o in outputs)
        seconds = sorted(times[1:])[len(times[1:]) // 2]
        cases.append({"requests": count, "seconds": seconds, "output tokens/s": written / seconds})
    return {"startup": startup, "cases": cases}


def steps(settings: dict[str, Any]) -> dict[str, Any]:
    """Decode steps of full batches, the engine in this process, and the device's share of one batch's steps."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import SamplingParams

    llm, startup = _engine(settings)
    import jax  # not before the engine: its start is measured, imports apart

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=settings["output"], ignore_eos=True, detokenize=False)

    # The step that is traced is to take as long as the others: a trace of Python's calls would let the device wait.
    traced = jax.profiler.ProfileOptions()
    traced.python_tracer_level = 0

    def decode(batch: int, trace: str | None = None) -> list[float]:
        """Seconds of the steps in the middle, in which all sequences decode."""
        for i in range(batch):
            prompt = [(7 * i + 13 * j) % 500 + 3 for j in range(settings["input"])]
            engine.add_request(f"{time.time()}-{i}", {"prompt_token_ids": prompt}, params)
        times: list[float] = []
        first, last = settings["output"] // 4, settings["output"] - 2
        while engine.has_unfinished_requests():
            if trace and len(times) == first:
                jax.profiler.start_trace(trace, profiler_options=traced)
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
            if trace and len(times) == last:
                jax.profiler.stop_trace()
        return sorted(times[first:last])

    cases = []
    for batch in settings["batches"]:
        decode(batch)
        times = decode(batch)
        with tempfile.TemporaryDirectory() as folder:
            decode(batch, folder)
            busy = _busy(folder, settings["output"] - 2 - settings["output"] // 4)
        cases.append({"batch": batch, "ms": 1e3 * times[len(times) // 2], "device busy ms": busy})
    return {"startup": startup, "cases": cases}


def _busy(folder: str, count: int) -> float | None:
    """Milliseconds of a step in which a GPU runs a kernel, from a trace of so many steps; None on a CPU."""
    from pathlib import Path

    import jax

    files = sorted(Path(folder).rglob("*.xplane.pb"))
    planes = jax.profiler.ProfileData.from_file(str(files[-1])).planes if files else ()
    for plane in planes:
        if "GPU:0" not in plane.name:
            continue
        spans = sorted(
            (event.start_ns, event.start_ns + event.duration_ns)
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        )
        busy, until = 0.0, 0.0
        for begin, end in spans:
            busy += max(0.0, end - max(begin, until))
            until = max(until, end)
        return busy / 1e6 / count
    return None


if __name__ == "__main__":
    main()
