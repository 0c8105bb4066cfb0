"""PyTorch/XLA's SPMD: the operations on each device's part of the heads, without a gather."""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashxla.ops.op import Call

Spec = tuple[Any, ...] | None


def shard_map(
    function: Callable[..., Any],
    mesh: Any,
    in_specs: Sequence[Spec],
    out_specs: Sequence[Spec],
    updated: Sequence[int] = (),
) -> Callable[..., Any]:
    """A function that runs on each device's part of its arguments. See flashxla.torch.shard_map."""
    from torch_xla.distributed import spmd

    @functools.wraps(function)
    def sharded(*args: torch.Tensor) -> Any:
        if len(args) != len(in_specs):
            raise TypeError(
                f"shard_map: got {len(args)} arguments; accepted: {len(in_specs)}, one for each of in_specs"
            )
        specs = [_full(spec, arg.dim()) for spec, arg in zip(in_specs, args, strict=True)]
        parts = [
            spmd.enable_manual_sharding(arg, spec, mesh=mesh).global_tensor
            for arg, spec in zip(args, specs, strict=True)
        ]
        results = function(*parts)
        many = isinstance(results, (tuple, list))
        whole = [
            _whole(result, _full(spec, result.dim()), mesh)
            for result, spec in zip(results if many else (results,), out_specs, strict=True)
        ]
        for i in updated:
            args[i].copy_(_whole(parts[i], specs[i], mesh))
        return tuple(whole) if many else whole[0]

    return sharded


def is_on() -> bool:
    """Whether this process is in SPMD mode."""
    import torch_xla.runtime

    return torch_xla.runtime.is_spmd()


def warn_of_gathers(call: Call, operands: Sequence[torch.Tensor]) -> None:
    """Say which operands XLA gathers for a call that is not inside a shard_map."""
    import torch_xla

    for (name, _), tensor in zip(call.operands, operands, strict=True):
        spec = torch_xla._XLAC._get_xla_sharding_spec(tensor)
        tiles = re.match(r"\{devices=\[([\d,]+)\]", spec)
        if tiles is None:
            continue
        parts = [int(n) for n in tiles[1].split(",")][: tensor.dim()]
        if math.prod(parts) > 1:
            label = call.op.label(name, call.dims.__contains__)
            warnings.warn(
                f"{call.op.function}: {label} {list(tensor.shape)} is sharded {spec}, and XLA gathers it on every "
                "device: call the function inside flashxla.torch.shard_map, which runs it on each device's heads",
                stacklevel=2,
            )


def _full(spec: Spec, rank: int) -> tuple[Any, ...]:
    return (None,) * rank if spec is None else spec


def _whole(part: torch.Tensor, spec: tuple[Any, ...], mesh: Any) -> torch.Tensor:
    from torch_xla.distributed import spmd

    axes = mesh.shape()
    sizes = (size * (1 if name is None else axes[name]) for size, name in zip(part.shape, spec, strict=True))
    return spmd.disable_manual_sharding(part, spec, torch.Size(sizes), mesh=mesh).global_tensor
