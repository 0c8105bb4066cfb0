"""The operations as custom kernels of TorchTPU: programs that JAX lowers, called on its tensors."""

from __future__ import annotations

import functools
import hashlib
from typing import Any, NamedTuple

import torch

from flashxla import torch_calls
from flashxla.ops.op import Call, Op
from flashxla.platforms import Platform
from flashxla.torch_calls import Values
from flashxla.xla import torch_tpu
from flashxla.xla.torch_tpu_memory import donatable, own


class Program(NamedTuple):
    """A call as a custom kernel of TorchTPU. operands: the positions of its operands among the op's arguments."""

    call: Call
    key: str
    outputs: tuple[torch.Tensor, ...]
    operands: tuple[int, ...]


def run(op: Op, values: Values, donate: bool) -> tuple[Call, list[torch.Tensor]]:
    """Run an operation on TorchTPU's tensors; returns the call, its results and then what it updates.

    donate: the caller does not need what the call updates, only the updates: they take its memory where they can.
    """
    from torch_tpu._internal.pallas import tpu_torch_pallas

    made = program(op, torch_calls.signature(op, values))
    operands = [values[i] for i in made.operands]
    donated = [i for i in made.call.updates if donatable(operands, i)] if donate and not _is_tracing() else []
    own([operands[i] for i in donated])
    results = tpu_torch_pallas.call_custom_kernel(
        _name(op),
        made.key,
        inputs=operands,
        output_shapes=list(made.outputs),
        donate_argnums=donated,
        device_assignment=[],
    )
    return made.call, list(results)


@functools.lru_cache(maxsize=4096)
def program(op: Op, signature: torch_calls.Signature) -> Program:
    """A call and its program. Raises TypeError and ValueError."""
    from torch_tpu._internal.pallas import pallas, tpu_torch_pallas

    call = torch_calls.resolve(op, signature)
    platform = torch_tpu.platform()
    if platform is None:
        raise RuntimeError(
            f"{op.function}: TorchTPU's tensors need flashxla.use_gpu() or flashxla.use_cpu() to have started TorchTPU"
        )
    module, results = _lower(op, call, signature, platform)
    key = hashlib.blake2b(module, digest_size=16).hexdigest()
    tpu_torch_pallas.register_custom_kernel(_name(op), key, serialized_mlir_module=module)
    return Program(
        call,
        key,
        outputs=tuple(pallas.torch_placeholder(aval) for aval in results),
        operands=tuple(op.names.index(name) for name, _ in call.operands),
    )


def _lower(op: Op, call: Call, signature: torch_calls.Signature, platform: Platform) -> tuple[bytes, Any]:
    """The serialized StableHLO of a call, and the shapes and dtypes of its results."""
    from jax.extend.mlir.dialects import stablehlo

    from flashxla import jax_calls
    from flashxla.xla import lowering

    given = torch_calls.tensor_metas(op, signature)
    metas = [given[name] for name, _ in call.operands]
    avals = [torch_calls.aval(meta) for meta in metas if meta is not None]

    def computation(*operands: Any) -> tuple[Any, ...]:
        return tuple(jax_calls.custom_call(call, operands))

    traced, lowered = lowering.lower(_name(op), computation, avals, platform.jax_lowering, call.updates)
    version = stablehlo.get_minimum_version()  # what every TorchTPU reads; the calls need nothing newer
    module = stablehlo.serialize_portable_artifact(lowered.compiler_ir("stablehlo"), version)
    return module, traced.jaxpr.out_avals


def _is_tracing() -> bool:
    """Whether calls are recorded for a compiled graph, which donates its own inputs (torch_tpu_graphs)."""
    from torch_tpu._internal import execution_mode

    return execution_mode.eager_mode == execution_mode.EagerMode._INTERNAL_COMPILE_FX_GRAPH


def _name(op: Op) -> str:
    return f"flashxla_{op.name}"
