"""`vllm serve` in a process of its own, and what tests ask of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai

from tests.ports import free_port

MAX_MODEL_LEN = 256


class Server:
    """A running `vllm serve`."""

    def __init__(self, process: subprocess.Popen, port: int, log: str) -> None:
        self.process, self.url, self.log = process, f"http://127.0.0.1:{port}", log
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def wait(self, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended: {self.tail()}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2)
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise AssertionError(f"the server does not answer: {self.tail()}")

    def tail(self) -> str:
        with open(self.log) as file:
            return file.read()[-4000:]

    def complete(self, prompt, count=12, **options):
        body = {"ignore_eos": True} | options.pop("extra_body", {})
        return self.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=count, temperature=0, extra_body=body, **options
        )

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    def wait_until_idle(self, seconds: float = 30) -> None:
        """Until no request runs and no cache block is held."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not any(
                map(self.metric, ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"))
            ):
                return
            time.sleep(0.3)
        raise AssertionError("requests or blocks are left")


def start(path, log, *options: str, **environment: str) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(path), "--port", str(port)]
    command += ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)]
    command += [
        "--max-num-seqs",
        "16",
        "--max-num-batched-tokens",
        "64",
        "--kv-cache-memory-bytes",
        str(32 << 20),
    ]
    command += ["--max-logprobs", "5", "--generation-config", "vllm", *options]
    # Its own session: the server's processes end with it.
    with open(log, "w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | environment,
        )
    return Server(process, port, str(log))


def stop(server: Server) -> int:
    """Ask it to end; its exit code."""
    server.process.send_signal(signal.SIGINT)
    try:
        return server.process.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
