"""Eager calls on torchax's tensors that repeat take a short way past torchax: when, and that it is the same way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.frontends import TorchaxFrontend
from tests.ops.test_errors import CALLS
from tests.ops.test_short_way import arguments, assert_same
from tests.torch_modes import mode_of

pytestmark = pytest.mark.frontends("torchax")


@pytest.fixture
def taken(frontend: TorchaxFrontend, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that took the short way; nothing has been learnt before the test."""
    from flashxla import torchax_calls

    calls: list[Any] = []
    run = torchax_calls._Repeat.run

    def counted(self: Any, values: Any, env: Any) -> Any:
        calls.append(values)
        return run(self, values, env)

    monkeypatch.setattr(torchax_calls._Repeat, "run", counted)
    torchax_calls._repeats.clear()
    return calls


def outcome(frontend: TorchaxFrontend, call: str, values: dict[str, Any]) -> list[np.ndarray]:
    """The results of a call and all its tensors after it."""
    with frontend.env:
        result = getattr(frontend.fx, CALLS[call][0])(**values)
    results = result if isinstance(result, tuple) else (result,)
    flat = [x for v in values.values() for x in (v if isinstance(v, tuple) else (v,))]
    return [frontend.array(x) for x in (*results, *flat) if isinstance(x, frontend.torch.Tensor)]


@pytest.mark.parametrize("call", CALLS)
def test_both_ways_are_one(frontend: TorchaxFrontend, taken: list[Any], call: str) -> None:
    long = outcome(frontend, call, arguments(frontend, call))
    assert not taken
    for _ in range(2):
        taken.clear()
        assert_same(outcome(frontend, call, arguments(frontend, call)), long)
        assert taken


@pytest.mark.parametrize("share", [None, "clone", "detach", "jax"])
def test_caches_keep_their_buffers_and_what_shares_them_its_values(
    frontend: TorchaxFrontend, taken: list[Any], share: str | None
) -> None:
    outcome(frontend, "write", arguments(frontend, "write"))
    values = arguments(frontend, "write")
    cache = values["key_cache"]
    old, pointer = frontend.array(cache).copy(), cache.jax().unsafe_buffer_pointer()
    with frontend.env:
        other = getattr(cache, share)() if share else None
    outcome(frontend, "write", values)
    assert taken and not np.array_equal(frontend.array(cache), old)
    assert (cache.jax().unsafe_buffer_pointer() == pointer) is (share is None)
    if share:
        np.testing.assert_array_equal(np.asarray(other if share == "jax" else other.jax()), old)


@pytest.mark.parametrize(
    ("mode", "is_short"),
    [("no_grad", True), ("dispatch mode", False), ("function mode", False), ("profiler", False)],
)
def test_modes(frontend: TorchaxFrontend, taken: list[Any], mode: str, is_short: bool) -> None:
    expected = [outcome(frontend, "pair", arguments(frontend, "pair")) for _ in range(2)][1]
    taken.clear()
    values = arguments(frontend, "pair")
    with frontend.env, mode_of(mode):
        out = frontend.fx.paged_attention(**values)
    assert_same([frontend.array(out)], expected[:1])
    assert bool(taken) is is_short


def test_outside_of_torchaxs_environment(frontend: TorchaxFrontend, taken: list[Any]) -> None:
    values = arguments(frontend, "pair")
    for _ in range(2):
        outcome(frontend, "pair", values)
    with pytest.raises(AssertionError, match="within the torchax environment"):
        frontend.fx.paged_attention(**values)


def test_gradients_take_the_long_way(frontend: TorchaxFrontend, taken: list[Any]) -> None:
    for _ in range(2):
        outcome(frontend, "dense", arguments(frontend, "dense"))
    taken.clear()
    values = arguments(frontend, "dense")
    values["q"].requires_grad_()
    with frontend.env:
        frontend.fx.flash_attn_varlen_func(**values).sum().backward()
        assert not taken and values["q"].grad is not None
        with frontend.torch.no_grad():
            frontend.fx.flash_attn_varlen_func(**values)
    assert taken


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"sliding_window": 1.0}, TypeError),
        ({"context_lens": lambda x: x.to("cpu")}, TypeError),
        ({"context_lens": lambda x: x.repeat(2)}, ValueError),
    ],
)
def test_wrong_calls_are_refused_behind_right_ones(
    frontend: TorchaxFrontend, taken: list[Any], wrong: dict[str, Any], error: type[Exception]
) -> None:
    values = arguments(frontend, "pair") | {"sliding_window": 1}
    with frontend.env:
        for _ in range(2):
            frontend.fx.paged_attention(**values)
        assert len(taken) == 1
        changed = {name: x(values[name]) if callable(x) else x for name, x in wrong.items()}
        with pytest.raises(error, match="paged_attention: "):
            frontend.fx.paged_attention(**values | changed)
    assert len(taken) == 1
