"""`vllm serve`, asked by vLLM's own serving benchmark at several rates of requests."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from flashxla_vllm.bench import child

_FIGURES = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms", "output_throughput", "completed")


def measure(settings: dict[str, Any], environment: dict[str, str], log: str) -> list[dict[str, float]]:
    """Time to the first token, time of each further one and tokens a second, for each rate of requests a second."""
    with _server(settings, environment, log) as port:
        return [_ask(settings, port, rate) for rate in settings["rates"]]


@contextlib.contextmanager
def _server(settings: dict[str, Any], environment: dict[str, str], log: str) -> Iterator[int]:
    from vllm.utils.network_utils import get_open_port

    port = get_open_port()
    chosen = child.options(settings)
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        chosen.pop("model"),
        "--port",
        str(port),
    ]
    for name, value in chosen.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{option}" if value else f"--no-{option}")
        else:
            command += [f"--{option}", str(value)]
    with open(log, "w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
    try:
        _wait(process, port, log)
        yield port
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], port: int, log: str, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    with open(log) as file:
        raise RuntimeError(f"vllm serve did not start:\n{file.read()[-3000:]}")


def _ask(settings: dict[str, Any], port: int, rate: float) -> dict[str, float]:
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    words = f"--port {port} --model {settings['model']} --dataset-name random --ignore-eos --seed 0"
    words += f" --random-input-len {settings['input']} --random-output-len {settings['output']}"
    words += f" --num-prompts {round(rate * settings['seconds'])} --request-rate {rate} --num-warmups 4"
    words += " --percentile-metrics ttft,tpot --metric-percentiles 50,99"
    result = serve.main(parser.parse_args(words.split()))
    return {"requests/s": rate, **{name: float(result[name]) for name in _FIGURES}}
