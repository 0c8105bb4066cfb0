"""In plain PyTorch on a CPU the kernels run on the threads of PyTorch's own operations."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A call that has work for several threads, and its result from one thread.
SETUP = """
import os, threading
import torch
import torch.nn.functional as F
from flashxla.torch import flash_attn_func

def call():
    return flash_attn_func(q, k, v, causal=True)

def operation():
    return torch.randn(512, 512) @ torch.randn(512, 512)

def threads():
    return len(os.listdir("/proc/self/task"))

q, k, v = (torch.randn(2, 200, heads, 64) for heads in (4, 2, 2))
heads_first = [x.transpose(1, 2) for x in (q, k, v)]
torch.set_num_threads(1)
expected = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)
call()
torch.set_num_threads(3)
"""

CASES = {
    "no threads of its own": """
operation()
before = threads()
assert before >= 3
torch.testing.assert_close(call(), expected)
assert threads() == before
""",
    "before any operation of PyTorch": """
before = threads()
torch.testing.assert_close(call(), expected)
assert threads() == before + 2
operation()
assert threads() == before + 2
""",
    "more threads, fewer, more": """
for count in (8, 2, 5, 1, 8):
    torch.set_num_threads(count)
    torch.testing.assert_close(call(), expected)
    operation()
""",
    "calls from several threads at once": """
def calls():
    for _ in range(20):
        right.append(torch.equal(call(), whole))

whole, right = call(), []
others = [threading.Thread(target=calls) for _ in range(3)]
for other in others:
    other.start()
for other in others:
    other.join()
assert right == [True] * 60
""",
    # OpenMP's threads stay in the parent, and PyTorch's own operations wait for them unless one thread is enough.
    "a forked child": """
operation()
call()
child = os.fork()
if child == 0:
    result = call()
    assert threads() == 3
    torch.set_num_threads(1)
    torch.testing.assert_close(result, expected)
    os._exit(17)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
torch.testing.assert_close(call(), expected)
""",
}


@pytest.mark.parametrize("case", CASES)
def test_in_a_process_of_its_own(case: str) -> None:
    code = SETUP + CASES[case]
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr
