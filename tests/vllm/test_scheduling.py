"""What vLLM's scheduler does to the cache: tokens stay Hugging Face's, pointers stay, every block comes back."""

import logging

import pytest
from flashxla_vllm import attention

from tests.vllm.checkpoints import PROMPTS
from tests.vllm.engine import engine, ngrams

LONG = [[(7 * i + 3) % 500 + 5 for i in range(200)], [(11 * i) % 500 + 5 for i in range(150)], [8, 9]]


@pytest.fixture(params=["llama", "gemma2"])  # gemma2 has two groups of layers
def family(request):
    return request.param


def test_chunked_prefill(family, checkpoint, hf_tokens):
    with engine(checkpoint(family), max_num_batched_tokens=32, max_num_seqs=4) as running:
        assert running.greedy(LONG) == hf_tokens(family, LONG)


def test_decode_steps_have_their_own_programs(family, checkpoint, hf_tokens, monkeypatch):
    """They promise one query for each sequence; no program is compiled while requests run."""
    promises, steps, ask = [], [], attention.fx.ragged_paged_attention_qkvpacked

    def traced(*args, **options):
        promises.append(options["max_seqlen_q"])
        return ask(*args, **options)

    def step(*args, shared_attention_metadata, **options):
        steps.append(shared_attention_metadata.padded_num_reqs == attention.DECODE)
        return run(*args, shared_attention_metadata=shared_attention_metadata, **options)

    monkeypatch.setattr(attention.fx, "ragged_paged_attention_qkvpacked", traced)
    with engine(checkpoint(family)) as running:
        run, running.runner.model_fn = running.runner.model_fn, step
        assert set(promises) == {None, 1}
        promises.clear()
        assert running.greedy() == hf_tokens(family)
        assert not promises
        assert steps.count(True) >= 8 and steps.count(False) >= 2


@pytest.mark.parametrize("option", ["enforce_eager", "one worker"])
def test_programs_compiled_while_requests_run_or_one_by_one(option, checkpoint, hf_tokens, monkeypatch):
    if option == "one worker":
        monkeypatch.setenv("NUM_PRECOMPILE_WORKERS", "1")
    with engine(checkpoint("llama"), enforce_eager=option == "enforce_eager") as running:
        assert running.greedy() == hf_tokens("llama")


def test_prefix_caching(family, checkpoint, hf_tokens):
    shared = [(5 * i) % 400 + 20 for i in range(80)]
    prompts = [[*shared, i, i + 1, 3 * i] for i in range(10, 16)]
    with engine(checkpoint(family), enable_prefix_caching=True) as running:
        before = running.cache_pointers()
        assert running.greedy(prompts[:1]) == hf_tokens(family, prompts)[:1]
        outputs = running.generate(prompts, 12)
        assert [list(o.outputs[0].token_ids) for o in outputs] == hf_tokens(family, prompts)
        assert all(o.num_cached_tokens >= 64 for o in outputs)
        assert running.cache_pointers() == before


def test_preemption(checkpoint, hf_tokens):
    """A cache of 12 blocks of 16 for six sequences that grow to 5 blocks each."""
    prompts = [[(i * j) % 450 + 11 for j in range(30)] for i in range(1, 7)]
    with engine(checkpoint("llama"), num_gpu_blocks_override=13, max_model_len=128) as running:
        free = running.free_blocks()
        assert running.greedy(prompts, 40) == hf_tokens("llama", prompts, 40)
        assert running.metric("num_preemptions") > 0
        assert running.free_blocks() == free


def test_speculation_by_ngrams(checkpoint, hf_tokens):
    prompts = [[*range(20, 30)] * 4, [7, 8, 9] * 5, [33]]
    with engine(checkpoint("llama"), speculative_config=ngrams(3, 2)) as running:
        assert running.greedy(prompts, 40) == hf_tokens("llama", prompts, 40)
        assert running.metric("spec_decode_num_draft_tokens") > 0


@pytest.mark.parametrize("asynchronous", [True, False])
def test_async_scheduling(asynchronous, checkpoint, hf_tokens):
    with engine(checkpoint("llama"), async_scheduling=asynchronous) as running:
        assert running.greedy(PROMPTS * 3) == hf_tokens("llama") * 3
        assert running.greedy(PROMPTS[::-1]) == hf_tokens("llama")[::-1]


def test_empty_steps_are_silent(checkpoint, monkeypatch):
    """vLLM asks for one where the last token of each request is under way."""
    from tpu_inference.runner import tpu_runner

    said, empty = [], []
    listener = logging.Handler(logging.WARNING)
    monkeypatch.setattr(listener, "emit", said.append)
    with engine(checkpoint("llama")) as running:
        execute = running.runner.execute_model

        def step(scheduler_output, *args, **options):
            nothing = scheduler_output.total_num_scheduled_tokens, scheduler_output.finished_req_ids
            empty.append(not any(nothing))
            return execute(scheduler_output, *args, **options)

        monkeypatch.setattr(running.runner, "execute_model", step)
        tpu_runner.logger.addHandler(listener)
        try:
            running.greedy(PROMPTS[:1])
        finally:
            tpu_runner.logger.removeHandler(listener)
    assert any(empty)
    assert not said


def test_abort_gives_blocks_back(checkpoint, hf_tokens):
    from vllm import SamplingParams

    with engine(checkpoint("llama")) as running:
        free, llm = running.free_blocks(), running.llm.llm_engine
        greedy = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        for i in range(4):
            llm.add_request(f"aborted-{i}", {"prompt_token_ids": PROMPTS[3]}, greedy)
        for _ in range(6):
            llm.step()
        assert running.free_blocks() < free
        llm.abort_request([f"aborted-{i}" for i in range(4)])
        assert running.greedy() == hf_tokens("llama")
        assert running.free_blocks() == free


def pause_and_reset(running):
    """As /pause?mode=keep and /resume: what is under way comes back first."""
    from vllm.v1.core.sched.interface import PauseState

    llm = running.llm.llm_engine
    core = llm.engine_core.engine_core
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    outputs = []
    while core.batch_queue:
        outputs += llm.step()
    core.pause_scheduler("keep")
    core.resume_scheduler()
    return outputs


def reset(running):
    """With a step under way, where scheduling is asynchronous."""
    assert running.llm.reset_prefix_cache(reset_running_requests=True)
    return []


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("interrupt", [pause_and_reset, reset])
def test_running_requests_begin_anew(interrupt, asynchronous, checkpoint):
    """The scheduler preempts and resumes them within a step; tokens and log probabilities stay."""
    from vllm import SamplingParams

    asked = [{}, {}, {"repetition_penalty": 1.3}, {"temperature": 1.0, "seed": 5}, {"logprobs": 2}]
    asked.append({"prompt_logprobs": 1})
    greedy = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    params = [SamplingParams(**greedy | more) for more in asked]
    prompts = [PROMPTS[3], PROMPTS[3], LONG[1], *PROMPTS[2:5]]  # two share their blocks

    with engine(checkpoint("llama"), async_scheduling=asynchronous, enable_prefix_caching=True) as running:
        free = running.free_blocks()
        expected = running.interrupted(prompts, params, 1000, list)
        for every in (4, 5, 7, 11, 18):
            found = running.interrupted(prompts, params, every, lambda: interrupt(running))
            for one, other in zip(found, expected, strict=True):
                assert one.outputs[0].token_ids == other.outputs[0].token_ids, every
                assert tops(one.outputs[0].logprobs) == tops(other.outputs[0].logprobs)
                assert tops(one.prompt_logprobs) == tops(other.prompt_logprobs)
        assert running.free_blocks() == free


def tops(logprobs):
    """Rounded log probabilities: chunks of a prompt differ in its last bits."""
    return [top and {t: round(x.logprob, 2) for t, x in top.items()} for top in logprobs or ()]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_oss"])
def test_tensor_parallel(family, checkpoint, hf_tokens):
    """On two virtual devices: each holds its heads of the cache, and the weights' halves."""
    with engine(checkpoint(family), tensor_parallel_size=2) as running:
        before = running.cache_pointers()
        assert running.greedy() == hf_tokens(family)
        assert running.cache_pointers() == before
        cache = running.runner.kv_caches[0]
        assert len(cache.sharding.device_set) == 2
        assert cache.addressable_shards[0].data.shape[2] == cache.shape[2] // 2


def test_tensor_parallel_with_fewer_heads_than_devices(checkpoint, hf_tokens):
    with engine(checkpoint("one_kv_head"), tensor_parallel_size=2) as running:
        assert running.greedy() == hf_tokens("one_kv_head")


def test_data_parallel(checkpoint, hf_tokens):
    with engine(checkpoint("llama"), data_parallel_size=2) as running:
        assert running.greedy() == hf_tokens("llama")
