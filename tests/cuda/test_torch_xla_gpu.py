"""PyTorch/XLA on a GPU: its plugin, one plan a step, and memory shared with other frameworks."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from flashxla.doctor import probe


@pytest.fixture
def torch_xla(gpu: None) -> Any:
    """PyTorch/XLA with a GPU; only with PJRT_DEVICE=CUDA."""
    if os.environ.get("PJRT_DEVICE") != "CUDA":
        pytest.skip("set PJRT_DEVICE=CUDA")
    return pytest.importorskip("torch_xla")


@pytest.fixture
def fx(torch_xla: Any) -> Any:
    return pytest.importorskip("flashxla.torch")


def pointer(tensor: Any) -> int:
    import torch_xla

    torch_xla.sync(wait=True)
    return torch_xla._XLAC._unsafe_buffer_pointer(tensor)


def test_the_device(torch_xla: Any) -> None:
    assert torch_xla._XLAC._xla_get_devices()[0].startswith("GPU:")
    used, limit = (torch_xla.core.xla_model.get_memory_info()[name] for name in ("bytes_used", "bytes_limit"))
    assert 0 <= used < limit


@pytest.mark.parametrize("route", ("lazy", "openxla"))
def test_all_layers_of_a_step_share_one_plan(torch_xla: Any, route: str) -> None:
    result = probe.run(route, layers=4, pjrt_device="CUDA")
    assert result.targets.count("flashxla_attention") == 4
    assert result.targets.count("flashxla_kv_cache") == 4
    assert result.targets.count("flashxla_attention_plan") == 1


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "int32", "uint8"))
@pytest.mark.parametrize("shape", ((), (1,), (3, 5, 7), (0, 4)))
def test_arrays_of_jax_come_in(fx: Any, jax: Any, dtype: str, shape: tuple[int, ...]) -> None:
    array = jax.numpy.asarray(np.random.default_rng(0).integers(0, 100, shape), dtype)
    tensor = fx.from_dlpack(array)
    assert tensor.device.type == "xla" and tuple(tensor.shape) == shape
    if array.size:
        assert pointer(tensor) == array.unsafe_buffer_pointer()
    np.testing.assert_array_equal(tensor.cpu().float().numpy(), np.asarray(array, np.float32))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_tensors_go_out_to_jax(fx: Any, torch_xla: Any, jax: Any, dtype: str) -> None:
    import torch

    tensor = (torch.randn(4, 6) * 3).to(getattr(torch, dtype)).to(torch_xla.device())
    array = jax.dlpack.from_dlpack(fx.to_dlpack(tensor))
    assert array.unsafe_buffer_pointer() == pointer(tensor)
    expected = tensor.cpu().float().numpy()
    del tensor
    np.testing.assert_array_equal(np.asarray(array, np.float32), expected)


def test_a_cache_of_jax_is_written_in_place(fx: Any, torch_xla: Any, jax: Any) -> None:
    """Both frameworks see one cache, and it stays where it is."""
    import torch

    arrays = [jax.numpy.zeros((4, 16, 2, 64)) for _ in range(2)]
    jax.block_until_ready(arrays)
    caches = [fx.from_dlpack(array) for array in arrays]
    key, value = torch.randn(2, 3, 2, 64).to(torch_xla.device())
    slots = torch.tensor([5, 0, 63], dtype=torch.int32, device=torch_xla.device())
    for _ in range(2):
        fx.reshape_and_cache_flash(key, value, *caches, slots)
        torch_xla.sync(wait=True)
    for cache, array, new in zip(caches, arrays, (key, value), strict=True):
        assert pointer(cache) == array.unsafe_buffer_pointer()
        seen = np.asarray(jax.dlpack.from_dlpack(fx.to_dlpack(cache))).reshape(-1, 2, 64)
        np.testing.assert_array_equal(seen[[5, 0, 63]], new.cpu().numpy())


def test_a_tensor_of_the_cpu_is_refused(fx: Any) -> None:
    import torch

    with pytest.raises(
        ValueError, match=r"from_dlpack: external: got a tensor on DLPack device \(1, 0\); accepted"
    ):
        fx.from_dlpack(torch.zeros(3))


def test_a_misaligned_view_is_refused(fx: Any, jax: Any) -> None:
    """XLA takes addresses that are multiples of 16 bytes."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA, and JAX's arrays are aligned")
    with pytest.raises(ValueError, match=r"from_dlpack: external: .*16"):
        fx.from_dlpack(torch.zeros(9, device="cuda")[1:])


def test_a_pending_write_goes_out(fx: Any, torch_xla: Any, jax: Any) -> None:
    """to_dlpack computes all that is pending, so that the value cache of the same write stays whole."""
    import torch

    device = torch_xla.device()
    key, slots = torch.ones(2, 1, 8, device=device), torch.tensor([1, 5], device=device)
    key_cache, value_cache = (torch.zeros(2, 4, 1, 8, device=device) for _ in "kv")
    fx.reshape_and_cache_flash(key, 2 * key, key_cache, value_cache, slots)
    keys = jax.dlpack.from_dlpack(fx.to_dlpack(key_cache))
    values = jax.dlpack.from_dlpack(fx.to_dlpack(value_cache))
    assert np.asarray(keys).sum() == 16 and np.asarray(values).sum() == 32
