"""What `flashxla doctor` says of vLLM: versions, the platform, and a live generation that is proven to be in place.

The generation runs in a process of its own (`python -m flashxla_vllm.doctor`): XLA reads the flag that makes it dump
its programs only once, vLLM writes logs to stdout, and a crash stays contained. No network is needed: the model is a
tiny Llama with random weights. This module imports vLLM only there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flashxla.doctor import hlo
from flashxla_vllm import versions

Row = tuple[str, bool | None, str]

PLATFORM = "flashxla_vllm.platform.XlaPlatform"
ATTENTION = "flashxla_attention"
LAYERS, NEW_TOKENS = 2, 8
PROMPTS = ([5, 6, 7], [9], list(range(10, 50)))
# Of one layer, and larger than the model's weights and activations: what copies so much copies a cache.
CACHE_BYTES = 4 << 20
_TIMEOUT = 300
_PROBE = (sys.executable, "-m", "flashxla_vllm.doctor")


@dataclasses.dataclass(frozen=True)
class Generation:
    """What an engine did with its caches.

    tokens, right: tokens that came, and how many of them are those of Hugging Face transformers.
    cache_bytes: of the smallest cache of a layer, on one device; cache_copies: of the steps' programs.
    """

    device: str
    tokens: int
    right: int
    steps: int
    caches: int
    pointers_stay: bool
    cache_bytes: int
    cache_copies: list[str]
    temp_bytes: int
    programs: int

    @property
    def ok(self) -> bool:
        """Whether the tokens came and are right, and the writes were in place."""
        right = self.tokens == self.right == len(PROMPTS) * NEW_TOKENS
        return right and self.pointers_stay and not self.cache_copies and self.programs > 0

    def text(self) -> str:
        """For the report."""
        pointers = "the pointers stayed" if self.pointers_stay else "THE POINTERS CHANGED"
        cache = f"a cache ({self.cache_bytes >> 10} KiB)"
        line = (
            f"on {self.device}: {self.tokens} tokens, {self.right} of them transformers'; {pointers}: "
            f"{self.caches} caches x {self.steps} steps; {len(self.cache_copies)} copies of {cache} in "
            f"{self.programs} compiled programs; temporary memory {self.temp_bytes >> 10} KiB"
        )
        return "\n".join([line, *self.cache_copies])


def findings() -> Iterator[Row]:
    """Topic, whether it works, and what to say, as flashxla.doctor asks for them."""
    rows = list(_versions())
    yield from rows
    if any(ok is False for _, ok, _ in rows):
        return  # the plugin refuses to start
    platform = _platform()
    yield platform
    if platform[1]:
        yield _generation()


def _versions() -> Iterator[Row]:
    for name, needed in versions.SUPPORTED.items():
        found = versions.installed(name)
        if found == needed:
            yield name, True, found
        else:
            said = f"{found or 'not installed'}; flashxla-vllm knows {needed}"
            tried = versions.any_version()
            yield (
                name,
                None if tried else False,
                f"{said}; {versions.ANY_VERSION}=1 tries it" if tried else said,
            )


def _platform() -> Row:
    """Which platform vLLM chooses."""
    topic = "vllm platform"
    code = (
        "from vllm.platforms import current_platform as p; print(f'{type(p).__module__}.{type(p).__name__}')"
    )
    try:
        chosen = _run([sys.executable, "-c", code], os.environ)
    except RuntimeError as error:
        return topic, False, str(error)
    if chosen != PLATFORM:
        return (
            topic,
            False,
            f"vLLM chose {chosen}, not {PLATFORM}; VLLM_PLUGINS={os.environ.get('VLLM_PLUGINS')!r}",
        )
    return topic, True, chosen


def _generation() -> Row:
    topic = "in place: vllm"
    try:
        result = generate()
    except RuntimeError as error:
        return topic, False, str(error)
    return topic, result.ok, result.text()


def generate(probe: Sequence[str] = _PROBE, timeout: float = _TIMEOUT) -> Generation:
    """Generate in a process of its own. Raises RuntimeError with its output if that fails.

    probe: the command, to which the folder of the model and that of XLA's programs are added.
    """
    with tempfile.TemporaryDirectory(prefix="flashxla-") as folder:
        dump = Path(folder, "programs")
        environment = os.environ | {
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text".strip(),
            # The engine in that process, where its caches can be looked at, with programs that are compiled anew.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_DISABLE_COMPILE_CACHE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            # Products as exact as transformers' on a CPU, and only the memory that is used.
            "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        }
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        last = _run([*probe, str(Path(folder, "model")), str(dump)], environment, timeout)
    return Generation(**json.loads(last))


def _run(command: Sequence[str], environment: Any, timeout: float = _TIMEOUT) -> str:
    """The last line that a command prints."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer within {timeout:g} s") from None
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"exit status {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return lines[-1]


# In the process of the generation: `python -m flashxla_vllm.doctor MODEL PROGRAMS`.


def main(model: Path, dump: Path) -> None:
    """Generate in this process and print what happened as JSON."""
    expected = _write_model(model)
    engine = _Engine(model)
    tokens, pointers = engine.generate()
    # A step attends in each layer; the sampler's programs do not.
    programs = [p for p in hlo.dumped_programs(dump) if p.targets().count(ATTENTION) >= LAYERS]
    cache_bytes = min(shard.data.nbytes for shard in engine.shards())
    generation = Generation(
        device=str(next(iter(engine.caches()[0].devices()))),
        tokens=sum(map(len, tokens)),
        right=sum(
            a == b
            for row, wanted in zip(tokens, expected, strict=True)
            for a, b in zip(row, wanted, strict=False)
        ),
        steps=len(pointers) - 1,
        caches=len(pointers[0]),
        pointers_stay=all(p == pointers[0] for p in pointers),
        cache_bytes=cache_bytes,
        cache_copies=[copy for p in programs for copy in p.copies(at_least=cache_bytes)],
        temp_bytes=max((p.temp_bytes for p in programs), default=0),
        programs=len(programs),
    )
    print(json.dumps(dataclasses.asdict(generation)))


def _write_model(folder: Path) -> list[list[int]]:
    """A tiny Llama with random weights, and the tokens that transformers writes with it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        # Large enough for tokens that vary: a model that repeats one would hide a wrong attention.
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    options: dict[str, Any] = {
        "do_sample": False,
        "min_new_tokens": NEW_TOKENS,
        "max_new_tokens": NEW_TOKENS,
        "eos_token_id": None,
    }
    written = [
        model.generate(torch.tensor([prompt]), pad_token_id=0, **options)[0].tolist() for prompt in PROMPTS
    ]
    return [row[len(prompt) :] for row, prompt in zip(written, PROMPTS, strict=True)]


class _Engine:
    """vLLM with the model, and the caches of its runner."""

    def __init__(self, model: Path) -> None:
        from vllm import LLM

        self._engine = LLM(
            str(model),
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            kv_cache_memory_bytes=LAYERS * CACHE_BYTES,
            enable_prefix_caching=False,
            seed=0,
        ).llm_engine

    def caches(self) -> list[Any]:
        """One JAX array a layer, as they are now: each step makes them anew, where they were."""
        core: Any = self._engine.engine_core
        return core.engine_core.model_executor.driver_worker.worker.model_runner.kv_caches

    def shards(self) -> list[Any]:
        """The part of each cache on each device."""
        return [shard for cache in self.caches() for shard in cache.addressable_shards]

    def generate(self) -> tuple[list[list[int]], list[list[int]]]:
        """The tokens after each prompt, and the caches' addresses before the first step and after each."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        for i, prompt in enumerate(PROMPTS):
            self._engine.add_request(str(i), {"prompt_token_ids": prompt}, greedy)
        tokens: dict[str, list[int]] = {}
        pointers = [self._pointers()]
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            pointers.append(self._pointers())
        return [tokens.get(str(i), []) for i in range(len(PROMPTS))], pointers

    def _pointers(self) -> list[int]:
        return [shard.data.unsafe_buffer_pointer() for shard in self.shards()]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
