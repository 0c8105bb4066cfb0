"""The programs of docs/sharding.md run as they are printed."""

from __future__ import annotations

import pytest

from tests.docs.blocks import blocks, run


@pytest.mark.parametrize(("number", "devices", "axis"), [(0, 2, "heads"), (1, 4, "replicas")])
def test_program(number: int, devices: int, axis: str) -> None:
    programs = blocks("docs/sharding.md")
    assert len(programs) == 2
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    assert run(programs[number], "-W", "error::UserWarning", **flags).split() == ["False", axis, axis]
