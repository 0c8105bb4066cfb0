"""The Python of a page, as pasted."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.native.test_sanitizers import ROOT


def blocks(page: str) -> list[str]:
    """The page's blocks of Python, in order."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def run(program: str, *options: str, **environment: str) -> str:
    """Run a program, which must not fail. Returns what it prints."""
    done = subprocess.run(
        [sys.executable, *options, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
