"""The programs of docs/torchtpu.md run as they are printed, but on the device of these tests."""

from __future__ import annotations

import os

from tests.docs import blocks


def test_programs() -> None:
    torchtpu, torchax = blocks.blocks("docs/torchtpu.md")
    if os.environ["PJRT_DEVICE"] == "CPU":
        torchtpu = torchtpu.replace("flashxla.use_gpu()", "flashxla.use_cpu()")
    for program, device, starts_by_itself in ((torchtpu, "tpu", "1"), (torchax, "jax", "0")):
        printed = blocks.run(program, TORCH_DEVICE_BACKEND_AUTOLOAD=starts_by_itself)
        assert printed.splitlines()[-1] == f"{device}:0 torch.Size([3, 8, 64]) True"
