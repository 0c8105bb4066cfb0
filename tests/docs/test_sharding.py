"""The program of docs/sharding.md runs as it is printed."""

from __future__ import annotations

from tests.docs.blocks import blocks, run


def test_program() -> None:
    (program,) = blocks("docs/sharding.md")
    devices = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    assert run(program, "-W", "error::UserWarning", **devices).split() == ["False", "heads", "heads"]
