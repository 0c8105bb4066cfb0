"""The operations as custom kernels of TorchTPU: programs that JAX lowers, called on its tensors."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashxla import torch_calls
from flashxla.ops.op import Call, Op
from flashxla.platforms import Platform
from flashxla.torch_calls import Values
from flashxla.xla import torch_tpu
from flashxla.xla.torch_tpu_memory import donatable, own


class Program:
    """A call as a custom kernel of TorchTPU.

    updated: none of its updates is still to be counted, as those of torch_calls.Prepared are.
    """

    updated = ()

    def __init__(self, op: Op, call: Call, key: str, outputs: Sequence[torch.Tensor]) -> None:
        from torch_tpu._internal.pallas import tpu_torch_pallas

        self.call = call
        self._name, self._key, self._outputs = _name(op), key, list(outputs)
        self._operands = [op.names.index(name) for name, _ in call.operands]
        self._launch = tpu_torch_pallas.call_custom_kernel

    def run_functional(self, values: Values, donate: bool) -> list[torch.Tensor]:
        """The results, and then what the call updates.

        donate: the caller does not need what the call updates, only the updates: they take its memory where they can.
        """
        operands = [values[i] for i in self._operands]
        updates = self.call.updates if donate and not is_recording() else ()
        if donated := donatable(operands, updates) if updates else []:
            own([operands[i] for i in donated])
        results = self._launch(
            self._name,
            self._key,
            inputs=operands,
            output_shapes=self._outputs,
            donate_argnums=donated,
            device_assignment=[],
        )
        return list(results)

    def run(self, values: Values) -> list[torch.Tensor]:
        """The results. What the call updates is in the tensors that it was given."""
        results = self.run_functional(values, donate=True)
        count = len(self.call.results)
        # A whole tensor takes the update's memory for its own, which was its own before where it was donated.
        for i, new in zip(self.call.updates, results[count:], strict=True):
            values[self._operands[i]].copy_(new)
        return results[:count]


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
    return Program(op, call, key, [pallas.torch_placeholder(aval) for aval in results])


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


def is_recording() -> bool:
    """Whether calls are recorded for a compiled graph, which donates its own inputs (torch_tpu_graphs)."""
    mode, recording = _modes()
    return mode() == recording


@functools.cache
def _modes() -> tuple[Callable[[], Any], Any]:
    """What tells TorchTPU's mode, and that in which it records. Importing it starts TorchTPU, which `start` does."""
    from torch_tpu._internal.execution_mode import execution_mode_impl

    return execution_mode_impl._get_eager_mode, execution_mode_impl._EagerMode.INTERNAL_COMPILE_FX_GRAPH


def _name(op: Op) -> str:
    return f"flashxla_{op.name}"
