"""docs/transformers.md: its Python, as pasted."""

from __future__ import annotations

import pytest

from tests.docs.blocks import blocks, run


def test_blocks() -> None:
    pytest.importorskip("transformers")
    found = blocks("docs/transformers.md")
    assert len(found) == 2
    generated, *batched = run("\n".join(found)).splitlines()
    assert "The with statement" in generated
    # The first two prompts are the same.
    assert len(batched) == 3
    assert all(text.strip() in generated for text in batched[:2])
