"""What vLLM's scheduler does to the cache: tokens stay Hugging Face's, pointers stay, every block comes back."""

import pytest
from flashxla_vllm import attention

from tests.vllm.checkpoints import PROMPTS
from tests.vllm.engine import engine

LONG = [[(7 * i + 3) % 500 + 5 for i in range(200)], [(11 * i) % 500 + 5 for i in range(150)], [8, 9]]


@pytest.fixture(params=["llama", "gemma2"])  # gemma2 has two groups of layers
def family(request):
    return request.param


def test_chunked_prefill(family, checkpoint, hf_tokens):
    with engine(checkpoint(family), max_num_batched_tokens=32, max_num_seqs=4) as running:
        assert running.greedy(LONG) == hf_tokens(family, LONG)


def test_decode_steps_have_their_own_programs(family, checkpoint, hf_tokens, monkeypatch):
    """They promise one query for each sequence; no program is compiled while requests run."""
    promises, steps, ask = [], [], attention.fx.ragged_paged_attention

    def traced(*args, **options):
        promises.append(options["max_seqlen_q"])
        return ask(*args, **options)

    def step(*args, shared_attention_metadata, **options):
        steps.append(shared_attention_metadata.padded_num_reqs == attention.DECODE)
        return run(*args, shared_attention_metadata=shared_attention_metadata, **options)

    monkeypatch.setattr(attention.fx, "ragged_paged_attention", traced)
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
    speculation = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    with engine(checkpoint("llama"), speculative_config=speculation) as running:
        assert running.greedy(prompts, 40) == hf_tokens("llama", prompts, 40)
        assert running.metric("spec_decode_num_draft_tokens") > 0


@pytest.mark.parametrize("asynchronous", [True, False])
def test_async_scheduling(asynchronous, checkpoint, hf_tokens):
    with engine(checkpoint("llama"), async_scheduling=asynchronous) as running:
        assert running.greedy(PROMPTS * 3) == hf_tokens("llama") * 3
        assert running.greedy(PROMPTS[::-1]) == hf_tokens("llama")[::-1]


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
