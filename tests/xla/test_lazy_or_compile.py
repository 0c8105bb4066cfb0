"""What lazy tensors and torch.compile(backend="openxla") do differently: every claim of docs/lazy-or-compile.md.

Programs are counted with torch_xla's metrics. Every test works on shapes that no other uses, because torch_xla
keeps a compiled program as long as the process lives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch_xla")

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchRuntimeError, Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch_xla.debug import metrics

import flashxla.torch as fx

P, B, H, D = 8, 4, 2, 32
SIZES = itertools.count(1001)
TOKENS = itertools.count(101)
GUARDS_IN_PYTHON = {"enable_cpp_symbolic_shape_guards": False}  # the others take a C++ compiler many seconds


@dataclasses.dataclass
class Counts:
    """What happened meanwhile: programs compiled, programs run, operations traced by the host."""

    compiled: int = 0
    ran: int = 0
    traced: int = 0


def metric(name: str) -> int:
    data = metrics.metric_data(name)
    return data[0] if data else 0


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    def now() -> tuple[int, ...]:
        xm.wait_device_ops()  # starts nothing
        return tuple(metric(name) for name in ("CompileTime", "ExecuteTime", "LazyTracing"))

    counts, before = Counts(), now()
    yield counts
    counts.compiled, counts.ran, counts.traced = (b - a for a, b in zip(before, now(), strict=True))


def count(function: Callable[..., Any], *args: Any) -> Counts:
    with counting() as counts:
        held = function(*args)
    del held
    return counts


@pytest.fixture(autouse=True)
def start_clean() -> None:
    torch._dynamo.reset()
    torch_xla.sync(wait=True)


def lazy(function: Callable[..., Any]) -> Callable[..., Any]:
    def step(*args: Any) -> Any:
        out = function(*args)
        torch_xla.sync()
        return out

    return step


def openxla(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="openxla", **options)


both = pytest.mark.parametrize("mode", [lazy, openxla])
Mode = Callable[[Callable[..., Any]], Callable[..., Any]]


def vector(size: int | None = None) -> torch.Tensor:
    x = torch.ones(size or next(SIZES), device=torch_xla.device())
    torch_xla.sync()
    return x


def line(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 3


def chain(operations: int, x: torch.Tensor) -> torch.Tensor:
    for _ in range(operations):
        x = x * 1.5
    return x


def write(key: Any, key_cache: Any, value_cache: Any, slots: Any) -> None:
    fx.reshape_and_cache_flash(key, key, key_cache, value_cache, slots)


def write_arguments() -> list[torch.Tensor]:
    tokens, device = next(TOKENS), torch_xla.device()
    caches = [torch.zeros(P, B, H, D, device=device) for _ in range(2)]
    arguments = [torch.ones(tokens, H, D, device=device), *caches, torch.arange(tokens, device=device) % 4]
    torch_xla.sync(wait=True)
    return arguments


def attend(*arguments: Any) -> Any:
    return fx.paged_attention(*arguments)


def integers(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(torch_xla.device())


def attend_arguments() -> list[torch.Tensor]:
    query = torch.ones(next(TOKENS), 2 * H, D, device=torch_xla.device())
    cache = torch.ones(P, B, 2 * H, D, device=torch_xla.device())
    torch_xla.sync()
    return [query, cache, integers([3]), integers([[0, 1]]), integers([0, 1]), integers([1])]


def pointer(tensor: torch.Tensor) -> int:
    torch_xla.sync(wait=True)
    return torch_xla._XLAC._unsafe_buffer_pointer(tensor)


# Execution


def test_lazy_runs_at_the_sync() -> None:
    x = vector()
    with counting() as call:
        y = line(x)
    assert (call.compiled, call.ran, call.traced) == (0, 0, 2)
    first, again = count(torch_xla.sync), count(torch_xla.sync)
    assert (first.compiled, first.ran) == (1, 1)
    assert (again.compiled, again.ran) == (0, 0)
    assert y[0].item() == 5


def test_openxla_runs_at_the_call() -> None:
    x, step = vector(), openxla(line)
    with counting() as call:
        y = step(x)
    assert (call.compiled, call.ran) == (1, 1)
    assert count(torch_xla.sync).ran == 0
    assert y[0].item() == 5


READS: dict[str, tuple[Callable[[torch.Tensor], Any], int]] = {
    "print": (str, 1),
    "item": (lambda t: t[0].item(), 1),
    "if": (lambda t: bool(t[0] > 0), 1),
    "tolist": (lambda t: t.tolist(), 1),
    "cpu": (lambda t: t.cpu(), 1),
    "nonzero": (lambda t: t.nonzero().shape, 1),
    "shape": (lambda t: (t.shape, t.dtype, t.device, len(t)), 0),
}


@pytest.mark.parametrize("read", READS)
def test_reading_a_lazy_value_runs_a_program(read: str) -> None:
    function, programs = READS[read]
    y = line(vector())
    assert count(function, y).ran == programs


def test_reading_one_lazy_tensor_leaves_the_others_pending() -> None:
    x = vector()
    y, other = x * 2, x * 3 + 1
    assert count(str, y).ran == 1
    assert count(torch_xla.sync).ran == 1
    assert other[0].item() == 4


def test_lazy_does_not_compute_what_nobody_holds() -> None:
    y = line(vector())
    del y
    assert count(torch_xla.sync).ran == 0


def test_openxla_runs_pending_arguments_first() -> None:
    x, step = vector(), openxla(line)
    step(x)
    assert count(step, x).ran == 1
    assert count(lambda: step(x * 7)).ran == 2


def test_the_first_openxla_call_runs_all_that_is_pending() -> None:
    x, unrelated, step = vector(), vector(), openxla(line)
    held = [unrelated * 5]
    assert count(step, x).ran == 2
    assert count(torch_xla.sync).ran == 0
    held.append(unrelated * 6)
    assert count(step, x).ran == 1
    assert count(torch_xla.sync).ran == 1


@pytest.mark.parametrize("operations", [2, 20])
def test_lazy_traces_each_step_anew(operations: int) -> None:
    x, step = vector(), lazy(functools.partial(chain, operations))
    step(x)
    again = count(step, x)
    assert (again.compiled, again.ran, again.traced) == (0, 1, operations)


@pytest.mark.parametrize("operations", [2, 20])
def test_openxla_traces_once(operations: int) -> None:
    x, step = vector(), openxla(functools.partial(chain, operations))
    assert count(step, x).traced > operations
    again = count(step, x)
    assert (again.compiled, again.ran, again.traced) == (0, 1, 0)


def test_openxla_traces_only_the_hand_over_of_an_updated_cache() -> None:
    """It does not grow with the program, and runs nothing of its own."""

    def step(operations: int, key: Any, *others: Any) -> None:
        write(chain(operations, key), *others)

    traced = []
    for operations in (2, 20):
        torch._dynamo.reset()
        arguments, compiled = write_arguments(), openxla(functools.partial(step, operations))
        compiled(*arguments)
        again = count(compiled, *arguments)
        assert again.ran == 1
        assert count(torch_xla.sync).ran == 0
        traced.append(again.traced)
    assert traced[0] == traced[1] > 0


# Programs


@both
def test_a_new_shape_is_a_new_program(mode: Mode) -> None:
    a, b, step = vector(), vector(), mode(line)
    assert [count(step, x).compiled for x in (a, b, a, b)] == [1, 1, 0, 0]


def test_dynamic_saves_tracing_by_dynamo_but_no_program() -> None:
    graphs, tensors = CompileCounterWithBackend("openxla"), [vector() for _ in range(3)]
    step = torch.compile(line, backend=graphs, dynamic=True)
    with torch._dynamo.config.patch(GUARDS_IN_PYTHON):
        assert [count(step, x).compiled for x in (*tensors, *tensors)] == [1, 1, 1, 0, 0, 0]
    assert graphs.frame_count == 1


def test_openxla_has_no_automatic_dynamic_shapes() -> None:
    """torch_xla switches off what makes a second shape dynamic elsewhere."""
    graphs, plain = CompileCounterWithBackend("openxla"), CompileCounterWithBackend("openxla")
    step = torch.compile(line, backend=graphs)
    for _ in range(4):
        step(vector())
    assert graphs.frame_count == 4
    with torch._dynamo.config.patch({"automatic_dynamic_shapes": True, **GUARDS_IN_PYTHON}):
        torch._dynamo.reset()
        step = torch.compile(line, backend=plain)
        for _ in range(4):
            step(vector())
    assert plain.frame_count == 2


def scaled(x: torch.Tensor, factor: Any) -> torch.Tensor:
    return x * factor


def test_a_python_number_is_data_in_lazy_mode() -> None:
    x, step = vector(), lazy(scaled)
    assert [count(step, x, factor).compiled for factor in (2, 3, 2.5, 3.5)] == [1, 0, 0, 0]


@pytest.mark.parametrize("factor", [0, 1])
def test_zero_and_one_are_part_of_a_lazy_program(factor: int) -> None:
    x, step = vector(), lazy(scaled)
    assert [count(step, x, factor).compiled for factor in (2, factor, factor)] == [1, 1, 0]


@pytest.mark.parametrize("factors", [(2, 3, 4), (2.5, 3.5, 4.5)], ids=["int", "float"])
def test_a_new_python_number_is_a_new_graph_but_no_new_program(factors: tuple[float, ...]) -> None:
    x, graphs = vector(), CompileCounterWithBackend("openxla")
    step = torch.compile(scaled, backend=graphs)
    assert [count(step, x, factor).compiled for factor in factors] == [1, 0, 0]
    assert graphs.frame_count == 3
    assert count(step, x, factors[0]).traced == 0


def test_a_number_in_a_tensor_is_one_graph() -> None:
    x, graphs = vector(), CompileCounterWithBackend("openxla")
    step = torch.compile(scaled, backend=graphs)
    for factor in (2.0, 3.0, 4.0):
        assert step(x, torch.tensor(factor).to(x.device))[0].item() == factor
    assert graphs.frame_count == 1


@both
def test_a_number_that_sets_a_shape_is_a_new_program(mode: Mode) -> None:
    x, step = vector(), mode(lambda x, size: x[:size] + 0.5)
    assert [count(step, x, size).compiled for size in (2, 3, 2)] == [1, 1, 0]


@both
def test_an_argument_of_an_operation_is_part_of_the_program(mode: Mode) -> None:
    arguments, step = attend_arguments(), mode(attend)
    assert [count(step, *arguments, scale).compiled for scale in (0.5, 0.25, 0.5)] == [1, 1, 0]


@both
def test_lengths_and_tables_are_not(mode: Mode) -> None:
    query, cache, *_, starts, num_seqs = attend_arguments()
    step, compiled = mode(attend), []
    for length, table in ((1, [0, 1]), (3, [2, 3]), (6, [5, 1])):
        compiled.append(
            count(step, query, cache, integers([length]), integers([table]), starts, num_seqs, 0.5).compiled
        )
    assert compiled == [1, 0, 0]


@both
def test_a_python_branch_is_a_program_for_each_side(mode: Mode) -> None:
    x, step = vector(), mode(lambda x, up: x + 3 if up else x / 3)
    assert [count(step, x, up).compiled for up in (True, False, True)] == [1, 1, 0]


def if_positive(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + 3 if y.sum() > 0 else y - 3


def test_a_branch_on_a_value_runs_two_programs() -> None:
    x, graphs = vector(), CompileCounterWithBackend("openxla")
    assert count(lazy(if_positive), x).ran == 2
    step = torch.compile(if_positive, backend=graphs)
    assert count(step, x).ran == 2
    assert graphs.frame_count == 2
    assert count(step, x).ran == 2
    with pytest.raises(Unsupported, match="Data-dependent branching"):
        openxla(if_positive, fullgraph=True)(x)


def says(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    print("doubled")
    return y + 3


def test_a_print_breaks_the_graph_of_torch_compile_only() -> None:
    """A constant text needs no value of a tensor."""
    x, graphs = vector(), CompileCounterWithBackend("openxla")
    assert count(lazy(says), x).ran == 1
    assert count(torch.compile(says, backend=graphs), x).ran == 2
    assert graphs.frame_count == 2
    with pytest.raises(Unsupported, match="print"):
        openxla(says, fullgraph=True)(x)


def test_beyond_the_recompile_limit_the_function_is_lazy() -> None:
    assert torch._dynamo.config.recompile_limit == 8
    step = openxla(line)
    with torch._dynamo.config.patch(recompile_limit=3):
        counts = [count(step, vector()) for _ in range(5)]
        x = vector()
        with counting() as pending:
            y = step(x)
    assert [c.ran for c in counts] == [1, 1, 1, 0, 0]
    assert (pending.ran, pending.traced) == (0, 2)
    assert count(torch_xla.sync).ran == 1
    assert y[0].item() == 5


def test_beyond_the_recompile_limit_fullgraph_raises() -> None:
    step = openxla(line, fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=3):
        for _ in range(3):
            step(vector())
        with pytest.raises(FailOnRecompileLimitHit):
            step(vector())


def test_a_lazy_program_has_what_python_holds_as_outputs() -> None:
    x = vector()

    def step(hold: bool) -> list[torch.Tensor]:
        y = x * 7
        z = y + 9
        held = [y, z] if hold else [z]
        del y
        torch_xla.sync()
        return held

    assert [count(step, hold).compiled for hold in (False, True, False, True)] == [1, 1, 0, 0]


def test_lazy_steps_without_a_sync_are_one_larger_program() -> None:
    x = vector()

    def steps(number: int) -> None:
        y = chain(number, x)
        torch_xla.sync()
        del y

    assert [count(steps, number).compiled for number in (1, 1, 2, 3, 2)] == [1, 0, 1, 1, 0]
    assert count(steps, 3).ran == 1


def test_full_graph_of_torch_xla_compile_finds_reads(capfd: pytest.CaptureFixture[str]) -> None:
    x = vector()
    assert torch_xla.compile(line, full_graph=True)(x)[0].item() == 5
    with pytest.raises(RuntimeError, match="Unexpected execution"):
        torch_xla.compile(if_positive, full_graph=True)(x)
    assert "if_positive" in capfd.readouterr().err


# Devices


def test_openxla_leaves_cpu_tensors_on_the_cpu() -> None:
    x = torch.ones(next(SIZES))
    with pytest.warns(UserWarning, match="Please move all tensors to xla device"), counting() as counts:
        out = openxla(line)(x)
    assert out.device.type == "cpu"
    assert (counts.compiled, counts.ran) == (0, 0)


def test_openxla_moves_what_the_function_moves() -> None:
    device = torch_xla.device()
    with pytest.warns(UserWarning, match="Please move all tensors to xla device"):
        out = openxla(lambda x: line(x.to(device)))(torch.ones(next(SIZES)))
    assert out.device == device
    assert out[0].item() == 5


def test_openxla_refuses_mixed_devices() -> None:
    x = vector()
    with pytest.raises(TorchRuntimeError, match="two different devices"):
        openxla(lambda x, y: x + y)(x, torch.ones(x.shape))
    with pytest.raises(TorchRuntimeError, match="two different devices"):
        openxla(lambda x: x + torch.arange(x.shape[0]))(x)


@pytest.mark.filterwarnings("ignore:Found tensor with shape")
@both
def test_a_cpu_scalar_may_be_mixed_in(mode: Mode) -> None:
    out = mode(lambda x, y: x * y)(vector(), torch.tensor(3.0))
    assert out.device.type == "xla"
    assert out[0].item() == 3


def test_lazy_arithmetic_moves_cpu_tensors() -> None:
    x = vector()
    for out in (x + torch.ones(x.shape), torch.ones(x.shape) + x):
        assert out.device == x.device
        assert out[0].item() == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.cat((x, y)),
        lambda x, y: torch.dot(x, y),
        lambda x, y: torch.nn.functional.linear(x, y[None]),
    ],
    ids=["cat", "dot", "linear"],
)
def test_other_lazy_operations_refuse_them(function: Callable[..., Any]) -> None:
    x = vector()
    with pytest.raises(RuntimeError, match="XLA tensor"):
        function(x, torch.ones(x.shape))


# Cache writes


@both
def test_a_write_keeps_the_buffers(mode: Mode) -> None:
    key, *caches, slots = write_arguments()
    before, step = [pointer(cache) for cache in caches], mode(write)
    for _ in range(3):
        step(key, *caches, slots)
        assert [pointer(cache) for cache in caches] == before
    assert caches[0].sum().item() == 4 * H * D


def test_when_a_write_happens() -> None:
    arguments = write_arguments()
    assert count(write, *arguments).ran == 0
    assert count(torch_xla.sync).ran == 1
    compiled = openxla(write)
    assert count(compiled, *arguments).ran == 1
    assert count(torch_xla.sync).ran == 0


@pytest.mark.parametrize(("mode", "stays"), [(lazy, True), (openxla, False)])
def test_copy_into_a_cache_keeps_its_buffer_in_lazy_mode_only(mode: Mode, stays: bool) -> None:
    def copies(key: Any, key_cache: Any, value_cache: Any, slots: Any) -> None:
        twin = torch.ops.flashxla.reshape_and_cache_flash_functional
        new_keys, new_values = twin(key, key, key_cache, value_cache, slots)
        key_cache.copy_(new_keys)
        value_cache.copy_(new_values)

    arguments, step = write_arguments(), mode(copies)
    before = pointer(arguments[1])
    step(*arguments)
    assert (pointer(arguments[1]) == before) is stays
    assert arguments[1].sum().item() == 4 * H * D


@both
def test_an_unused_result_is_not_computed_and_an_unread_write_is(mode: Mode) -> None:
    attention, (key, key_cache, value_cache, slots) = attend_arguments(), write_arguments()

    def unused(*arguments: Any) -> None:
        attend(*arguments, 0.5)

    assert count(mode(unused), *attention).ran == 0
    torch._dynamo.reset()
    assert count(mode(write), key, key_cache, value_cache, slots).ran == 1
    assert value_cache.sum().item() == 4 * H * D


def test_the_graphs_hold_flashxlas_calls() -> None:
    """Nothing replaces them by other operations."""
    arguments = attend_arguments()
    operations: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        operations.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(attend, backend=aot_autograd(fw_compiler=backend))(*arguments, 0.5)
    assert operations == ["flashxla.paged_attention_with_lse.default", "<built-in function getitem>"]
    out = attend(*arguments, 0.5)
    assert 'custom_call_target="flashxla_attention"' in torch_xla._XLAC._get_xla_tensors_hlo([out])


# Operations of one's own


@pytest.fixture
def library() -> Iterator[Any]:
    with torch.library._scoped_library("flashxla_lazy_or_compile", "FRAGMENT") as library:
        yield library


def test_a_mutating_custom_operation_of_ones_own(library: Any) -> None:
    def add(cache: torch.Tensor, x: torch.Tensor) -> None:
        cache.add_(x)

    library.define("add_to(Tensor(a!) cache, Tensor x) -> ()")
    library.impl("add_to", add, "XLA")
    torch.library.register_fake("flashxla_lazy_or_compile::add_to", lambda cache, x: None, lib=library)

    def step(cache: torch.Tensor, x: torch.Tensor) -> None:
        torch.ops.flashxla_lazy_or_compile.add_to(cache, x)

    cache = vector()
    x = vector(cache.shape[0])
    with pytest.raises(RuntimeError, match="alias annotations"):
        step(cache, x)
    before = pointer(cache)
    openxla(step, fullgraph=True)(cache, x)
    assert pointer(cache) != before
    assert cache[0].item() == 2


def test_an_operation_without_a_fake_kernel_is_lazy_only(library: Any) -> None:
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "XLA")

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.flashxla_lazy_or_compile.twice(x)

    x = vector()
    assert lazy(step)(x)[0].item() == 2
    with pytest.raises(Unsupported, match="fake tensors"):
        openxla(step, fullgraph=True)(x)


@both
def test_a_kernel_for_cuda_does_not_serve_xla_tensors(mode: Mode, library: Any) -> None:
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", lambda x: x.clone(), "CUDA")
    torch.library.register_fake("flashxla_lazy_or_compile::same", torch.empty_like, lib=library)
    with pytest.raises(NotImplementedError):
        mode(lambda x: torch.ops.flashxla_lazy_or_compile.same(x))(vector())


def own_custom_call(x: torch.Tensor, config: str = "") -> torch.Tensor:
    """torch_xla's custom-call node. Its target does not exist: never to be run."""
    call = torch_xla._XLAC._xla_custom_call
    return call([x], "no_such_target", [list(x.shape)], [x.dtype], False, config, 4, {})[0]


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_torch_xlas_own_custom_call_is_no_part_of_a_graph() -> None:
    with pytest.raises(Unsupported, match="_xla_custom_call"):
        openxla(own_custom_call, fullgraph=True)(vector())


def test_torch_xlas_own_custom_call_ignores_attributes() -> None:
    """Programs are looked up by this hash."""
    x, arguments, hash_of = vector(), attend_arguments(), torch_xla._XLAC._get_graph_hash
    own = {hash_of([own_custom_call(x, f"{{factor = {factor} : f32}}")]) for factor in (1.5, 2.5)}
    flashxla = {hash_of([attend(*arguments, scale)]) for scale in (0.5, 0.25)}
    assert (len(own), len(flashxla)) == (1, 2)


# Errors


ERRORS = [
    (
        lambda key, *others: (key[:, :1], *others),
        ValueError,
        "reshape_and_cache_flash: key_cache: got shape [8, 4, 2, 32]; accepted: [P, B, Hk, D] with Hk = 1",
    ),
    (
        lambda key, *others: (key.half(), *others),
        TypeError,
        "reshape_and_cache_flash: key_cache: got dtype float32; accepted: float16, the dtype of key",
    ),
    (
        lambda *others: (*others[:-1], others[-1].cpu()),
        ValueError,
        "reshape_and_cache_flash: slot_mapping: got a tensor on cpu; accepted: xla:0, the device of key",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), ERRORS, ids=["shape", "dtype", "device"])
def test_errors_come_at_the_call(change: Callable[..., Any], error: type[Exception], message: str) -> None:
    arguments = change(*write_arguments())
    with pytest.raises(error) as raised:
        write(*arguments)
    assert raised.type is error
    assert message in str(raised.value)
    with pytest.raises(TorchRuntimeError) as wrapped:
        openxla(write)(*arguments)
    assert not isinstance(wrapped.value, error)
    assert message in str(wrapped.value)
    assert "in write" in str(wrapped.value)


# Debugging


def test_ir_debug_names_lines_of_the_program() -> None:
    texts = []
    for debug in (False, True):
        torch_xla._XLAC._set_ir_debug(debug)
        try:
            texts.append(torch_xla._XLAC._get_xla_tensors_text([line(vector())]))
        finally:
            torch_xla._XLAC._set_ir_debug(False)
    assert "location=line@test_lazy_or_compile.py" not in texts[0]
    assert "location=line@test_lazy_or_compile.py" in texts[1]


def test_graphs_as_text() -> None:
    y = line(vector())
    assert "aten::mul" in torch_xla._XLAC._get_xla_tensors_text([y])
    assert "multiply(" in torch_xla._XLAC._get_xla_tensors_hlo([y])
    assert count(lambda: torch_xla._XLAC._get_xla_tensors_hlo([y])).ran == 0


def test_compiling_clears_the_counters_but_not_the_metrics() -> None:
    x = vector()
    compiles, marks = metric("CompileTime"), metrics.counter_value("MarkStep")
    for _ in range(9):
        torch_xla.sync()
    assert metrics.counter_value("MarkStep") == marks + 9
    openxla(line)(x)
    assert (metrics.counter_value("MarkStep") or 0) < 9
    assert metric("CompileTime") == compiles + 1


def test_dynamo_explains_graph_breaks() -> None:
    explanation = torch._dynamo.explain(says)(vector())
    assert (explanation.graph_count, explanation.graph_break_count) == (2, 1)
    assert "print" in str(explanation.break_reasons)
