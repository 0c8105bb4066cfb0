"""TorchTPU on a CPU's plugin: compiled caches keep their memory; what shares a cache's storage sees its updates."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import flashxla
import flashxla.torch as fx
from tests.torch_steps import arguments, expected, write_and_attend
from tests.torchtpu.executions import watch

flashxla.use_cpu()


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


def test_compiled_steps_keep_their_caches_memory(given):
    step = step_of(compiled=True)
    tensors = [x.to("tpu") for x in given]
    check([step(*tensors), *tensors[2:4]], expected(given))  # compiles
    seen = []
    for _ in range(3):
        with watch() as runs:
            out = step(*tensors)
            out.cpu()
        seen.append(set().union(*runs))
    check([out, *tensors[2:4]], expected(given, 4))
    # The caches' addresses are among every step's inputs; the other arguments never change.
    assert set.intersection(*seen) == seen[0]
    assert len(seen[0]) >= 4


@ways()
def test_what_shares_a_cache_sees_its_updates(given, compiled):
    step = step_of(compiled)
    tensors = [x.to("tpu") for x in given]
    flat, detached = tensors[2].view(-1), tensors[2].detach()
    out = step(*tensors)
    reference = expected(given)
    check([out, *tensors[2:4]], reference)
    check([flat, detached], [reference[1].view(-1), reference[1]])


def test_clones_do_not(given):
    """Which share their source's memory at first."""
    for _ in range(5):
        tensors = [x.to("tpu") for x in given]
        view, copy, of_view = tensors[2].view(-1), tensors[2].clone(), tensors[2].view(-1).clone()
        out = write_and_attend(*tensors)
        reference = expected(given)
        check([out, *tensors[2:4], view], [*reference, reference[1].view(-1)])
        check([copy, of_view], [given[2], given[2].view(-1)])


@ways()
def test_caches_that_are_views_of_one_tensor(given, compiled):
    step = step_of(compiled)
    tensors = [x.to("tpu") for x in given]
    both = torch.stack(given[2:4]).to("tpu")
    tensors[2:4] = both[0], both[1]
    out = step(*tensors)
    reference = expected(given)
    check([out, both], [reference[0], torch.stack(reference[1:])])


def test_keys_that_lie_in_the_cache(given):
    """Their memory is an input twice."""
    tensors = [x.to("tpu") for x in given]
    count = given[0].shape[0]
    tensors[0] = tensors[2].view(-1, *given[0].shape[1:])[:count]
    reference = [x.clone() for x in given]
    reference[0] = reference[2].view(-1, *given[0].shape[1:])[:count].clone()
    check([write_and_attend(*tensors), *tensors[2:4]], expected(reference))


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
    flashxla.use_cpu()
    with pytest.raises(RuntimeError, match=r"use_gpu: TorchTPU runs already, on cpu"):
        flashxla.use_gpu()


def test_programs_say_what_to_call():
    """In a process that has TorchTPU's tensors, but not by use_cpu or use_gpu."""
    code = """
import os
from flashxla.xla import cpu, pjrt_adapter
os.environ[pjrt_adapter.PLUGIN_VARIABLE] = str(cpu._plugin())
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
