"""Embeds custom calls in PyTorch/XLA's graphs.

torch_xla's own custom-call node can declare no aliasing, and takes calls that differ only in their attributes for
the same. A computation that JAX lowers has neither fault: it holds the custom call with
output_to_operand_aliasing, and its node in the graph is identified by the whole HLO.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

from flashxla import jax_calls, torch_calls
from flashxla.ops.op import Aval, Call, Op
from flashxla.torch_calls import Values
from flashxla.xla import lowering, registration, spmd


def run(op: Op, values: Values, donate: bool = False) -> tuple[Call, list[torch.Tensor]]:
    """Add an operation on XLA tensors to the graph; returns the call, its results and then what it updates.

    donate: let the compiled program reuse the buffers of operands that the call updates in place. Only for
        operands whose old value dies with the call, which torch.compile's graphs do not tell XLA by themselves.
    """
    call, computation = program(op, torch_calls.signature(op, values))
    operands = [values[op.names.index(name)] for name, _ in call.operands]
    if spmd.is_on():
        spmd.warn_of_gathers(call, operands)
    if donate:
        for operand in call.updates:
            _donate(operands[operand])
    # Reversed: see _lower.
    return call, user_computation()(name_of(call), operands[::-1], computation)


def user_computation() -> Callable[..., list[torch.Tensor]]:
    """The function that adds a computation to the graph."""
    import torch_xla

    return torch_xla._XLAC._xla_user_computation


def name_of(call: Call) -> str:
    """What the graph calls a call's node."""
    return f"xla::flashxla_{call.op.native}"


def _donate(tensor: torch.Tensor) -> None:
    import torch_xla

    # A clone shares its source's buffer until it is changed; the source still needs it.
    owners, _ = torch_xla._XLAC._get_tensors_xla_device_data_node([tensor])
    if owners == [torch_xla._XLAC._xla_get_tensor_id(tensor)]:
        torch_xla._XLAC._set_buffer_donation(tensor, True)


@functools.lru_cache(maxsize=4096)
def program(op: Op, signature: torch_calls.Signature) -> tuple[Call, Any]:
    """A call and its computation. Raises TypeError and ValueError."""
    import torch_xla

    registration.register_torch_xla()
    call = torch_calls.resolve(op, signature)
    given = torch_calls.tensor_metas(op, signature)
    operands = [given[name] for name, _ in call.operands]
    avals = tuple(torch_calls.aval(meta) for meta in operands if meta is not None)
    hlo = _lower(call, avals, registration.torch_xla_platform())
    return call, torch_xla._XLAC._xla_op_computation_from_module_proto(f"flashxla_{call.op.native}", hlo)


def _lower(call: Call, operands: tuple[Aval, ...], platform: str) -> bytes:
    """The HLO module of a call for a platform, its operands in reverse.

    torch_xla numbers a program's parameters by a walk of the graph that visits a node's last input first, and XLA
    matches donated parameters with outputs of their size in order. Reversed, a call's caches are numbered in the
    order in which it returns them, so that each keeps its own buffer; otherwise K and V would change places, at
    the price of copying both.
    """

    def computation(*args: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax_calls.custom_call(call, args[::-1]))

    with _no_source_locations():
        _, lowered = lowering.lower(f"flashxla_{call.op.native}", computation, operands[::-1], platform)
        return lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()


@contextlib.contextmanager
def _no_source_locations() -> Iterator[None]:
    """torch_xla loses the table of JAX's stack frames, after which XLA warns about each reference into it."""
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)
