"""Where TorchTPU runs in these tests: PJRT_DEVICE, which the option --device sets, says it."""

import os

import flashxla


def start() -> None:
    """Start TorchTPU there."""
    if os.environ.get("PJRT_DEVICE") == "CUDA":
        flashxla.use_gpu()
        import torch

        torch.set_float32_matmul_precision("highest")  # TorchTPU's default is TF32 there
    else:
        flashxla.use_cpu()
