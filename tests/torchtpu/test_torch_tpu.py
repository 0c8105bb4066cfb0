"""TorchTPU on a CPU's plugin: compiled caches keep their memory; what shares a cache's storage sees its updates."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import flashxla
import flashxla.torch as fx
from flashxla.xla.torch_tpu_memory import addresses
from tests.torch_steps import arguments, expected, write_and_attend
from tests.torchtpu import device

device.start()


@pytest.fixture
def given():
    return arguments()


def check(tensors, references):
    for x, reference in zip(tensors, references, strict=True):
        torch.testing.assert_close(x.cpu(), reference, atol=1e-5, rtol=1e-5)


def ways():
    return pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def step_of(compiled):
    torch._dynamo.reset()
    return torch.compile(write_and_attend, backend="tpu", fullgraph=True) if compiled else write_and_attend


@ways()
def test_steps_keep_their_caches_memory(given, compiled):
    step = step_of(compiled)
    tensors = [x.to("tpu") for x in given]
    caches = tensors[2:4]
    before = addresses(caches)
    assert len(set(before)) == 2
    for steps in range(1, 5):
        check([step(*tensors), *caches], expected(given, steps))
        assert addresses(caches) == before


def test_many_caches_of_one_shape_keep_their_memory(given):
    def layers(caches, tensors):
        return [write_and_attend(*tensors[:2], *pair, *tensors[4:]) for pair in caches]

    step = torch.compile(layers, backend="tpu", fullgraph=True)
    tensors = [x.to("tpu") for x in given]
    caches = [[x.to("tpu") for x in torch.randn(2, *given[2].shape)] for _ in range(4)]
    flat = [x for pair in caches for x in pair]
    before = addresses(flat)
    for _ in range(3):
        step(caches, tensors)
        assert addresses(flat) == before


@ways()
def test_buffers_of_a_module_keep_their_memory(given, compiled):
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", given[2].clone())
            self.register_buffer("values", torch.zeros_like(given[3]))

        def forward(self, *tensors):
            return write_and_attend(*tensors[:2], self.keys, self.values, *tensors[2:])

    torch._dynamo.reset()
    layer = Layer().to("tpu")
    step = torch.compile(layer, backend="tpu", fullgraph=True) if compiled else layer
    tensors = [x.to("tpu") for x in given[:2] + given[4:]]
    before = addresses([layer.keys, layer.values])
    given[3].zero_()
    for steps in range(1, 4):
        check([step(*tensors), layer.keys, layer.values], expected(given, steps))
        assert addresses([layer.keys, layer.values]) == before


@ways()
def test_whole_views_keep_their_memory(given, compiled):
    step = step_of(compiled)
    tensors = [x.to("tpu") for x in given]
    flat = [x.view(-1) for x in tensors[2:4]]
    before = addresses(flat)
    tensors[2:4] = [x.view(given[2].shape) for x in flat]
    reference = expected(given)
    check([step(*tensors), *flat], [reference[0], *(x.view(-1) for x in reference[1:])])
    assert addresses(flat) == before


def test_graphs_from_the_disk_keep_their_caches_memory(tmp_path):
    """In a process that finds the compiled graph of another: in place, and a clone is left alone."""
    code = """
from tests.torchtpu import device
device.start()
import torch
from torch._dynamo.utils import counters
from tests.torch_steps import arguments, write_and_attend
from tests.torchtpu import device
from flashxla.xla.torch_tpu_memory import addresses
tensors = [x.to("tpu") for x in arguments()]
step = torch.compile(write_and_attend, backend="tpu", fullgraph=True)
before, copy = addresses(tensors[2:4]), tensors[2].cpu()
step(*tensors)
assert addresses(tensors[2:4]) == before
clone, copy = tensors[2].clone(), tensors[2].cpu()
tensors[0].add_(1)
step(*tensors)
assert torch.equal(clone.cpu(), copy)
assert not torch.equal(tensors[2].cpu(), copy)
print(counters["aot_autograd"]["autograd_cache_hit"])
"""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    hits = []
    for _ in range(2):
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert ended.returncode == 0, ended.stderr
        hits.append(ended.stdout.split()[-1])
    assert hits == ["0", "1"]


@ways()
def test_what_shares_a_cache_sees_its_updates(given, compiled):
    step = step_of(compiled)
    tensors = [x.to("tpu") for x in given]
    flat, detached = tensors[2].view(-1), tensors[2].detach()
    out = step(*tensors)
    reference = expected(given)
    check([out, *tensors[2:4]], reference)
    check([flat, detached], [reference[1].view(-1), reference[1]])


@ways()
def test_clones_do_not(given, compiled):
    """Which share their source's memory at first."""
    step = step_of(compiled)
    for _ in range(5):  # eager the second call takes the short way
        tensors = [x.to("tpu") for x in given]
        view, copy, of_view = tensors[2].view(-1), tensors[2].clone(), tensors[2].view(-1).clone()
        given_away = torch.empty_like(tensors[3]).copy_(tensors[3])
        out = step(*tensors)
        reference = expected(given)
        check([out, *tensors[2:4], view], [*reference, reference[1].view(-1)])
        check([copy, of_view, given_away], [given[2], given[2].view(-1), given[3]])


@ways()
def test_caches_that_are_views_of_one_tensor(given, compiled):
    step = step_of(compiled)
    tensors = [x.to("tpu") for x in given]
    both = torch.stack(given[2:4]).to("tpu")
    tensors[2:4] = both[0], both[1]
    out = step(*tensors)
    reference = expected(given)
    check([out, both], [reference[0], torch.stack(reference[1:])])


@ways()
def test_keys_that_lie_in_the_cache(given, compiled):
    """Their memory is an input twice."""
    step = step_of(compiled)
    tensors = [x.to("tpu") for x in given]
    count = given[0].shape[0]
    tensors[0] = tensors[2].view(-1, *given[0].shape[1:])[:count]
    reference = [x.clone() for x in given]
    reference[0] = reference[2].view(-1, *given[0].shape[1:])[:count].clone()
    check([step(*tensors), *tensors[2:4]], expected(reference))


def test_bad_arguments_are_named(given):
    tensors = [x.to("tpu") for x in given]
    with pytest.raises(ValueError, match=r"reshape_and_cache_flash: value: got a tensor on cpu"):
        fx.reshape_and_cache_flash(tensors[0], given[1], *tensors[2:5])
    with pytest.raises(ValueError, match=r"reshape_and_cache_flash: value: got shape"):
        fx.reshape_and_cache_flash(tensors[0][:, :1], *tensors[1:5])


def test_gradients_that_do_not_exist(given):
    tensors = [x.to("tpu") for x in given]
    tensors[5].requires_grad_()
    out = write_and_attend(*tensors)
    with pytest.raises(NotImplementedError, match="paged_attention: no backward pass"):
        out.sum().backward()


def test_starting_again():
    device.start()
    other = "use_cpu" if os.environ["PJRT_DEVICE"] == "CUDA" else "use_gpu"
    environment = dict(os.environ)
    with pytest.raises(RuntimeError, match=rf"{other}: TorchTPU runs already, on c"):
        getattr(flashxla, other)()
    assert environment == os.environ


@pytest.mark.skipif(os.environ["PJRT_DEVICE"] != "CPU", reason="it loads the plugin for CPUs")
def test_programs_say_what_to_call():
    """In a process that has TorchTPU's tensors, but not by use_cpu or use_gpu."""
    code = """
import os
from flashxla.xla import cpu, pjrt_adapter
os.environ[pjrt_adapter.PLUGIN_VARIABLE] = str(cpu.find_plugin())
os.environ["TPU_LIBRARY_PATH"] = str(pjrt_adapter.load().path)
from torch_tpu import _loader
_loader._init_device("tpu")
import torch, flashxla.torch as fx
x = torch.zeros(1, 1, 8, device="tpu")
fx.merge_attn_states(x, x[:, :, 0].T, x, x[:, :, 0].T)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert (
        "merge_attn_states: TorchTPU's tensors need flashxla.use_gpu() or flashxla.use_cpu()" in ended.stderr
    )


def test_jax_is_ready_before_anything_compiles_and_keeps_its_own_devices():
    """A variable that is set while a thread starts a compiler's process makes that fail."""
    code = """
import os, flashxla, tests.torchtpu.device as device
device.start()
import torch
from flashxla.torch import reshape_and_cache_flash
before = dict(os.environ)
x, slots = torch.ones(1, 1, 8, device="tpu"), torch.zeros(1, dtype=torch.int32, device="tpu")
reshape_and_cache_flash(x, x, *torch.zeros(2, 2, 4, 1, 8, device="tpu"), slots)
torch.accelerator.synchronize()
assert os.environ == before
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
import jax
print(sorted({d.platform for d in (*jax.devices(), *jax.devices("cpu"))}))
"""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    expected_platforms = ["cpu", "gpu"] if os.environ.get("PJRT_DEVICE") == "CUDA" else ["cpu"]
    assert ended.stdout.splitlines()[-1:] == [str(expected_platforms)], ended.stderr[-3000:]
