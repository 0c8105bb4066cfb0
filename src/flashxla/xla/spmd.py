"""PyTorch/XLA's SPMD: the operations on each device's part of the heads, without a gather."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

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


def _full(spec: Spec, rank: int) -> tuple[Any, ...]:
    return (None,) * rank if spec is None else spec


def _whole(part: torch.Tensor, spec: tuple[Any, ...], mesh: Any) -> torch.Tensor:
    from torch_xla.distributed import spmd

    axes = mesh.shape()
    sizes = (size * (1 if name is None else axes[name]) for size, name in zip(part.shape, spec, strict=True))
    return spmd.disable_manual_sharding(part, spec, torch.Size(sizes), mesh=mesh).global_tensor
