"""Eager calls by a short way: a call like one before it goes straight to the native library, or to TorchTPU.

PyTorch's dispatcher, autograd and the checks of arguments take longer than a small kernel runs. What they find out
about a call depends on its scalars, on its tensors' shapes, strides, dtypes, devices and requires_grad, and on the
dispatch keys of the tensors and the thread. PyTorch's own guards, those of torch.compile, compare all of these at
once. The long way (flashxla.torch_library) stays for every call that is new or not plain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from flashxla import torch_calls
from flashxla.ops.op import Op
from flashxla.platforms import PLATFORMS
from flashxla.torch_calls import LONG_WAY, PLAIN, Values
from flashxla.xla import torch_tpu

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # not a public part of PyTorch
    TensorGuards = None  # type: ignore[assignment,misc]

# Of an op: shapes of the first tensor for which calls are kept, and calls of each.
_MAX_SHAPES, _MAX_REPEATS = 1024, 8

_Key = torch._C.DispatchKey
_Keys = torch._C.DispatchKeySet


def _keys(*names: str) -> Any:
    keys = _Keys(getattr(_Key, names[0]))
    for name in names[1:]:
        keys = keys.add(getattr(_Key, name))
    return keys


# Through these, and no others, a call of ours goes straight to the kernel of a platform.
_PLATFORM_KEYS = {
    name: _keys(key, f"Autograd{key}", "ADInplaceOrView", "BackendSelect")
    for name, key in (
        *((platform.name, platform.torch_key) for platform in PLATFORMS.values()),
        (torch_tpu.DEVICE, torch_tpu.TORCH_KEY),
    )
}


def _is_watched() -> bool:
    """Whether something looks on, which must see a call, and which no dispatch key shows."""
    return (
        torch._C._len_torch_function_stack() > 0
        or forward_ad._current_level >= 0
        or torch._C._autograd._profiler_enabled()  # type: ignore[attr-defined]
    )


class ShortWay:
    """The calls of an op that were learnt. It is called with the op's arguments.

    Returns what the public function returns, or LONG_WAY.
    """

    def __init__(self, op: Op) -> None:
        self._op = op
        self._repeats: dict[Any, list[_Repeat]] = {}

    def __call__(self, values: Values) -> Any:
        """Make a call, if it is like one that was learnt."""
        if type(values[0]) not in PLAIN:
            return LONG_WAY
        repeats = self._repeats.get(values[0].shape)
        if repeats is None or _is_watched():
            return LONG_WAY
        for repeat in repeats:
            if repeat.is_like(values):
                return repeat.run(values)
        return LONG_WAY

    def knows(self, values: Values) -> bool:
        """Whether a call is like one that was learnt, so that its arguments are right."""
        repeats = self._repeats.get(values[0].shape, ()) if type(values[0]) in PLAIN else ()
        return any(repeat.is_like(values) for repeat in repeats)

    def learn(self, values: Values) -> None:
        """Take in a call that went the long way, so that the next one like it can take the short one."""
        if TensorGuards is None or _is_watched() or (platform := _platform(self._op, values)) is None:
            return
        key = values[0].shape
        if len(self._repeats) == _MAX_SHAPES:
            self._repeats.clear()
        known = self._repeats.get(key, [])
        if (repeat := _Repeat(self._op, platform, values)).is_like(values):
            # A new list: other threads may be looking through the old one.
            self._repeats[key] = [repeat, *known[: _MAX_REPEATS - 1]]


def _platform(op: Op, values: Values) -> str | None:
    """The platform whose kernel a call goes straight to, None if something comes between."""
    keys = torch._C._dispatch_tls_local_include_set()
    for value, is_tensor in zip(values, op.is_tensor, strict=True):
        if not is_tensor or value is None:
            continue
        if type(value) not in PLAIN or (value.requires_grad and torch.is_grad_enabled()):
            return None
        keys = keys | torch._C._dispatch_keys(value)
    keys = keys - torch._C._dispatch_tls_local_exclude_set()
    for platform, allowed in _PLATFORM_KEYS.items():
        if (keys | allowed).raw_repr() == allowed.raw_repr():
            return platform
    return None


class _Repeat:
    """A call that was made: recognizes those like it, and makes them."""

    def __init__(self, op: Op, platform: str, values: Values) -> None:
        self._is_recording: Callable[[], bool] | None = None
        signature = torch_calls.signature(op, values)
        if platform == torch_tpu.DEVICE:
            from flashxla.xla import torch_tpu_calls

            self._prepared: Any = torch_tpu_calls.program(op, signature)
            self._is_recording = torch_tpu_calls.is_recording
        else:
            self._prepared = torch_calls.prepare(op, platform, signature)
        given = [i for i, is_tensor in enumerate(op.is_tensor) if is_tensor and values[i] is not None]
        # The guards take each tensor once. One that is given twice, such as the offsets of both queries and keys, must
        # be given for the same two arguments again.
        first = {id(values[i]): i for i in reversed(given)}
        self._same = [(first[id(values[i])], i) for i in given if first[id(values[i])] != i]
        self._tensors = torch_calls.getter(sorted(first.values()))
        self._others = torch_calls.getter([i for i in range(len(values)) if i not in given])
        self._others_then = self._others(values)
        self._types = [*map(type, values)]  # 1 is equal to True and to 1.0, and not the same argument
        tensors = self._tensors(values)
        self._guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        # The guards compare requires_grad, which means something only where gradients are on.
        self._only_without_gradients = any(tensor.requires_grad for tensor in tensors)
        # As torch_calls.mark_updated; the guards tell tensors of the inference mode apart.
        updated = self._prepared.updated
        self._counted = () if any(values[i].is_inference() for i in updated) else updated
        self._device = values[0].get_device() if values[0].is_cuda else None

    def is_like(self, values: Values) -> bool:
        return (
            [*map(type, values)] == self._types
            and self._others(values) == self._others_then
            and not (self._same and any([values[i] is not values[j] for i, j in self._same]))
            and self._guards.check(*self._tensors(values))
            and not (self._only_without_gradients and torch.is_grad_enabled())
            # Kernels are launched on the current device.
            and (self._device is None or self._device == torch._C._cuda_getDevice())
            and not (self._is_recording and self._is_recording())
        )

    def run(self, values: Values) -> Any:
        results = self._prepared.run(values)
        if self._counted:
            torch._C._increment_version([values[i] for i in self._counted])
        return results[0] if len(results) == 1 else tuple(results) or None
