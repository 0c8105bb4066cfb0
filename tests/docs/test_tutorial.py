"""docs/tutorial.md and README: their Python, as pasted."""

from __future__ import annotations

import pytest

from tests.docs.blocks import blocks, run


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
