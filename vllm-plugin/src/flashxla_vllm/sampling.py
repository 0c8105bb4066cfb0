"""How a batch is sampled: what its requests ask for, and what each step tells the device.

A batch of greedy requests is sampled by sampling_program.most_likely, one with others by draw, and one by sample where
a request asks for more than temperature, top-k and top-p. Which tokens a request has is held on the device, a row of
`seen` for each request that needs it. A row is set when the request enters the batch, or comes back, and grows by one
token a step.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flashxla_vllm import sampling_program
from flashxla_vllm.sampling_program import ADD, ALLOW, GREEDY_BELOW, STOP, Entries, Rows, views

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

# Entries are padded to these lengths, and by this factor beyond; each length is a program.
SMALLEST_ENTRIES = 256
_ENTRIES_FACTOR = 8
_OUTPUTS_AT_MOST = 2**15 - 1  # what a cell of `seen` can count


@dataclasses.dataclass
class Request:
    """What one request asks for, and what the device knows of it."""

    params: SamplingParams
    slot: int | None = None  # its row of `seen`
    counted: int = -1  # its tokens that the device has counted; -1: the row is not set

    def entries(self, output: np.ndarray) -> Iterator[tuple[int, int, float]]:
        """Kind, token and value of the changes to its next logits, after these tokens."""
        params = self.params
        for token in params.allowed_token_ids or ():
            yield ALLOW, token, 0.0
        for word in params.bad_words_token_ids or ():
            *start, last = word
            if len(start) <= len(output) and list(output[len(output) - len(start) :]) == start:
                yield ADD, last, -np.inf
        if len(output) < params.min_tokens:
            for token in params.all_stop_token_ids:
                yield STOP, token, 0.0
        for token, bias in (params.logit_bias or {}).items():
            yield ADD, int(token), bias


def is_penalised(params: SamplingParams) -> bool:
    """Whether the next logits depend on which tokens there are."""
    return any(name.endswith("penalty") for name in asks_for_more(params))


# What tpu-inference's sampler does not know, and whether a request asks for it.
PARAMETERS: dict[str, Callable[[Any], bool]] = {
    "repetition_penalty": lambda params: params.repetition_penalty != 1.0,
    "frequency_penalty": lambda params: params.frequency_penalty != 0.0,
    "presence_penalty": lambda params: params.presence_penalty != 0.0,
    "min_p": lambda params: params.min_p > 0.0,
    "min_tokens": lambda params: params.min_tokens > 0,
    "logit_bias": lambda params: bool(params.logit_bias),
    "allowed_token_ids": lambda params: bool(params.allowed_token_ids),
    "bad_words": lambda params: bool(params.bad_words),
    "seed": lambda params: params.seed is not None and params.temperature > 0.0,
}


def asks_for_more(params: SamplingParams | None) -> list[str]:
    """The names of the PARAMETERS that a request asks for."""
    return [] if params is None else [name for name, is_asked in PARAMETERS.items() if is_asked(params)]


class Batch:
    """The requests of a runner that ask for more."""

    def __init__(self, mesh: Mesh, rows: int, vocabulary: int, data_axis: str, keep: bool) -> None:
        self.mesh, self.data_axis, self.vocabulary = mesh, data_axis, vocabulary
        self.keep = keep  # log probabilities are to be those that were drawn from
        self.requests: dict[str, Request] = {}
        self._unused_slot = rows  # of rows that are not penalised
        self._free = list(range(rows))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        # [slots, vocabulary]: as the program describes it. Made now, for the KV cache takes what is left.
        self.seen = jax.jit(
            lambda: jnp.zeros((rows + 1, vocabulary), jnp.uint16), out_shardings=self._everywhere
        )()

    def update(self, scheduler_output: Any) -> None:
        """Take note of the requests that begin and end with this step.

        tpu-inference fails on allowed_token_ids, so that it does not get to see them.
        """
        for request_id in scheduler_output.finished_req_ids:
            self._release(self.requests.pop(request_id, None))
        for new in scheduler_output.scheduled_new_reqs:
            params = new.sampling_params
            if not asks_for_more(params):
                continue
            self.requests[new.req_id] = Request(params)
            if params.allowed_token_ids:
                new.sampling_params = copy.copy(params)
                new.sampling_params.allowed_token_ids = None

    def asks_for_more(self, input_batch: Any) -> bool:
        """Whether a request of the runner's batch asks for more."""
        return any(request_id in input_batch.req_id_to_index for request_id in self.requests)

    def _release(self, request: Request | None) -> None:
        if request is not None and request.slot is not None:
            self._free.append(request.slot)
            request.slot, request.counted = None, -1

    def sample(
        self, rng: jax.Array, logits: jax.Array, input_batch: Any, selector: Sequence[int] | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """The next tokens, and with `keep` the logits that they were drawn from.

        Args:
            rng: the step's key.
            logits: [rows, vocabulary]
            input_batch: the runner's; its token_ids_cpu has all tokens so far.
            selector: the row of each request; None: its index in the batch.
        """
        more = self.asks_for_more(input_batch)
        if input_batch.all_greedy and not more and not self.keep:
            return sampling_program.most_likely(logits, mesh=self.mesh), None
        packed = _neutral_rows(logits.shape[0], self._unused_slot)
        rows = views(packed, Rows)
        count = input_batch.num_reqs
        places = np.arange(count) if selector is None else np.asarray(selector[:count])
        rows.temperature[places] = input_batch.temperature_cpu[:count]
        rows.top_k[places] = input_batch.top_k_cpu[:count]
        rows.top_p[places] = input_batch.top_p_cpu[:count]
        on = self.static
        if not more:
            narrowed = bool(((rows.top_k > 0) | (rows.top_p < 1)).any())
            return sampling_program.draw(rng, logits, self._to_device(packed), narrowed=narrowed, **on)
        entries = self._fill(rows, places, input_batch)
        greedy = bool((rows.temperature < GREEDY_BELOW).all())
        tokens, processed, self.seen = sampling_program.sample(
            self.seen, rng, logits, *self._to_device((packed, entries)), greedy=greedy, **on
        )
        return tokens, processed

    @property
    def static(self) -> dict[str, Any]:
        """What a program that draws is compiled for."""
        return {"mesh": self.mesh, "data_axis": self.data_axis, "keep": self.keep}

    def neutral_inputs(self, count: int) -> tuple[Any, Any]:
        """Packed rows and entries that ask for nothing."""
        return self._to_device((_neutral_rows(count, self._unused_slot), _pad([], count)))

    def _fill(self, rows: Rows, places: np.ndarray, batch: Any) -> np.ndarray:
        """Fill in what the requests ask for; returns the packed entries."""
        entries: list[tuple[int, int, int, float]] = []
        for request_id, request in self.requests.items():
            index = batch.req_id_to_index.get(request_id)
            if index is None:  # preempted
                self._release(request)
                continue
            row = int(places[index])
            known, prompt = int(batch.num_tokens_no_spec[index]), int(batch.num_prompt_tokens[index])
            tokens = batch.token_ids_cpu[index]
            self._fill_row(rows, row, request, tokens[:known], prompt)
            entries.extend((row, *entry) for entry in request.entries(tokens[prompt:known]))
        return _pad(entries, len(rows.slot))

    def _fill_row(self, rows: Rows, row: int, request: Request, tokens: np.ndarray, prompt: int) -> None:
        params = request.params
        rows.min_p[row] = params.min_p
        rows.restricted[row] = bool(params.allowed_token_ids)
        rows.structured[row] = params.structured_outputs is not None
        rows.position[row] = len(tokens) - prompt
        if params.seed is not None:
            rows.seeded[row] = True
            rows.seed_high[row] = (params.seed >> 32) & 0xFFFFFFFF
            rows.seed_low[row] = params.seed & 0xFFFFFFFF
        if not is_penalised(params):
            return
        if request.slot is None:
            request.slot = self._free.pop()
        rows.repetition[row] = params.repetition_penalty
        rows.frequency[row], rows.presence[row] = params.frequency_penalty, params.presence_penalty
        rows.slot[row] = request.slot
        if request.counted == len(tokens) - 1:
            rows.new_token[row] = tokens[-1]
        elif request.counted != len(tokens):
            self._set(request.slot, tokens, prompt)
        request.counted = len(tokens)

    def _set(self, slot: int, tokens: np.ndarray, prompt: int) -> None:
        in_vocabulary = tokens < self.vocabulary  # placeholders of images may be beyond
        written = np.bincount(tokens[prompt:][in_vocabulary[prompt:]], minlength=self.vocabulary)
        cells = (np.minimum(written, _OUTPUTS_AT_MOST) * 2).astype(np.uint16)
        cells[tokens[:prompt][in_vocabulary[:prompt]]] |= 1
        self.seen = sampling_program.set_row(self.seen, np.int32(slot), self._to_device(cells))

    def _to_device(self, x: Any) -> Any:
        return jax.device_put(x, self._everywhere)


class Unwidened:
    """Logits of a step in which nothing but the sampler reads them, which need not be float32.

    tpu-inference widens the logits of every step before it samples.
    """

    dtype = np.dtype(np.float32)

    def astype(self, dtype: Any) -> Unwidened:
        """Itself: what tpu-inference asks for is float32."""
        assert np.dtype(dtype) == self.dtype
        return self


def batch_of(runner: Any) -> Batch:
    """The runner's Batch, made on first use."""
    from tpu_inference.layers.common.sharding import ShardingAxisName
    from tpu_inference.layers.jax.sample.sampling import logprobs_use_processed_logits

    found: Batch | None = getattr(runner, "flashxla_sampling", None)
    if found is None:
        keep = logprobs_use_processed_logits(runner.model_config.logprobs_mode)
        found = Batch(runner.mesh, runner.max_num_reqs, runner.vocab_size, ShardingAxisName.ATTN_DATA, keep)
        runner.flashxla_sampling = found
    return found


def precompile(manager: Any) -> None:
    """Have tpu-inference's CompilationManager compile the programs for each padded number of requests."""
    from tpu_inference.layers.common.sharding import ShardingAxisName
    from tpu_inference.utils import to_jax_dtype

    runner = manager.runner
    batch = batch_of(runner)
    rng = runner.rng_params_for_sampling
    dtype = to_jax_dtype(runner.model_config.dtype)
    on_logits = NamedSharding(
        runner.mesh, PartitionSpec(ShardingAxisName.MLP_DATA, ShardingAxisName.MLP_TENSOR)
    )

    def run(program: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        tokens, logits, batch.seen = program(batch.seen, *args[1:], **options)
        return tokens, logits

    for count in runner.num_reqs_paddings:
        logits = jax.device_put(np.ones((count, batch.vocabulary), dtype), on_logits)
        rows, entries = batch.neutral_inputs(count)
        if not batch.keep:
            manager._run_compilation(
                "most likely",
                sampling_program.most_likely,
                logits,
                call_kwargs={"mesh": batch.mesh},
                num_reqs=count,
            )
        for narrowed in (False, True):
            manager._run_compilation(
                "draw",
                sampling_program.draw,
                rng,
                logits,
                rows,
                call_kwargs=batch.static | {"narrowed": narrowed},
                num_reqs=count,
            )
        for greedy in (False, True):
            manager._run_compilation(
                "sample by more parameters",
                sampling_program.sample,
                batch.seen,
                rng,
                logits,
                rows,
                entries,
                call_kwargs=batch.static | {"greedy": greedy},
                warmup_handler=run,
                num_reqs=count,
            )


_NEUTRAL = {"temperature": -1, "top_p": 1, "repetition": 1, "new_token": -1}


def _neutral_rows(count: int, unused_slot: int) -> np.ndarray:
    """Packed Rows that change nothing."""
    packed = np.zeros((len(Rows._fields), count), np.int32)
    rows = views(packed, Rows)
    for name, value in _NEUTRAL.items():
        getattr(rows, name)[:] = value
    rows.slot[:] = unused_slot
    rows.position[:] = np.arange(count)
    return packed


def _pad(entries: list[tuple[int, int, int, float]], rows: int) -> np.ndarray:
    """Packed Entries of (row, kind, token, value)."""
    length = SMALLEST_ENTRIES
    while length < len(entries):
        length *= _ENTRIES_FACTOR
    packed = np.zeros((len(Entries._fields), length), np.int32)
    padded = views(packed, Entries)
    padded.row[:] = rows  # past the last
    for name, values in zip(("row", "kind", "token", "value"), zip(*entries, strict=True), strict=False):
        getattr(padded, name)[: len(values)] = values
    return packed
