"""What JAX lowers for a GPU; needs none."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flashxla import native

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import flashxla.jax as fx  # noqa: E402

P, B, H, D, T, S, M = 32, 16, 2, 64, 6, 3, 4
CACHE = jax.ShapeDtypeStruct((P, B, H, D), jnp.bfloat16)


def layers(query: Any, caches: Any, slots: Any, lengths: Any, tables: Any, starts: Any, num_seqs: Any) -> Any:
    new = []
    for k, v in caches:
        k, v = fx.reshape_and_cache_flash(query[:, :H], query[:, H:], k, v, slots)
        query = fx.paged_attention(query, (k, v), lengths, tables, starts, num_seqs, D**-0.5)
        new.append((k, v))
    return query, new


def lowered(function: Any = layers, *, count: int = 2, platforms: tuple[str, ...] = ("cuda",)) -> str:
    shapes = [(T,), (S,), (S, M), (S + 1,), (1,)]
    index = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    query = jax.ShapeDtypeStruct((T, 2 * H, D), jnp.bfloat16)
    # A function of its own each time: JAX keeps what it traced by function.
    traced = jax.jit(lambda *args: function(*args), donate_argnums=1).trace(
        query, [(CACHE, CACHE)] * count, *index
    )
    return traced.lower(lowering_platforms=platforms).as_text()


def calls(text: str, target: str) -> list[str]:
    return [
        line.strip()
        for line in text.splitlines()
        if f'custom_call @"{target}"' in line or f"@{target}(" in line
    ]


def test_layers_ask_for_one_plan(library: native.Library) -> None:
    """The plans of both layers are the same operation on the same values: XLA makes one of them."""
    text = lowered()
    plans = {re.sub(r"^%\w+ = ", "", line) for line in calls(text, "flashxla_attention_plan")}
    assert len(calls(text, "flashxla_attention_plan")) == 2
    assert len(plans) == 1
    assert "has_side_effect" not in plans.pop()
    assert len(calls(text, "flashxla_attention")) == 2


def test_attention_takes_the_plan_and_a_workspace(library: native.Library) -> None:
    text = lowered(count=1)
    (plan,) = calls(text, "flashxla_attention_plan")
    (attention,) = calls(text, "flashxla_attention")
    assert f"{plan.split()[0]}) {{" in attention  # the last operand
    assert re.search(r'operands = "[^"]*,plan"', attention)
    assert 'results = "out,workspace"' in attention  # no lse
    assert re.search(r"-> \(tensor<6x4x64xbf16>, tensor<\d+xui8>\)", attention)


def test_writes_stay_aliased(library: native.Library) -> None:
    text = lowered()
    assert text.count("tf.aliasing_output") == 4
    for write in calls(text, "flashxla_kv_cache"):
        assert write.count("#stablehlo.output_operand_alias") == 2


def write_and_attend(query: Any, caches: Any, slots: Any, *meta: Any) -> Any:
    new = []
    for cache in caches:
        query, cache = fx.ragged_paged_attention(query, query[:, :H], query[:, H:], cache, *meta, D**-0.5)
        new.append(cache)
    return query, new


def test_write_and_attend_stays_aliased(library: native.Library) -> None:
    """One call a layer, both caches updated; the plan of all layers is one."""
    text = lowered(write_and_attend)
    assert text.count("tf.aliasing_output") == 4
    attentions = calls(text, "flashxla_attention")
    assert len(attentions) == 2 and not calls(text, "flashxla_kv_cache")
    for attention in attentions:
        assert attention.count("#stablehlo.output_operand_alias") == 2
        assert 'results = "out,k,v,workspace"' in attention
    plans = {re.sub(r"^%\w+ = ", "", line) for line in calls(text, "flashxla_attention_plan")}
    assert len(plans) == 1


def loss(x: Any, weights: Any) -> Any:
    """Of layers in a scan: it stacks what they save for the backward pass."""
    offsets = jnp.array([0, 40, 100], jnp.int32)

    def layer(x: Any, weight: Any) -> Any:
        q = (x @ weight).reshape(100, 2, D)
        out = fx.flash_attn_varlen_func(q, q, q, 60, offsets, 60, offsets, causal=True)
        return x + out.reshape(x.shape), None

    return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32))


LOSS = (
    jax.ShapeDtypeStruct((100, 2 * D), jnp.bfloat16),
    jax.ShapeDtypeStruct((3, 2 * D, 2 * D), jnp.bfloat16),
)


def test_results_are_fenced(library: native.Library) -> None:
    """XLA:GPU would run a call whose results are stacked twice."""
    text = jax.jit(jax.grad(loss)).trace(*LOSS).lower(lowering_platforms=("cuda",)).as_text()
    (attention,) = calls(text, "flashxla_attention")
    name = attention.split(":")[0].split(" ")[0]
    assert re.search(rf"optimization_barrier {name}#0, {name}#1 :", text)  # out and the LSE


def test_scan_calls_once(jax: Any, library: native.Library) -> None:
    text = jax.jit(jax.grad(loss)).lower(*LOSS).compile().as_text()
    for target in ("flashxla_attention", "flashxla_attention_backward"):
        assert text.count(f'custom_call_target="{target}"') == 1


def test_other_masks_are_other_plans(library: native.Library) -> None:
    def function(query: Any, caches: Any, slots: Any, *meta: Any) -> Any:
        (cache,) = caches
        full = fx.paged_attention(query, cache, *meta, 0.1)
        return full + fx.paged_attention(query, cache, *meta, 0.1, sliding_window=5), caches

    plans = calls(lowered(function, count=1), "flashxla_attention_plan")
    assert len({re.sub(r"^%\w+ = ", "", line) for line in plans}) == 2


def test_programs_for_both_platforms(library: native.Library) -> None:
    text = lowered(count=1, platforms=("cpu", "cuda"))
    assert len(calls(text, "flashxla_attention")) == 2
    assert len(calls(text, "flashxla_attention_plan")) == 1


def test_programs_for_cpu_have_no_plan() -> None:
    text = lowered(platforms=("cpu",))
    assert len(calls(text, "flashxla_attention")) == 2
    assert "flashxla_attention_plan" not in text


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_installed", lambda platform: platform == "cpu")
    text = lowered()
    assert "libflashxla_cuda.so is not installed" in text and "make cuda" in text
    assert not calls(text, "flashxla_attention") and not calls(text, "flashxla_kv_cache")
