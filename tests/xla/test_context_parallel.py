"""Attention over keys that are spread over devices: ring attention, and decoding with merged results."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from flashxla import jax as fx
from flashxla.xla import gpu


@pytest.mark.parametrize("devices", [2, 4])
def test_over_devices(request: pytest.FixtureRequest, devices: int) -> None:
    """On virtual CPU devices, or on so many GPUs."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if request.config.option.device == "cpu":
        count = f"--xla_force_host_platform_device_count={devices}"
        environment.update(JAX_PLATFORMS="cpu", XLA_FLAGS=count)
    elif gpu.count(os.environ) != devices:
        pytest.skip(f"needs {devices} GPUs")
    done = subprocess.run(
        [sys.executable, "-m", "tests.xla.context_parallel_steps"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_ring_order() -> None:
    """Device i has chunk i, and the chunk that is as far from the end."""
    assert fx.ring_order(12, 2).tolist() == [0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8]
    with pytest.raises(ValueError, match="ring_order: tokens: got 10; accepted: a multiple of 4"):
        fx.ring_order(10, 2)


def test_check_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check would blame lengths that the ring's parts have on purpose."""
    monkeypatch.setenv("FLASHXLA_CHECK", "1")
    x = np.zeros((4, 2, 8), np.float32)
    with pytest.raises(ValueError, match="ring_attention: FLASHXLA_CHECK: got 1; accepted: 0"):
        fx.ring_attention(x, x, x, np.array([0, 4], np.int32), 4, axis_name="context")


@pytest.mark.parametrize(("tokens", "keys"), [(5, 5), (4, 6)])
def test_tokens_that_do_not_go_together(tokens: int, keys: int) -> None:
    q, kv = np.zeros((tokens, 2, 8), np.float32), np.zeros((keys, 2, 8), np.float32)
    with pytest.raises(ValueError, match=f"ring_attention: q, k, v: got {tokens}, {keys} and {keys} tokens"):
        fx.ring_attention(q, kv, kv, np.array([0, 8], np.int32), 8, axis_name="context")


ERRORS = [
    ({"q": np.zeros((4, 2, 8), np.int32)}, TypeError, "q: got dtype int32"),
    ({"q": np.zeros((4, 8), np.float32)}, ValueError, r"q: got shape \[4, 8\]"),
    ({"q": np.zeros((4, 3, 8), np.float32)}, ValueError, "q: got 3 heads"),
    ({"cu_seqlens": np.zeros(2, np.float32)}, TypeError, "cu_seqlens: got dtype float32"),
    ({"max_seqlen": -1}, ValueError, "max_seqlen: got -1"),
    ({"window_size": (-3, 0)}, ValueError, r"window_size: got \(-3, 0\)"),
    ({"softmax_scale": "x"}, TypeError, "softmax_scale: got 'x'"),
    (
        {name: np.zeros((4, 2, 8), ml_dtypes.float8_e4m3fn) for name in "qkv"},
        TypeError,
        "q: got dtype float8",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), ERRORS, ids=lambda x: str(x)[:25])
def test_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {name: np.zeros((4, 2, 8), np.float32) for name in "qkv"}
    arguments |= {"cu_seqlens": np.array([0, 8], np.int32), "max_seqlen": 8, "axis_name": "context"}
    with pytest.raises(error, match=f"^ring_attention: {message}"):
        fx.ring_attention(**arguments | changes)


def on_mesh(function: Any) -> None:
    """Trace a function of nothing inside a shard_map over the axes "data" and "context"."""
    mesh = jax.make_mesh((1, 1), ("data", "context"), devices=jax.devices()[:1])
    jax.eval_shape(jax.shard_map(function, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False))


def ring(axis_name: Any) -> Any:
    """A right call but for the axis."""
    q = np.zeros((4, 2, 8), np.float32)
    return fx.ring_attention(q, q, q, np.array([0, 4], np.int32), 4, axis_name=axis_name)


def merge(axis_name: Any = "context", **changes: Any) -> Any:
    arguments = {"out": np.zeros((4, 2, 8), np.float32), "lse": np.zeros((2, 4), np.float32)}
    return fx.merge_attn_states_over(**arguments | changes, axis_name=axis_name)


ON_AN_AXIS = pytest.mark.parametrize(
    ("function", "name"), [(ring, "ring_attention"), (merge, "merge_attn_states_over")]
)


@ON_AN_AXIS
def test_outside_shard_map(function: Any, name: str) -> None:
    """Also under a mesh, and with a jit around."""
    message = f"^{name}: axis_name: got 'context' outside jax.shard_map; accepted: a mesh axis of"
    mesh = jax.make_mesh((1,), ("context",), devices=jax.devices()[:1])
    for call in (function, jax.jit(function, static_argnums=0)):
        with pytest.raises(ValueError, match=message):
            call("context")
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
            call("context")


@ON_AN_AXIS
@pytest.mark.parametrize("axis_name", ["nope", ("context", "nope"), (), None, 0, ["context"]], ids=str)
def test_unknown_axes(function: Any, name: str, axis_name: Any) -> None:
    with pytest.raises(
        ValueError, match=f"^{name}: axis_name: got .*; accepted: .*'context', 'data'"
    ) as error:
        on_mesh(lambda: function(axis_name))
    assert f"got {axis_name!r};" in str(error.value)


@ON_AN_AXIS
@pytest.mark.parametrize("axis_name", ["context", ("data", "context")], ids=str)
def test_known_axes(function: Any, name: str, axis_name: Any) -> None:
    on_mesh(lambda: function(axis_name))


def test_merging_over_an_axis_of_vmap() -> None:
    """Two parts of equal weights: the mean."""
    outs, lses = np.arange(128, dtype=np.float32).reshape(2, 4, 2, 8), np.zeros((2, 2, 4), np.float32)
    out, lse = jax.vmap(lambda *part: fx.merge_attn_states_over(*part, "part"), axis_name="part")(outs, lses)
    for part in range(2):
        np.testing.assert_allclose(out[part], outs.mean(0))
        np.testing.assert_allclose(lse[part], np.full((2, 4), np.log(2.0)), rtol=1e-6)


WRONG_STATES = [
    ({"lse": np.zeros((4, 2), np.float32)}, ValueError, r"lse: got shape \[4, 2\]; accepted: \[2, 4\]"),
    ({"lse": np.zeros(4, np.float32)}, ValueError, r"lse: got shape \[4\]; accepted: \[2, 4\]"),
    ({"lse": 0.0}, TypeError, r"lse: got 0.0 \(float\); accepted: a tensor \[2, 4\]"),
    ({"lse": np.zeros((2, 4), np.float16)}, TypeError, "lse: got dtype float16; accepted: float32"),
    ({"out": np.zeros((4, 2), np.float32)}, ValueError, r"out: got shape \[4, 2\]; accepted: \[T, Hq, D\]"),
    ({"out": np.zeros((4, 2, 8), np.int32)}, TypeError, "out: got dtype int32; accepted: float32"),
    ({"out": None}, TypeError, r"out: got None \(NoneType\)"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_STATES, ids=lambda x: str(x)[:25])
def test_wrong_states(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^merge_attn_states_over: {message}"):
        on_mesh(lambda: merge(**changes))
