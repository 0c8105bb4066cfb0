"""docs/generate.md: its Python, as pasted."""

from __future__ import annotations

import pytest

from tests.docs.blocks import blocks, run


def test_block() -> None:
    pytest.importorskip("transformers")
    (found,) = blocks("docs/generate.md")
    first, second, streamed = run(found, PJRT_DEVICE="CPU").splitlines()[:3]
    assert "length" in first or "stop" in first
    assert second and streamed
