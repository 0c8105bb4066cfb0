"""Serve a Llama in JAX: batched generation with a paged cache, from a checkpoint to text, with nothing but flashxla.

    python examples/serve_jax.py
    python examples/serve_jax.py --prompt "A list is" "Return" --tokens 80

The model is the small one in the package. Two compiled programs serve all prompts: a step of many tokens, for prompts,
and a step of one token a sequence. Each step's tokens are one packed row: lengths, pages and places are arrays, so
nothing is compiled again. The layers are one jax.lax.scan. Their caches are one array of pages, which the scan carries
and each step donates, so it stays where it is.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from flashxla import jax as fx
from flashxla.generate import DEFAULT_MODEL

PAGE = 16  # tokens
CHUNK = 64  # tokens of a step with prompts

Params = dict[str, Any]


class Config(NamedTuple):
    """What of a checkpoint's config.json the model needs."""

    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    bos_token_id: int
    eos_token_id: int


class Step(NamedTuple):
    """What one step computes: T tokens (padded) of S sequences, M pages each.

    tokens, positions: int32 [T]. context_lens: int32 [S], the keys of each sequence with the new tokens.
    block_tables: int32 [S, M]. query_start_loc: int32 [S + 1]. num_seqs: int32 [1].
    """

    tokens: Any
    positions: Any
    context_lens: Any
    block_tables: Any
    query_start_loc: Any
    num_seqs: Any


def load(folder: Path) -> tuple[Config, Params]:
    """A Llama checkpoint: what is of a layer is stacked [layers, ...]."""
    facts = json.loads((folder / "config.json").read_text())
    facts["rope_theta"] = facts["rope_parameters"]["rope_theta"]
    config = Config(*(facts[name] for name in Config._fields))
    tensors = {
        name: jnp.asarray(x, jnp.float32) for name, x in load_file(folder / "model.safetensors").items()
    }
    first = "model.layers.0."
    names = [name.removeprefix(first) for name in tensors if name.startswith(first)]
    layers = {
        name: jnp.stack([tensors[f"model.layers.{i}.{name}"] for i in range(config.num_hidden_layers)])
        for name in names
    }
    return config, {
        "embed": tensors["model.embed_tokens.weight"],
        "norm": tensors["model.norm.weight"],
        "layers": layers,
    }


def norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """RMS norm."""
    return weight * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon)


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding of [T, H, D]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def run(
    config: Config, params: Params, caches: tuple[jax.Array, jax.Array], step: Step
) -> tuple[jax.Array, Any]:
    """One step. Returns the likeliest next token of each sequence int32 [S], and the caches."""
    pages = caches[0].shape[0] // config.num_hidden_layers
    count = step.tokens.shape[0]

    def layer(carry: tuple[jax.Array, Any], weights_and_number: tuple[Params, jax.Array]) -> tuple[Any, None]:
        x, caches = carry
        w, number = weights_and_number
        h = norm(x, w["input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = (
            (h @ w[f"self_attn.{name}_proj.weight"].T).reshape(count, heads, config.head_dim)
            for name, heads in zip(
                "qkv", (config.num_attention_heads, *[config.num_key_value_heads] * 2), strict=True
            )
        )
        q, k = (rotate(x, step.positions, config.rope_theta) for x in (q, k))
        # Layer number n has the pages from n * pages on.
        out, caches = fx.ragged_paged_attention(
            q,
            k,
            v,
            caches,
            step.context_lens,
            step.block_tables + number * pages,
            step.query_start_loc,
            step.num_seqs,
            config.head_dim**-0.5,
        )
        x += out.reshape(count, -1) @ w["self_attn.o_proj.weight"].T
        h = norm(x, w["post_attention_layernorm.weight"], config.rms_norm_eps)
        gate = jax.nn.silu(h @ w["mlp.gate_proj.weight"].T)
        x += (gate * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
        return (x, caches), None

    numbers = jnp.arange(config.num_hidden_layers, dtype=jnp.int32)
    (x, caches), _ = jax.lax.scan(layer, (params["embed"][step.tokens], caches), (params["layers"], numbers))
    last = norm(x[step.query_start_loc[1:] - 1], params["norm"], config.rms_norm_eps)
    return jnp.argmax(last @ params["embed"].T, -1).astype(jnp.int32), caches


def make_step(work: Sequence[tuple[int, list[int], int]], size: int, tables: np.ndarray) -> Step:
    """work: of each sequence in the step its number, its new tokens, and how many it has in the cache."""
    sequences, padding = len(tables), len(tables) - len(work)
    tokens = [token for _, new, _ in work for token in new]
    positions = [held + i for _, new, held in work for i in range(len(new))]
    ends = np.cumsum([len(new) for _, new, _ in work])
    return Step(
        np.array(tokens + [0] * (size - len(tokens)), np.int32),
        np.array(positions + [0] * (size - len(tokens)), np.int32),
        np.array([held + len(new) for _, new, held in work] + [0] * padding, np.int32),
        np.concatenate([tables[[n for n, _, _ in work]], np.zeros((padding, tables.shape[1]), np.int32)]),
        np.array([0, *ends, *[ends[-1]] * padding], np.int32).reshape(sequences + 1),
        np.array([len(work)], np.int32),
    )


def generate(
    config: Config, params: Params, prompts: list[list[int]], count: int
) -> tuple[list[list[int]], str]:
    """`count` tokens for each prompt, or up to the model's end of text. Returns them, and how it went."""
    each = -(-(max(map(len, prompts)) + count) // PAGE)
    # Any pages will do: here they are dealt out in turn.
    tables = np.arange(each * len(prompts), dtype=np.int32).reshape(each, len(prompts)).T.copy()
    shape = (config.num_hidden_layers * tables.size, PAGE, config.num_key_value_heads, config.head_dim)
    caches = jnp.zeros(shape), jnp.zeros(shape)
    texts: list[list[int]] = [[] for _ in prompts]
    held = [0] * len(prompts)
    where = [cache.unsafe_buffer_pointer() for cache in caches]
    steps, sizes, started = 0, set(), time.monotonic()
    while True:
        work, room = [], CHUNK
        for n, prompt in enumerate(prompts):
            if len(texts[n]) < count and (not texts[n] or texts[n][-1] != config.eos_token_id):
                new = (prompt + texts[n])[held[n] :][:room]
                room -= len(new)
                if new:
                    work.append((n, new, held[n]))
        if not work:
            break
        size = len(prompts) if all(len(new) == 1 for _, new, _ in work) else CHUNK
        sizes.add(size)
        likeliest, caches = run(config, params, caches, make_step(work, size, tables))
        steps += 1
        for (n, new, _), token in zip(work, np.asarray(likeliest).tolist(), strict=False):
            held[n] += len(new)
            if held[n] == len(prompts[n]) + len(texts[n]):
                texts[n].append(token)
    seconds = time.monotonic() - started
    stayed = where == [cache.unsafe_buffer_pointer() for cache in caches]
    tokens = sum(map(len, texts))
    where_now = "stayed in their buffers" if stayed else "MOVED"
    speed = f"{tokens / seconds:.0f} tokens/s with compilation"
    return (
        texts,
        f"{tokens} tokens, {steps} steps, {len(sizes)} programs, {speed}; the caches {where_now}",
    )


def main() -> None:
    """Read the options, generate, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--prompt", nargs="+", default=["The with statement is used to", "A dictionary"], metavar="TEXT"
    )
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="to write for each (default %(default)s)"
    )
    args = parser.parse_args()
    config, params = load(DEFAULT_MODEL)
    # The model's tokens are the bytes of the text, behind one that begins it.
    prompts = [[config.bos_token_id, *text.encode()] for text in args.prompt]
    texts, summary = generate(config, params, prompts, args.tokens)
    for text, tokens in zip(args.prompt, texts, strict=True):
        print(f"--- {text}{bytes(t for t in tokens if t < 256).decode(errors='replace')}")
    print(summary)


if __name__ == "__main__":
    main()
