"""Train the default model of `flashxla generate`: a small byte-level Llama that writes about Python.

The text is what every CPython carries with it: the language reference in `pydoc_data.topics` and the
docstrings of the standard library, both under the PSF licence. Nothing is downloaded. Documents are packed
in windows, and flashxla's attention keeps them apart.

    python scripts/train_default_model.py --out src/flashxla/generate/default_model

takes about a quarter of an hour on one CPU thread. The same seed, Python, torch and kind of CPU give the same weights.

    python scripts/train_default_model.py --attention flashxla eager --out DIR --curve FILE.json --plot FILE.svg

trains the same model with transformers' own attention, too, in turn with the first one, and writes how both went.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path
from typing import Any

import torch
from default_model import curve, data
from default_model.card import PROMPT, card
from default_model.model import make_tokenizer
from default_model.training import ATTENTIONS, Options, mean_loss, train
from transformers import GenerationConfig, PreTrainedTokenizerFast

from flashxla import output_file


def sample(model: Any, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """A greedy continuation, for the log and the model card."""
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    output = model.generate(tokens, max_new_tokens=160, do_sample=False)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def main() -> None:
    """Train, save, and write the model card."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument(
        "--attention",
        nargs="+",
        choices=ATTENTIONS,
        default=ATTENTIONS[:1],
        help="the first one's model is saved; others are trained beside it (default flashxla)",
    )
    parser.add_argument("--steps", type=int, default=1600, help="training steps (default %(default)s)")
    parser.add_argument(
        "--batch", type=int, default=4, help=f"windows of {data.CONTEXT} a step (default %(default)s)"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="peak rate (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default %(default)s)")
    parser.add_argument("--report", type=int, default=50, help="steps between lines of progress")
    parser.add_argument("--validate", type=int, default=200, help="steps between validations")
    parser.add_argument("--validation-windows", type=int, metavar="N", help="validate on the first ones only")
    parser.add_argument("--curve", metavar="FILE", help="write losses and times as JSON")
    parser.add_argument("--plot", metavar="FILE", help="and as a plot, such as FILE.svg (needs matplotlib)")
    args = parser.parse_args()
    for option, file in (("--curve", args.curve), ("--plot", args.plot)):
        output_file.check(option, file)
    names = ("steps", "batch", "learning_rate", "seed", "report", "validate", "validation_windows")
    options = Options(**{name: getattr(args, name) for name in names})

    # One thread: sums are then taken in one order, so a seed gives the same weights on every run.
    torch.set_num_threads(1)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    text = data.load()
    print(f"{text.bytes:,} bytes of text", flush=True)
    contenders = train(text, args.attention, options)
    found = curve.content(contenders, options, " ".join(["python", *sys.argv]), date)
    print(curve.table(found), flush=True)

    # The loss reported is that of the weights as they are stored.
    trained = contenders[0]
    model = trained.model.bfloat16().float().eval()
    loss = mean_loss(model, list(data.held_out(text, args.batch))[: args.validation_windows])
    print(f"loss of held-out documents, as stored: {loss:.3f} nats a byte", flush=True)

    tokenizer = make_tokenizer()
    model.generation_config = GenerationConfig(
        bos_token_id=data.BOS, eos_token_id=data.EOS, pad_token_id=data.PAD
    )
    written = sample(model, tokenizer, PROMPT)
    print(written)

    args.out.mkdir(parents=True, exist_ok=True)
    model.bfloat16().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "README.md").write_text(card(trained, options, text.bytes, loss, written), encoding="utf-8")
    if args.curve:
        output_file.write_json(args.curve, found)
    if args.plot:
        curve.draw(found, args.plot)


if __name__ == "__main__":
    main()
