"""What TorchTPU runs and compiles, eager and under torch.compile: its column of docs/lazy-or-compile.md.

Programs are counted by the adapter, graphs by the backend that torch.compile calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchRuntimeError, Unsupported

import flashxla.torch as fx
from flashxla.xla import pjrt_adapter
from flashxla.xla.torch_tpu_memory import addresses
from tests.torch_steps import arguments, write_and_attend
from tests.torchtpu import device

device.start()


@pytest.fixture(autouse=True)
def start_clean() -> None:
    torch._dynamo.reset()


def ran(function: Callable[..., Any], *args: Any) -> int:
    """How many programs a call runs."""
    torch.accelerator.synchronize()
    with pjrt_adapter.load().watch_inputs() as seen:
        held = function(*args)
        torch.accelerator.synchronize()
    del held
    return len(seen)


def compiled(
    function: Callable[..., Any], calls: Sequence[Sequence[Any]], **options: Any
) -> list[tuple[int, int]]:
    """For each call of the compiled function: the graphs that it compiles, the programs that it runs."""
    from flashxla.xla.torch_tpu_graphs import CountingBackend  # which needs TorchTPU to have been started

    backend, counts = CountingBackend(), []
    step = torch.compile(function, backend=backend, **{"dynamic": False, **options})
    for args in calls:
        before = backend.graphs
        programs = ran(step, *args)
        counts.append((backend.graphs - before, programs))
    return counts


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape).to("tpu")


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(20):
        x = x * 1.5
    return x


def attend(*args: Any) -> Any:
    return fx.paged_attention(*args)


def attention_arguments() -> list[torch.Tensor]:
    _, _, cache, _, _, query, *index = arguments()
    return [x.to("tpu") for x in (query, cache.repeat(1, 1, 2, 1), *index)]


# Execution


def test_eager_runs_a_program_for_each_operation() -> None:
    assert ran(chain, ones(101)) == 20


def test_eager_computes_what_nobody_holds() -> None:
    x = ones(101)
    assert ran(lambda: chain(x) is None) == 20


def test_compiled_runs_one_program_at_the_call() -> None:
    x = ones(102)
    assert compiled(chain, [(x,), (x,)]) == [(1, 1), (0, 1)]


def test_reading_runs_nothing_that_was_not_run() -> None:
    y = chain(ones(103))
    assert ran(y.cpu) == 0
    assert ran(lambda: (y.shape, y.dtype, y.device)) == 0


# Programs


def test_a_new_shape_is_a_new_graph() -> None:
    calls = [(ones(n),) for n in (104, 105, 106, 104)]
    assert compiled(chain, calls) == [(1, 1), (1, 1), (1, 1), (0, 1)]


@pytest.mark.parametrize("numbers", [(2, 3, 2), (2.5, 3.5, 2.5)], ids=["int", "float"])
def test_a_python_number_is_a_new_graph(numbers: tuple[float, ...]) -> None:
    x = ones(107)
    assert [graphs for graphs, _ in compiled(torch.mul, [(x, n) for n in numbers])] == [1, 1, 0]


def test_a_number_that_sets_a_shape_is_a_new_graph() -> None:
    x = ones(116)
    calls = [(x, size) for size in (2, 3, 2)]
    assert compiled(lambda x, size: x[:size] + 0.5, calls) == [(1, 1), (1, 1), (0, 1)]


def test_without_options_too_there_are_no_dynamic_graphs() -> None:
    """use_cpu and use_gpu switch them off: TorchTPU's programs for them are for TPUs."""
    for calls in (
        [(ones(n), 1.5) for n in (117, 118, 119, 118)],
        [(ones(117), n) for n in (2, 3, 4, 3)],
        [(ones(117), n) for n in (2.5, 3.5, 4.5, 3.5)],
    ):
        torch._dynamo.reset()
        assert compiled(torch.mul, calls, dynamic=None) == [(1, 1), (1, 1), (1, 1), (0, 1)]
    torch._dynamo.reset()
    step = torch.compile(chain, backend="tpu")
    for n in (120, 121, 122):
        torch.testing.assert_close(step(ones(n)).cpu(), chain(torch.ones(n)))


def test_a_number_in_a_tensor_is_one_graph() -> None:
    calls = [(ones(108), torch.tensor(n).to("tpu")) for n in (2.0, 3.0, 4.0)]
    assert [graphs for graphs, _ in compiled(torch.mul, calls)] == [1, 0, 0]


def test_an_argument_of_an_operation_is_part_of_the_graph_and_lengths_are_not() -> None:
    tensors = attention_arguments()
    scales = [(*tensors, scale) for scale in (0.5, 0.25, 0.5)]
    assert [graphs for graphs, _ in compiled(attend, scales)] == [1, 1, 0]
    torch._dynamo.reset()
    query, cache, lengths, *others = tensors
    calls = [(query, cache, lengths - n, *others, 0.5) for n in range(3)]
    assert compiled(attend, calls) == [(1, 1), (0, 1), (0, 1)]


def test_a_branch_on_a_value_is_two_graphs() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 3 if (x * 2).sum() > 0 else x - 3

    x = ones(109)
    assert compiled(function, [(x,), (x,)]) == [(2, 2), (0, 2)]
    with pytest.raises(Unsupported, match="branching"):
        compiled(function, [(x,)], fullgraph=True)


def test_a_print_breaks_the_graph() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        print("doubled")
        return y + 3

    assert compiled(function, [(ones(110),)]) == [(2, 2)]


def test_beyond_the_recompile_limit_the_function_is_eager() -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        calls = [(ones(n),) for n in (111, 112, 113)]
        assert compiled(chain, calls) == [(1, 1), (1, 1), (0, 20)]
        torch._dynamo.reset()
        with pytest.raises(FailOnRecompileLimitHit):
            compiled(chain, calls, fullgraph=True)


def test_dynamic_shapes_are_refused() -> None:
    with pytest.raises(Exception, match=r"does not support torch\.compile\(..., dynamic=True"):
        compiled(chain, [(ones(114),)], dynamic=True)


def test_a_compiled_step_is_one_program_and_one_for_all_its_caches() -> None:
    """Which makes sure that no clone shares them (tests/torchtpu/test_memory.py)."""
    key, value, cache, _, *others = [x.to("tpu") for x in arguments()]
    caches = [(torch.zeros_like(cache), torch.zeros_like(cache)) for _ in range(3)]

    def layers() -> list[torch.Tensor]:
        return [write_and_attend(key, value, *pair, *others) for pair in caches]

    assert compiled(layers, [(), ()]) == [(1, 2), (0, 2)]
    assert ran(lambda: write_and_attend(key, value, *caches[0], *others)) == 3  # a write has two caches


# Devices


def test_tensors_of_the_cpu_are_refused_but_for_numbers() -> None:
    x, cpu = ones(115), torch.ones(115)
    assert (x * torch.tensor(3.0)).cpu()[0] == 3
    with pytest.raises(RuntimeError, match="same device"):
        x + cpu
    with pytest.raises(TorchRuntimeError, match=r"two different devices|fake tensors|at least two devices"):
        compiled(torch.add, [(x, cpu)])
    for calls in ([(x, torch.tensor(3.0))], [(cpu, cpu)]):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match="device=cpu"):
            compiled(torch.add, calls)


# Cache writes


def same_memory(function: Callable[..., Any], cache: torch.Tensor, *args: Any) -> bool:
    before = addresses([cache])
    function(cache, *args)
    return addresses([cache]) == before


def test_what_keeps_a_tensors_memory() -> None:
    """flashxla's updates: tests/torchtpu/test_torch_tpu.py."""

    def adds(cache: torch.Tensor) -> None:
        cache.add_(1)

    def copies(cache: torch.Tensor) -> None:
        cache.copy_(cache * 0.5)

    cache = ones(16, 64)
    assert same_memory(adds, cache)
    assert not same_memory(copies, cache)
    for function in (adds, copies):
        step = torch.compile(function, backend="tpu")
        step(cache)
        assert not same_memory(step, cache)


def test_a_result_that_nobody_uses() -> None:
    """Eager it is computed; compiled it is not, but a write is."""
    tensors = attention_arguments()

    def unused(*args: Any) -> None:
        attend(*args, 0.5)

    assert ran(unused, *tensors) == 1
    assert compiled(unused, [tensors]) == [(1, 0)]
    torch._dynamo.reset()
    given = [x.to("tpu") for x in arguments()]
    old = given[2].cpu()

    def writes(*args: Any) -> None:
        write_and_attend(*args)

    compiled(writes, [given])
    assert not torch.equal(given[2].cpu(), old)


# Operations of one's own, and errors


@pytest.fixture
def library() -> Iterator[Any]:
    with torch.library._scoped_library("flashxla_execution", "FRAGMENT") as library:
        yield library


def test_operations_of_ones_own(library: Any) -> None:
    def add_one(cache: torch.Tensor) -> None:
        cache.add_(1)

    def step(cache: torch.Tensor) -> None:
        torch.ops.flashxla_execution.add_one(cache)

    library.define("add_one(Tensor(a!) cache) -> ()")
    library.impl("add_one", add_one, "PrivateUse1")
    cache = ones(16, 64)
    assert same_memory(step, cache)
    torch.library.register_fake("flashxla_execution::add_one", lambda cache: None, lib=library)
    compiled_step = torch.compile(step, backend="tpu", fullgraph=True)
    compiled_step(cache)
    assert not same_memory(compiled_step, cache)
    assert cache.cpu()[0, 0] == 4

    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "PrivateUse1")
    assert torch.ops.flashxla_execution.twice(cache).cpu()[0, 0] == 8
    with pytest.raises(Unsupported, match="fake tensors"):
        compiled(lambda x: torch.ops.flashxla_execution.twice(x), [(cache,)], fullgraph=True)

    library.define("same(Tensor x) -> Tensor")
    library.impl("same", torch.clone, "CUDA")
    with pytest.raises(RuntimeError, match="not implemented for TPU"):
        torch.ops.flashxla_execution.same(cache)


def test_errors_come_at_the_call() -> None:
    query, *others = attention_arguments()
    with pytest.raises(TypeError, match="paged_attention: query: got dtype int32"):
        attend(query.to(torch.int32), *others, 0.5)
    with pytest.raises(TorchRuntimeError, match="paged_attention: query: got dtype int32"):
        compiled(attend, [(query.to(torch.int32), *others, 0.5)])
