"""The section kv_write: new keys and values into a paged cache, in place, and whether the cache's size matters."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

import flashxla.torch as fx
from benchmarks import compare, device, jax_programs, timers
from benchmarks.batch import rows, torch_dtype
from benchmarks.compare import Contender, Prepared, Row, Work, WrongResult
from benchmarks.settings import Settings

_GIB = 2**30
_COLD_BYTES = 200 * 2**20
_MAX_SETS = 64
_MARGIN = 3 * _GIB  # of memory, for everything else


@dataclasses.dataclass(frozen=True)
class Write:
    """`tokens` new tokens to random slots."""

    name: str
    tokens: int
    dtype: str
    cache: str = "auto"
    heads: int = 8
    dim: int = 128
    page: int = 16
    sizes: tuple[int, ...] = (_GIB, 64 * _GIB)  # of K and V together, in bytes

    @property
    def cache_dtype(self) -> torch.dtype:
        """What a cache element is."""
        return torch_dtype(self.dtype if self.cache == "auto" else self.cache)


def work_bytes(case: Write) -> float:
    """Of the new keys and values: read in their type, written in the cache's."""
    numbers = 2.0 * case.tokens * case.heads * case.dim
    return numbers * (torch_dtype(case.dtype).itemsize + case.cache_dtype.itemsize)


def num_blocks(case: Write, size: int) -> int:
    """Of caches of `size` bytes."""
    return size // (2 * case.page * case.heads * case.dim * case.cache_dtype.itemsize)


def _cases(settings: Settings) -> list[Write]:
    counts = (5, 40) if settings.quick else (64, 8192)
    found = []
    for tokens in counts:
        for cache in ("auto", "fp8_e4m3"):
            name = f"{tokens} tokens" + (", fp8 cache" if cache != "auto" else "")
            found.append(Write(name, tokens, settings.dtype, cache))
    if settings.quick:
        small = {"heads": 2, "dim": 64, "sizes": (2**20, 2**21)}
        return [dataclasses.replace(case, **small) for case in found]  # type: ignore[arg-type]
    return found


def cases(settings: Settings) -> list[str]:
    """Their names."""
    return [case.name for case in _cases(settings)]


@dataclasses.dataclass(frozen=True)
class _Problem:
    """Keys, values [T, H, D] and slots [T] of each set, below `num_slots`."""

    case: Write
    sets: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    device: str


def _problem(case: Write, size: int, device: str) -> _Problem:
    """Slots are spread over the whole cache of that size."""
    slots = num_blocks(case, size) * case.page
    one = case.tokens * case.heads * case.dim * 4
    count = 2 if device == "cpu" else min(_MAX_SETS, max(4, math.ceil(_COLD_BYTES / one)))

    def tokens() -> torch.Tensor:
        shape = (case.tokens, case.heads, case.dim)
        return torch.randn(shape, device=device, dtype=torch_dtype(case.dtype))

    def distinct() -> torch.Tensor:
        # A token in each of as many equal stretches: no slot twice, and no permutation of a huge cache.
        stretch = slots // case.tokens
        offsets = torch.randint(stretch, (case.tokens,), device=device)
        starts = torch.randperm(case.tokens, device=device) * stretch
        return starts + offsets

    return _Problem(case, [(tokens(), tokens(), distinct()) for _ in range(count)], device)


def run(section: str, name: str, settings: Settings) -> Iterator[Row]:
    """A case's rows."""
    case = next(case for case in _cases(settings) if case.name == name)
    small, large = case.sizes
    problem = _problem(case, small, settings.device)
    found = [
        Contender(_ours_name(small), lambda: _ours(problem, small), ours=True),
        Contender(_ours_name(large), lambda: _ours(_problem(case, large, settings.device), large), ours=True),
        Contender("flashxla in JAX", lambda: _jax_ours(problem, small), ours=True),
    ]
    if settings.peers:
        found += [
            Contender("torch index_put_", lambda: _index_put(problem, small)),
            Contender("JAX donated scatter", lambda: _jax_scatter(problem, small, 10)),
            Contender("JAX donated scatter, a program a call", lambda: _jax_scatter(problem, small, 1)),
        ]
    work = Work(work_bytes(case), "TB/s", device.COPY)
    yield from compare.run(name, case.dtype, found, settings, work)


def _ours_name(size: int) -> str:
    return f"flashxla, {size / _GIB:.3g} GiB cache"


def _caches(case: Write, size: int, device: str) -> list[torch.Tensor]:
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        if free < size + _MARGIN:
            raise MemoryError(f"{free / _GIB:.0f} GiB of GPU memory are free, {size / _GIB:.0f} are needed")
    shape = (num_blocks(case, size), case.page, case.heads, case.dim)
    # Not filled: nobody reads what was there.
    return [torch.empty(shape, device=device, dtype=case.cache_dtype) for _ in range(2)]


def _check(case: Write, caches: Any, one: tuple[torch.Tensor, ...]) -> float:
    """The tokens must be in their slots, to the bit."""
    for cache, tokens in zip(caches, one[:2], strict=True):
        if not torch.equal(rows(cache, one[2]).float(), tokens.to(case.cache_dtype).float()):
            raise WrongResult("wrong result: the cache does not hold the tokens")
    return 0.0


def _from_torch(problem: _Problem, size: int, write: Callable[..., Any]) -> Prepared:
    caches = _caches(problem.case, size, problem.device)
    calls = [functools.partial(write, *caches, *one) for one in problem.sets]

    def check() -> float:
        calls[0]()
        return _check(problem.case, caches, problem.sets[0])

    def timer() -> timers.Timer:
        timer = timers.of_torch(calls, problem.device)
        if isinstance(timer, timers.GraphTimer):
            _check(problem.case, caches, problem.sets[0])  # the last of its writes
        return timer

    return Prepared(check, timer)


def _ours(problem: _Problem, size: int) -> Prepared:
    def write(keys: Any, values: Any, key: Any, value: Any, slots: Any) -> None:
        fx.reshape_and_cache_flash(key, value, keys, values, slots, problem.case.cache)

    return _from_torch(problem, size, write)


def _index_put(problem: _Problem, size: int) -> Prepared:
    def write(keys: Any, values: Any, key: Any, value: Any, slots: Any) -> None:
        for cache, tokens in ((keys, key), (values, value)):
            flat, new = cache.flatten(0, 1), tokens.to(cache.dtype)
            if new.dtype.itemsize == 1:
                flat, new = flat.view(torch.uint8), new.view(torch.uint8)
            flat.index_put_((slots,), new)

    return _from_torch(problem, size, write)


def _donated(problem: _Problem, size: int, write: Callable[..., Any], count: int) -> Prepared:
    """JAX owns its caches: memory that is not its own would be copied when it is donated."""
    import jax
    import jax.numpy as jnp

    case = problem.case
    shape = (num_blocks(case, size), case.page, case.heads, case.dim)
    name = str(case.cache_dtype).removeprefix("torch.")
    device = jax_programs.array(problem.sets[0][0]).device
    caches = tuple(jax.device_put(jnp.zeros(shape, name), device) for _ in range(2))
    inputs = [
        (jax_programs.array(key), jax_programs.array(value), jax_programs.array(slots.int()))
        for key, value, slots in problem.sets
    ]

    def check(state: tuple[Any, ...]) -> float:
        # Only the rows in question leave JAX, as float32, which every DLPack knows.
        slots = inputs[0][2]
        found = [jax_programs.tensor(x.reshape(-1, *x.shape[2:])[slots].astype("float32")) for x in state]
        for got, tokens in zip(found, problem.sets[0][:2], strict=True):
            if not torch.equal(got, tokens.to(case.cache_dtype).float()):
                raise WrongResult("wrong result: the cache does not hold the tokens")
        return 0.0

    return jax_programs.donated(write, caches, inputs, check, count)


def _jax_ours(problem: _Problem, size: int) -> Prepared:
    import flashxla.jax as fx_jax

    def write(caches: Any, one: Any) -> Any:
        keys, values = caches
        return fx_jax.reshape_and_cache_flash(one[0], one[1], keys, values, one[2], problem.case.cache)

    return _donated(problem, size, write, count=32)


def _jax_scatter(problem: _Problem, size: int, count: int) -> Prepared:
    page = problem.case.page

    def write(caches: Any, one: Any) -> Any:
        block, offset = one[2] // page, one[2] % page
        return tuple(
            cache.at[block, offset].set(tokens.astype(cache.dtype))
            for cache, tokens in zip(caches, one[:2], strict=True)
        )

    return _donated(problem, size, write, count)
