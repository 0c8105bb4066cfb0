"""`transformers serve` with flashxla's attention, as a process: a chat completion is eager attention's text."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.utils.import_utils import is_serve_available

import flashxla.transformers
from tests.ports import free_port

pytestmark = pytest.mark.skipif(
    not is_serve_available(), reason="needs fastapi, uvicorn and openai: transformers[serving]"
)

# The command of docs/transformers.md, which says here that it was asked.
SERVE = """
import runpy
from flashxla.transformers import interface

original = interface.attention

def attention(*args, **kwargs):
    print("flashxla's attention was called", flush=True)
    return original(*args, **kwargs)

interface.attention = attention
runpy.run_module("flashxla.transformers", run_name="__main__", alter_sys=True)
"""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPTS = ("The with statement is used to", "A list is")
NEW_TOKENS = 24
OPTIONS = {
    "one by one": [],
    "continuous batching": ["--continuous-batching", "--cb-num-blocks", "32", "--cb-max-batch-tokens", "64"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model, with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    for path in Path(flashxla.transformers.DEFAULT_MODEL).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module", params=OPTIONS)
def server(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: Any) -> Iterator[tuple[str, Path]]:
    """The address of a server, and its log."""
    port = free_port()
    options = ["--attn-implementation", flashxla.transformers.KERNEL_NAME, "--dtype", "float32"]
    options += ["--device", request.config.option.device, "--host", "127.0.0.1", "--port", str(port)]
    log = tmp_path_factory.mktemp("log") / "log"
    with open(log, "w") as file:
        command = [sys.executable, "-c", SERVE, "serve", str(folder), *options, *OPTIONS[request.param]]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        wait(address, process, log)
        yield address, log
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"{address}/health", timeout=2)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise AssertionError(f"the server does not answer: {log.read_text()[-3000:]}")


def complete(address: str, folder: Path, prompt: str) -> str:
    body = {
        "model": str(folder),
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        answer = urllib.request.urlopen(request, timeout=120)
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from error
    return json.load(answer)["choices"][0]["message"]["content"]


def test_chat_completions(server: tuple[str, Path], folder: Path) -> None:
    address, log = server
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype="float32"
    )
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        inputs = inputs.to(model.device)
        tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        expected = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert len(expected) >= NEW_TOKENS // 2
        assert complete(address, folder, prompt) == expected
    assert "flashxla's attention was called" in log.read_text()
