"""torch.export: programs of any number of tokens keep the operations, and update the caches that they are given."""

from __future__ import annotations

import io
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples/aot_inductor.py"))


def saved(program: Any) -> Any:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("saves", [False, True], ids=["kept", "saved"])
@pytest.mark.parametrize("decomposes", [False, True], ids=["exported", "decomposed"])
def test_a_step(decomposes: bool, saves: bool) -> None:
    new_arguments: Callable[[], tuple[Any, ...]] = EXAMPLE["new_arguments"]
    layer = EXAMPLE["Layer"]().eval()
    tokens = torch.export.Dim("tokens", min=2, max=512)
    with torch.no_grad():
        program = torch.export.export(layer, new_arguments(), dynamic_shapes=({0: tokens}, *[{}] * 6))
        if decomposes:
            program = program.run_decompositions()
        step = (saved(program) if saves else program).module()
        for count in (3, 5):  # of which two are padding
            given, expected = (list(new_arguments()) for _ in range(2))
            given[0] = expected[0] = torch.linspace(-1, 1, count * 64).view(count, 64)
            torch.testing.assert_close(step(*given), layer(*expected))
            torch.testing.assert_close(given[1:3], expected[1:3])
            assert not torch.equal(given[1], new_arguments()[1])
