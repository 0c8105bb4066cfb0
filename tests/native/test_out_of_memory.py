"""An allocation that fails is a status of the C ABI, and a MemoryError in Python; no exception leaves the library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALLS = ("kv_cache", "attention", "write_and_attend", "merge_states")

# Each call, large enough for several threads: with its first allocation failing, its second, until none fails.
CODE = """
import ctypes, json, sys
import numpy as np
from flashxla import native
from tests.native.driver import Call, Memory, arguments

def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)

def index(*values):
    return np.array(values, np.int32)

MASK = {"window_left": -1, "window_right": -1, "max_seqlen_q": 300, "max_seqlen_k": 300, "softmax_scale": 1.0}
QUERIES = {**{name: normal(300, 2, 64) for name in ("q", "out")}, "cu_seqlens_q": index(0, 100, 101, 300)}
CALLS = {
    "kv_cache": Call(
        "kv_cache",
        {
            **{name: normal(600, 8, 128) for name in ("key", "value")},
            **{name: normal(40, 16, 8, 128) for name in ("key_cache", "value_cache")},
            "slot_mapping": np.arange(600, dtype=np.int32),
        },
        {"layout": "NHD", "cache_dtype": "float32"},
    ),
    "attention": Call(
        "attention",
        {**QUERIES, **{name: normal(300, 2, 64) for name in "kv"}, "cu_seqlens_k": QUERIES["cu_seqlens_q"]},
        MASK,
    ),
    "write_and_attend": Call(
        "attention",
        {
            **QUERIES,
            **{name: normal(30, 16, 2, 64) for name in "kv"},
            **{name: normal(300, 2, 64) for name in ("key", "value")},
            "seqused_k": index(120, 1, 199),
            "block_table": np.arange(30, dtype=np.int32).reshape(3, 10),
        },
        MASK,
    ),
    "merge_states": Call(
        "merge_states",
        {
            **{name: normal(300, 8, 128) for name in ("out_a", "out_b", "out")},
            **{name: normal(8, 300) for name in ("lse_a", "lse_b", "lse")},
        },
        {},
    ),
}

process = ctypes.CDLL(None)
failing_after = ctypes.c_int.in_dll(process, "failing_after")
failed = ctypes.c_int.in_dll(process, "failed")
library, memory = native.library("cpu"), Memory()
errors, clean = 0, False
for after in range(200):
    operation, arrays, scalars = CALLS[sys.argv[1]]
    tensors = {name: memory.tensor(array) for name, array in arrays.items()}
    args = arguments(library, operation, tensors, scalars)
    before = failed.value
    failing_after.value = after
    try:
        problem = library.run(operation, args, num_threads=3)
    except MemoryError as error:
        assert "out of memory" in str(error), error
        errors += 1
    failing_after.value = -1
    if failed.value == before:
        clean = True
        break
print(json.dumps({"errors": errors, "clean": clean}))
"""


@pytest.fixture(scope="module")
def failing_malloc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    library = tmp_path_factory.mktemp("malloc") / "failing_malloc.so"
    source = Path(__file__).with_name("failing_malloc.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.mark.parametrize("call", CALLS)
def test_allocations_that_fail(failing_malloc: Path, call: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, call],
        env={**os.environ, "LD_PRELOAD": str(failing_malloc), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["errors"] >= 1 and result["clean"], result
