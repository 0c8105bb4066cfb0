"""Embeds custom calls in PyTorch/XLA's graphs.

torch_xla's own custom-call node can declare no aliasing, and takes calls that differ only in their attributes for
the same. A computation that JAX lowers has neither fault: it holds the custom call with
output_to_operand_aliasing, and its node in the graph is identified by the whole HLO.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import torch

from flashxla import jax_calls
from flashxla.ops.op import Aval, Call
from flashxla.xla import registration


def run(call: Call, operands: Sequence[torch.Tensor], donate: bool = False) -> list[torch.Tensor]:
    """Add a call on XLA tensors to the graph; returns its results.

    donate: let the compiled program reuse the buffers of operands that the call updates in place. Only for
        operands whose old value dies with the call, which torch.compile's graphs do not tell XLA by themselves.
    """
    import torch_xla

    registration.register_torch_xla()
    avals = tuple(Aval(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in operands)
    computation = _computation(call, avals)
    if donate:
        for _, operand in call.aliases:
            _donate(operands[operand])
    # Reversed: see _lower.
    return torch_xla._XLAC._xla_user_computation(f"xla::{call.native.target}", operands[::-1], computation)


def _donate(tensor: torch.Tensor) -> None:
    import torch_xla

    # A clone shares its source's buffer until it is changed; the source still needs it.
    owners, _ = torch_xla._XLAC._get_tensors_xla_device_data_node([tensor])
    if owners == [torch_xla._XLAC._xla_get_tensor_id(tensor)]:
        torch_xla._XLAC._set_buffer_donation(tensor, True)


@functools.cache
def _computation(call: Call, operands: tuple[Aval, ...]) -> Any:
    import torch_xla

    name = call.native.target
    hlo = _lower(call, operands)
    return torch_xla._XLAC._xla_op_computation_from_module_proto(name, hlo)


def _lower(call: Call, operands: tuple[Aval, ...]) -> bytes:
    """The HLO module of a call, its operands in reverse.

    torch_xla numbers a program's parameters by a walk of the graph that visits a node's last input first, and XLA
    matches donated parameters with outputs of their size in order. Reversed, a call's caches are numbered in the
    order in which it returns them, so that each keeps its own buffer; otherwise K and V would change places, at
    the price of copying both.
    """

    def computation(*args: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax_calls.custom_call(call, args[::-1]))

    computation.__name__ = call.native.target
    # keep_unused: the computation's parameters are the operands, whatever the call makes of them.
    with jax.enable_x64(True):
        traced = jax.jit(computation, keep_unused=True).trace(*map(jax_calls.shape_dtype, operands[::-1]))
        lowered = traced.lower(lowering_platforms=("cpu",))
        return lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
