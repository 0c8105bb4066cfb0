"""What a step gets from the host: one array, and one program that takes it apart on the device.

tpu-inference puts ten small arrays on the device for each step, through JAX's Python, while the device waits. Here they
wait for each other (`Waiting`). The program also writes the tokens of the step before into their places: with
asynchronous scheduling the host does not know them yet. There is one for each padded number of tokens, and none depends
on the padded number of requests, of which the rows of the hidden states are selected afterwards.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

# Where in input_ids the tokens of the step before belong, and which of its rows they are.
_TARGETS, _SOURCES = "targets", "sources"
_waiting: contextvars.ContextVar[Waiting | None] = contextvars.ContextVar("waiting", default=None)


class Part:
    """Stands for an array that waits for the others."""

    def __init__(self, name: str) -> None:
        self.name = name


class Waiting:
    """The arrays of a step that is being prepared: views of buffers, which the next step overwrites."""

    def __init__(self, inputs: StepInputs) -> None:
        self.inputs = inputs
        self.values: dict[str, np.ndarray] = {}
        self.previous: jax.Array | None = None  # the tokens of the step before, if some are input of this one

    def put(self, arrays: Any) -> Any:
        """What stands for the positions, or for the distribution of the requests and the buffer of all others."""
        if isinstance(arrays, np.ndarray):
            self.values["positions"] = arrays
            return Part("positions")
        self.values["request_distribution"], buffer = arrays
        return Part("request_distribution"), buffer

    def unpack(self, buffer: np.ndarray, layout: Any) -> dict[str, Part]:
        """What stands for the arrays in tpu-inference's buffer."""
        ends = np.cumsum(layout.sizes)[:-1]
        self.values.update(zip(layout.keys, np.split(buffer, ends), strict=True))
        return {name: Part(name) for name in layout.keys}

    def replace_tokens(self, targets: np.ndarray, sources: np.ndarray, previous: jax.Array) -> None:
        """input_ids[targets] is to be previous[sources]."""
        if len(targets):
            self.values[_TARGETS], self.values[_SOURCES], self.previous = targets, sources, previous


def waiting() -> Waiting | None:
    """The step that is being prepared, if its inputs go together."""
    return _waiting.get()


class StepInputs:
    """The programs of a runner's steps, and what they have in common."""

    def __init__(self, runner: Any) -> None:
        from tpu_inference.layers.common.sharding import ShardingAxisName

        sequences, self.most_rows = runner.max_num_reqs, runner.num_reqs_paddings[-1]
        self.rows = self.most_rows  # of the step that was prepared last
        tables = {
            f"block_tables_gid_{group}": sequences
            * runner.input_batch.block_table[group].max_num_blocks_per_req
            for group in range(len(runner.kv_cache_config.kv_cache_groups))
        }
        self._lengths = {
            "request_distribution": 3,
            "query_start_loc": sequences + 1,
            "seq_lens": sequences,
            "logits_indices": self.most_rows,
            **tables,
            _TARGETS: self.most_rows,
            _SOURCES: self.most_rows,
        }
        self.everywhere = NamedSharding(runner.mesh, PartitionSpec())
        self.by_batch = by_batch = NamedSharding(runner.mesh, PartitionSpec(ShardingAxisName.BATCH))
        by_token = NamedSharding(runner.mesh, PartitionSpec(ShardingAxisName.ATTN_DATA))
        self.by_row = NamedSharding(runner.mesh, PartitionSpec(ShardingAxisName.ATTN_DATA, None))
        # As tpu-inference's own: its programs are compiled for these.
        names = ({"input_ids"} | self._lengths.keys()) - {_TARGETS, _SOURCES}
        shardings = dict.fromkeys(names, by_batch) | {"positions": by_token}
        self.unpack = jax.jit(self._unpack, static_argnames="tokens", out_shardings=shardings)
        self.keep = jax.jit(self._keep, out_shardings=self.everywhere)
        self.select = jax.jit(_select, static_argnames="rows", out_shardings=self.by_row)
        self.of_logits = NamedSharding(
            runner.mesh, PartitionSpec(ShardingAxisName.MLP_DATA, ShardingAxisName.MLP_TENSOR)
        )
        self.widen = jax.jit(_widen, out_shardings=self.of_logits)
        self.no_tokens = jax.device_put(np.zeros(self.most_rows, np.int32), self.everywhere)

    @contextlib.contextmanager
    def collect(self) -> Iterator[Waiting]:
        """While it lasts, arrays for the device wait."""
        waiting = Waiting(self)
        token = _waiting.set(waiting)
        try:
            yield waiting
        finally:
            _waiting.reset(token)

    def finish(self, waiting: Waiting, inputs: Any) -> Any:
        """A tree with the arrays that its Parts stand for."""
        tokens = len(waiting.values["positions"])
        self.rows = len(waiting.values["logits_indices"])
        previous = self.no_tokens if waiting.previous is None else waiting.previous
        arrays = self.unpack(self.pack(waiting.values, tokens), previous, tokens=tokens)
        return jax.tree.map(lambda x: arrays[x.name] if isinstance(x, Part) else x, inputs)

    def pack(self, values: dict[str, np.ndarray], tokens: int) -> np.ndarray:
        """One array, int32; of a name that is missing, what changes nothing."""
        places = self._places(tokens)
        packed = np.zeros(sum(length for _, length in places.values()), np.int32)
        start, length = places[_TARGETS]
        packed[start : start + length] = np.arange(tokens, tokens + length)  # past the last
        for name, value in values.items():
            start = places[name][0]
            packed[start : start + len(value)] = value
        return packed

    @functools.cache  # noqa: B019 - a runner lasts as long as its process
    def _places(self, tokens: int) -> dict[str, tuple[int, int]]:
        """The start and length of each array in the packed one."""
        lengths = {"positions": tokens, "input_ids": tokens, **self._lengths}
        starts = np.cumsum([0, *lengths.values()]).tolist()
        return dict(zip(lengths, zip(starts, lengths.values(), strict=False), strict=True))

    def _unpack(self, packed: jax.Array, previous: jax.Array, tokens: int) -> dict[str, jax.Array]:
        parts = {
            name: packed[start : start + length] for name, (start, length) in self._places(tokens).items()
        }
        targets, sources = parts.pop(_TARGETS), parts.pop(_SOURCES)
        known = parts["input_ids"].at[targets]
        parts["input_ids"] = known.set(previous[sources], mode="drop", unique_indices=True)
        return parts

    def _keep(self, tokens: jax.Array) -> jax.Array:
        """A step's tokens for the next one, in an array of one length. tokens: int32 [rows]"""
        return jnp.pad(tokens, (0, self.most_rows - len(tokens)))


def _select(states: jax.Array, indices: jax.Array, rows: int) -> jax.Array:
    return jnp.take(states, indices[:rows], axis=0, mode="clip")


def _widen(logits: jax.Array) -> jax.Array:
    return logits.astype(jnp.float32)


def of(runner: Any) -> StepInputs | None:
    """The runner's, made on first use when its cache is known; None where tpu-inference prepares the steps itself."""
    if not hasattr(runner, "flashxla_step_inputs"):
        runner.flashxla_step_inputs = StepInputs(runner) if _is_plain(runner) else None
    found: StepInputs | None = runner.flashxla_step_inputs
    return found


def _is_plain(runner: Any) -> bool:
    """Whether steps have nothing but tokens and their cache, on the devices of this process."""
    groups = runner.kv_cache_config.kv_cache_groups
    return not (
        runner.dp_size > 1
        or runner.speculative_config
        or runner.is_pooling_model
        or runner.is_multimodal_model
        or runner.uses_mrope
        or runner.pcp_preprocessor is not None
        or runner.enable_continue_decode
        or runner.kv_cache_config.has_mamba_layers
        or not groups
        or jax.process_count() > 1
    )


def precompile(manager: Any, inputs: StepInputs) -> None:
    """Have tpu-inference's CompilationManager compile the programs for each padded number of tokens and requests."""
    from tpu_inference.utils import to_jax_dtype

    runner = manager.runner
    model = runner.model_config
    dtype = to_jax_dtype(model.dtype)
    indices = jax.ShapeDtypeStruct((inputs.most_rows,), jnp.int32, sharding=inputs.by_batch)
    list(jax.random.split(runner.rng_params_for_sampling))  # as steps do that are not greedy
    for rows in runner.num_reqs_paddings:
        tokens = jax.device_put(np.zeros(rows, np.int32), inputs.everywhere)
        manager._run_compilation("keep tokens", inputs.keep, tokens, num_reqs=rows)
        if dtype != jnp.float32:
            logits = jax.ShapeDtypeStruct((rows, runner.vocab_size), dtype, sharding=inputs.of_logits)
            manager._run_compilation("widen logits", inputs.widen, logits, compile_only=True, num_reqs=rows)
    for count in runner.num_tokens_paddings:
        manager._run_compilation(
            "unpack step inputs",
            inputs.unpack,
            inputs.pack({}, count),
            inputs.no_tokens,
            call_kwargs={"tokens": count},
            num_tokens=count,
        )
        states = jax.ShapeDtypeStruct((count, model.get_hidden_size()), dtype, sharding=inputs.by_row)
        for rows in runner.num_reqs_paddings:
            if rows <= count:
                manager._run_compilation(
                    "select rows",
                    inputs.select,
                    states,
                    indices,
                    call_kwargs={"rows": rows},
                    compile_only=True,
                    num_tokens=count,
                    num_reqs=rows,
                )
