"""What vLLM's scheduler does to the cache: tokens stay Hugging Face's, pointers stay, every block comes back."""

from tests.vllm.checkpoints import PROMPTS
from tests.vllm_legacy.engine import engine

LONG = [[(7 * i + 3) % 500 + 5 for i in range(200)], [(11 * i) % 500 + 5 for i in range(150)], [8, 9]]


def test_chunked_prefill_and_prefix_caching(checkpoint, hf_tokens):
    shared = [(5 * i) % 400 + 20 for i in range(80)]
    prompts = [[*shared, i, i + 1, 3 * i] for i in range(10, 16)]
    with engine(checkpoint("qwen3"), max_num_batched_tokens=32, enable_prefix_caching=True) as running:
        before = running.cache_pointers()
        assert running.greedy(LONG) == hf_tokens("qwen3", LONG)
        assert running.greedy(prompts[:1]) == hf_tokens("qwen3", prompts)[:1]
        outputs = running.generate(prompts, 12)
        assert [list(o.outputs[0].token_ids) for o in outputs] == hf_tokens("qwen3", prompts)
        assert all(o.num_cached_tokens >= 64 for o in outputs)
        assert running.cache_pointers() == before


def test_preemption_and_aborts(checkpoint, hf_tokens):
    """A cache of 12 blocks of 16 for six sequences that grow to 5 blocks each."""
    from vllm import SamplingParams

    prompts = [[(i * j) % 450 + 11 for j in range(30)] for i in range(1, 7)]
    with engine(checkpoint("llama"), num_gpu_blocks_override=13, max_model_len=128) as running:
        free, llm = running.free_blocks(), running.llm.llm_engine
        assert running.greedy(prompts, 40) == hf_tokens("llama", prompts, 40)
        assert running.metric("num_preemptions") > 0
        assert running.free_blocks() == free
        greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        for i in range(2):
            llm.add_request(f"aborted-{i}", {"prompt_token_ids": PROMPTS[3]}, greedy)
        for _ in range(6):
            llm.step()
        assert running.free_blocks() < free
        llm.abort_request(["aborted-0", "aborted-1"])
        assert running.greedy() == hf_tokens("llama")
        assert running.free_blocks() == free


def test_more_requests_than_a_step_takes(checkpoint, hf_tokens):
    with engine(checkpoint("llama"), max_num_seqs=3) as running:
        # conftest.py asks for it.
        assert running.runner.check_recompilation and running.runner.num_xla_graphs > 0
        assert running.greedy(PROMPTS * 3) == hf_tokens("llama") * 3
        assert running.greedy(PROMPTS[::-1]) == hf_tokens("llama")[::-1]
