"""Scheduling under any limits loses no sequence and changes no token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashxla.generate.batch import token_buckets
from flashxla.generate.engine import Engine
from flashxla.generate.errors import GenerateError
from flashxla.generate.options import SamplingOptions
from flashxla.generate.scheduler import Limits, Scheduler
from flashxla.generate.sequence import Sequence
from tests.generate.fake_runner import VOCABULARY, FakeRunner, next_token

_GREEDY = SamplingOptions()


def generate(
    prompts: list[list[int]], limits: Limits, new_tokens: int, sampling: SamplingOptions = _GREEDY
) -> tuple[list[list[int]], Engine, FakeRunner]:
    runner = FakeRunner(limits)
    engine = Engine(runner, limits, frozenset())
    outputs: list[list[int]] = [[] for _ in prompts]
    finished = []
    for token in engine.generate(prompts, new_tokens, sampling):
        outputs[token.index].append(token.token)
        if token.finish_reason:
            finished.append(token.index)
    assert sorted(finished) == list(range(len(prompts)))
    assert engine.scheduler.allocator.num_free == limits.num_blocks
    return outputs, engine, runner


def expected(prompt: list[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


@given(data=st.data())
def test_any_limits_give_the_same_tokens(data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 8), "block_size")
    num_blocks = data.draw(st.integers(1, 12), "num_blocks")
    max_seqs = data.draw(st.integers(1, 5), "max_seqs")
    limits = Limits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_batch_tokens=data.draw(st.integers(max_seqs, 24), "max_batch_tokens"),
        max_seqs=max_seqs,
        max_length=data.draw(st.integers(1, num_blocks * block_size), "max_length"),
    )
    prompt = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=limits.max_length)
    prompts = data.draw(st.lists(prompt, min_size=1, max_size=8), "prompts")
    new_tokens = data.draw(st.integers(1, 20), "new_tokens")

    outputs, _, runner = generate(prompts, limits, new_tokens)

    for prompt_tokens, output in zip(prompts, outputs, strict=True):
        count = min(new_tokens, limits.max_length - len(prompt_tokens) + 1)
        assert output == expected(prompt_tokens, count)
    assert runner.shapes <= set(token_buckets(limits))


@pytest.mark.parametrize("sampling", [_GREEDY, SamplingOptions(temperature=1.0)], ids=["greedy", "sampled"])
def test_a_tiny_cache_preempts_and_resumes(sampling: SamplingOptions) -> None:
    prompts = [[i] * 9 for i in range(6)]
    big = Limits(num_blocks=64, block_size=4, max_batch_tokens=16, max_seqs=4, max_length=40)
    tiny = Limits(num_blocks=10, block_size=4, max_batch_tokens=16, max_seqs=4, max_length=40)
    outputs, engine, _ = generate(prompts, big, 30, sampling)
    assert engine.scheduler.preemptions == 0
    tiny_outputs, tiny_engine, _ = generate(prompts, tiny, 30, sampling)
    assert tiny_engine.scheduler.preemptions > 0
    assert tiny_outputs == outputs


def test_prefill_and_decode_share_a_step() -> None:
    scheduler = Scheduler(Limits(num_blocks=32, block_size=4, max_batch_tokens=8, max_seqs=4, max_length=64))
    first, second = Sequence(0, [1] * 3, 10), Sequence(1, [2] * 20, 10)
    scheduler.add(first)
    scheduler.add(second)
    chunks = scheduler.schedule()
    assert [(c.sequence, c.start, c.count, c.completes) for c in chunks] == [
        (first, 0, 3, True),
        (second, 0, 5, False),
    ]
    first.output.append(7)
    chunks = scheduler.schedule()
    assert [(c.sequence, c.start, c.count) for c in chunks] == [(first, 3, 1), (second, 5, 7)]


def test_the_youngest_is_preempted() -> None:
    scheduler = Scheduler(Limits(num_blocks=4, block_size=2, max_batch_tokens=8, max_seqs=4, max_length=8))
    old, young = Sequence(0, [1] * 2, 10), Sequence(1, [2] * 2, 10)
    scheduler.add(old)
    scheduler.add(young)
    while not scheduler.preemptions:
        for chunk in scheduler.schedule():
            chunk.sequence.output.append(0)
    assert scheduler.running == [old]
    assert list(scheduler.waiting) == [young]
    assert (young.computed, young.blocks, young.preemptions) == (0, [], 1)
    assert young.output  # kept


def test_prompts_that_can_never_run_are_refused() -> None:
    scheduler = Scheduler(Limits(num_blocks=4, block_size=16, max_batch_tokens=8, max_seqs=4, max_length=50))
    with pytest.raises(GenerateError, match=r"prompt 3: got 65 tokens; accepted: at most 64.*4 x --block"):
        scheduler.add(Sequence(2, [0] * 65, 1))
    with pytest.raises(GenerateError, match="prompt 1: got 51 tokens; accepted: at most 50"):
        scheduler.add(Sequence(0, [0] * 51, 1))
    with pytest.raises(GenerateError, match="prompt 1: got no tokens"):
        scheduler.add(Sequence(0, [], 1))
    assert not scheduler.busy
