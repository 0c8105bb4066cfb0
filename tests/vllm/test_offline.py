"""A program of its own, as docs/vllm.md shows it: with the engine in its process, and in another."""

import os
import subprocess
import sys

import pytest

from tests.vllm.checkpoints import PROMPTS, words

PROGRAM = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="float32", max_model_len=256, kv_cache_memory_bytes=32 << 20)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    print("TEXT", llm.generate([sys.argv[2]], params, use_tqdm=False)[0].outputs[0].text)
"""


@pytest.mark.parametrize("processes", ["0", "1"], ids=["one process", "two processes"])
def test_program(processes, checkpoint, hf_tokens, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, str(script), str(checkpoint("qwen3")), words(PROMPTS[3])],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": processes},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    (text,) = (line for line in ended.stdout.splitlines() if line.startswith("TEXT"))
    assert text.split()[1:] == words(hf_tokens("qwen3")[3]).split()
    assert "Traceback" not in ended.stderr
