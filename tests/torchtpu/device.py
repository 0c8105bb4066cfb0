"""Where TorchTPU runs in these tests: PJRT_DEVICE, which the option --device sets, says it."""

import os

import flashxla


def start() -> None:
    """Start TorchTPU there."""
    if os.environ.get("PJRT_DEVICE") == "CUDA":
        flashxla.use_gpu()
    else:
        flashxla.use_cpu()
