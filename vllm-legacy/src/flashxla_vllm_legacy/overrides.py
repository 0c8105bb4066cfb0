"""Every replacement of an internal of vLLM or PyTorch, each with its reason.

vLLM 0.13.0 has a runner for PyTorch/XLA, made for TPUs. It stays installed as it is; what keeps it from other devices
is replaced here, in the process that runs the model. `OVERRIDES` says which upstream code each one relies on, and
`USED` on what the classes of this package build; tests/vllm_legacy/test_overrides.py fails when that code changes.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

Stage = Callable[[], None]
OVERRIDES: dict[str, tuple[str, ...]] = {}
_STAGES: list[Stage] = []
_done: set[str] = set()

# What worker.py, runner.py, attention.py and platform.py derive from, call or fill in.
USED = (
    "vllm.v1.worker.tpu_worker:TPUWorker",
    "vllm.v1.worker.tpu_model_runner:TPUModelRunner",
    "vllm.v1.attention.backends.pallas:PallasMetadata",
    "vllm.v1.sample.tpu.metadata:TPUSupportedSamplingMetadata",
    "vllm.v1.sample.tpu.sampler:Sampler",
    "vllm.attention.layer:Attention",
    "vllm.platforms.interface:Platform",
)


def apply() -> None:
    """In a process that runs the model, before the runner's modules are imported."""
    for stage in _STAGES:
        if stage.__name__ not in _done:
            _done.add(stage.__name__)
            stage()


def _override(*relies_on: str) -> Callable[[Stage], Stage]:
    """Register a stage, and the upstream functions, classes or modules ("module:name" or "module") it relies on."""

    def register(stage: Stage) -> Stage:
        _STAGES.append(stage)
        OVERRIDES[stage.__name__] = relies_on
        return stage

    return register


def _runner() -> Any:
    return importlib.import_module("vllm.v1.worker.tpu_model_runner")


@_override("vllm.platforms.tpu")
def no_tpu_info() -> None:
    """vllm.platforms.tpu, which the worker imports, takes `device` from tpu_info, which looks for TPU chips."""
    package: Any = types.ModuleType("tpu_info")
    package.device = types.ModuleType("tpu_info.device")
    sys.modules.setdefault("tpu_info", package)
    sys.modules.setdefault("tpu_info.device", package.device)


@_override("vllm.v1.attention.backends.pallas:PallasAttentionBackend")
def cache_of_flashxla() -> None:
    """The runner asks PallasAttentionBackend for the cache's shape, which pads heads to 128, and for how many requests
    fit a TPU's scalar memory.
    """
    from flashxla_vllm_legacy.attention import FlashXlaBackend

    _runner().PallasAttentionBackend = FlashXlaBackend


@_override(
    "vllm.v1.worker.tpu_model_runner:_get_padded_num_kv_cache_update_slices",
    "vllm.v1.worker.tpu_model_runner:_get_num_slices_per_kv_cache_update_block",
    "vllm.v1.worker.tpu_model_runner:TPUModelRunner._prepare_inputs",
)
def no_slices_of_the_cache() -> None:
    """The TPU's write kernel takes a list of slices of pages, of a padded length. flashxla's op finds the places of new
    tokens on the device: one row stays, which is padding.
    """
    runner = _runner()
    runner._get_padded_num_kv_cache_update_slices = lambda num_tokens, max_num_reqs, page_size: 1
    runner._get_num_slices_per_kv_cache_update_block = lambda page_size_bytes: 1
