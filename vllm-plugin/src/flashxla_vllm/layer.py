"""The attention layer of vLLM's own (PyTorch) models, which torchax traces into JAX programs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh
from torchax.interop import jax_view, torch_view
from tpu_inference.layers.common.attention_metadata import AttentionMetadata, SharedAttentionMetadata
from tpu_inference.layers.vllm.backends.flash_attn import PallasAttentionBackend, PallasAttentionBackendImpl
from tpu_inference.models.vllm.vllm_model_wrapper_context import get_vllm_model_wrapper_context
from vllm.v1.attention.backend import AttentionType

from flashxla_vllm.attention import Mask, attend_on_mesh


@functools.partial(
    jax.jit, static_argnames=("mesh", "mask", "heads", "kv_heads", "head_size"), donate_argnames=("kv_cache",)
)
def _layer(
    kv_cache: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    alibi_slopes: jax.Array | None,
    metadata: AttentionMetadata,
    shared: SharedAttentionMetadata,
    *,
    mesh: Mesh,
    mask: Mask,
    heads: int,
    kv_heads: int,
    head_size: int,
) -> tuple[jax.Array, jax.Array]:
    """One layer; jit, so that the layers of one kind share one trace."""
    tokens = query.shape[0]
    query = query.reshape(tokens, heads, head_size)
    key, value = (x.reshape(tokens, kv_heads, head_size) for x in (key, value))
    kv_cache, out = attend_on_mesh(
        mesh, mask, kv_cache, query, key, value, metadata, shared, sinks, alibi_slopes
    )
    return kv_cache, out.reshape(tokens, heads * head_size)


class FlashXlaImpl(PallasAttentionBackendImpl):
    """Attention over the paged cache by flashxla; without a cache (encoders) it refuses."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: AttentionType = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                f"flashxla-vllm: attention of type {attn_type}; only decoders are supported"
            )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            None,  # the base class refuses slopes
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            sinks,
        )
        self.alibi_slopes = alibi_slopes

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: AttentionMetadata,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layer's output; its cache, in the model's context, is replaced by the updated one."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("flashxla-vllm: attention with a quantised output")
        context = get_vllm_model_wrapper_context()
        index = context.layer_name_to_kvcache_index[layer.layer_name]
        fp8 = self.kv_cache_quantized_dtype is not None
        writes = self.kv_sharing_target_layer_name is None
        q = jax_view(query)
        kv_width = self.num_kv_heads * self.head_size
        k, v = (q[:, :kv_width] if x is None else jax_view(x) for x in (key, value))
        mask = Mask(
            self.scale,
            self.sliding_window,
            self.logits_soft_cap,
            layer._k_scale_float if fp8 else None,
            layer._v_scale_float if fp8 else None,
            write=writes,
        )
        slopes = None if self.alibi_slopes is None else jnp.asarray(self.alibi_slopes, jnp.float32)
        context.kv_caches[index], out = _layer(
            context.kv_caches[index],
            q,
            k,
            v,
            jax_view(self.sinks),
            slopes,
            attn_metadata,
            context.shared_attn_metadata,
            mesh=context.mesh,
            mask=mask,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_size=self.head_size,
        )
        result = torch_view(out)
        if output is not None:
            output.copy_(result)
        return result


class FlashXlaLayerBackend(PallasAttentionBackend):
    """vLLM's handle on the layer; its name stays that of the base class, which vLLM looks up in an enum."""

    @staticmethod
    def get_impl_cls() -> type[FlashXlaImpl]:
        """The class of the layers' attention."""
        return FlashXlaImpl
