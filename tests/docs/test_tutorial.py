"""docs/tutorial.md and README: their Python, as pasted."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.native.test_sanitizers import ROOT


def test_tutorial() -> None:
    pytest.importorskip("torch")
    page = (ROOT / "docs" / "tutorial.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
