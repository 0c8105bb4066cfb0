"""Caches of more than 64 GiB: offsets that 32 bits do not count, in bytes or in vectors of 16 bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashxla
from tests import reference
from tests.checks import TOLERANCE, assert_attention, assert_close, assert_same_bits
from tests.frontends import TorchFrontend

GIB = 2**30
HEADS, KV_HEADS, DIM = 8, 8, 128


@pytest.fixture
def pool(torch: Any) -> Any:
    """A list with the bytes of a cache that is larger than 64 GiB. K and V share them: no test here writes both."""
    size = 68 * GIB
    if torch.cuda.mem_get_info()[0] < size + 4 * GIB:
        pytest.skip("needs 72 GiB of free memory")
    held = [torch.empty(size, dtype=torch.uint8, device="cuda")]
    yield held
    held.clear()
    torch.cuda.empty_cache()


# page size, queries of a sequence, the engine that serves it
CASES = [(16, 1, "swap"), (4, 1, "split"), (16, 60, "wide"), (4, 60, "tile"), (4, 40, "tile")]


@pytest.mark.parametrize(("page", "queries", "engine"), CASES)
def test_pages_at_the_end(
    torch: Any, pool: Any, rng: np.random.Generator, page: int, queries: int, engine: str
) -> None:
    frontend = TorchFrontend("cuda")
    cache = pool[0].view(torch.bfloat16).view(-1, page, KV_HEADS, DIM)
    blocks = cache.shape[0]
    # Some of the first pages, some of the last.
    near, far = rng.permutation(50)[:30], blocks - 1 - rng.permutation(50)[:30]
    table = rng.permutation(np.concatenate([near, far])).reshape(2, 30).astype(np.int32)
    small = rng.standard_normal((60, page, KV_HEADS, DIM), np.float32)
    small = frontend.array(frontend.tensor(small).to(torch.bfloat16))
    cache[torch.from_numpy(table.reshape(-1)).cuda().long()] = frontend.tensor(small)
    lengths = np.array([30 * page - 3, queries + 17], np.int32)
    query = frontend.tensor(rng.standard_normal((2 * queries, HEADS, DIM), np.float32)).to(torch.bfloat16)
    index = {
        "context_lens": lengths,
        "block_tables": table,
        "query_start_loc": np.array([0, queries, 2 * queries], np.int32),
        "num_seqs": np.array([2], np.int32),
    }
    arguments = {"query": query, "kv_cache": (cache, cache), "scale": DIM**-0.5}
    arguments |= {name: frontend.tensor(array) for name, array in index.items()}
    served = flashxla.explain("paged_attention", **arguments)
    assert (served.many_queries if queries > 1 else served.few_queries).startswith(engine), served
    out = frontend.array(frontend.fx.paged_attention(**arguments))
    index["block_tables"] = np.arange(60, dtype=np.int32).reshape(2, 30)
    expected = reference.paged_attention(
        query=frontend.array(query), kv_cache=(small, small), scale=DIM**-0.5, **index
    )
    assert_attention(out, None, expected, frontend.array(query).dtype)


def test_writes_at_the_end(torch: Any, pool: Any, rng: np.random.Generator) -> None:
    frontend = TorchFrontend("cuda")
    cache = pool[0].view(torch.bfloat16).view(2, -1, 16, KV_HEADS, DIM)
    slots = cache.shape[1] * 16 - 1 - rng.permutation(100)[:40]
    key = frontend.tensor(rng.standard_normal((2, 40, KV_HEADS, DIM), np.float32)).to(torch.bfloat16)
    frontend.fx.reshape_and_cache(key[0], key[1], cache, torch.from_numpy(slots).cuda(), "stacked")
    written = cache.view(2, -1, KV_HEADS, DIM)[:, torch.from_numpy(slots).cuda()]
    assert_same_bits(frontend.array(written), frontend.array(key), "cache")


@pytest.mark.parametrize(("queries", "engine"), [(1, "split32"), (70, "tile32")])
def test_float32_keys_at_the_end(
    torch: Any, pool: Any, rng: np.random.Generator, queries: int, engine: str
) -> None:
    frontend = TorchFrontend("cuda")
    cache = pool[0].view(torch.float32).view(-1, 16, KV_HEADS, DIM)
    last = cache.shape[0] - 1
    small = rng.standard_normal((2, 16, KV_HEADS, DIM), np.float32)
    cache[last - 1 :] = frontend.tensor(small)
    arguments = {
        "query": rng.standard_normal((queries, HEADS, DIM), np.float32),
        "context_lens": np.array([25], np.int32),
        "query_start_loc": np.array([0, queries], np.int32),
        "num_seqs": np.array([1], np.int32),
    }
    tensors = {name: frontend.tensor(array) for name, array in arguments.items()}
    table = np.array([[last - 1, last]], np.int32)
    tensors |= {"kv_cache": (cache, cache), "block_tables": frontend.tensor(table)}
    served = flashxla.explain("paged_attention", scale=DIM**-0.5, **tensors)
    assert (served.many_queries if queries > 1 else served.few_queries).startswith(engine), served
    out = frontend.fx.paged_attention(scale=DIM**-0.5, **tensors)
    expected, _ = reference.paged_attention(
        kv_cache=(small, small), block_tables=np.array([[0, 1]], np.int32), scale=DIM**-0.5, **arguments
    )
    assert_close(frontend.array(out), expected, TOLERANCE["f32"])
