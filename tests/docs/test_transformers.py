"""docs/transformers.md: its Python, as pasted."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.native.test_sanitizers import ROOT


def test_blocks() -> None:
    pytest.importorskip("transformers")
    page = (ROOT / "docs" / "transformers.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    generated, *batched = done.stdout.splitlines()
    assert "The with statement" in generated
    # The first two prompts are the same.
    assert len(batched) == 3
    assert all(text.strip() in generated for text in batched[:2])
