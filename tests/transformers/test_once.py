"""What the layers of a forward share, and that a CUDA graph makes all of it itself."""

from __future__ import annotations

import pytest
import torch

from flashxla.transformers import once as module
from flashxla.transformers.once import once


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch):
    """Calls of `make` so far, and a way to begin and end a capture."""
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    def capture(on: bool) -> None:
        monkeypatch.setattr(module, "capturing", lambda tensor: on)

    return make, capture


def test_made_once_for_a_tensor_and_a_key(made) -> None:
    make, _ = made
    a, b = torch.zeros(2), torch.zeros(2)
    assert [once(a, 1, make), once(a, 1, make), once(a, 2, make), once(b, 1, make)] == [0, 0, 1, 2]
    with torch.inference_mode():
        assert once(a, 1, make) == 3


def test_made_anew_for_a_tensor_that_was_written(made) -> None:
    """And what was made before is gone: a training may write its positions into one tensor in each step."""
    make, _ = made
    tensor = torch.zeros(2)
    before = once(tensor, "key", make)
    for _ in range(3):
        tensor.add_(1)
        assert once(tensor, "key", make) == once(tensor, "key", make) > before
        assert len(module._MADE[tensor][1]) == 1


def test_inference_mode_counts_no_writes(made) -> None:
    make, _ = made
    with torch.inference_mode():
        tensor = torch.zeros(2)
        assert [once(tensor, "ours", make), once(tensor, "ours", make)] == [0, 0]
        assert [once(tensor, "theirs", make, of_caller=True) for _ in range(2)] == [1, 2]


def test_a_graph_takes_nothing_from_before_it_nor_gives_anything(made) -> None:
    make, capture = made
    tensor = torch.zeros(2)

    def forward() -> list[int]:
        return [once(tensor, "key", make) for _ in range(2)]

    assert forward() == [0, 0]  # the warm-up
    capture(True)
    assert forward() == [1, 2]
    capture(False)
    assert forward() == [0, 0]
