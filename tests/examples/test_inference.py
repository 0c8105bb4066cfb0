"""The examples of inference: what they print is right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def output(name: str, *arguments: str) -> str:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_serve_jax() -> None:
    """The tokens of transformers' own generation: test_default_model.py has them from `flashxla generate`."""
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import flashxla.transformers

    folder = flashxla.transformers.DEFAULT_MODEL
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="float32")
    # One is longer than a step.
    prompts = [
        "The with statement is used to",
        "A",
        "When an exception is raised in the body of a function, Python " * 2,
    ]
    lines = output("serve_jax", "--tokens", "24", "--prompt", *prompts)
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        tokens = model.generate(ids, max_new_tokens=24, do_sample=False)
        assert f"--- {tokenizer.decode(tokens[0], skip_special_tokens=True)}" in lines
    assert "2 programs" in lines
    assert lines.rstrip().endswith("the caches stayed in their buffers")


def test_shared_prefix() -> None:
    pytest.importorskip("torch")
    lines = output("shared_prefix", "--sequences", "5", "--prefix", "300", "--own", "9")
    assert lines.startswith("5 sequences, 304 tokens in common, 9 of their own")
    assert float(re.findall(r"largest difference (\S+)", lines)[0]) < 1e-5


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_cache(kind: str) -> None:
    pytest.importorskip("torch")
    lines = output("fp8_cache", "--format", kind).splitlines()
    (exact,) = map(int, re.findall(r"float32: (\d+) bytes", lines[0]))
    found = [re.findall(r"(\d+) bytes, error (\S+)%", line)[0] for line in lines[1:]]
    assert [int(size) * 4 for size, _ in found] == [exact, exact]
    without, scaled = (float(error) for _, error in found)
    assert scaled < 8
    # A thousand is too much for e4m3, whose largest is 448.
    assert (without > 20) == (kind == "fp8_e4m3")


@pytest.mark.parametrize("way", [(), ("--lazy",)], ids=str)
def test_loop_torch_xla(way: tuple[str, ...]) -> None:
    pytest.importorskip("torch_xla")
    lines = output("loop_torch_xla", "--tokens", "8", *way)
    assert lines.startswith("lazy on xla:0: 9 steps" if way else "openxla on xla:0: 9 steps")
    assert float(re.findall(r"whole text: (\S+)", lines)[0]) < 1e-5
