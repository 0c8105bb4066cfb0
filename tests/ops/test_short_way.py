"""Eager calls that repeat take a short way past PyTorch's dispatcher: when, and that it is the same way."""

from __future__ import annotations

import concurrent.futures
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.frontends import TorchFrontend, map_arrays
from tests.ops.test_errors import CALLS
from tests.torch_modes import mode_of

pytestmark = pytest.mark.frontends("torch", "torchtpu")


@pytest.fixture
def taken(frontend: TorchFrontend, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that took the short way; nothing has been learnt before the test."""
    from flashxla import torch_short_way

    calls: list[Any] = []
    run = torch_short_way._Repeat.run

    def counted(self: Any, values: Any) -> Any:
        calls.append(values)
        return run(self, values)

    monkeypatch.setattr(torch_short_way._Repeat, "run", counted)
    for way in gc.get_objects():
        if type(way) is torch_short_way.ShortWay:
            way._repeats.clear()
    return calls


# Two sequences; the other index tensors stay 0.
INDICES = {
    "cu_seqlens_q": [0, 4, 6],
    "query_start_loc": [0, 4, 6],
    "cu_seqlens_k": [0, 5, 9],
    "seqused_k": [5, 9],
    "context_lens": [6, 9],
    "num_seqs": [2],
}


def arguments(frontend: TorchFrontend, call: str) -> dict[str, Any]:
    """Those of a call, with random numbers. Each token has a slot of its own: of several, a GPU writes any."""
    rng = np.random.default_rng(0)

    def tensor(array: np.ndarray) -> Any:
        if array.dtype == np.float32:
            array = rng.standard_normal(array.shape).astype(np.float32)
        return frontend.tensor(array)

    given = CALLS[call][1]
    indices = {name: np.array(INDICES[name], given[name].dtype) for name in INDICES if name in given}
    if (slots := given.get("slot_mapping")) is not None:
        indices["slot_mapping"] = np.arange(len(slots), dtype=slots.dtype)[::-1]
    return {name: map_arrays(tensor, value) for name, value in (given | indices).items()}


def outcome(frontend: TorchFrontend, call: str, values: dict[str, Any]) -> list[np.ndarray]:
    """The results of a call and all its tensors after it."""
    result = getattr(frontend.fx, CALLS[call][0])(**values)
    results = result if isinstance(result, tuple) else (result,)
    flat = [x for v in values.values() for x in (v if isinstance(v, tuple) else (v,))]
    tensors = [x for x in (*results, *flat) if isinstance(x, frontend.torch.Tensor)]
    return [frontend.array(tensor) for tensor in tensors]


def assert_same(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype and np.array_equal(x.view(np.uint8), y.view(np.uint8))


@pytest.mark.parametrize("call", CALLS)
def test_both_ways_are_one(frontend: TorchFrontend, taken: list[Any], call: str) -> None:
    long = outcome(frontend, call, arguments(frontend, call))
    assert not taken
    for _ in range(2):
        taken.clear()
        assert_same(outcome(frontend, call, arguments(frontend, call)), long)
        assert taken


def test_a_tensor_given_twice(frontend: TorchFrontend, taken: list[Any]) -> None:
    """Offsets of queries that are those of keys, too: a call with two tensors is another one."""
    values = arguments(frontend, "dense")
    del values["cu_seqlens_k"]
    same, other = (frontend.tensor(np.array(x, np.int32)) for x in ([0, 4, 6], [0, 5, 9]))
    calls = [
        {"cu_seqlens_q": same, "cu_seqlens_k": same},
        {"cu_seqlens_q": same, "cu_seqlens_k": other},
        {"cu_seqlens_q": frontend.tensor(np.array([0, 4, 6], np.int32)), "cu_seqlens_k": same},
    ]
    long = [outcome(frontend, "dense", values | offsets) for offsets in calls]
    taken.clear()
    for offsets, expected in zip(calls, long, strict=True):
        assert_same(outcome(frontend, "dense", values | offsets), expected)
    assert len(taken) == len(calls)


MODES = {
    "plain": True,
    "no_grad": True,
    "inference": True,
    "dispatch mode": False,
    "function mode": False,
    "profiler": False,
    "forward AD": False,
    "autocast": False,
}


@pytest.mark.parametrize(("mode", "is_short"), MODES.items())
@pytest.mark.parametrize("call", ["write", "pair"])
def test_modes(frontend: TorchFrontend, taken: list[Any], call: str, mode: str, is_short: bool) -> None:
    expected = [outcome(frontend, call, arguments(frontend, call)) for _ in range(2)][1]
    with mode_of(mode, frontend.torch.device(frontend.target_device()).type):
        for _ in range(2):
            taken.clear()
            values = arguments(frontend, call)
            assert_same(outcome(frontend, call, values), expected)
    assert bool(taken) == is_short


def narrow(x: Any) -> Any:
    return x[:-1]


def transposed(x: Any) -> Any:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


OTHERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "shape": ("query", narrow),
    "strides": ("query", transposed),
    "shape of a table": ("block_tables", lambda x: x[:, :-1]),
    "scalar": ("scale", lambda x: x / 2),
    "flag": ("causal", lambda _: False),
    "argument": ("s_aux", lambda _: None),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_calls_are_not_taken_for_it(frontend: TorchFrontend, taken: list[Any], other: str) -> None:
    """Each goes the long way once, and has the result of a call that nothing was learnt before."""
    name, change = OTHERS[other]
    values = arguments(frontend, "pair") | {"scale": 0.25, "causal": True}
    values["s_aux"] = frontend.tensor(np.ones(values["query"].shape[1], np.float32))
    changed = values | {name: change(values[name])}
    expected = frontend.array(frontend.fx.paged_attention(**changed))
    for _ in range(2):
        frontend.fx.paged_attention(**values)
    taken.clear()
    got = frontend.array(frontend.fx.paged_attention(**changed))
    assert len(taken) == 1  # as it was learnt itself
    assert_same([got], [expected])


def test_wrong_calls_are_refused_behind_right_ones(frontend: TorchFrontend, taken: list[Any]) -> None:
    values = arguments(frontend, "pair") | {"sliding_window": 1}
    for _ in range(2):
        frontend.fx.paged_attention(**values)
    assert len(taken) == 1
    for wrong, error in (
        ({"sliding_window": 1.0}, TypeError),
        ({"context_lens": values["context_lens"].long()}, TypeError),
        ({"context_lens": values["context_lens"].repeat(2)}, ValueError),
    ):
        with pytest.raises(error, match="paged_attention: "):
            frontend.fx.paged_attention(**values | wrong)
    assert len(taken) == 1


@pytest.mark.parametrize("kind", ["tensor", "Parameter"])
@pytest.mark.parametrize("without", ["no_grad", "inference"])
@pytest.mark.parametrize("learnt_first", [False, True])
def test_gradients(
    frontend: TorchFrontend, taken: list[Any], without: str, kind: str, learnt_first: bool
) -> None:
    """They go the long way, whatever was learnt from calls that need none."""
    torch = frontend.torch
    values = arguments(frontend, "dense")
    values["q"] = torch.nn.Parameter(values["q"]) if kind == "Parameter" else values["q"].requires_grad_()

    def calls_without() -> None:
        with mode_of(without):
            frontend.fx.flash_attn_varlen_func(**values)
            taken.clear()
            assert not frontend.fx.flash_attn_varlen_func(**values).requires_grad
            assert len(taken) == 1

    if learnt_first:
        calls_without()
    taken.clear()
    for _ in range(3):
        values["q"].grad = None
        frontend.fx.flash_attn_varlen_func(**values).sum().backward()
        assert not taken and values["q"].grad.any()
    calls_without()


def test_updates_are_counted(frontend: TorchFrontend, taken: list[Any]) -> None:
    """Autograd sees them: a gradient that needs the old values is refused."""
    values = arguments(frontend, "write")
    cache = values["key_cache"]
    versions = []
    for _ in range(3):
        frontend.fx.reshape_and_cache_flash(**values)
        versions.append(cache._version)
    assert len(taken) == 2 and 0 < versions[0] < versions[1] < versions[2]
    # TorchTPU counts some of its own.
    assert versions == [1, 2, 3] or frontend.name == "torchtpu"


def test_inside_vmap(frontend: TorchFrontend, taken: list[Any]) -> None:
    values = arguments(frontend, "dense")
    frontend.fx.flash_attn_varlen_func(**values)
    expected = frontend.array(frontend.fx.flash_attn_varlen_func(**values))
    assert taken
    taken.clear()
    seen = []

    def function(x: Any) -> Any:
        seen.append(frontend.fx.flash_attn_varlen_func(**values))
        return x

    frontend.torch.vmap(function)(frontend.torch.zeros(2, device=frontend.target_device()))
    assert not taken
    assert np.array_equal(frontend.array(seen[0]), expected)


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("public", [False, True])
def test_results_are_like_those_of_torch_empty(
    frontend: TorchFrontend, monkeypatch: pytest.MonkeyPatch, inference: bool, public: bool
) -> None:
    """However they are made: by a function that is not public, or without it."""
    from flashxla import torch_calls

    if public:
        monkeypatch.setattr(torch_calls, "_guards", None)
    torch, device = frontend.torch, frontend.device
    empty = torch_calls._empty_on(device)
    with torch.inference_mode(inference):
        for shape in ((2, 3, 5), (2, 0, 3), (0,)):
            got = empty(*torch_calls._dense(shape, torch.bfloat16))
            like = torch.empty(shape, dtype=torch.bfloat16, device=device)
            assert (got.shape, got.dtype, got.device) == (like.shape, like.dtype, like.device)
            assert got.stride() == like.stride() and got.is_inference() == like.is_inference() == inference
            assert not got.requires_grad


def test_nothing_is_kept_alive(frontend: TorchFrontend, taken: list[Any]) -> None:
    values = arguments(frontend, "write")
    for _ in range(2):
        frontend.fx.reshape_and_cache_flash(**values)
    assert len(taken) == 1
    taken.clear()
    alive = weakref.ref(values["key_cache"])
    values.clear()
    gc.collect()
    assert alive() is None


def test_threads(frontend: TorchFrontend, taken: list[Any]) -> None:
    """Calls at the same time have arguments of their own."""
    frontend.torch.set_grad_enabled(True)
    inputs = [arguments(frontend, "dense") for _ in range(4)]
    for scale, values in enumerate(inputs):
        values["v"] = values["v"] * (scale + 1)
    expected = [frontend.array(frontend.fx.flash_attn_varlen_func(**values)) for values in inputs]

    def calls(values: dict[str, Any]) -> list[np.ndarray]:
        return [frontend.array(frontend.fx.flash_attn_varlen_func(**values)) for _ in range(200)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for results, right in zip(pool.map(calls, inputs), expected, strict=True):
            assert all(np.array_equal(result, right) for result in results)
    assert len(taken) >= 800
