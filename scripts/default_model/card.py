"""The model card."""

from __future__ import annotations

import math
import platform

import torch

from default_model.data import CONTEXT
from default_model.training import Contender, Options

PROMPT = "The with statement is used to"
CARD = """---
license: psf-2.0
language: en
library_name: transformers
---
# The default model of `flashxla generate`

A byte-level Llama with {parameters:,} parameters, small enough to live in the package. It continues text in the
manner of Python's documentation: real words and familiar phrases, not facts to rely on. It exists so that
generation can be tried and tested anywhere, without a download.

- Licence: the weights are derived from Python's documentation, (c) Python Software Foundation, and are given
  under the same PSF licence, version 2.
- Data: {bytes:,} bytes of text that ships with CPython: `pydoc_data.topics` (the language reference) and the
  docstrings of the standard library. A twentieth of the documents is held out for validation.
- Tokens: the 256 bytes (token id = byte), bos, eos and pad. Any UTF-8 text survives encoding and decoding.
- Shape: {layers} layers, hidden size {hidden}, {heads} query heads over {kv_heads} key/value heads of size
  {head_dim}, rotary positions, context {context}, tied embeddings, stored as bfloat16.
- Training: {steps} steps of {batch} x {context} tokens, packed documents that do not see each other, attention
  "{attention}", Muon and AdamW, cosine schedule, seed {seed}, on one CPU thread ({minutes:.0f} minutes), Python
  {python}, torch {torch}.
- Loss (bfloat16 weights, held-out documents): {loss:.3f} nats a byte ({bits:.2f} bits a byte).

To reproduce, with that Python and torch, on a CPU with the same instructions:

    python scripts/train_default_model.py --steps {steps} --batch {batch} --seed {seed} --out DIR

Greedy continuation of "{prompt}":

{sample}
"""


def card(trained: Contender, options: Options, size: int, loss: float, sample: str) -> str:
    """size: bytes of text. loss: of the weights as they are stored. sample: what it writes after PROMPT."""
    config = trained.model.config
    return CARD.format(
        parameters=trained.model.num_parameters(),
        bytes=size,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        context=CONTEXT,
        steps=options.steps,
        batch=options.batch,
        attention=trained.attention,
        seed=options.seed,
        minutes=sum(trained.seconds) / 60,
        python=platform.python_version(),
        torch=torch.__version__.split("+")[0],
        loss=loss,
        bits=loss / math.log(2),
        prompt=PROMPT,
        sample="\n".join("    " + line if line else "" for line in sample.splitlines()),
    )
