"""No block is lost, owned twice, or handed out of range, whatever the order of calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashxla.generate.block_allocator import BlockAllocator

# A positive number asks for that many blocks, a negative one gives a holding back.
_CALLS = st.lists(st.integers(-5, 9), max_size=60)


@given(num_blocks=st.integers(1, 24), calls=_CALLS)
def test_every_block_is_free_or_owned_once(num_blocks: int, calls: list[int]) -> None:
    allocator = BlockAllocator(num_blocks)
    holdings: list[list[int]] = []
    for call in calls:
        if call < 0:
            if holdings:
                allocator.free(holdings.pop(call % len(holdings)))
        elif call <= allocator.num_free:
            holdings.append(allocator.allocate(call))
            assert len(holdings[-1]) == call
        else:
            free = allocator.num_free
            with pytest.raises(RuntimeError, match=f"{call} blocks asked for, {free} are free"):
                allocator.allocate(call)
            assert allocator.num_free == free
        owned = [block for holding in holdings for block in holding]
        assert len(owned) == len(set(owned))
        assert set(owned) <= set(range(num_blocks))
        assert len(owned) + allocator.num_free == num_blocks


def test_freeing_twice_is_an_error() -> None:
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(1)
    allocator.free(blocks)
    with pytest.raises(RuntimeError, match="block 0 was freed but is not owned"):
        allocator.free(blocks)
    assert allocator.num_free == 2
