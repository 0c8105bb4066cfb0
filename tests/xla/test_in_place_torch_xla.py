"""The in-place ops on XLA tensors: whatever the order and shape of a model's caches, they keep their buffers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch_xla = pytest.importorskip("torch_xla")

import flashxla.torch as fx  # noqa: E402
from flashxla.doctor import hlo  # noqa: E402

P, B, H, D = 32, 8, 2, 32
CACHE = (P, B, H, D)
SLOTS = torch.tensor([0, 1, B + 1, -1])


@pytest.fixture(params=["lazy", "openxla"])
def compile_step(request: pytest.FixtureRequest) -> Callable[[Callable], Callable]:
    if request.param == "lazy":
        return lambda step: step
    torch._dynamo.reset()
    return lambda step: torch.compile(step, backend="openxla")


def on_xla(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.to(torch_xla.device()) for t in tensors]


def caches(count: int, shape: Sequence[int] = CACHE) -> list[torch.Tensor]:
    return [torch.zeros(shape, device=torch_xla.device()) for _ in range(count)]


def pointers(tensors: Sequence[torch.Tensor]) -> list[int]:
    torch_xla.sync(wait=True)
    return [torch_xla._XLAC._unsafe_buffer_pointer(t) for t in tensors]


def attend(x: torch.Tensor, kv: Any, meta: Sequence[torch.Tensor]) -> torch.Tensor:
    lengths, tables, starts, num_seqs = meta
    return fx.paged_attention(x, kv, lengths, tables, starts, num_seqs, D**-0.5)


def metadata() -> list[torch.Tensor]:
    return on_xla(
        torch.tensor([2, 1, 1], dtype=torch.int32),
        torch.tensor([[0], [1], [2]], dtype=torch.int32),
        torch.tensor([0, 2, 3, 4], dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32),
    )


def assert_stay(tensors: Sequence[torch.Tensor], step: Callable, *args: Any) -> None:
    before = pointers(tensors)
    assert len(set(before)) == len(before)
    for _ in range(3):
        step(*args)
        assert pointers(tensors) == before


def test_keys_and_values_in_lists_used_out_of_order(compile_step: Callable) -> None:
    keys, values = caches(3), caches(3)

    def step(keys: Any, values: Any, key: Any, x: Any, slots: Any, meta: Any) -> Any:
        for layer in (2, 0, 1):
            fx.reshape_and_cache_flash(x[:, :H] + key, key, keys[layer], values[layer], slots)
            x = attend(x, (keys[layer], values[layer]), meta)
        return x

    key, x, slots = on_xla(torch.randn(4, H, D), torch.randn(4, 2 * H, D), SLOTS)
    assert_stay(keys + values, compile_step(step), keys, values, key, x, slots, metadata())


def test_arguments_in_any_order(compile_step: Callable) -> None:
    def step(v0: Any, v1: Any, k1: Any, k0: Any, key: Any, x: Any, slots: Any, meta: Any) -> Any:
        for k, v in ((k0, v0), (k1, v1)):
            fx.reshape_and_cache_flash(x[:, :H] + key, key, k, v, slots)
            x = attend(x, (k, v), meta)
        return x

    held = caches(4)
    key, x, slots = on_xla(torch.randn(4, H, D), torch.randn(4, 2 * H, D), SLOTS)
    assert_stay(held, compile_step(step), *held, key, x, slots, metadata())


def test_one_tensor_for_keys_and_values(compile_step: Callable) -> None:
    held = caches(3, (P, B, 2 * H, D))

    def step(held: Any, key: Any, x: Any, slots: Any, meta: Any) -> Any:
        for cache in held:
            fx.reshape_and_cache(x[:, :H] + key, key, cache, slots, "interleaved")
            x = attend(x, cache, meta)
        return x

    key, x, slots = on_xla(torch.randn(4, H, D), torch.randn(4, 2 * H, D), SLOTS)
    assert_stay(held, compile_step(step), held, key, x, slots, metadata())


@pytest.mark.parametrize("slots", [False, True], ids=["by table", "slot_mapping"])
def test_write_and_attend(compile_step: Callable, slots: bool) -> None:
    """One call a layer, with caches that are pairs and one that is one tensor, in any order."""
    v0, k0, k1, v1 = caches(4)
    (one,) = caches(1, (P, B, 2 * H, D))

    def step(v0: Any, k0: Any, one: Any, k1: Any, v1: Any, x: Any, slots: Any, meta: Any) -> Any:
        mapping = {} if slots is None else {"slot_mapping": slots}
        for cache in ((k1, v1), one, (k0, v0)):
            x = fx.ragged_paged_attention(x, x[:, :H], x[:, H:], cache, *meta, D**-0.5, **mapping)
        return x

    held = (v0, k0, one, k1, v1)
    x, mapping = on_xla(torch.randn(4, 2 * H, D), SLOTS)
    assert_stay(held, compile_step(step), *held, x, mapping if slots else None, metadata())
    assert all(cache.cpu().abs().sum() > 0 for cache in held)


def test_write_and_attend_is_one_aliased_call(tmp_path: Path) -> None:
    """In the optimized programs of both routes: no other call, no copy of a cache, and right results."""
    from tests.xla import write_and_attend_steps as steps

    environment = {**os.environ, "XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"}
    command = [sys.executable, "-m", "tests.xla.write_and_attend_steps"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    programs = [p for p in hlo.dumped_programs(tmp_path) if "flashxla_attention" in p.targets()]
    for route, blocks in steps.BLOCKS.items():
        assert found[route]["stay"] and found[route]["same_caches"] and found[route]["error"] < 1e-5, found
        cache = rf"f32\[{blocks},{steps.B},{steps.H},{steps.D}\]"
        mine = [p for p in programs if re.search(cache, p.text)]
        assert len(mine) == 1, [p.name for p in programs]
        (program,) = mine
        # On a GPU the layers have plans beside, one for each of their different caches.
        calls = [t for t in program.targets() if t.startswith("flashxla") and not t.endswith("_plan")]
        assert calls == ["flashxla_attention"] * 2
        assert program.copies(at_least=blocks * steps.B * steps.H * steps.D * 4) == []
        assert sorted(map(len, hlo_aliases(program))) == [1, 2]


def hlo_aliases(program: hlo.Program) -> list[list[str]]:
    """Of each custom call of attention the results that are operands updated in place."""
    calls = [line for line in program.text.splitlines() if 'target="flashxla_attention"' in line]
    return [
        re.findall(r"\{\d+\}: \(\d+, \{\}\)", call.partition("output_to_operand_aliasing=")[2])
        for call in calls
    ]


def test_caches_held_by_a_module(compile_step: Callable) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = torch.nn.Linear(D, D)
            self.kv = [tuple(caches(2)) for _ in range(2)]

        def forward(self, x: Any, slots: Any, meta: Any) -> Any:
            for k, v in self.kv:
                key = self.projection(x)[:, :H]
                fx.reshape_and_cache_flash(key, key, k, v, slots)
                x = attend(x, (k, v), meta)
            return x

    model = Model().to(torch_xla.device())
    x, slots = on_xla(torch.randn(4, 2 * H, D), SLOTS)
    with torch.no_grad():
        assert_stay([t for kv in model.kv for t in kv], compile_step(model), x, slots, metadata())


def test_several_writes_of_one_cache_in_a_step(compile_step: Callable) -> None:
    held = caches(2)

    def step(k: Any, v: Any, key: Any, slots: Any) -> Any:
        for i in range(3):
            fx.reshape_and_cache_flash(key + i, key - i, k, v, slots + i * B)
        return k.sum()

    key, slots = on_xla(torch.randn(4, H, D), torch.tensor([0, 1, 2, 3]))
    assert_stay(held, compile_step(step), *held, key, slots)
    rows = held[0].cpu().view(-1, H, D)
    for i in range(3):
        assert torch.equal(rows[i * B : i * B + 4], key.cpu() + i)


def test_number_of_tokens_may_change(compile_step: Callable) -> None:
    held = caches(2)
    step = compile_step(lambda k, v, key, slots: fx.reshape_and_cache_flash(key, key, k, v, slots))
    before = pointers(held)
    for tokens in (1, 2, 3, 5, 8):
        key, slots = on_xla(torch.randn(tokens, H, D), torch.arange(tokens))
        step(*held, key, slots)
        assert pointers(held) == before
        assert torch.equal(held[1].cpu().view(-1, H, D)[:tokens], key.cpu())


def test_a_clone_keeps_the_old_value(compile_step: Callable) -> None:
    def step(k: Any, v: Any, key: Any, slots: Any) -> Any:
        old = k.clone()
        fx.reshape_and_cache_flash(key, key, k, v, slots)
        return old

    k, v = caches(2)
    key, slots = on_xla(torch.randn(4, H, D), SLOTS)
    step = compile_step(step)
    assert step(k, v, key, slots).cpu().abs().sum() == 0
    first = k.cpu()
    assert torch.equal(step(k, v, key * 2, slots).cpu(), first)
    assert torch.equal(k.cpu(), first * 2)


def test_writing_to_a_clone_leaves_the_original(compile_step: Callable) -> None:
    def step(k: Any, v: Any, key: Any, slots: Any) -> Any:
        k, v = k.clone(), v.clone()
        fx.reshape_and_cache_flash(key, key, k, v, slots)
        return k

    k, v = caches(2)
    key, slots = on_xla(torch.randn(4, H, D), SLOTS)
    step = compile_step(step)
    for _ in range(2):
        assert step(k, v, key, slots).cpu().abs().sum() > 0
        assert k.cpu().abs().sum() == 0
        assert v.cpu().abs().sum() == 0


def test_views_of_a_stacked_cache_are_written(compile_step: Callable) -> None:
    (stacked,) = caches(1, (2, *CACHE))
    key, value, slots = on_xla(torch.randn(4, H, D), torch.randn(4, H, D), SLOTS)
    compile_step(lambda c, k, v, s: fx.reshape_and_cache_flash(k, v, c[0], c[1], s))(
        stacked, key, value, slots
    )
    written = stacked.cpu().view(2, -1, H, D)[:, SLOTS[:3]]
    assert torch.equal(written, torch.stack((key.cpu()[:3], value.cpu()[:3])))


def test_write_and_attend_on_views_of_a_stacked_cache(compile_step: Callable) -> None:
    """K and V as slices: their base is updated, and attention sees what was written."""
    (stacked,) = caches(1, (2, *CACHE))
    x, *meta = on_xla(torch.randn(4, 2 * H, D), *(t.cpu() for t in metadata()))

    def step(cache: Any, x: Any, meta: Any) -> Any:
        pair = (cache[0], cache[1])
        return fx.ragged_paged_attention(x, x[:, :H], x[:, H:], pair, *meta, D**-0.5)

    out = compile_step(step)(stacked, x, meta).cpu()
    plain = torch.zeros(2, *CACHE)
    expected = step(plain, x.cpu(), [t.cpu() for t in meta])
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(stacked.cpu(), plain)


def test_the_raw_op_needs_no_help(compile_step: Callable) -> None:
    """No allow_in_graph, no dynamo_set_buffer_donor_: the annotated op itself, as vLLM calls it."""
    k, v = caches(2)
    key, slots = on_xla(torch.randn(4, H, D), SLOTS)

    def step(k: Any, v: Any, key: Any, slots: Any) -> Any:
        torch.ops.flashxla.reshape_and_cache_flash(key, key, k, v, slots, "auto", None, None)
        return k.sum()

    schema = str(torch.ops.flashxla.reshape_and_cache_flash.default._schema)
    assert "Tensor(a!) key_cache" in schema and "Tensor(b!) value_cache" in schema
    assert_stay([k, v], compile_step(step), k, v, key, slots)


def test_the_raw_write_and_attend_needs_no_help(compile_step: Callable) -> None:
    k, v = caches(2)
    (x,) = on_xla(torch.randn(4, 2 * H, D))

    def step(k: Any, v: Any, x: Any, meta: Any) -> Any:
        op = torch.ops.flashxla.ragged_paged_attention
        return op(x, x[:, :H], x[:, H:], k, *meta, D**-0.5, value_cache=v, layout="NHD")[0]

    schema = str(torch.ops.flashxla.ragged_paged_attention.default._schema)
    assert "Tensor(a!) kv_cache" in schema and "Tensor(b!)? value_cache=None" in schema
    assert_stay([k, v], compile_step(step), k, v, x, metadata())


def test_calls_that_differ_only_in_attributes_are_different_programs() -> None:
    """torch_xla's own custom-call node would reuse the first program."""
    lengths, tables, starts, num_seqs = metadata()
    x, cache = on_xla(torch.randn(4, 2 * H, D), torch.randn(P, B, 2 * H, D))
    outs = [
        fx.paged_attention(x, cache, lengths, tables, starts, num_seqs, scale).cpu() for scale in (0.1, 2.0)
    ]
    assert not torch.allclose(outs[0], outs[1])
