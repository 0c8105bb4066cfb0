"""What torchax runs and compiles, eager and under jax.jit: its column of docs/lazy-or-compile.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest
import torch
import torchax
from torchax import interop

import flashxla.torch as fx
import flashxla.torchax
from tests.torch_steps import arguments

flashxla.torchax.register()
env = torchax.default_env()


def programs(function: Callable[..., Any], calls: Sequence[Sequence[Any]], **options: Any) -> list[int]:
    """How many programs each call of the function under jax.jit compiles."""
    jitted: Any = jax.jit(interop.jax_view(function), **options)
    step, counts = interop.torch_view(jitted), []
    for args in calls:
        before = jitted._cache_size()
        step(*args)
        counts.append(jitted._cache_size() - before)
    return counts


def ones(*shape: int) -> torch.Tensor:
    with env:
        return torch.ones(*shape, device="jax")


def if_positive(x: torch.Tensor) -> torch.Tensor:
    return x + 3 if x.sum() > 0 else x - 3


def start(x: torch.Tensor, size: int) -> torch.Tensor:
    return x[:size] + 0.5


def test_a_new_shape_is_a_new_program() -> None:
    assert programs(lambda x: x * 2 + 3, [(ones(n),) for n in (3, 4, 3)]) == [1, 1, 0]


def test_a_python_number_is_data_or_static() -> None:
    calls = [(ones(3), number) for number in (2.5, 3.5, 2.5)]
    assert programs(torch.mul, calls) == [1, 0, 0]
    assert programs(torch.mul, calls, static_argnums=1) == [1, 1, 0]


def test_a_number_that_sets_a_shape_must_be_static() -> None:
    calls = [(ones(5), size) for size in (2, 3, 2)]
    assert programs(start, calls, static_argnums=1) == [1, 1, 0]
    with pytest.raises(jax.errors.ConcretizationTypeError):
        programs(start, calls)


def test_lengths_are_data_and_the_scale_is_static() -> None:
    _, _, cache, _, _, query, *index = arguments()
    lengths, *others = (env.to_xla(x) for x in index)
    query, cache = env.to_xla(query), env.to_xla(cache.repeat(1, 1, 2, 1))

    def attend(*args: Any) -> torch.Tensor:
        return fx.paged_attention(*args, 0.5)

    with env:
        calls = [(query, cache, lengths - n, *others) for n in range(3)]
    assert programs(attend, calls) == [1, 0, 0]
    scales = [(*calls[0], scale) for scale in (0.5, 0.25, 0.5)]
    assert programs(fx.paged_attention, scales, static_argnums=6) == [1, 1, 0]
    with pytest.raises(TypeError, match="paged_attention: scale"):
        programs(fx.paged_attention, scales)


def test_a_branch_on_a_value_runs_eager_only() -> None:
    x = ones(3)
    with env:
        assert if_positive(x)[0].item() == 4
    with pytest.raises(jax.errors.ConcretizationTypeError):
        programs(if_positive, [(x,)])


def test_a_print_is_made_once(capsys: pytest.CaptureFixture[str]) -> None:
    def says(x: torch.Tensor) -> torch.Tensor:
        print("traced")
        return x + 3

    assert programs(says, [(ones(3),)] * 2) == [1, 0]
    assert capsys.readouterr().out == "traced\n"


def test_tensors_of_the_cpu_are_refused_but_for_numbers() -> None:
    x, cpu = ones(3), torch.ones(3)
    with env:
        assert (x + torch.tensor(2.0))[0].item() == 3
        with pytest.raises(AssertionError, match="mixed math"):
            x + cpu
    with pytest.raises(AssertionError):
        programs(torch.add, [(x, cpu)])


def test_pytorchs_own_updates() -> None:
    """Eager they take new memory; under jit one that is not returned is lost. flashxla's: test_torchax.py."""
    x = ones(64, 64)
    before = x.jax().unsafe_buffer_pointer()
    with env:
        x.add_(1)
    assert x.jax().unsafe_buffer_pointer() != before and x.jax()[0, 0] == 2

    def adds(x: torch.Tensor) -> None:
        x.add_(1)

    programs(adds, [(x,)])
    assert x.jax()[0, 0] == 2


@pytest.mark.parametrize("jitted", [False, True])
def test_errors_come_at_the_call(jitted: bool) -> None:
    _, _, cache, _, _, query, *index = (env.to_xla(x) for x in arguments())

    def attend(query: torch.Tensor) -> torch.Tensor:
        return fx.paged_attention(query, (cache, cache), *index, 0.5)

    with env, pytest.raises(TypeError, match="paged_attention: query: got dtype int32"):
        integers = query.to(torch.int32)
        programs(attend, [(integers,)]) if jitted else attend(integers)
