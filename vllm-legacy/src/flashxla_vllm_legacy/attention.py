"""Attention of a layer: flashxla's write-and-attend, one call that updates the layer's cache in place.

The cache is one tensor a layer, [blocks, block size, KV heads, 2 * head size], keys before values in the last
dimension. Where new tokens go follows from the block tables, on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionType
from vllm.v1.attention.backends.pallas import PallasMetadata

import flashxla.torch as fx

LAYOUT = "packed_NHD"
# The names of vLLM's --kv-cache-dtype, and flashxla's.
FP8_FORMATS = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}


class FlashXlaBackend(AttentionBackend):
    """What the platform names as the backend, and what the runner asks for the cache's shape."""

    accept_output_buffer = False

    @staticmethod
    def get_name() -> str:
        """vLLM's name for backends that are not its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashXlaImpl]:
        """The layer's attention."""
        return FlashXlaImpl

    @staticmethod
    def get_builder_cls() -> Any:
        """The runner builds the metadata itself."""
        raise NotImplementedError("flashxla-vllm-legacy: the runner builds the attention metadata")

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The shape of one layer's cache."""
        return (num_blocks, block_size, num_kv_heads, 2 * head_size)

    @staticmethod
    def get_max_num_seqs(model_len: int, page_size: int) -> int:
        """How many requests a step can take: on TPUs their tables must fit a small memory, here they need not."""
        return 1 << 30


class FlashXlaImpl(AttentionImpl):
    """One layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        asked = {
            "alibi_slopes": alibi_slopes,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        } | others
        unknown = [name for name, value in asked.items() if value is not None]
        if attn_type != AttentionType.DECODER or unknown:
            raise NotImplementedError(
                f"flashxla-vllm-legacy: attention layer: got {' and '.join([attn_type, *unknown])}; accepted: "
                f"{AttentionType.DECODER} with its own cache, a window and a softcap"
            )
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads = num_kv_heads or num_heads
        self.scale = float(scale)
        self.fp8 = FP8_FORMATS.get(kv_cache_dtype)
        self.sliding_window = sliding_window
        self.soft_cap = logits_soft_cap or None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PallasMetadata,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write key and value into kv_cache, in place, and attend to it; all are [tokens, heads * head size]."""
        tokens, hidden = query.shape
        out = fx.ragged_paged_attention(
            query.view(tokens, self.num_heads, self.head_size),
            key.view(tokens, self.num_kv_heads, self.head_size),
            value.view(tokens, self.num_kv_heads, self.head_size),
            kv_cache,
            attn_metadata.context_lens,
            attn_metadata.block_tables,
            attn_metadata.query_start_loc,
            attn_metadata.num_seqs,
            self.scale,
            self.sliding_window,
            self.soft_cap,
            layer._k_scale_float if self.fp8 else None,
            layer._v_scale_float if self.fp8 else None,
            LAYOUT,
            kv_cache_dtype=self.fp8 or "auto",
        )
        return out.reshape(tokens, hidden)
