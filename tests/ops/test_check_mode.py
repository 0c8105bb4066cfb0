"""FLASHXLA_CHECK=1: a bad index tensor is an error that names the op's argument and the first bad position.

The variable is read once a process, so each front end runs all its calls in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.batches import (
    Case,
    flash_attn_arguments,
    paged_attention_arguments,
    ragged_paged_attention_arguments,
)
from tests.frontends import FRONTENDS, Frontend

BATCH = ((1, 17), (5, 9), (8, 8))
PAGED = Case(BATCH, page=8, pad_tokens=2, pad_seqs=0, leftpad=True)
DENSE = Case(BATCH, used=True)
RAGGED = Case(BATCH, page=8, layout="interleaved", pad_tokens=2)
PAIR = Case(((1, 17), (5, 9), (3, 2)), page=8, pad_tokens=2)  # one token has no place, which is no error

# name: (op, case, argument, position, bad value, how the message writes the position)
BAD = {
    "slot too large": ("write", None, "slot_mapping", (2,), 64, "slot_mapping[2]"),
    "slot int64 maximum": ("write", None, "slot_mapping", (3,), 2**63 - 1, "slot_mapping[3]"),
    "query start": ("flash", PAGED, "cu_seqlens_q", (0,), -1, "cu_seqlens_q[0]"),
    "query end": ("flash", PAGED, "cu_seqlens_q", (3,), 1000, "cu_seqlens_q[3]"),
    "query order": ("flash", DENSE, "cu_seqlens_q", (1,), 7, "cu_seqlens_q[2]"),
    "key end": ("flash", DENSE, "cu_seqlens_k", (3,), 2**31 - 1, "cu_seqlens_k[3]"),
    "negative length": ("flash", PAGED, "seqused_k", (1,), -3, "seqused_k[1]"),
    "length beyond the table": ("flash", PAGED, "seqused_k", (2,), 10_000, "seqused_k[2]"),
    "page too large": ("flash", PAGED, "block_table", (0, 2), 99, "block_table[0, 2]"),
    "negative page": ("flash", PAGED, "block_table", (1, 0), -1, "block_table[1, 0]"),
    "negative left padding": ("flash", PAGED, "leftpad_k", (2,), -1, "leftpad_k[2]"),
    "too many sequences": ("flash", PAGED, "num_seqs", (0,), 4, "num_seqs"),
    "ragged offsets": ("ragged", RAGGED, "query_start_loc", (2,), 10_000, "query_start_loc[2]"),
    "ragged length": ("ragged", RAGGED, "context_lens", (0,), 10_000, "context_lens[0]"),
    "ragged page": ("ragged", RAGGED, "block_tables", (2, 0), 2**31 - 1, "block_tables[2, 0]"),
    "ragged sequences": ("ragged", RAGGED, "num_seqs", (0,), -1, "num_seqs"),
    "written offsets": ("fused", RAGGED, "query_start_loc", (2,), 10_000, "query_start_loc[2]"),
    "written length": ("fused", RAGGED, "context_lens", (1,), 10_000, "context_lens[1]"),
    "written page": ("fused", RAGGED, "block_tables", (1, 1), -2, "block_tables[1, 1]"),
    "written slot": ("fused slots", PAIR, "slot_mapping", (4,), 10_000, "slot_mapping[4]"),
    "written length beside slots": ("fused slots", PAIR, "context_lens", (2,), -3, "context_lens[2]"),
}
FUNCTIONS = {
    "write": "reshape_and_cache_flash",
    "flash": "flash_attn_varlen_func",
    "ragged": "paged_attention",
    "fused": "ragged_paged_attention",
    "fused slots": "ragged_paged_attention",
}


def arguments_of(op: str, case: Case | None) -> dict[str, Any]:
    """A valid call. Unused entries of tables and slots hold what is no error: other pages, padding."""
    rng = np.random.default_rng(0)
    if op == "write":
        zeros = np.zeros((4, 8, 2, 16), np.float32)
        return {
            "key": np.zeros((5, 2, 16), np.float32),
            "value": np.zeros((5, 2, 16), np.float32),
            "key_cache": zeros,
            "value_cache": zeros,
            "slot_mapping": np.array([3, -1, 5, 31, -7], np.int64),
        }
    assert case is not None
    if op.startswith("fused"):
        slots = "i32" if op == "fused slots" else None
        return ragged_paged_attention_arguments(rng, case, "same", slots)
    return (flash_attn_arguments if op == "flash" else paged_attention_arguments)(rng, case)


def messages(frontend: Frontend) -> Iterator[tuple[str, str | None]]:
    """(name, message): the good call of every op, then the bad calls."""
    calls = {f"good {op} {case}": (op, case, None, (), 0, "") for op, case, *_ in BAD.values()}
    for name, (op, case, argument, position, value, _) in (calls | BAD).items():
        arguments = arguments_of(op, case)
        if argument:
            arguments[argument][position] = value
        try:
            getattr(frontend, FUNCTIONS[op])(**arguments)
        except Exception as error:
            yield name, f"{type(error).__name__}: {error}"
        else:
            yield name, None


def messages_in_check_mode(frontend: Frontend) -> dict[str, str | None]:
    """What `messages` yields in a process with FLASHXLA_CHECK=1."""
    root = Path(__file__).parents[2]
    process = subprocess.run(
        [sys.executable, "-m", "tests.ops.test_check_mode", frontend.name, frontend.device],
        env={**os.environ, "FLASHXLA_CHECK": "1"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.frontends("torch", "lazy", "jax")
def test_check_mode(frontend: Frontend) -> None:
    got = messages_in_check_mode(frontend)
    problems = []
    for name, message in got.items():
        expected = f"{FUNCTIONS[BAD[name][0]]}: {BAD[name][-1]}" if name in BAD else None
        if expected is None and message is not None:
            problems.append(f"{name}: {message}")
        if expected is not None and (message is None or expected not in message):
            problems.append(f"{name}: expected {expected!r}, got {message}")
    assert not problems, "\n".join(problems)
    assert set(BAD) < set(got)


@pytest.mark.skipif(os.environ.get("FLASHXLA_CHECK") == "1", reason="FLASHXLA_CHECK=1")
@pytest.mark.frontends("torch", "lazy", "jax")
def test_without_check_mode(frontend: Frontend) -> None:
    """The same calls skip the bad entries."""
    got = dict(messages(frontend))
    assert not any(got.values()), got


if __name__ == "__main__":
    print(json.dumps(dict(messages(FRONTENDS[sys.argv[1]](sys.argv[2])))))
