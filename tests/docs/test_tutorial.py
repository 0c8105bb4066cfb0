"""docs/tutorial.md and README: their Python, as pasted."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.native.test_sanitizers import ROOT


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_tutorial() -> None:
    pytest.importorskip("torch")
    found = blocks("docs/tutorial.md")
    assert len(found) == 5
    run("\n".join(found))


@pytest.mark.parametrize(("number", "needs"), [(0, "torch_xla"), (1, "jax")])
def test_readme(number: int, needs: str) -> None:
    pytest.importorskip(needs)
    found = blocks("README.md")
    assert len(found) == 2
    run(found[number] + "\nassert out.shape == (4, 32, 128) and float(abs(out).max()) > 0\n")
