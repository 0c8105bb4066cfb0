"""start.py [--quick]: from a start of vLLM to the first token, cold and warm, and where the seconds go.

The model is that of `flashxla bench vllm`. Each start is a process of its own. Two have the engine in their process,
with a timeline and samples of all threads' stacks (cold, warm); one is as users have it (warm, the engine in another
process). Results: $OUT/start.json; stacks, the outermost first, with how often each was met: $OUT/stacks-*.txt.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

T0 = time.perf_counter()
OUT = Path(os.environ.get("OUT", tempfile.gettempdir()))
LAST = "start-result: "
STARTS = (("cold", "0"), ("warm", "0"), ("warm, engine in its own process", "1"))


def parent(quick: bool) -> int:
    """Start three times with one folder of compiled programs."""
    from flashxla_vllm.bench import command, model

    folder = Path(os.environ.get("START_FOLDER") or tempfile.mkdtemp(prefix="flashxla-start-"))
    settings = (command._QUICK if quick else command._GPU) | {"quick": quick, "model": str(folder)}
    model.write(folder, quick)
    device = "cpu" if os.environ["JAX_PLATFORMS"] == "cpu" else "cuda"
    environment = os.environ | command._environment(device, str(folder))
    environment |= {"VLLM_LOGGING_LEVEL": "INFO"}
    results: dict[str, dict[str, Any]] = {}
    for name, separate in STARTS:
        begin = time.perf_counter()
        ended = subprocess.run(
            [sys.executable, __file__, "child", name, json.dumps(settings)],
            capture_output=True,
            text=True,
            env=environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": separate},
        )
        (OUT / f"start-{name.split(',')[0]}-{separate}.log").write_text(ended.stdout + ended.stderr)
        if ended.returncode:
            print(name, "FAILED", ended.stdout[-3000:], ended.stderr[-5000:])
            continue
        line = [text for text in ended.stdout.splitlines() if text.startswith(LAST)][-1]
        results[name] = json.loads(line.removeprefix(LAST)) | {"process": time.perf_counter() - begin}
        (OUT / "start.json").write_text(json.dumps(results, indent=1))
        show(name, results[name])
    return 0 if len(results) == len(STARTS) else 1


def show(name: str, result: dict[str, Any]) -> None:
    """Print the seconds of a start."""
    print(f"--- {name}")
    for key, value in result.items():
        if not isinstance(value, dict):
            print(f"  {value:8.2f} {key}", flush=True)
            continue
        print(f"  {key}:")
        for inner, seconds in value.items():
            print(f"    {seconds:8.2f} {inner}")


class Timeline:
    """Seconds inside chosen functions of the worker (nested ones count in both), and what JAX says of its own work."""

    def __init__(self) -> None:
        self.spans: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.jax: collections.defaultdict[str, float] = collections.defaultdict(float)

    def wrap(self, owner: Any, name: str) -> None:
        """Measure a function from now on."""
        original = getattr(owner, name)
        title = f"{getattr(owner, '__name__', owner)}.{name}"

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin, cpu = time.perf_counter(), time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.spans[title] += time.perf_counter() - begin
                self.spans[f"{title} (of that, this thread's CPU)"] += time.thread_time() - cpu

        setattr(owner, name, timed)

    def heard(self, event: str, seconds: float, **_: Any) -> None:
        """JAX did something that takes time."""
        self.jax[f"{event} (s, all threads)"] += seconds
        self.counted(event)

    def counted(self, event: str, **_: Any) -> None:
        """JAX did something."""
        self.jax[f"{event} (count)"] += 1

    def install(self) -> None:
        """Measure the worker's steps of a start."""
        import jax.monitoring
        from flashxla_vllm import memory, waiting, worker
        from tpu_inference.runner.compilation_manager import CompilationManager
        from tpu_inference.runner.tpu_runner import TPUModelRunner
        from vllm.v1.engine.core import EngineCore

        jax.monitoring.register_event_duration_secs_listener(self.heard)
        jax.monitoring.register_event_listener(self.counted)
        self.wrap(EngineCore, "__init__")
        steps = ("init_device", "load_model", "determine_available_memory", "initialize_from_config")
        for name in (*steps, "compile_or_warm_up_model"):
            self.wrap(worker.XlaWorker, name)
        prefixes = ("_precompile", "capture_model", "_flush", "_run_warm", "_compile")
        for name, value in sorted(vars(CompilationManager).items()):
            special = isinstance(value, (staticmethod, classmethod, property))
            if name.startswith(prefixes) and callable(value) and not special:
                self.wrap(CompilationManager, name)
        name = "reinitialize_kv_cache"
        self.wrap(TPUModelRunner, name if hasattr(TPUModelRunner, name) else "initialize_kv_cache")
        for module, name in (
            (waiting, "to_host"),
            (waiting, "to_device"),
            (memory, "hold_room_for_step"),
            (memory, "_settle"),
        ):
            self.wrap(module, name)


class Sampler(threading.Thread):
    """Stacks of all threads, each hundredth of a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stacks: collections.Counter[str] = collections.Counter()
        self.ended = False

    def run(self) -> None:
        """Sample until it is ended."""
        own = threading.get_ident()
        names: dict[int, str] = {}
        while not self.ended:
            time.sleep(0.01)
            for ident, frame in sys._current_frames().items():
                if ident == own:
                    continue
                if ident not in names:
                    names[ident] = next((t.name for t in threading.enumerate() if t.ident == ident), "?")
                self.stacks[";".join((names[ident], *stack(frame)))] += 1


def stack(frame: FrameType | None) -> list[str]:
    """The functions of a stack, the outermost first."""
    functions: list[str] = []
    while frame is not None and len(functions) < 60:
        code = frame.f_code
        file = "/".join(code.co_filename.split("/")[-2:])
        functions.append(f"{file}:{code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return functions[::-1]


def largest(values: dict[str, float], count: int) -> dict[str, float]:
    """The largest of them, in order."""
    return dict(sorted(values.items(), key=lambda item: -item[1])[:count])


def child(name: str, settings: dict[str, Any]) -> None:
    """One start."""
    separate = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    sampler, timeline = Sampler(), Timeline()
    if not separate:
        sampler.start()
    from flashxla_vllm.bench.child import options
    from vllm import LLM, SamplingParams

    imported = time.perf_counter()
    if not separate:
        timeline.install()
    installed = time.perf_counter()
    llm = LLM(**options(settings))
    made = time.perf_counter()
    prompt = {"prompt_token_ids": [5] * settings["input"]}
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate([prompt], one, use_tqdm=False)
    end = time.perf_counter()
    result: dict[str, Any] = {
        "imports": imported - T0,
        "imports of the worker for the timeline": installed - imported,
        "LLM()": made - installed,
        "first token": end - made,
        "all": end - T0,
    }
    if not separate:
        sampler.ended = True
        result["functions, s"] = largest(timeline.spans, 50)
        result["jax"] = largest(timeline.jax, 24)
        lines = (f"{count} {functions}\n" for functions, count in sampler.stacks.most_common(4000))
        (OUT / f"stacks-{name}.txt").write_text("".join(lines))
    print(LAST + json.dumps(result), flush=True)
    if not separate:
        os._exit(0)  # without the engine's own end, which is not measured


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], json.loads(sys.argv[3]))
    else:
        raise SystemExit(parent("--quick" in sys.argv))
