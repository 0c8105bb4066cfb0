"""torch.library.opcheck over every raw operation: schema, fake kernel, autograd, AOT dispatch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashxla.ops import FLASH_ATTN_VARLEN_BACKWARD
from tests.batches import (
    Case,
    flash_attn_arguments,
    paged_attention_arguments,
    qkvpacked,
    ragged_paged_attention_arguments,
)
from tests.frontends import TorchFrontend
from tests.ops.test_kv_cache import Write, arguments_of

pytestmark = pytest.mark.frontends("torch", "torchtpu")

BATCH = ((1, 17), (5, 9), (8, 8))
# float8 caches are raw bytes here: opcheck compares tensors with torch.allclose, which has no float8.
WRITES = [
    Write(),
    Write("bf16", "u8:e4m3", scale="H", layout="HND"),
    Write("f16", layout="interleaved", slots=17),
    Write("f32", "u8:e5m2", layout="packed_HND", scale="1"),
    Write("bf16", layout="packed_NHD", slot_dtype="i32"),
    Write("bf16", layout="stacked"),
    Write("f16", dim=40, v_dim=72),
]
FLASH = [
    Case(BATCH),
    Case(BATCH, page=8, dtype="bf16", lse=False),
    Case(BATCH, used=True, alibi="H", sinks="f32", descale="SH", leftpad=True, pad_seqs=1),
    Case(BATCH, page=8, layout="HND", cache="u8:e5m2", dtype="f16", softcap=2.0, window=(3, -1)),
    Case(BATCH, page=8, dim=40, v_dim=72),
    Case(BATCH, dim=192, v_dim=128, dtype="bf16", lse=False),
]
PAGED = [
    Case(BATCH, page=8, layout="interleaved", pad_tokens=2, lse=False),
    Case(BATCH, page=8, layout="NHD", window=(4, 0), softcap=2.0, dtype="bf16"),
    Case(BATCH, page=8, layout="packed_HND", cache="u8:e4m3", descale="H", lse=False),
    Case(BATCH, page=8, layout="stacked", causal=False, window=(4, 3), alibi="SH", sinks="f32"),
    Case(BATCH, page=8, layout="HND", dim=40, v_dim=72),
]
# What the aliases have no argument for.
NEWER = (
    "return_softmax_lse",
    "causal",
    "window_left",
    "window_right",
    "alibi_slopes",
    "s_aux",
    "max_seqlen_q",
)
RAGGED = [
    (Case(BATCH, page=8, layout="NHD", pad_tokens=2, lse=False), "same", None),
    (Case(BATCH, page=8, layout="interleaved", cache="u8:e4m3", descale="H"), "bf16", "i64"),
    (Case(BATCH, page=8, layout="HND", dim=40, v_dim=72, causal=False, sinks="f32"), "same", "short"),
]


def opcheck(frontend: TorchFrontend, op: Any, arguments: dict[str, Any]) -> None:
    tensors = {k: frontend.tensor(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    frontend.torch.library.opcheck(op, (), tensors)


def raw_attention(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a raw op: window_size is two, a pair of caches too."""
    if "window_size" in arguments:
        arguments["window_left"], arguments["window_right"] = arguments.pop("window_size")
    if isinstance(arguments.get("kv_cache"), tuple):
        arguments["kv_cache"], arguments["value_cache"] = arguments["kv_cache"]
    return arguments


@pytest.mark.parametrize("case", WRITES, ids=str)
def test_writes(frontend: TorchFrontend, rng: np.random.Generator, case: Write) -> None:
    arguments = arguments_of(rng, case)
    name = "reshape_and_cache" if "kv_cache" in arguments else "reshape_and_cache_flash"
    opcheck(frontend, getattr(frontend.torch.ops.flashxla, name).default, arguments)


@pytest.mark.parametrize("case", FLASH, ids=str)
def test_flash_attn_varlen(frontend: TorchFrontend, rng: np.random.Generator, case: Case) -> None:
    arguments = raw_attention(flash_attn_arguments(rng, case))
    opcheck(frontend, frontend.torch.ops.flashxla.flash_attn_varlen.default, arguments)


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_paged_attention(frontend: TorchFrontend, rng: np.random.Generator, case: Case) -> None:
    arguments = raw_attention(paged_attention_arguments(rng, case))
    opcheck(frontend, frontend.torch.ops.flashxla.paged_attention_with_lse.default, arguments)


@pytest.mark.parametrize("case", PAGED[:3], ids=str)
def test_paged_attention_alias(frontend: TorchFrontend, rng: np.random.Generator, case: Case) -> None:
    arguments = raw_attention(paged_attention_arguments(rng, case))
    arguments = {name: value for name, value in arguments.items() if name not in NEWER}
    opcheck(frontend, frontend.torch.ops.flashxla.paged_attention.default, arguments)


@pytest.mark.parametrize("lse", [False, True])
def test_paged_attention_returns(frontend: TorchFrontend, rng: np.random.Generator, lse: bool) -> None:
    """With an LSE, or an empty tensor in its place; the alias returns the output alone."""
    ops = frontend.torch.ops.flashxla
    arguments = raw_attention(paged_attention_arguments(rng, Case(BATCH, page=8, layout="stacked", lse=lse)))
    tensors = {k: frontend.tensor(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    out, softmax_lse = ops.paged_attention_with_lse(**tensors)
    assert tuple(softmax_lse.shape) == ((4, 14) if lse else (0,))
    assert softmax_lse.dtype == frontend.torch.float32
    alone = ops.paged_attention(**{name: x for name, x in tensors.items() if name not in NEWER})
    assert frontend.torch.equal(alone, out)


@pytest.mark.parametrize(("case", "new", "slots"), RAGGED, ids=str)
def test_ragged_paged_attention(
    frontend: TorchFrontend, rng: np.random.Generator, case: Case, new: str, slots: str | None
) -> None:
    arguments = raw_attention(ragged_paged_attention_arguments(rng, case, new, slots))
    opcheck(frontend, frontend.torch.ops.flashxla.ragged_paged_attention.default, arguments)
    if packed := qkvpacked(arguments):
        opcheck(frontend, frontend.torch.ops.flashxla.ragged_paged_attention_qkvpacked.default, packed)


@pytest.mark.parametrize("sinks", [None, "f32"])
def test_flash_attn_varlen_backward(
    frontend: TorchFrontend, rng: np.random.Generator, sinks: str | None
) -> None:
    given = flash_attn_arguments(rng, Case(BATCH, dtype="bf16", sinks=sinks))
    out, lse = frontend.flash_attn_varlen_func(**given)
    arguments = {t.name: given[t.name] for t in FLASH_ATTN_VARLEN_BACKWARD.tensors if t.name in given}
    arguments |= {name: given[name] for name in ("max_seqlen_q", "max_seqlen_k", "causal")}
    arguments |= {"grad_out": out, "out": out, "softmax_lse": lse, "grad_softmax_lse": lse}
    opcheck(frontend, frontend.torch.ops.flashxla.flash_attn_varlen_backward.default, arguments)


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
    for name in ("layout", "kv_cache_dtype", "return_softmax_lse"):
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
        "flash_attn_varlen_backward",
        "paged_attention",
        "paged_attention_with_lse",
        "ragged_paged_attention",
        "ragged_paged_attention_qkvpacked",
        "merge_attn_states",
    }
