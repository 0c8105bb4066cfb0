"""Every call of the documents that the project started from, as written there beyond the import line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests import reference
from tests.batches import Case, flash_attn_arguments, paged_attention_arguments
from tests.checks import TOLERANCE, assert_close
from tests.frontends import LazyFrontend

pytestmark = pytest.mark.frontends("lazy")


@pytest.fixture
def torch(frontend: LazyFrontend) -> Any:
    return frontend.torch


@pytest.fixture
def xm(frontend: LazyFrontend) -> Any:
    frontend.torch._dynamo.reset()
    return pytest.importorskip("torch_xla.core.xla_model")


def write_tensors(torch: Any, device: Any) -> tuple[Any, ...]:
    """The tensors of "On XLA device"."""
    key = torch.randn(4, 2, 8, device=device)
    value = torch.randn(4, 2, 8, device=device)
    key_cache = torch.zeros(2, 16, 2, 8, device=device)
    value_cache = torch.zeros(2, 16, 2, 8, device=device)
    slot_mapping = torch.tensor([0, 1, 2, 3], dtype=torch.int64, device=device)
    return key, value, key_cache, value_cache, slot_mapping


def check_caches(torch: Any, key: Any, value: Any, key_cache: Any, value_cache: Any) -> None:
    """The four tokens are in the first four slots, and nothing else is."""
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.cpu().reshape(32, 2, 8)
        torch.testing.assert_close(flat[:4], tokens.cpu(), atol=0, rtol=0)
        assert not flat[4:].any()


def test_setup_custom_call(frontend: LazyFrontend) -> None:
    from flashxla.torch import setup_custom_call

    setup_custom_call()
    setup_custom_call()


def test_basic_usage(torch: Any, xm: Any) -> None:
    from flashxla.torch import reshape_and_cache_flash

    device = xm.xla_device()
    key, value, key_cache, value_cache, slot_mapping = write_tensors(torch, device)
    reshape_and_cache_flash(
        key, value, key_cache, value_cache,
        slot_mapping, "auto", None, None
    )  # fmt: skip
    xm.mark_step()
    check_caches(torch, key, value, key_cache, value_cache)


def test_with_torch_compile(torch: Any, xm: Any) -> None:
    from flashxla.torch import reshape_and_cache_flash

    @torch.compile(backend="openxla")
    def model_forward(key, value, key_cache, value_cache, slot_mapping):
        reshape_and_cache_flash(
            key, value, key_cache, value_cache,
            slot_mapping, "auto", None, None
        )  # fmt: skip
        return key_cache.sum()

    key, value, key_cache, value_cache, slot_mapping = write_tensors(torch, xm.xla_device())
    result = model_forward(key, value, key_cache, value_cache, slot_mapping)
    torch.testing.assert_close(result.cpu(), key.cpu().sum(), atol=1e-5, rtol=1e-5)
    check_caches(torch, key, value, key_cache, value_cache)


def test_direct_xla_with_allow_in_graph(torch: Any, xm: Any) -> None:
    from flashxla.torch import reshape_and_cache_flash as reshape_and_cache_flash_direct

    def compute_attention(key_cache, value_cache):
        return key_cache.sum() + value_cache.sum()

    torch._dynamo.allow_in_graph(reshape_and_cache_flash_direct)

    @torch.compile(backend="openxla")
    def model_forward(key, value, key_cache, value_cache, slot_mapping):
        reshape_and_cache_flash_direct(
            key, value, key_cache, value_cache,
            slot_mapping, "auto", None, None
        )  # fmt: skip
        return compute_attention(key_cache, value_cache)

    try:
        key, value, key_cache, value_cache, slot_mapping = write_tensors(torch, xm.xla_device())
        result = model_forward(key, value, key_cache, value_cache, slot_mapping)
    finally:
        # As it was: later tests trace into the function.
        torch._dynamo.disallow_in_graph(reshape_and_cache_flash_direct)
        torch._dynamo.trace_rules._disallowed_callable_ids.remove(id(reshape_and_cache_flash_direct))
    torch.testing.assert_close(result.cpu(), key.cpu().sum() + value.cpu().sum(), atol=1e-5, rtol=1e-5)
    check_caches(torch, key, value, key_cache, value_cache)


@pytest.mark.parametrize("inside", [False, True])
def test_buffer_donor(torch: Any, xm: Any, inside: bool) -> None:
    from flashxla.torch import reshape_and_cache_flash

    @torch.compile(backend="openxla")
    def model_forward(key, value, key_cache, value_cache, slot_mapping):
        if inside:
            torch.ops.xla.dynamo_set_buffer_donor_(key_cache, True)
            torch.ops.xla.dynamo_set_buffer_donor_(value_cache, True)
        reshape_and_cache_flash(
            key, value, key_cache, value_cache,
            slot_mapping, "auto", None, None
        )  # fmt: skip
        return key_cache.sum()

    key, value, key_cache, value_cache, slot_mapping = write_tensors(torch, xm.xla_device())
    if not inside:
        torch.ops.xla.dynamo_set_buffer_donor_(key_cache, True)
        torch.ops.xla.dynamo_set_buffer_donor_(value_cache, True)
    result = model_forward(key, value, key_cache, value_cache, slot_mapping)
    torch.testing.assert_close(result.cpu(), key.cpu().sum(), atol=1e-5, rtol=1e-5)
    check_caches(torch, key, value, key_cache, value_cache)


def test_attention_backend(torch: Any, xm: Any) -> None:
    """A backend that keeps its caches and scales as attributes."""
    from flashxla.torch import reshape_and_cache_flash

    device = xm.xla_device()

    class XlaGpuNativeAttentionBackend:
        kv_cache_dtype = "auto"

        def forward(self, key, value, slot_mapping, k_scale, v_scale):
            reshape_and_cache_flash(
                key, value, self.key_cache, self.value_cache,
                slot_mapping, self.kv_cache_dtype, k_scale, v_scale
            )  # fmt: skip

    backend = XlaGpuNativeAttentionBackend()
    key, value, backend.key_cache, backend.value_cache, slot_mapping = write_tensors(torch, device)
    one = torch.ones(1, device=device)
    backend.forward(key, value, slot_mapping, one, one)
    check_caches(torch, key, value, backend.key_cache, backend.value_cache)


def test_padding_and_fp8(torch: Any, xm: Any) -> None:
    """Two items of the document's list of tests."""
    from flashxla.torch import reshape_and_cache_flash

    device = xm.xla_device()
    key, value, *_ = write_tensors(torch, device)
    caches = [torch.zeros(2, 16, 2, 8, dtype=torch.uint8, device=device) for _ in "kv"]
    slot_mapping = torch.tensor([5, -1, 17, -1], dtype=torch.int64, device=device)
    scale = torch.tensor([0.5], device=device)
    reshape_and_cache_flash(key, value, *caches, slot_mapping, "fp8", scale, scale)
    zeros = np.zeros((2, 16, 2, 8), np.uint8)
    arrays = [x.cpu().numpy() for x in (key, value)]
    expected = reference.reshape_and_cache_flash(
        *arrays, zeros, zeros, slot_mapping.cpu().numpy(), "fp8", np.float32([0.5]), np.float32([0.5])
    )
    for cache, wanted in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(cache.cpu().numpy(), wanted)


def test_cpu_tensors_under_openxla(torch: Any, xm: Any) -> None:
    """The documents also call compiled functions with CPU tensors."""
    from flashxla.torch import reshape_and_cache_flash

    @torch.compile(backend="openxla")
    def my_function(key, value, key_cache, value_cache, slot_mapping):
        reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, "auto", None, None)
        return key_cache.sum()

    key, value, key_cache, value_cache, slot_mapping = write_tensors(torch, "cpu")
    result = my_function(key, value, key_cache, value_cache, slot_mapping)
    torch.testing.assert_close(result.cpu(), key.sum(), atol=1e-5, rtol=1e-5)
    check_caches(torch, key, value, key_cache, value_cache)


def flash_attn_usage(torch: Any) -> Callable[..., Any]:
    def call(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        softmax_scale = 1.0 / (q.shape[-1] ** 0.5)
        return torch.ops.xla.flash_attn_varlen_op(
            q, k, v,
            cu_seqlens_q, cu_seqlens_k,
            max_seqlen_q, max_seqlen_k,
            softmax_scale,
            is_causal=True,
            window_left=-1, window_right=-1,
            softcap=0.0,
            seqused_k=None,
            block_table=None
        )  # fmt: skip

    return call


@pytest.mark.parametrize("compiled", [False, True], ids=["lazy", "openxla"])
def test_flash_attn_varlen_op(
    frontend: LazyFrontend, torch: Any, xm: Any, rng: np.random.Generator, compiled: bool
) -> None:
    from flashxla.torch import setup_custom_call

    setup_custom_call()
    arguments = flash_attn_arguments(rng, Case(((6, 6), (6, 6)), dtype="f16"))
    function = flash_attn_usage(torch)
    if compiled:
        function = torch.compile(backend="openxla")(function)
    tensors = [frontend.tensor(arguments[n]) for n in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")]
    out, softmax_lse = function(*tensors, 6, 6)
    xm.mark_step()
    expected_out, expected_lse = reference.flash_attn_varlen_func(**arguments)
    assert_close(frontend.array(out), expected_out, TOLERANCE["f16"])
    assert_close(frontend.array(softmax_lse), expected_lse, (1e-4, 1e-5))


@pytest.mark.parametrize("compiled", [False, True], ids=["lazy", "openxla"])
def test_forward_prefill(
    frontend: LazyFrontend, torch: Any, xm: Any, rng: np.random.Generator, compiled: bool
) -> None:
    """Paged keys, with a cu_seqlens_k that is "not used when seqused_k is provided"."""
    arguments = flash_attn_arguments(rng, Case(((5, 9), (3, 20)), dtype="f16", page=16))
    dummy_cu_seqlens_k = frontend.tensor(np.zeros(3, np.int32))

    def forward_prefill(query, key_cache, value_cache, query_start_loc, seq_lens_tensor, block_tables):
        return torch.ops.xla.flash_attn_varlen_op(
            query, key_cache, value_cache,
            query_start_loc,
            dummy_cu_seqlens_k,  # Not used when seqused_k is provided
            5,
            20,
            0.125,
            is_causal=True,
            window_left=-1, window_right=-1,
            softcap=0.0,
            seqused_k=seq_lens_tensor,
            block_table=block_tables
        )  # fmt: skip

    function = torch.compile(backend="openxla")(forward_prefill) if compiled else forward_prefill
    names = ("q", "k", "v", "cu_seqlens_q", "seqused_k", "block_table")
    out, softmax_lse = function(*(frontend.tensor(arguments[name]) for name in names))
    expected_out, expected_lse = reference.flash_attn_varlen_func(**arguments)
    assert_close(frontend.array(out), expected_out, TOLERANCE["f16"])
    assert_close(frontend.array(softmax_lse), expected_lse, (1e-4, 1e-5))


@pytest.mark.parametrize("form", ["function", "raw", "openxla", "openxla-fullgraph", "openxla-raw"])
def test_paged_attention(
    frontend: LazyFrontend, torch: Any, xm: Any, rng: np.random.Generator, form: str
) -> None:
    from flashxla.torch import paged_attention as xla_gpu_paged_attention

    case = Case(((1, 20), (5, 9)), dtype="bf16", page=16, layout="interleaved", pad_tokens=2)
    arguments = paged_attention_arguments(rng, case)

    def attention_fn(query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs, scale):
        if form.endswith("raw"):
            return torch.ops.xla_gpu.paged_attention(
                query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs, scale, None, None
            )
        return xla_gpu_paged_attention(
            query=query,
            kv_cache=kv_cache,
            context_lens=context_lens,
            block_tables=block_tables,
            query_start_loc=query_start_loc,
            num_seqs=num_seqs,
            scale=scale,
            sliding_window=None,
            soft_cap=None,
        )

    function = attention_fn
    if form.startswith("openxla"):
        function = torch.compile(backend="openxla", fullgraph=form.endswith("fullgraph"))(attention_fn)
    names = ("query", "kv_cache", "context_lens", "block_tables", "query_start_loc", "num_seqs")
    output = function(*(frontend.tensor(arguments[name]) for name in names), arguments["scale"])
    assert_close(frontend.array(output), reference.paged_attention(**arguments)[0], TOLERANCE["bf16"])


def test_scale_is_one_over_sqrt_of_head_size(frontend: LazyFrontend, rng: np.random.Generator) -> None:
    """The documents' scale and the default of flash_attn_varlen_func are one."""
    arguments = flash_attn_arguments(rng, Case(((3, 5),), dim=40))
    out, _ = frontend.flash_attn_varlen_func(**arguments)
    explicit, _ = frontend.flash_attn_varlen_func(**arguments, softmax_scale=1.0 / (40**0.5))
    np.testing.assert_array_equal(out, explicit)
