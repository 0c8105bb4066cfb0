"""A step's inputs go to the device in one array; the programs of a step are all compiled before requests come."""

import types

import jax
import numpy as np
import pytest
from flashxla_vllm import step_inputs
from jax.sharding import AxisType
from tpu_inference.layers.common.sharding import MESH_AXIS_NAMES_2D

from tests.vllm.checkpoints import PROMPTS
from tests.vllm.engine import engine

SEQUENCES, BLOCKS = 6, (3, 2)
COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def inputs():
    mesh = jax.make_mesh((1, 1), MESH_AXIS_NAMES_2D, (AxisType.Auto,) * 2, devices=jax.devices()[:1])
    tables = [types.SimpleNamespace(max_num_blocks_per_req=count) for count in BLOCKS]
    groups = types.SimpleNamespace(kv_cache_groups=tables)
    batch = types.SimpleNamespace(block_table=tables)
    return step_inputs.StepInputs(
        types.SimpleNamespace(
            mesh=mesh,
            max_num_reqs=SEQUENCES,
            num_reqs_paddings=[4, 8],
            input_batch=batch,
            kv_cache_config=groups,
        )
    )


@pytest.mark.parametrize("replaced", [{}, {0: 2, 3: 7}, {15: 0}], ids=["none", "two", "last"])
def test_each_array_arrives(inputs, replaced):
    """As tpu-inference hands them over, in a buffer that is overwritten when the step has been prepared."""
    rng = np.random.default_rng(0)
    sizes = {"input_ids": 16, "query_start_loc": SEQUENCES + 1, "seq_lens": SEQUENCES, "logits_indices": 4}
    sizes |= {f"block_tables_gid_{i}": SEQUENCES * count for i, count in enumerate(BLOCKS)}
    values = {name: rng.integers(0, 1000, size, np.int32) for name, size in sizes.items()}
    positions, distribution, previous = (rng.integers(0, 1000, n, np.int32) for n in (16, 3, 5))
    buffer = np.concatenate(list(values.values()))
    layout = types.SimpleNamespace(keys=tuple(sizes), sizes=tuple(sizes.values()))
    with inputs.collect() as waiting:
        assert step_inputs.waiting() is waiting
        put = {"positions": waiting.put(positions)}
        put["request_distribution"], held = waiting.put((distribution, buffer))
        put |= waiting.unpack(held, layout)
        kept = inputs.keep(jax.numpy.asarray([*previous, 11, 12, 13]))
        waiting.replace_tokens(np.array([*replaced]), np.array([*replaced.values()]), kept)
    assert step_inputs.waiting() is None
    arrived = inputs.finish(waiting, put)
    expected = {name: value.copy() for name, value in values.items()}
    expected |= {"positions": positions.copy(), "request_distribution": distribution.copy()}
    for target, source in replaced.items():
        expected["input_ids"][target] = [*previous, 11, 12, 13][source]
    buffer[:] = positions[:] = distribution[:] = -1
    assert arrived.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(arrived[name][: len(value)], value, err_msg=name)
    states = np.arange(2000.0, dtype=np.float32).reshape(1000, 2)
    chosen = inputs.select(states, arrived["logits_indices"], rows=inputs.rows)
    np.testing.assert_array_equal(chosen, states[values["logits_indices"]])


@pytest.mark.parametrize("asynchronous", [True, False])
def test_nothing_is_compiled_or_put_while_requests_run(asynchronous, checkpoint, monkeypatch):
    compiled, put, counting = [], [], False

    def listen(event, duration, **_):
        if counting and event == COMPILED:
            compiled.append(event)

    def device_put(*args, **kwargs):
        if counting:
            put.append(args[0])
        return original(*args, **kwargs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    original = jax.device_put
    with engine(
        checkpoint("llama"), dtype="bfloat16", max_num_seqs=32, async_scheduling=asynchronous
    ) as running:
        assert step_inputs.of(running.runner) is not None
        monkeypatch.setattr(jax, "device_put", device_put)
        counting = True
        for prompts in (PROMPTS[:1], PROMPTS, PROMPTS * 3):
            running.greedy(prompts, 6)
        assert not put
        running.generate(PROMPTS * 2, 6, temperature=1.0)
        assert len(put) <= 12  # one array for each step's parameters
        running.generate(PROMPTS, 3, logprobs=2)
        counting = False
    assert not compiled
