"""What keeps the caches of TorchTPU's tensors apart from their clones, and costs nothing where there are none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashxla.xla import pjrt_adapter
from flashxla.xla.torch_tpu_memory import addresses, own
from tests.torchtpu import device

device.start()

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().view(torch.uint8)


def of_all_dtypes() -> list[torch.Tensor]:
    """Tensors of any bits: NaNs of all kinds, negative zeros."""
    return [
        torch.randint(256, (3, 4, 8 * (n + 1)), dtype=torch.uint8).view(dtype).to("tpu")
        for n, dtype in enumerate(DTYPES)
    ]


def inputs_of_programs(tensors: list[torch.Tensor]) -> list[int]:
    """The numbers of inputs of the programs that `own` runs."""
    torch.accelerator.synchronize()
    with pjrt_adapter.load().watch_inputs() as seen:
        own(tensors)
        torch.accelerator.synchronize()
    return [len(inputs) for inputs in seen]


def test_tensors_of_their_own_stay_where_they_are() -> None:
    tensors = of_all_dtypes()
    before, old = addresses(tensors), [bits(x) for x in tensors]
    for _ in range(2):
        assert inputs_of_programs(tensors) == [len(tensors)]  # one program; the 1 is no input
    assert addresses(tensors) == before
    assert all(torch.equal(bits(x), y) for x, y in zip(tensors, old, strict=True))


@pytest.mark.parametrize("cloned", [range(len(DTYPES)), [1, 4]], ids=["all", "some"])
def test_clones_are_left_their_buffers(cloned: list[int]) -> None:
    tensors = of_all_dtypes()
    before, old = addresses(tensors), [bits(x) for x in tensors]
    clones = {i: tensors[i].clone() for i in cloned}
    assert addresses(clones.values()) == [before[i] for i in cloned]  # shared, or there is nothing to test
    own(tensors)
    after = addresses(tensors)
    assert {i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b} == set(cloned)
    assert addresses(clones.values()) == [before[i] for i in cloned]
    for i, y in enumerate(old):
        assert torch.equal(bits(tensors[i]), y)
        assert i not in clones or torch.equal(bits(clones[i]), y)


def test_clones_of_one_tensor_part() -> None:
    tensors = [torch.ones(4, 8).to("tpu")]
    tensors += [tensors[0].clone() for _ in range(3)]
    assert len(set(addresses(tensors))) == 1
    own(tensors)
    assert len(set(addresses(tensors))) == len(tensors)


def test_views_and_leaves_keep_theirs() -> None:
    x = torch.ones(4, 8).to("tpu").requires_grad_()
    before = addresses([x])
    own([x.detach()])
    own([x.view(-1).view(4, 8)])
    own([x])
    own([])
    assert addresses([x]) == before
    assert x.requires_grad and x.is_leaf


def test_the_program_computes_nothing(tmp_path: Path) -> None:
    """XLA keeps no multiplication of it, in any dtype, nor a copy."""
    code = """
from tests.torchtpu import device
device.start()
from flashxla.xla.torch_tpu_memory import own
from tests.torchtpu.test_memory import of_all_dtypes
import torch
tensors = of_all_dtypes()
own(tensors)
torch.accelerator.synchronize()
"""
    environment = os.environ | {"XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    [program] = tmp_path.glob("*foreach_mul_*after_optimizations.txt")
    lines = [line for line in program.read_text().splitlines() if " = " in line]
    operations = [
        line.split(" = ")[1].split("(%")[0].split()[-1] for line in lines if "parameter(" not in line
    ]
    assert operations == ["tuple"], program.read_text()
