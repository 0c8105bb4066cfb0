"""An engine in this process, and what tests ask of it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from tests.vllm import checkpoints

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 32 << 20,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "seed": 0,
}


def ngrams(tokens: int, longest: int) -> dict[str, Any]:
    """The configuration of speculation by n-grams: so many drafted tokens, behind what is at most so long."""
    return {
        "method": "ngram",
        "num_speculative_tokens": tokens,
        "prompt_lookup_max": longest,
        "prompt_lookup_min": 1,
    }


class Engine:
    """vllm.LLM with the questions of the tests."""

    def __init__(self, path: Path, **options: Any) -> None:
        from vllm import LLM

        self.llm = LLM(str(path), **DEFAULTS | options)

    @property
    def runner(self) -> Any:
        """tpu-inference's runner: it owns the caches."""
        core = self.llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner

    def greedy(
        self,
        prompts: list[list[int]] = checkpoints.PROMPTS,
        count: int = checkpoints.NEW_TOKENS,
        **sampling: Any,
    ) -> list[list[int]]:
        """The tokens after each prompt."""
        return [list(output.outputs[0].token_ids) for output in self.generate(prompts, count, **sampling)]

    def generate(self, prompts: list[list[int]], count: int, **sampling: Any) -> list[Any]:
        """vLLM's own outputs."""
        from vllm import SamplingParams

        params = SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True} | sampling)
        return self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    def interrupted(
        self, prompts: list[list[int]], params: list[Any], every: int, interrupt: Callable[[], list[Any]]
    ) -> list[Any]:
        """vLLM's own outputs, where something happens after every few steps, which returns what has finished in it."""
        llm = self.llm.llm_engine
        for i, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
            llm.add_request(str(i), {"prompt_token_ids": prompt}, asked)
        outputs, steps = [], 0
        while llm.has_unfinished_requests():
            outputs += llm.step()
            steps += 1
            if steps % every == 0:
                outputs += interrupt()
        finished = {output.request_id: output for output in outputs if output.finished}
        return [finished[str(i)] for i in range(len(prompts))]

    def cache_pointers(self) -> list[int]:
        """The addresses of the layers' caches, on each device."""
        return [
            shard.data.unsafe_buffer_pointer()
            for cache in self.runner.kv_caches
            for shard in cache.addressable_shards
        ]

    def metric(self, name: str) -> float:
        """The sum of one of vLLM's counters."""
        return sum(m.value for m in self.llm.get_metrics() if m.name == f"vllm:{name}")

    def free_blocks(self) -> int:
        """Blocks that no request holds."""
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        return scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def close(self) -> None:
        """Give its memory back."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        self.forget_programs()
        gc.collect()
        gc.freeze()  # what is left are modules: the next engine's collections need not look through them

    def forget_programs(self) -> None:
        """Drop what was compiled for it."""
        jax.clear_caches()


@contextlib.contextmanager
def engine(path: Path, **options: Any) -> Iterator[Engine]:
    """An engine; its memory is given back behind the block."""
    with contextlib.closing(Engine(path, **options)) as running:
        yield running
