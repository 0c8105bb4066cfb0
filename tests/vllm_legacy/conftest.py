"""Fixtures: checkpoints and engines. Engines run in this process, on the CPU unless PJRT_DEVICE says CUDA.

tests/conftest.py is not read: the environment has none of what it needs (make test-vllm-legacy).
"""

from __future__ import annotations

import os

# Before PyTorch/XLA and vLLM are imported; the processes that tests start inherit it.
os.environ.setdefault("PJRT_DEVICE", "CPU")
# Several processes share a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_XLA_CHECK_RECOMPILATION="1",  # a program that is compiled after the start is an error
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)

from tests.vllm.fixtures import checkpoint, hf_tokens  # noqa: F401
