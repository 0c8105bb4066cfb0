"""The runner: vLLM's for PyTorch/XLA."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashxla_vllm_legacy import overrides

overrides.apply()

from vllm.v1.worker.tpu_model_runner import TPUModelRunner  # noqa: E402


class XlaModelRunner(TPUModelRunner):
    """Without the list of cache slices that the TPU's write kernel needs."""

    def _get_slot_mapping_metadata(self, num_reqs: int, num_scheduled_tokens_per_req: Any) -> np.ndarray:
        return np.zeros((0, 3), np.int32)
