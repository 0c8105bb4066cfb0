"""The compiled attention of a layer: the cache is neither copied nor gathered."""

import re
import types

import jax
import jax.numpy as jnp
import pytest
from flashxla_vllm.attention import Mask, attend_on_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_inference.layers.common.sharding import MESH_AXIS_NAMES_2D, ShardingAxisName

from tests.vllm.engine import engine

PAGES, PAGE, KV_HEADS, SIZE, TOKENS = 64, 16, 4, 64, 8


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("sinks", [False, True])
def test_cache_is_updated_where_it_is(devices, sinks):
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, devices), MESH_AXIS_NAMES_2D, auto, devices=jax.devices()[:devices])
    split = P(ShardingAxisName.ATTN_DATA, None, ShardingAxisName.ATTN_HEAD)
    cache = jax.device_put(jnp.zeros((PAGES, PAGE, KV_HEADS, 2 * SIZE)), NamedSharding(mesh, split))
    query, key = jnp.ones((TOKENS, 8, SIZE)), jnp.ones((TOKENS, KV_HEADS, SIZE))

    def step(cache, query, key, block_tables, sequences):
        seq_lens, query_start_loc, distribution = sequences
        metadata = types.SimpleNamespace(
            block_tables=block_tables,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            request_distribution=distribution,
            padded_num_reqs=2,
        )
        sink = jnp.ones((8,)) if sinks else None
        return attend_on_mesh(mesh, Mask(0.125, 32), cache, query, key, key, metadata, metadata, sink)

    index = [jnp.asarray(x, jnp.int32) for x in ([9, 3], [0, 7, 8], [1, 1, 2])]
    tables = jnp.asarray([5, 7, 9, 0], jnp.int32)
    with jax.set_mesh(mesh):
        program = jax.jit(step, donate_argnums=0).lower(cache, query, key, tables, index).compile()
        shape = rf"f32\[{PAGES},{PAGE},{KV_HEADS // devices},{2 * SIZE}\]"
        hlo = program.as_text()
        assert re.search(rf"{shape}.* custom-call\(", hlo)
        assert not re.search(rf"{shape}\S* (copy|all-gather|fusion|dynamic-update-slice)", hlo)
        assert "all-gather" not in hlo
        before = [shard.data.unsafe_buffer_pointer() for shard in cache.addressable_shards]
        new, _ = program(cache, query, key, tables, index)
    assert [shard.data.unsafe_buffer_pointer() for shard in new.addressable_shards] == before


def test_the_next_start_finds_its_programs(checkpoint):
    """Every program is in VLLM_XLA_CACHE_PATH, small ones too."""
    from flashxla_vllm import worker

    for _ in range(2):  # the second stores what JAX compiled before the first named the folder
        with engine(checkpoint("llama")):
            pass
    before = worker.programs.copy()
    with engine(checkpoint("llama")):
        pass
    new = worker.programs - before
    assert new[worker.FOUND] > 30
    assert not new[worker.COMPILED]


def test_arguments_of_programs_are_no_programs(checkpoint):
    """What programs are compiled for is made on the host, where it is small."""
    from flashxla_vllm import worker

    with engine(checkpoint("llama")) as running:
        before = worker.programs.copy()
        made = running.runner.compilation_manager._create_dummy_tensor((3, 14), jnp.bfloat16)
        assert worker.programs == before
    assert made.dtype == jnp.bfloat16
    assert made.tolist() == [[1.0] * 14] * 3


def test_layers_share_one_trace(checkpoint):
    """A layer is traced once for each program; the first has no residual, so that two layers make two kinds."""
    with engine(checkpoint("llama")) as running:
        shared = [layer.forward for layer in running.runner.model.model.vllm_model.model.layers]
        assert shared[0].kind == shared[1].kind
        assert shared[0].programs is shared[1].programs
        assert len(shared[0].programs) == 2
    with engine(checkpoint("gemma2")) as running:  # its second layer has no window
        shared = [layer.forward for layer in running.runner.model.model.vllm_model.model.layers]
        assert shared[0].kind is None or shared[0].kind != shared[1].kind
