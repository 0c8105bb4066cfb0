"""Train the default model of `flashxla generate`: a small byte-level Llama that writes about Python.

The text is what every CPython carries with it: the language reference in `pydoc_data.topics` and the
docstrings of the standard library, both under the PSF licence. Nothing is downloaded.

    python scripts/train_default_model.py --out src/flashxla/generate/default_model

takes about half an hour on one CPU thread. The same seed, Python and torch give the same weights.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import math
import platform
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS, PAD = 256, 257, 258
SPECIAL_TOKENS = {"<|bos|>": BOS, "<|eos|>": EOS, "<|pad|>": PAD}
CONTEXT = 512
SHORTEST_DOCUMENT = 120
# Not text about Python: tests, other people's code in bundled packages, generated tables.
SKIPPED_PACKAGES = (
    "site-packages",
    "test",
    "lib2to3",
    "idlelib",
    "turtledemo",
    "ensurepip",
    "pydoc_data",
    "encodings",
)


@dataclasses.dataclass(frozen=True)
class Data:
    """The documents as one row of tokens each side of the split, and where the training documents start."""

    train: torch.Tensor
    validation: torch.Tensor
    starts: torch.Tensor
    bytes: int


def documents() -> Iterator[str]:
    """Yield the topics of Python's reference, then the library's docstrings, in a fixed order."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if parts[0] in SKIPPED_PACKAGES or {"test", "tests"} & set(parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring and len(docstring) >= SHORTEST_DOCUMENT:
                    yield docstring


def load_data() -> Data:
    """Tokenize the text; every twentieth document (by its hash) is held out for validation."""
    train: list[int] = []
    validation: list[int] = []
    starts: list[int] = []
    size = 0
    for text in dict.fromkeys(documents()):
        data = text.strip().encode() + b"\n"
        size += len(data)
        tokens = [BOS, *data, EOS]
        if hashlib.sha256(data).digest()[0] % 20 == 0:
            validation += tokens
        else:
            starts.append(len(train))
            train += tokens
    return Data(torch.tensor(train), torch.tensor(validation), torch.tensor(starts), size)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose token ids are the bytes of the UTF-8 text, after a leading bos."""
    # ByteLevel writes each byte as one printable character: the printable Latin-1 bytes as themselves, the
    # others, in order, from U+0100 on. Spelling it out fixes the ids: token id = byte.
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary |= {chr(256 + position): byte for position, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def make_model() -> LlamaForCausalLM:
    """The untrained model: rotary positions, six query heads over two key/value heads, tied embeddings."""
    config = LlamaConfig(
        vocab_size=256 + len(SPECIAL_TOKENS),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        initializer_range=0.03,
    )
    return LlamaForCausalLM(config)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal (https://kellerjordan.github.io/posts/muon).

    torch.optim.Muon does the same in bfloat16, which costs a CPU without bfloat16 units as much time as the
    gradients themselves; float32 halves that.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float, weight_decay: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
                update = self.orthogonalize(torch.lerp(p.grad, momentum, 0.95))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                # The size of an AdamW step, so that one learning rate serves both optimizers.
                p.add_(update, alpha=-0.2 * math.sqrt(max(p.shape)) * group["lr"])

    @staticmethod
    def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
        """Bring all singular values near one, by five Newton-Schulz steps."""
        wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        x = wide / (wide.norm() + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
        return x if wide is matrix else x.T


def make_optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [Muon(matrices, rate), torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)]


def rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first hundredth, then a cosine down to nothing."""
    warmup = max(1, steps // 100)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def sample_batch(data: Data, batch: int, generator: torch.Generator) -> torch.Tensor:
    """Windows of CONTEXT + 1 tokens; a quarter of them begin where a document begins, as a prompt does."""
    last = data.train.numel() - CONTEXT - 1
    offsets = torch.randint(last, (batch,), generator=generator)
    at_start = data.starts[torch.randint(data.starts.numel(), (batch,), generator=generator)].clamp(max=last)
    offsets = torch.where(torch.rand(batch, generator=generator) < 0.25, at_start, offsets)
    return torch.stack([data.train[o : o + CONTEXT + 1] for o in offsets.tolist()])


def loss_of(model: LlamaForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token, in nats."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, data: Data) -> float:
    """The loss on all held-out text, cut into windows."""
    count = (data.validation.numel() - 1) // CONTEXT
    losses = []
    for i in range(count):
        losses.append(loss_of(model, data.validation[None, i * CONTEXT : (i + 1) * CONTEXT + 1]).item())
    return sum(losses) / count


def train(model: LlamaForCausalLM, data: Data, args: argparse.Namespace) -> None:
    """Run the training loop, printing progress."""
    generator = torch.Generator().manual_seed(args.seed)
    optimizers = make_optimizers(model, args.learning_rate)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: rate_factor(step, args.steps)) for o in optimizers
    ]
    started = time.monotonic()
    running = 0.0
    for step in range(args.steps):
        loss = loss_of(model, sample_batch(data, args.batch, generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()
        running = loss.item() if step == 0 else 0.9 * running + 0.1 * loss.item()
        if (step + 1) % args.report == 0 or step + 1 == args.steps:
            speed = (step + 1) * args.batch * CONTEXT / (time.monotonic() - started)
            print(f"step {step + 1}/{args.steps}  loss {running:.3f}  {speed:,.0f} tokens/s", flush=True)


def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """A greedy continuation, for the log and the model card."""
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    output = model.generate(tokens, max_new_tokens=160, do_sample=False)
    return tokenizer.decode(output[0], skip_special_tokens=True)


CARD = """---
license: psf-2.0
language: en
library_name: transformers
---
# The default model of `flashxla generate`

A byte-level Llama with {parameters:,} parameters, small enough to live in the package. It continues text in
the manner of Python's documentation: real words and familiar phrases, not facts to rely on. It exists so that
generation can be tried and tested anywhere, without a download.

- Licence: the weights are derived from Python's documentation, (c) Python Software Foundation, and are given
  under the same PSF licence, version 2.
- Data: {bytes:,} bytes of text that ships with CPython: `pydoc_data.topics` (the language reference) and the
  docstrings of the standard library. A twentieth of the documents is held out for validation.
- Tokens: the 256 bytes (token id = byte), bos, eos and pad. Any UTF-8 text survives encoding and decoding.
- Shape: {layers} layers, hidden size {hidden}, {heads} query heads over {kv_heads} key/value heads of size
  {head_dim}, rotary positions, context {context}, tied embeddings, stored as bfloat16.
- Training: {steps} steps of {batch} x {context} tokens, Muon and AdamW, cosine schedule, seed {seed}, on one
  CPU thread ({minutes:.0f} minutes), Python {python}, torch {torch}.
- Validation loss (bfloat16 weights, held-out documents): {loss:.3f} nats a byte ({bits:.2f} bits a byte).

To reproduce, with that Python and torch:

    python scripts/train_default_model.py --steps {steps} --batch {batch} --seed {seed} --out DIR

Greedy continuation of "{prompt}":

{sample}
"""


def main() -> None:
    """Train, save, and write the model card."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--steps", type=int, default=1600, help="training steps (default %(default)s)")
    parser.add_argument(
        "--batch", type=int, default=4, help=f"windows of {CONTEXT} a step (default %(default)s)"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="peak rate (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default %(default)s)")
    parser.add_argument("--report", type=int, default=50, help="steps between lines of progress")
    args = parser.parse_args()

    # One thread: sums are then taken in one order, so a seed gives the same weights on every run.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    data = load_data()
    model = make_model()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{data.bytes:,} bytes of text, {parameters:,} parameters", flush=True)

    started = time.monotonic()
    train(model, data, args)
    minutes = (time.monotonic() - started) / 60

    # The loss reported is that of the weights as they are stored.
    model.to(torch.bfloat16).to(torch.float32).eval()
    loss = validation_loss(model, data)
    print(f"validation loss {loss:.3f} nats a byte", flush=True)

    tokenizer = make_tokenizer()
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    prompt = "The with statement is used to"
    text = sample(model, tokenizer, prompt)
    print(text)

    args.out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    config = model.config
    card = CARD.format(
        parameters=parameters,
        bytes=data.bytes,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        context=CONTEXT,
        steps=args.steps,
        batch=args.batch,
        seed=args.seed,
        minutes=minutes,
        python=platform.python_version(),
        torch=torch.__version__.split("+")[0],
        loss=loss,
        bits=loss / math.log(2),
        prompt=prompt,
        sample="\n".join("    " + line if line else "" for line in text.splitlines()),
    )
    (args.out / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
