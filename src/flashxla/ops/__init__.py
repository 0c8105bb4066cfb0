"""The operations, each declared once; every front end derives from these declarations."""

from flashxla.ops.attention import FLASH_ATTN_VARLEN, PAGED_ATTENTION
from flashxla.ops.kv_cache import RESHAPE_AND_CACHE, RESHAPE_AND_CACHE_FLASH
from flashxla.ops.merge_states import MERGE_ATTN_STATES
from flashxla.ops.op import Aval, Call, Native, Op, Scalar, Tensor

OPS: tuple[Op, ...] = (
    RESHAPE_AND_CACHE_FLASH,
    RESHAPE_AND_CACHE,
    FLASH_ATTN_VARLEN,
    PAGED_ATTENTION,
    MERGE_ATTN_STATES,
)

__all__ = [
    "FLASH_ATTN_VARLEN",
    "MERGE_ATTN_STATES",
    "OPS",
    "PAGED_ATTENTION",
    "RESHAPE_AND_CACHE",
    "RESHAPE_AND_CACHE_FLASH",
    "Aval",
    "Call",
    "Native",
    "Op",
    "Scalar",
    "Tensor",
]
