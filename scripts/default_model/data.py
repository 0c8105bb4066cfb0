"""The text: Python's own documentation as documents, packed in windows."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

BOS, EOS, PAD = 256, 257, 258
CONTEXT = 512
NO_TARGET = -100
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


class Batch(NamedTuple):
    """Windows of documents, each [B, CONTEXT]."""

    tokens: torch.Tensor
    positions: torch.Tensor  # begin anew with each document: so attention knows where one begins
    targets: torch.Tensor  # the next tokens; NO_TARGET where the next token begins another document


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


def load() -> Data:
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


def packed(windows: torch.Tensor) -> Batch:
    """What to learn from windows [B, CONTEXT + 1]. One that begins within a document begins with the rest of it."""
    tokens, targets = windows[:, :-1], windows[:, 1:]
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    begins = torch.where(tokens == BOS, places, 0).cummax(dim=1).values
    return Batch(tokens, places - begins, targets.masked_fill(targets == BOS, NO_TARGET))


def sample(data: Data, batch: int, generator: torch.Generator) -> Batch:
    """Windows of the training documents; a quarter begin where a document begins, as a prompt does."""
    last = data.train.numel() - CONTEXT - 1
    offsets = torch.randint(last, (batch,), generator=generator)
    at_start = data.starts[torch.randint(data.starts.numel(), (batch,), generator=generator)].clamp(max=last)
    offsets = torch.where(torch.rand(batch, generator=generator) < 0.25, at_start, offsets)
    return packed(torch.stack([data.train[o : o + CONTEXT + 1] for o in offsets.tolist()]))


def held_out(data: Data, batch: int) -> Iterator[Batch]:
    """All text that is held out, cut into windows."""
    count = (data.validation.numel() - 1) // CONTEXT
    windows = data.validation[: count * CONTEXT + 1].unfold(0, CONTEXT + 1, CONTEXT)
    for part in windows.split(batch):
        yield packed(part)
