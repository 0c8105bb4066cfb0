"""Calls on plain lazy tensors take a short way past PyTorch's dispatcher: when, and that it is the same way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.frontends import LazyFrontend
from tests.ops.test_errors import CALLS
from tests.torch_modes import mode_of

pytestmark = pytest.mark.frontends("lazy")


@pytest.fixture
def taken(frontend: LazyFrontend, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that took the short way, by the name of the custom call."""
    from flashxla.xla import lazy

    names: list[str] = []
    run = lazy._Program.run

    def counted(self: Any, inner: Any) -> Any:
        names.append(self._name)
        return run(self, inner)

    monkeypatch.setattr(lazy._Program, "run", counted)
    return names


def arguments(frontend: LazyFrontend, call: str) -> dict[str, Any]:
    from tests.frontends import map_arrays

    return {name: map_arrays(frontend.tensor, value) for name, value in CALLS[call][1].items()}


def outcome(frontend: LazyFrontend, call: str, values: dict[str, Any]) -> list[np.ndarray]:
    """The results of a call and all its tensors after it."""
    result = getattr(frontend.fx, CALLS[call][0])(**values)
    frontend.torch_xla.sync()
    results = result if isinstance(result, tuple) else (result,)
    flat = [x for v in values.values() for x in (v if isinstance(v, tuple) else (v,))]
    tensors = [x for x in (*results, *flat) if isinstance(x, frontend.torch.Tensor)]
    return [frontend.array(tensor) for tensor in tensors]


@pytest.mark.parametrize("call", CALLS)
def test_both_ways_are_one(
    frontend: LazyFrontend, taken: list[str], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    from flashxla.xla import lazy

    short = outcome(frontend, call, arguments(frontend, call))
    assert len(taken) == 1
    monkeypatch.setattr(lazy, "_is_special", lambda: True)
    long = outcome(frontend, call, arguments(frontend, call))
    assert len(taken) == 1
    for x, y in zip(short, long, strict=True):
        assert x.dtype == y.dtype and np.array_equal(x.view(np.uint8), y.view(np.uint8))


@pytest.mark.parametrize(
    ("mode", "is_short"),
    [("plain", 1), ("no_grad", 1), ("inference", 1), ("dispatch mode", 0), ("function mode", 0)],
)
@pytest.mark.parametrize("call", ["write", "pair"])
def test_modes(frontend: LazyFrontend, taken: list[str], call: str, mode: str, is_short: int) -> None:
    expected = outcome(frontend, call, arguments(frontend, call))
    taken.clear()
    with mode_of(mode):
        values = arguments(frontend, call)
        got = outcome(frontend, call, values)
    assert len(taken) == is_short
    assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(got, expected, strict=True))


def test_gradients_take_the_long_way(frontend: LazyFrontend, taken: list[str]) -> None:
    values = arguments(frontend, "pair")
    values["query"].requires_grad_()
    result = frontend.fx.paged_attention(**values)
    assert result.requires_grad and not taken
    with frontend.torch.no_grad():
        assert not frontend.fx.paged_attention(**values).requires_grad
    assert len(taken) == 1


def test_parameters(frontend: LazyFrontend, taken: list[str]) -> None:
    values = arguments(frontend, "pair")
    sinks = frontend.tensor(np.zeros(values["query"].shape[1], np.float32))
    with frontend.torch.no_grad():
        frontend.fx.paged_attention(**values, s_aux=frontend.torch.nn.Parameter(sinks))
    assert len(taken) == 1


def test_one_graph_whatever_the_way(frontend: LazyFrontend) -> None:
    """A repeated step compiles nothing: the short way's nodes are the same each time."""
    from torch_xla.debug import metrics

    values = arguments(frontend, "write")

    def compiled() -> int:
        data = metrics.metric_data("CompileTime")
        return 0 if data is None else int(data[0])

    counts = []
    for _ in range(4):
        frontend.fx.reshape_and_cache_flash(**values)
        frontend.torch_xla.sync(wait=True)
        counts.append(compiled())
    assert counts[1] == counts[3]


def test_tensors_of_other_devices_are_refused(frontend: LazyFrontend, taken: list[str]) -> None:
    values = arguments(frontend, "pair")
    values["context_lens"] = values["context_lens"].cpu()
    with pytest.raises(ValueError, match="paged_attention: context_lens: got a tensor on cpu"):
        frontend.fx.paged_attention(**values)
    assert not taken
