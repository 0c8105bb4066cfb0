"""A program of its own, as docs/vllm-legacy.md shows it: the engine in another process. What XLA compiles for it."""

import os
import subprocess
import sys

import pytest

from flashxla.doctor import hlo
from tests.vllm.checkpoints import PROMPTS, words

PROGRAM = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    options = {"max_model_len": 256, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 32 << 20}
    llm = LLM(sys.argv[1], dtype="float32", **options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    print("TEXT", llm.generate([sys.argv[2]], params, use_tqdm=False)[0].outputs[0].text)
"""
LAYERS, TOKEN_SIZES, CACHE_BYTES = 2, (16, 32, 64), 16 << 20


@pytest.fixture(scope="module")
def ran(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("program")
    (folder / "program.py").write_text(PROGRAM)
    dump = f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_as_text --xla_dump_hlo_pass_re=none"
    ended = subprocess.run(
        [sys.executable, str(folder / "program.py"), str(checkpoint("llama")), words(PROMPTS[3])],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "XLA_FLAGS": dump},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended, hlo.dumped_programs(folder / "dump")


def test_tokens(ran, hf_tokens):
    (text,) = (line for line in ran[0].stdout.splitlines() if line.startswith("TEXT"))
    assert text.split()[1:] == words(hf_tokens("llama")[3]).split()
    assert "Traceback" not in ran[0].stderr


def test_programs_hold_no_copy_of_the_cache(ran):
    """One program for each size, one custom call a layer, which updates the cache where it is."""
    steps = [program for program in ran[1] if "flashxla_attention" in program.targets()]
    assert len(steps) == len(TOKEN_SIZES)
    for program in steps:
        assert program.targets().count("flashxla_attention") == LAYERS
        assert program.text.count("output_to_operand_aliasing") == LAYERS
        assert not program.copies(at_least=CACHE_BYTES // 2)
        assert program.temp_bytes < CACHE_BYTES // 2
