"""One trace for all decoder layers of a kind.

torchax runs a model's Python once for each program, layer by layer, and each layer is lowered: most of the time that a
warm start takes. A decoder layer is a pure function of its weights, its cache, the step's metadata and what comes in.
It is traced by jax.jit on its first call; the other layers of its kind use that trace.

Layers are of one kind where all settings in them are equal but for the numbers in their names. What cannot be compared
equals itself alone, so a layer that has such a thing of its own has its own trace.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torchax.interop import jax_view, torch_view
from torchax.tensor import Tensor
from tpu_inference.layers.common.attention_metadata import AttentionMetadata
from tpu_inference.models.vllm.vllm_model_wrapper_context import (
    get_vllm_model_wrapper_context,
    set_vllm_model_wrapper_context,
)
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.model_executor.layers.attention import Attention

_VALUES = (bool, int, float, bytes, type(None), torch.dtype, torch.device)
_HASHABLE = (Mesh, NamedSharding, PartitionSpec)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# What every module has; its parts are compared by themselves.
_OF_MODULES = {*torch.nn.Module().__dict__, "forward"}
_OWN_PACKAGES = ("vllm", "tpu_inference", "flashxla_vllm")
_DEPTH = 6

Programs = dict[Any, Callable[..., Any]]


def share(model: torch.nn.Module) -> None:
    """Let the decoder layers use one trace for each kind. A layer with experts counts them: it keeps its own."""
    programs: Programs = {}
    for layers in model.modules():
        if not isinstance(layers, torch.nn.ModuleList):
            continue
        for layer in layers:
            attention = [part for part in layer.modules() if isinstance(part, Attention)]
            experts = any("MoE" in type(part).__name__ for part in layer.modules())
            if len(attention) == 1 and not experts:
                layer.forward = _Shared(layer, attention[0], programs)


class _Shared:
    """The forward of a layer."""

    def __init__(self, layer: torch.nn.Module, attention: Attention, programs: Programs) -> None:
        self.layer, self.name, self.programs = layer, attention.layer_name, programs
        self.writes = attention.impl.kv_sharing_target_layer_name is None
        self.kind: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context, metadata = get_vllm_model_wrapper_context(), get_forward_context().attn_metadata
        leaves, structure = jax.tree.flatten((args, kwargs))
        constants = tuple(None if isinstance(x, Tensor) else x for x in leaves)
        # Caches of several groups, as models with windows have them, come with metadata of another type.
        usual = self.writes and isinstance(metadata, AttentionMetadata)
        if not usual or not all(isinstance(x, (str, *_VALUES)) for x in constants):
            return type(self.layer).forward(self.layer, *args, **kwargs)
        if self.kind is None:
            self.kind = _kind(self.layer)
        key = (self.kind, structure, constants)
        program = self.programs.get(key)
        if program is None:
            program = self.programs[key] = self._program(structure, constants)
        index = context.layer_name_to_kvcache_index[self.name]
        context.kv_caches[index], out = program(
            jax_view({**dict(self.layer.named_parameters()), **dict(self.layer.named_buffers())}),
            context.kv_caches[index],
            metadata,
            context.shared_attn_metadata,
            jax_view([x for x in leaves if isinstance(x, Tensor)]),
        )
        return torch_view(out)

    def _program(self, structure: Any, constants: tuple[Any, ...]) -> Callable[..., Any]:
        mesh, vllm_config = (getattr(get_vllm_model_wrapper_context(), x) for x in ("mesh", "vllm_config"))
        forward = dataclasses.replace(get_forward_context(), attn_metadata={})  # no arrays of this trace

        def run(state: Any, cache: jax.Array, metadata: Any, shared: Any, tensors: list[jax.Array]) -> Any:
            rest = iter(torch_view(tensors))
            args, kwargs = jax.tree.unflatten(structure, [next(rest) if x is None else x for x in constants])
            weights = {f"layer.{name}": value for name, value in torch_view(state).items()}
            own = set_vllm_model_wrapper_context(
                kv_caches=[cache],
                mesh=mesh,
                layer_name_to_kvcache_index={self.name: 0},
                vllm_config=vllm_config,
                shared_attn_metadata=shared,
            )
            with own, override_forward_context(dataclasses.replace(forward, attn_metadata=metadata)):
                out = torch.func.functional_call(_Call(self.layer), weights, args, kwargs)
                return get_vllm_model_wrapper_context().kv_caches[0], jax_view(out)

        return jax.jit(run)


class _Call(torch.nn.Module):
    """What functional_call can call of a layer: its class's forward."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.layer).forward(self.layer, *args, **kwargs)


class _Itself:
    """What equals itself alone. It is held, so that nothing else gets its identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _kind(layer: torch.nn.Module) -> Any:
    """What is equal for layers that compute the same from the same arrays."""
    return tuple(
        (
            name,
            type(part),
            _comparable({k: v for k, v in part.__dict__.items() if k not in _OF_MODULES}, _DEPTH),
        )
        for name, part in layer.named_modules()
    )


def _comparable(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return _NUMBER.sub("#", value)
    if isinstance(value, (*_VALUES, *_HASHABLE)):
        return (type(value), value)
    if isinstance(value, torch.nn.Module):
        return type(value)
    if inspect.ismethod(value) and isinstance(value.__self__, torch.nn.Module):
        return (type(value.__self__), value.__func__)
    if type(value) is torch.Tensor and value.numel() <= 1 and value.device.type == "cpu":
        return (value.dtype, tuple(value.shape), tuple(value.flatten().tolist()))
    if depth and isinstance(value, list | tuple):
        return (type(value), tuple(_comparable(x, depth - 1) for x in value))
    if depth and isinstance(value, dict):
        return tuple((_comparable(k, depth - 1), _comparable(v, depth - 1)) for k, v in value.items())
    ours = type(value).__module__.split(".")[0] in _OWN_PACKAGES
    if depth and ours and getattr(value, "__dict__", None) and not isinstance(value, type):
        return (type(value), _comparable(value.__dict__, depth - 1))
    return _Itself(value)
