"""One adapter per front end: numpy arrays in, numpy arrays out, so that one test serves them all.

An adapter has the public operations as methods that take keyword arguments. Arguments that are numpy arrays
(or tuples of them) become tensors of the front end. In-place operations also return the new caches: torch's
mutated tensors, jax's returned arrays; a pair where the argument is a pair.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from tests.expanded import stored

Array = np.ndarray

# The dtypes that numpy has from ml_dtypes, by torch's name: their ml_dtypes and the integers of their width.
_EXTENDED = {
    "bfloat16": (ml_dtypes.bfloat16, np.int16),
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, np.uint8),
    "float8_e5m2": (ml_dtypes.float8_e5m2, np.uint8),
}


class Unavailable(Exception):
    """This front end cannot run here; the message says why."""


def map_arrays(function: Callable[[Array], Any], value: Any) -> Any:
    """Apply a function to an array or to each of a tuple of arrays; other values stay."""
    if isinstance(value, tuple) and value and all(isinstance(item, np.ndarray) for item in value):
        return tuple(function(item) for item in value)
    return function(value) if isinstance(value, np.ndarray) else value


def has_arrays(value: Any) -> bool:
    """Whether `map_arrays` would change it."""
    return isinstance(value, np.ndarray) or map_arrays(lambda _: None, value) is not value


def split(arguments: dict[str, Any], tensor: Callable[[Array], Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments that are arrays, as tensors, and the others."""
    tensors = {k: map_arrays(tensor, v) for k, v in arguments.items() if has_arrays(v)}
    return tensors, {k: v for k, v in arguments.items() if k not in tensors}


def _arrays(function: Callable[[Any], Array], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply a function to each value, or to each of a pair."""
    return tuple(_arrays(function, x) if isinstance(x, tuple) else function(x) for x in values)


class Frontend:
    """The protocol. A subclass says how one call runs."""

    name: str
    module: str

    def __init__(self, device: str) -> None:
        self.device = device
        try:
            self.start()
        except ImportError as error:
            raise Unavailable(f"{self.name}: {error}") from error
        self.fx = importlib.import_module(self.module)

    def start(self) -> None:
        """Import the framework. Raises ImportError or Unavailable."""

    def run(self, op: str, arguments: dict[str, Any], mutated: tuple[str, ...] = ()) -> tuple[Any, ...]:
        """Call a public function; returns its results, and behind them the arguments that it mutates."""
        raise NotImplementedError

    def reshape_and_cache_flash(self, **arguments: Any) -> tuple[Array, Array]:
        key_cache, value_cache = self.run("reshape_and_cache_flash", arguments, ("key_cache", "value_cache"))
        return key_cache, value_cache

    def reshape_and_cache(self, **arguments: Any) -> Array:
        (kv_cache,) = self.run("reshape_and_cache", arguments, ("kv_cache",))
        return kv_cache

    def flash_attn_varlen_func(self, **arguments: Any) -> tuple[Array, Array | None]:
        results = self.run("flash_attn_varlen_func", arguments)
        assert len(results) == (2 if arguments.get("return_softmax_lse") else 1)
        return results[0], results[1] if len(results) == 2 else None

    def paged_attention(self, **arguments: Any) -> tuple[Array, Array | None]:
        results = self.run("paged_attention", arguments)
        assert len(results) == (2 if arguments.get("return_softmax_lse") else 1)
        return results[0], results[1] if len(results) == 2 else None

    def ragged_paged_attention(self, **arguments: Any) -> tuple[Array, Array | None, Any]:
        """Returns out, the LSE or None, and the new kv_cache: an array, or a pair where it is given as one."""
        return self._write_and_attend("ragged_paged_attention", arguments)

    def ragged_paged_attention_qkvpacked(self, **arguments: Any) -> tuple[Array, Array | None, Any]:
        """Returns what ragged_paged_attention does."""
        return self._write_and_attend("ragged_paged_attention_qkvpacked", arguments)

    def _write_and_attend(self, op: str, arguments: dict[str, Any]) -> tuple[Array, Array | None, Any]:
        *results, kv_cache = self.run(op, arguments, ("kv_cache",))
        assert isinstance(kv_cache, tuple) == isinstance(arguments["kv_cache"], tuple)
        assert len(results) == (2 if arguments.get("return_softmax_lse") else 1)
        return results[0], results[1] if len(results) == 2 else None, kv_cache

    def gradients(
        self,
        op: str,
        arguments: dict[str, Any],
        wanted: tuple[str, ...],
        cotangents: tuple[Array | None, ...],
    ) -> dict[str, Array]:
        """The gradients of the arguments that are named, from those of the results; None: of no gradient."""
        raise NotImplementedError

    def merge_attn_states(self, **arguments: Any) -> tuple[Array, Array]:
        out, lse = self.run("merge_attn_states", arguments)
        return out, lse


class TorchFrontend(Frontend):
    """Eager torch tensors, on the CPU or on a CUDA device."""

    name = "torch"
    module = "flashxla.torch"

    def start(self) -> None:
        self.torch = importlib.import_module("torch")
        if self.device == "cuda" and not self.torch.cuda.is_available():
            raise Unavailable(f"{self.name}: torch sees no CUDA device")

    def target_device(self) -> Any:
        return self.device

    def tensor(self, array: Array) -> Any:
        """A tensor with a copy of the array's data, expanded where the array is."""
        once = stored(array)
        if array.dtype.name in _EXTENDED:
            integers = _EXTENDED[array.dtype.name][1]
            tensor = self.torch.from_numpy(np.array(once, order="C").view(integers))
            tensor = tensor.view(getattr(self.torch, array.dtype.name))
        else:
            tensor = self.torch.from_numpy(np.array(once, order="C"))
        tensor = tensor.to(self.target_device())
        return tensor if once.shape == array.shape else tensor.expand(array.shape)

    def array(self, tensor: Any) -> Array:
        """The data of a tensor."""
        tensor = tensor.detach().cpu().contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        if name in _EXTENDED:
            dtype, integers = _EXTENDED[name]
            bits = self.torch.int16 if integers is np.int16 else self.torch.uint8
            return tensor.view(bits).numpy().view(dtype)
        return tensor.numpy()

    def call(self, function: Callable[..., Any], tensors: dict[str, Any], scalars: dict[str, Any]) -> Any:
        return function(**tensors, **scalars)

    def run(self, op: str, arguments: dict[str, Any], mutated: tuple[str, ...] = ()) -> tuple[Any, ...]:
        tensors, scalars = split(arguments, self.tensor)
        result = self.call(getattr(self.fx, op), tensors, scalars)
        results = () if result is None else result if isinstance(result, tuple) else (result,)
        assert results or mutated
        return _arrays(self.array, (*results, *(tensors[name] for name in mutated)))

    def gradients(
        self,
        op: str,
        arguments: dict[str, Any],
        wanted: tuple[str, ...],
        cotangents: tuple[Array | None, ...],
    ) -> dict[str, Array]:
        tensors, scalars = split(arguments, self.tensor)
        for name in wanted:
            tensors[name].requires_grad_()
        result = self.call(getattr(self.fx, op), tensors, scalars)
        results = result if isinstance(result, tuple) else (result,)
        given = [(x, self.tensor(c)) for x, c in zip(results, cotangents, strict=True) if c is not None]
        sources = [tensors[name] for name in wanted]
        gradients = self.torch.autograd.grad([x for x, _ in given], sources, [c for _, c in given])
        return dict(zip(wanted, map(self.array, gradients), strict=True))


class _Compiled(TorchFrontend):
    backend: str

    def call(self, function: Callable[..., Any], tensors: dict[str, Any], scalars: dict[str, Any]) -> Any:
        def graph(tensors: dict[str, Any]) -> Any:
            return function(**tensors, **scalars)

        self.torch._dynamo.reset()  # dynamo gives up after a few graphs of one function
        return self.torch.compile(graph, backend=self.backend, fullgraph=True)(tensors)


class InductorFrontend(_Compiled):
    """torch.compile with its default backend."""

    name = "inductor"
    backend = "inductor"


class LazyFrontend(TorchFrontend):
    """PyTorch/XLA's lazy tensors."""

    name = "lazy"

    def start(self) -> None:
        if self.device == "cuda" and os.environ.get("PJRT_DEVICE") != "CUDA":
            raise Unavailable(f"{self.name}: set PJRT_DEVICE=CUDA")
        self.torch = importlib.import_module("torch")
        self.torch_xla = importlib.import_module("torch_xla")

    def target_device(self) -> Any:
        return self.torch_xla.device()

    def call(self, function: Callable[..., Any], tensors: dict[str, Any], scalars: dict[str, Any]) -> Any:
        result = super().call(function, tensors, scalars)
        self.torch_xla.sync()
        return result


class OpenxlaFrontend(_Compiled, LazyFrontend):
    """torch.compile(backend="openxla") on XLA tensors."""

    name = "openxla"
    backend = "openxla"


class JaxFrontend(Frontend):
    """JAX without jit."""

    name = "jax"
    module = "flashxla.jax"

    def start(self) -> None:
        self.jax = importlib.import_module("jax")
        platform = {"cpu": "cpu", "cuda": "gpu"}[self.device]
        try:
            self.target = self.jax.devices(platform)[0]
        except RuntimeError as error:
            raise Unavailable(f"{self.name}: {error}") from error

    def tensor(self, array: Array) -> Any:
        """An array of JAX's with a copy of the data."""
        return self.jax.device_put(self.jax.numpy.array(array, copy=True), self.target)

    @contextlib.contextmanager
    def integers_of(self, arguments: dict[str, Any]) -> Iterator[None]:
        """JAX has int64 only where x64 is enabled."""
        if any(isinstance(v, np.ndarray) and v.dtype == np.int64 for v in arguments.values()):
            with self.jax.enable_x64(True):
                yield
        else:
            yield

    def call(self, function: Callable[..., Any], donated: dict[str, Any], others: dict[str, Any]) -> Any:
        return function(**donated, **others)

    def run(self, op: str, arguments: dict[str, Any], mutated: tuple[str, ...] = ()) -> tuple[Any, ...]:
        with self.integers_of(arguments):
            arrays, scalars = split(arguments, self.tensor)
            donated = {name: arrays.pop(name) for name in mutated if name in arrays}

            def function(**arrays: Any) -> Any:
                return getattr(self.fx, op)(**arrays, **scalars)

            result = self.call(function, donated, arrays)
            return _arrays(np.asarray, result if isinstance(result, tuple) else (result,))

    def gradients(
        self,
        op: str,
        arguments: dict[str, Any],
        wanted: tuple[str, ...],
        cotangents: tuple[Array | None, ...],
    ) -> dict[str, Array]:
        arrays, scalars = split(arguments, self.tensor)
        sources = {name: arrays.pop(name) for name in wanted}

        def gradients(**others: Any) -> dict[str, Any]:
            def function(sources: dict[str, Any]) -> Any:
                results = getattr(self.fx, op)(**sources, **others, **scalars)
                results = results if isinstance(results, tuple) else (results,)
                return [x for x, c in zip(results, cotangents, strict=True) if c is not None]

            _, pullback = self.jax.vjp(function, sources)
            return pullback([self.tensor(c) for c in cotangents if c is not None])[0]

        return {name: np.asarray(x) for name, x in self.call(gradients, {}, arrays).items()}


class JaxJitFrontend(JaxFrontend):
    """jax.jit with donated caches."""

    name = "jax_jit"

    def call(self, function: Callable[..., Any], donated: dict[str, Any], others: dict[str, Any]) -> Any:
        program = self.jax.jit(lambda donated, others: function(**donated, **others), donate_argnums=0)
        return program(donated, others)


class TorchaxFrontend(TorchFrontend):
    """torchax's tensors, whose caches keep their buffers."""

    name = "torchax"

    def start(self) -> None:
        self.torch = importlib.import_module("torch")
        self.torchax = importlib.import_module("torchax")
        importlib.import_module("flashxla.torchax").register()
        self.env = self.torchax.default_env()
        if importlib.import_module("jax").default_backend() != {"cpu": "cpu", "cuda": "gpu"}[self.device]:
            raise Unavailable(f"{self.name}: JAX is not on {self.device}")

    def tensor(self, array: Array) -> Any:
        """A tensor with a copy of the array's data."""
        return self.torchax.tensor.Tensor(self.torchax.interop.jax.numpy.array(array, copy=True), self.env)

    def array(self, tensor: Any) -> Array:
        """The data of a tensor."""
        return np.asarray(tensor.jax())

    def call(self, function: Callable[..., Any], tensors: dict[str, Any], scalars: dict[str, Any]) -> Any:
        with self.env:
            return function(**tensors, **scalars)


class TorchaxJitFrontend(TorchaxFrontend):
    """torchax.interop.jax_jit with donated caches."""

    name = "torchax_jit"

    def call(self, function: Callable[..., Any], tensors: dict[str, Any], scalars: dict[str, Any]) -> Any:
        names = ("key_cache", "value_cache", "kv_cache", "k_cache", "v_cache", "paged_kv_cache")
        updated = {name: tensors[name] for name in names if name in tensors}
        writes_none = function.__name__ == "flash_attn_with_kvcache" and "k" not in tensors
        if function.__name__ in ("flash_attn_varlen_func", "paged_attention") or writes_none:
            updated = {}  # which read it
        others = {name: x for name, x in tensors.items() if name not in updated}

        def program(updated: dict[str, Any], others: dict[str, Any]) -> Any:
            return function(**updated, **others, **scalars), updated

        jit = self.torchax.interop.jax_jit(program, kwargs_for_jax_jit={"donate_argnums": 0})
        result, new = jit(updated, others)
        tensors.update(new)
        return result


class TorchTpuFrontend(TorchFrontend):
    """TorchTPU's tensors, eager."""

    name = "torchtpu"

    def start(self) -> None:
        flashxla = importlib.import_module("flashxla")
        try:
            flashxla.use_cpu() if self.device == "cpu" else flashxla.use_gpu()
        except RuntimeError as error:
            raise Unavailable(f"{self.name}: {error}") from error
        self.torch = importlib.import_module("torch")

    def target_device(self) -> Any:
        return "tpu"


class TorchTpuCompiledFrontend(_Compiled, TorchTpuFrontend):
    """torch.compile(backend="tpu") on TorchTPU's tensors."""

    name = "torchtpu_compiled"
    backend = "tpu"


# Those of environments with other versions of PyTorch: they run where they are named.
OF_OTHER_ENVIRONMENTS = ("torchax", "torchax_jit", "torchtpu", "torchtpu_compiled")

FRONTENDS: dict[str, type[Frontend]] = {
    frontend.name: frontend
    for frontend in (
        TorchFrontend,
        InductorFrontend,
        LazyFrontend,
        OpenxlaFrontend,
        JaxFrontend,
        JaxJitFrontend,
        TorchaxFrontend,
        TorchaxJitFrontend,
        TorchTpuFrontend,
        TorchTpuCompiledFrontend,
    )
}
