"""A call as a program: traced and lowered by JAX, without starting any of its backends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxlib import xla_client

from flashxla import jax_avals
from flashxla.ops.op import Aval


def lower(
    name: str,
    computation: Callable[..., Any],
    operands: Sequence[Aval],
    platform: str,
    donated: Sequence[int] = (),
) -> tuple[Any, Any]:
    """A function of these operands, traced and lowered for a platform, as JAX's stages.

    donated: the positions of the operands whose memory the program's results may take.
    """
    computation.__name__ = name
    # keep_unused: the program's parameters are the operands, whatever the computation makes of them.
    jitted = jax.jit(computation, donate_argnums=donated, keep_unused=True)
    with jax.enable_x64(True), jax.default_device(_device_to_lower_for()):
        traced = jitted.trace(*map(jax_avals.shape_dtype, operands))
        return traced, traced.lower(lowering_platforms=(platform,))


@functools.cache
def _device_to_lower_for() -> jax.Device:
    """A CPU device of a client of its own, whatever is lowered for.

    Asking JAX for one, as jax.export does, would start all its backends, and the one for GPUs takes their memory.
    """
    client: Any = xla_client.make_cpu_client()
    return client.local_devices()[0]
