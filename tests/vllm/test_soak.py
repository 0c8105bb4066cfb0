"""Random requests and aborts on a tiny cache: tokens stay, no block is lost, memory stays flat.

FLASHXLA_VLLM_SOAK_SECONDS says for how long; make soak-vllm takes an hour.
"""

import os
import random
import time

import psutil
from vllm import SamplingParams

from tests.vllm.engine import engine

SECONDS = float(os.environ.get("FLASHXLA_VLLM_SOAK_SECONDS", "60"))
MEBI = 1 << 20


def test_random_requests_and_aborts(checkpoint, hf_tokens):
    rng = random.Random(0)
    shared = [(3 * i) % 450 + 20 for i in range(48)]
    # Prompts of which some share a prefix, and what a model writes after each.
    prompts = [
        (shared[:48] if rng.random() < 0.4 else [])
        + [rng.randrange(4, 500) for _ in range(rng.randrange(1, 60))]
        for _ in range(24)
    ]
    expected = hf_tokens("llama", prompts, 40)
    options = {"num_gpu_blocks_override": 24, "max_model_len": 192, "enable_prefix_caching": True}
    with engine(checkpoint("llama"), **options) as running:
        llm, free = running.llm.llm_engine, running.free_blocks()
        asked: dict[str, tuple[int, int]] = {}
        done = aborted = number = 0
        memory: list[int] = []
        start = time.monotonic()
        while (elapsed := time.monotonic() - start) < SECONDS or asked:
            if elapsed < SECONDS and len(asked) < 12 and rng.random() < 0.4:
                which, count = rng.randrange(len(prompts)), rng.randrange(1, 41)
                params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                number += 1
                llm.add_request(str(number), {"prompt_token_ids": prompts[which]}, params)
                asked[str(number)] = (which, count)
            if asked and rng.random() < 0.02:
                victim = rng.choice(list(asked))
                llm.abort_request([victim])
                del asked[victim]
                aborted += 1
            for output in llm.step():
                if output.finished and output.request_id in asked:
                    which, count = asked.pop(output.request_id)
                    assert list(output.outputs[0].token_ids) == expected[which][:count]
                    done += 1
                    if done % 50 == 0:
                        memory.append(psutil.Process().memory_info().rss)
        assert running.metric("num_preemptions") > 0
        assert running.metric("prefix_cache_hits") > 0
        for _ in range(3):  # the last outputs of aborted requests
            llm.step()
        assert running.free_blocks() == free
    seen = [m // MEBI for m in memory[:: max(1, len(memory) // 10)]]
    print(f"{done} requests, {aborted} aborted in {SECONDS:.0f} s; MiB of memory: {seen}")
    assert done > SECONDS
    settled = memory[len(memory) // 4 :]
    assert max(settled) - settled[0] < 64 * MEBI
