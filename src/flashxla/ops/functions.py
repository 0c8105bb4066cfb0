"""The public functions of the operations, as the declarations have them; for type checkers.

Each front end has them under these names and signatures, made from the declarations (flashxla.ops.OPS).
"""

from flashxla.ops.flash_attn_forms import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flashxla.ops.flash_attn_varlen import flash_attn_varlen_func
from flashxla.ops.kv_cache import reshape_and_cache, reshape_and_cache_flash
from flashxla.ops.kv_cache_forms import append_paged_kv_cache, flash_attn_with_kvcache
from flashxla.ops.merge_forms import merge_all_attn_states
from flashxla.ops.merge_states import merge_attn_states
from flashxla.ops.paged_attention import (
    paged_attention,
    ragged_paged_attention,
    ragged_paged_attention_qkvpacked,
)

__all__ = [
    "append_paged_kv_cache",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "merge_all_attn_states",
    "merge_attn_states",
    "paged_attention",
    "ragged_paged_attention",
    "ragged_paged_attention_qkvpacked",
    "reshape_and_cache",
    "reshape_and_cache_flash",
]
