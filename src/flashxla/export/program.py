"""Lowers a model's step to StableHLO, and describes its arguments and results in the order of the program's."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.extend.mlir
import torch
import torchax
from jax.extend.mlir.dialects import stablehlo
from torchax.ops.mappings import t2j_dtype

from flashxla.generate.batch import StepInputs, padding_inputs
from flashxla.generate.model import LoadedModel
from flashxla.generate.scheduler import Limits
from flashxla.generate.torchax_runner import like_torch, step_program, step_weights
from flashxla.platforms import Platform

# Of 2024, the first with composite operations, as which JAX writes top_k.
_OLDEST_STABLEHLO = "1.0.0"
# The names of dtypes in safetensors files.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An argument or a result of a program.

    kind: "cache", "weight", "input" or "logits".
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def describe(self) -> dict[str, Any]:
        """As the manifest has it."""
        return {
            "kind": self.kind,
            "name": self.name,
            "dtype": _DTYPES[self.dtype],
            "shape": list(self.shape),
        }

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """What JAX traces in its place."""
        return jax.ShapeDtypeStruct(self.shape, t2j_dtype(self.dtype))


@dataclasses.dataclass(frozen=True)
class Program:
    """A step of a number of tokens (padded)."""

    tokens: int
    code: bytes
    arguments: list[Tensor]
    results: list[Tensor]
    targets: list[str]


def lower_step(loaded: LoadedModel, limits: Limits, tokens: int, platform: Platform) -> Program:
    """Lower the step of a number of tokens. The caches are donated: result i + 1 is cache i, in its memory."""
    caches = [
        tuple(
            Tensor("cache", f"layers.{number}.{what}", (limits.num_blocks, *block), layer.dtype)
            for what, block in zip(("key", "value"), layer.block_shapes(limits.block_size), strict=True)
        )
        for number, layer in enumerate(loaded.layers)
    ]
    weights = {
        name: Tensor("weight", name, tuple(w.shape), w.dtype)
        for name, w in step_weights(loaded.model).items()
    }
    padding = padding_inputs(limits, tokens)
    inputs = tuple(
        Tensor("input", name, tuple(x.shape), x.dtype)
        for name, x in zip(StepInputs._fields, padding, strict=True)
    )
    described = caches, weights, inputs
    # keep_unused: the arguments of the program are those described, all of them.
    program = jax.jit(step_program(loaded.model), donate_argnums=0, keep_unused=True)
    with torchax.default_env(), like_torch(), torch.no_grad():
        avals = jax.tree.map(lambda tensor: tensor.aval, described)
        traced = program.trace(*avals)
        text = traced.lower(lowering_platforms=(platform.jax_lowering,)).as_text()
    logits = Tensor("logits", "logits", traced.out_info[0].shape, torch.float32)
    return Program(
        tokens,
        _serialize(text),
        arguments=jax.tree.leaves(described),
        results=[logits, *jax.tree.leaves(caches)],
        targets=sorted(set(re.findall(r"stablehlo\.custom_call @([\w.]+)", text))),
    )


def _serialize(text: str) -> bytes:
    """As a portable artifact, for plugins of many versions: they read older StableHLO and refuse newer."""
    try:
        return jax.extend.mlir.serialize_portable_artifact(text, _OLDEST_STABLEHLO)
    except RuntimeError:  # it has operations of later versions
        return jax.extend.mlir.serialize_portable_artifact(text, stablehlo.get_current_version())
