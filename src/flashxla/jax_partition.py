"""Calls on several devices: each works on the part that its operation's declaration allows, and nothing else moves.

XLA's partitioner cannot look into a custom call, so by itself it gathers every operand. Here a call is a
`custom_partitioning`: the partitioner gives the shardings of its operands, `flashxla.ops.parts` chooses what each
device works on, and the call is made again with the sizes that a device has. What must move for that is said in a
warning. On one device, and inside jax.shard_map, a call is what it is without all this.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jaxlib import xla_client

from flashxla import __version__
from flashxla.ops import parts
from flashxla.ops.op import Call
from flashxla.ops.parts import Parallel, Parts, Placed
from flashxla.ops.shapes import Dimension, Dims

Function = Callable[..., list[jax.Array]]
_BATCH = Dimension("V")  # no operation's symbol


@dataclasses.dataclass(frozen=True)
class Batch:
    """Several calls at once, as jax.vmap makes them: how many, and which operands have one for each, in front.

    even: each is one sequence with all tokens of the call.
    """

    size: int
    batched: tuple[bool, ...]
    even: bool = False


class ShardingWarning(UserWarning):
    """An argument of a call is moved between devices, because the call cannot work on it as it is sharded."""


@dataclasses.dataclass(frozen=True)
class _Layout:
    """A call's operands and results in symbols, with the batch in front."""

    call: Call
    batch: Batch | None

    @functools.cached_property
    def operands(self) -> tuple[Dims, ...]:
        batched = self.batch.batched if self.batch else (False,) * len(self.call.operands)
        return tuple((_BATCH, *d) if b else d for d, b in zip(self.call.operand_dims, batched, strict=True))

    @functools.cached_property
    def results(self) -> tuple[Dims, ...]:
        return tuple((_BATCH, *d) if self.batch else d for d in self.call.result_dims)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        return {**self.call.sizes, **({_BATCH.symbol: self.batch.size} if self.batch else {})}

    @functools.cached_property
    def parallels(self) -> tuple[Parallel, ...]:
        return (*((Parallel(_BATCH.symbol),) if self.batch else ()), *self.call.op.parallel)

    @functools.cached_property
    def summed(self) -> dict[int, str]:
        """Of the results that are sums, over which symbol."""
        over = {r.field: r.sums_over for r in self.call.op.results}
        return {i: over[field] for i, (field, _) in enumerate(self.call.results) if over[field]}

    def placed(self, shapes: Sequence[Any], divisions: Sequence[tuple[Parts, ...]]) -> list[Placed]:
        """The operands where they are."""
        return [
            Placed(dims, math.prod(x.shape) * np.dtype(x.dtype).itemsize, division)
            for dims, x, division in zip(self.operands, shapes, divisions, strict=True)
        ]

    def local(self, chosen: Mapping[str, Parts]) -> tuple[Call, Batch | None]:
        """The call that one device makes."""
        sizes = parts.local_sizes(chosen, self.sizes)
        batch = self.batch and dataclasses.replace(self.batch, size=sizes.pop(_BATCH.symbol))
        return self.call.resized(sizes), batch


def partitioned(call: Call, batch: Batch | None, local: Callable[[Call, Batch | None], Function]) -> Function:
    """A call, which XLA divides among devices. local: how a call is made on one."""
    layout = _Layout(call, batch)
    function = local(call, batch)

    def computation(identity: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        return function(*operands)

    identity = _identity(layout)
    divided = custom_partitioning(computation)
    rule, factor_sizes = _sharding_rule(layout)
    divided.def_partition(
        functools.partial(_partition, layout, local),
        infer_sharding_from_operands=functools.partial(_infer, layout),
        decode_shardings=False,
        sharding_rule=rule,
        **factor_sizes,
    )

    def choose(*operands: jax.Array) -> list[jax.Array]:
        mesh = explicit_mesh(operands)
        if mesh is not None:
            return _by_types(layout, local, mesh, operands)
        if jax.sharding.AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
            return function(*operands)
        return list(divided(identity, *operands))

    return choose


def _identity(layout: _Layout) -> np.ndarray:
    """A number that tells calls apart: an operand of its own.

    A program shows nothing else of what is divided, such as the softmax scale, and JAX's compilation cache on disk goes
    by what a program shows.
    """
    call = layout.call
    facts = (
        __version__,
        call.op.name,
        call.operands,
        call.results,
        call.updates,
        call.attributes,
        layout.batch,
    )
    return np.frombuffer(hashlib.sha256(repr(facts).encode()).digest(), np.uint32)[:2]


def _sharding_rule(layout: _Layout) -> tuple[str, dict[str, int]]:
    """Shardy's rule, and the sizes of the factors that are no dimension by themselves.

    What the call cannot divide has a factor of its own, so that nothing spreads along it, and the partitioner is told
    how it is sharded; an update keeps the sharding of what it updates.
    """
    factors: dict[str, int] = {}
    own = iter(range(1 << 30))
    finer = {p.finer: p.symbol for p in layout.parallels if p.finer}
    divisible = {symbol for p in layout.parallels for symbol in p.symbols}

    def dimension(dim: Dimension) -> str:
        if dim.symbol not in divisible or dim.plus:
            return f"own{next(own)}"
        name, size = dim.symbol.lower(), layout.sizes[dim.symbol]
        if dim.symbol in finer:
            coarse = finer[dim.symbol]
            each = size // layout.sizes[coarse]
            found = [(coarse.lower(), layout.sizes[coarse]), (f"{name}each", each)]
        else:
            found = [(name, size)]
        if dim.factor > 1:
            found.append((f"own{next(own)}", dim.factor))
        found = [(n, s) for n, s in found if s != 1]
        if not found:
            return f"own{next(own)}"
        factors.update(found)
        names = [n for n, _ in found]
        if len(names) > 1:
            return f"({' '.join(names)})"
        whole.add(names[0])
        return names[0]

    whole: set[str] = set()
    operands = [[dimension(d) for d in dims] for dims in layout.operands]
    results = [[dimension(d) for d in dims] for dims in layout.results[: len(layout.call.results)]]
    for position in layout.call.updates:
        batched = layout.operands[position][:1] == (_BATCH,)
        front = [dimension(_BATCH)] if layout.batch and not batched else []
        results.append(front + operands[position])
    rule = f"identity, {', '.join(map(' '.join, operands))} -> {', '.join(map(' '.join, results))}"
    return rule, {name: size for name, size in factors.items() if name not in whole}


def _partition(
    layout: _Layout,
    local: Callable[[Call, Batch | None], Function],
    mesh: Any,
    given: Sequence[Any],
    results: Sequence[Any],
) -> tuple[Any, Function, list[Any], tuple[Any, ...]]:
    """What custom_partitioning asks: the computation of one device, and the shardings of its results and operands."""
    operands = given[1:]
    like = next(x.sharding for x in operands if x.sharding is not None)
    devices = list(like._device_assignment)
    count = len(devices)
    chosen = _chosen(layout, operands, count)
    own, batch = layout.local(chosen)
    compute = local(own, batch)
    sums = _sums(layout, chosen)

    def on_one_device(identity: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        got = list(compute(*arrays))
        for i, together in sums.items():
            got[i] = jax.lax.psum(got[i], "devices", axis_index_groups=together)
        return got

    def sharding(dims: Dims) -> Any:
        return type(like)(devices, _op_sharding([parts.parts_of(d, chosen, count) for d in dims]))

    every = jax.sharding.Mesh(np.array(devices), ("devices",))
    placed = (sharding((Dimension("", 0, 2),)), *map(sharding, layout.operands))
    return every, on_one_device, [sharding(d) for d in layout.results], placed


def _infer(layout: _Layout, mesh: Any, given: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The results' shardings by the operands', for the partitioner before Shardy."""
    operands = given[1:]
    like = next(x.sharding for x in operands if x.sharding is not None)
    chosen = _chosen(layout, operands, like.num_devices, quiet=True)
    return [
        type(like)(
            list(like._device_assignment),
            _op_sharding([parts.parts_of(d, chosen, like.num_devices) for d in dims]),
        )
        for dims in layout.results
    ]


def _chosen(layout: _Layout, operands: Sequence[Any], count: int, quiet: bool = False) -> dict[str, Parts]:
    placed = layout.placed(operands, [_division(x, count) for x in operands])
    chosen = parts.divide(layout.parallels, layout.sizes, placed, count)
    if not quiet:
        _warn(layout, operands, placed, chosen, count)
    return chosen


def _division(x: Any, count: int) -> tuple[Parts, ...]:
    """How the partitioner has divided each dimension of an operand."""
    whole = ((0,) * count,) * len(x.shape)
    if x.sharding is None:
        return whole
    hlo = x.sharding._to_xla_hlo_sharding(len(x.shape))
    if not hlo.is_tiled():
        return whole
    tiles = np.reshape(hlo.tile_assignment_devices(), hlo.tile_assignment_dimensions())
    found = np.zeros((len(x.shape), count), int)
    for index, device in np.ndenumerate(tiles):
        found[:, device] = index[: len(x.shape)]
    return tuple(tuple(row) for row in found.tolist())


def _op_sharding(division: Sequence[Parts]) -> Any:
    """A sharding of XLA's, of how each dimension is divided."""
    proto: Any = xla_client.OpSharding()
    if not division or all(parts.ways(p) == 1 for p in division):
        proto.type = xla_client.OpSharding.Type.REPLICATED
        return proto
    ways = [parts.ways(p) for p in division]
    # Devices by their part, those with the same one behind each other.
    order = sorted(range(len(division[0])), key=lambda device: [p[device] for p in division])
    proto.type = xla_client.OpSharding.Type.OTHER
    proto.tile_assignment_dimensions = [*ways, len(order) // math.prod(ways)]
    proto.tile_assignment_devices = order
    proto.replicate_on_last_tile_dim = True
    return proto


def _sums(layout: _Layout, chosen: Mapping[str, Parts]) -> dict[int, list[list[int]]]:
    """Of the results that are sums over several devices the groups of devices that add up."""
    found = {}
    for i, over in layout.summed.items():
        of_result = [chosen[d.symbol] for d in layout.results[i] if d.symbol in chosen and not d.plus]
        combined = list(zip(*of_result, strict=True)) if of_result else [()] * len(chosen[over])
        numbers = {c: n for n, c in enumerate(sorted(set(combined)))}
        together = parts.groups(chosen[over], tuple(numbers[c] for c in combined))
        if len(together[0]) > 1:
            found[i] = together
    return found


def _warn(
    layout: _Layout,
    operands: Sequence[Any],
    placed: Sequence[Placed],
    chosen: Mapping[str, Parts],
    count: int,
) -> None:
    """Say what must move, and which cache is copied."""
    call = layout.call
    for (name, _), x, tensor in zip(call.operands, operands, placed, strict=True):
        label = f"{call.op.label(name, call.dims.__contains__)} [{', '.join(map(str, x.shape))}]"
        is_cache = any(dim.symbol == "P" for dim in tensor.dims)
        for i, (dim, given) in enumerate(zip(tensor.dims, tensor.parts, strict=True)):
            wanted = parts.parts_of(dim, chosen, count)
            if not parts.kept(given, wanted):
                message = (
                    f"{label} is sharded over its dimension {i} ({_meaning(dim)}), in {parts.ways(given)} parts, which "
                    f"the call cannot keep: {_size(tensor.nbytes)} are gathered or moved. "
                    + _advice(layout, tensor.dims, dim, parts.ways(given))
                )
            elif is_cache and parts.ways(wanted) > parts.ways(given):
                message = (
                    f"{label} is whole in its dimension {i} ({_meaning(dim)}), of which each device needs one of "
                    f"{parts.ways(wanted)} parts: each copies its part of {_size(tensor.nbytes)}. "
                    f"To avoid it, shard its dimension {i} as the other arguments are"
                )
            else:
                continue
            warnings.warn(f"{call.op.function}: {message}", ShardingWarning, stacklevel=2)


def _meaning(dim: Dimension) -> str:
    return "the batch" if dim == _BATCH else parts.MEANINGS.get(dim.symbol, dim.symbol or "keys and values")


def _advice(layout: _Layout, dims: Dims, dim: Dimension, ways: int) -> str:
    parallel = {symbol: p for p in layout.parallels for symbol in p.symbols}
    if dim.symbol in parallel and not dim.plus:
        size = layout.sizes[parallel[dim.symbol].symbol]
        if size % ways:
            what = _meaning(Dimension(parallel[dim.symbol].symbol))
            return f"{size} {what} do not divide into {ways} equal parts"
        return "To avoid it, shard all arguments alike"
    heads = [i for i, d in enumerate(dims) if d.symbol in parallel and d != _BATCH and not d.plus]
    instead = f"shard its dimension {heads[0]} (heads) instead" if heads else "replicate it"
    return f"To avoid it, {instead}, or divide the call by jax.vmap or jax.shard_map (docs/sharding.md)"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes} bytes"


def explicit_mesh(operands: Sequence[jax.Array]) -> Any:
    """The mesh with explicit axes of the operands, if they have one."""
    meshes = [jax.typeof(x).sharding.mesh for x in operands]
    return next((m for m in meshes if jax.sharding.AxisType.Explicit in m.axis_types), None)


def _by_types(
    layout: _Layout,
    local: Callable[[Call, Batch | None], Function],
    mesh: Any,
    operands: Sequence[jax.Array],
) -> list[jax.Array]:
    """The call where shardings are part of the types (a mesh with explicit axes): in a shard_map."""
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    places = dict(zip(sizes, np.indices(mesh.axis_sizes).reshape(len(sizes), -1), strict=True))
    count = mesh.size
    axes_of: dict[Parts, tuple[str, ...]] = {}

    def divided(axes: tuple[str, ...]) -> Parts:
        number = np.zeros(count, int)
        for axis in axes:
            number = number * sizes[axis] + places[axis]
        division = tuple(number.tolist())
        axes_of.setdefault(division, axes)
        return division

    def spec(x: jax.Array) -> list[tuple[str, ...]]:
        found = [(e,) if isinstance(e, str) else tuple(e or ()) for e in jax.typeof(x).sharding.spec]
        return found + [()] * (x.ndim - len(found))

    def sharding(spec: Sequence[tuple[str, ...]]) -> Any:
        return jax.sharding.PartitionSpec(*(axes or None for axes in spec))

    specs = [spec(x) for x in operands]
    for axes in [axes for s in specs for axes in s]:
        for end in range(len(axes) + 1):
            divided(axes[:end])
    placed = layout.placed(operands, [tuple(map(divided, s)) for s in specs])
    chosen = parts.divide(layout.parallels, layout.sizes, placed, count, axes_of.__contains__)
    _warn(layout, operands, placed, chosen, count)
    own, batch = layout.local(chosen)
    compute = local(own, batch)
    sums = _sums(layout, chosen)
    fine = {symbol: axes_of[p] for symbol, p in chosen.items()}

    def on_one_device(*arrays: jax.Array) -> list[jax.Array]:
        got = list(compute(*arrays))
        for i in sums:
            of_result = {axis for d in layout.results[i] for axis in fine.get(d.symbol, ())}
            over = [axis for axis in fine[layout.summed[i]] if axis not in of_result]
            got[i] = jax.lax.psum(got[i], tuple(over))
        return got

    def wanted(dims: Dims) -> Any:
        return sharding([axes_of[parts.parts_of(d, chosen, count)] for d in dims])

    in_specs = tuple(map(wanted, layout.operands))
    out_specs = [wanted(dims) for dims in layout.results]
    mapped = jax.shard_map(on_one_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    moved = [
        jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, s))
        for x, s in zip(operands, in_specs, strict=True)
    ]
    results = mapped(*moved)
    # An update stays where it was.
    for i, position in enumerate(layout.call.updates, len(layout.call.results)):
        if results[i].ndim == operands[position].ndim:
            results[i] = retyped(results[i], operands[position])
    return results


def retyped(x: jax.Array, like: jax.Array) -> jax.Array:
    """An array with the type of another one, where shardings are part of types."""
    wanted = jax.typeof(like).sharding
    if wanted == jax.typeof(x).sharding or jax.sharding.AxisType.Explicit not in wanted.mesh.axis_types:
        return x
    return jax.sharding.reshard(x, wanted)
