"""Writes docs/benchmarks.md: `python -m benchmarks.document`.

The words are in page.md. Every measured figure in them is a name there, whose value comes from the JSON files in
docs/benchmarks; so do the statements that the figures must bear out (`figures.claim`).
"""

from __future__ import annotations

import string
from pathlib import Path

from benchmarks import figures, prose_cpu, prose_gpu

PAGE = figures.FOLDER.parent / "benchmarks.md"
TEMPLATE = Path(__file__).with_name("page.md")


def text() -> str:
    """The page as it should be."""
    template = string.Template(TEMPLATE.read_text())
    values = {**prose_cpu.values(), **prose_gpu.values()}
    unused = values.keys() - set(template.get_identifiers())
    if unused:
        raise ValueError(f"page.md does not use {sorted(unused)}")
    return template.substitute(values)


if __name__ == "__main__":
    PAGE.write_text(text())
