"""The operations, each declared once; every front end derives from these declarations."""

from flashxla.ops.flash_attn_varlen import FLASH_ATTN_VARLEN
from flashxla.ops.flash_attn_varlen_backward import FLASH_ATTN_VARLEN_BACKWARD
from flashxla.ops.kv_cache import RESHAPE_AND_CACHE, RESHAPE_AND_CACHE_FLASH
from flashxla.ops.merge_states import MERGE_ATTN_STATES
from flashxla.ops.op import Op
from flashxla.ops.paged_attention import (
    PAGED_ATTENTION,
    RAGGED_PAGED_ATTENTION,
    RAGGED_PAGED_ATTENTION_QKVPACKED,
)

OPS: tuple[Op, ...] = (
    RESHAPE_AND_CACHE_FLASH,
    RESHAPE_AND_CACHE,
    FLASH_ATTN_VARLEN,
    FLASH_ATTN_VARLEN_BACKWARD,
    PAGED_ATTENTION,
    RAGGED_PAGED_ATTENTION,
    RAGGED_PAGED_ATTENTION_QKVPACKED,
    MERGE_ATTN_STATES,
)
