"""torch.library.opcheck over every raw operation: schema, fake kernel, autograd, AOT dispatch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.batches import Case, flash_attn_arguments, paged_attention_arguments
from tests.frontends import TorchFrontend
from tests.ops.test_kv_cache import Write, arguments_of

pytestmark = pytest.mark.frontends("torch")

BATCH = ((1, 17), (5, 9), (8, 8))
# float8 caches are raw bytes here: opcheck compares tensors with torch.allclose, which has no float8.
WRITES = [
    Write(),
    Write("bf16", "u8:e4m3", scale="H", layout="HND"),
    Write("f16", layout="interleaved", slots=17),
    Write("f32", "u8:e5m2", layout="packed_HND", scale="1"),
    Write("bf16", layout="packed_NHD", slot_dtype="i32"),
    Write("bf16", layout="stacked"),
]
FLASH = [
    Case(BATCH),
    Case(BATCH, page=8, dtype="bf16", lse=False),
    Case(BATCH, used=True, alibi="H", sinks="f32", descale="SH", leftpad=True, pad_seqs=1),
    Case(BATCH, page=8, layout="HND", cache="u8:e5m2", dtype="f16", softcap=2.0, window=(3, -1)),
]
PAGED = [
    Case(BATCH, page=8, layout="interleaved", pad_tokens=2),
    Case(BATCH, page=8, layout="NHD", window=(4, 0), softcap=2.0, dtype="bf16"),
    Case(BATCH, page=8, layout="packed_HND", cache="u8:e4m3", descale="H"),
]


def opcheck(frontend: TorchFrontend, op: Any, arguments: dict[str, Any]) -> None:
    tensors = {k: frontend.tensor(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    frontend.torch.library.opcheck(op, (), tensors)


def raw_flash(arguments: dict[str, Any]) -> dict[str, Any]:
    left, right = arguments.pop("window_size")
    return arguments | {"window_left": left, "window_right": right}


@pytest.mark.parametrize("case", WRITES, ids=str)
def test_writes(frontend: TorchFrontend, rng: np.random.Generator, case: Write) -> None:
    arguments = arguments_of(rng, case)
    name = "reshape_and_cache" if "kv_cache" in arguments else "reshape_and_cache_flash"
    opcheck(frontend, getattr(frontend.torch.ops.flashxla, name).default, arguments)


@pytest.mark.parametrize("case", FLASH, ids=str)
def test_flash_attn_varlen(frontend: TorchFrontend, rng: np.random.Generator, case: Case) -> None:
    arguments = raw_flash(flash_attn_arguments(rng, case))
    opcheck(frontend, frontend.torch.ops.flashxla.flash_attn_varlen.default, arguments)


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_paged_attention(frontend: TorchFrontend, rng: np.random.Generator, case: Case) -> None:
    arguments = paged_attention_arguments(rng, case)
    if isinstance(arguments["kv_cache"], tuple):
        arguments["kv_cache"], arguments["value_cache"] = arguments["kv_cache"]
    opcheck(frontend, frontend.torch.ops.flashxla.paged_attention.default, arguments)


def test_merge_attn_states(frontend: TorchFrontend, rng: np.random.Generator) -> None:
    shapes = {"out_a": (5, 4, 16), "lse_a": (4, 5), "out_b": (5, 4, 16), "lse_b": (4, 5)}
    arguments = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    opcheck(frontend, frontend.torch.ops.flashxla.merge_attn_states.default, arguments)


@pytest.mark.parametrize("page", [None, 8])
def test_seed_flash_attn_varlen_op(
    frontend: TorchFrontend, rng: np.random.Generator, page: int | None
) -> None:
    arguments = flash_attn_arguments(rng, Case(BATCH, dtype="f16", page=page))
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    taken = {name: arguments.get(name) for name in (*names, "seqused_k", "block_table")}
    if taken["cu_seqlens_k"] is None:
        taken["cu_seqlens_k"] = np.zeros_like(arguments["cu_seqlens_q"])
    extra = {"softmax_scale": 0.125, "is_causal": True, "window_left": -1, "window_right": -1, "softcap": 0.0}
    opcheck(frontend, frontend.torch.ops.xla.flash_attn_varlen_op.default, taken | extra)


def test_seed_paged_attention(frontend: TorchFrontend, rng: np.random.Generator) -> None:
    arguments = paged_attention_arguments(rng, PAGED[0])
    for name in ("layout", "kv_cache_dtype"):
        del arguments[name]
    opcheck(frontend, frontend.torch.ops.xla_gpu.paged_attention.default, arguments)


def test_every_operation_is_checked(frontend: TorchFrontend) -> None:
    """An operation that is added must be added here."""
    schemas = frontend.torch._C._jit_get_all_schemas()
    names = {schema.name.removeprefix("flashxla::") for schema in schemas if "flashxla::" in schema.name}
    internal = {name for name in names if name.startswith("_") or name.endswith("_functional")}
    assert names - internal == {
        "reshape_and_cache_flash",
        "reshape_and_cache",
        "flash_attn_varlen",
        "paged_attention",
        "merge_attn_states",
    }
