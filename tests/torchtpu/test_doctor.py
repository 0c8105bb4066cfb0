"""What `flashxla doctor` says of TorchTPU and torchax: in place, and where a step is compiled, no copy in it."""

from __future__ import annotations

import argparse
import os
import re

import pytest

from flashxla.doctor import cli, probe


@pytest.mark.parametrize(("route", "programs"), [("torchtpu", 0), ("torchtpu_compiled", 1), ("torchax", 0)])
def test_probes(route: str, programs: int) -> None:
    result = probe.run(route, layers=4, steps=4)
    assert result.in_place
    assert result.largest_error < 1e-5
    assert result.programs == programs
    assert result.targets.count("flashxla_attention") == 4 * programs


def test_memory_of_a_compiled_step_does_not_grow_with_the_cache() -> None:
    small, large = (probe.run("torchtpu_compiled", blocks=n) for n in (64, 1024))
    assert large.cache_bytes == 16 * small.cache_bytes
    assert large.temp_bytes <= small.temp_bytes < small.cache_bytes


def test_report(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(argparse.Namespace(json=None)) == 0
    text = capfd.readouterr().out
    where = "GPU" if os.environ["PJRT_DEVICE"] == "CUDA" else "CPU"
    for topic in (f"torchtpu on {where}", f"torchtpu_compiled on {where}", "torchax"):
        assert re.search(rf"ok  in place: {topic} +on .*: the pointers stayed", text), text
