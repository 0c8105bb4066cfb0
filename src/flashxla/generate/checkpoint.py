"""Reads the weights and the tokenizer from a checkpoint's folder, and refuses what is damaged or incomplete."""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from flashxla.generate.errors import GenerateError, describe

# The files that transformers takes for what a group of processes saved while training.
_DISTRIBUTED = "shard-*-model-*-of-*.safetensors"
# How many tensors a message names.
_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder, and how to read it.

    trust_remote_code: whether code in the folder may run.
    """

    folder: Path
    dtype: torch.dtype | str
    trust_remote_code: bool = False

    def load_model(self, attention: str, experts: str | None) -> tuple[PreTrainedModel, set[str]]:
        """The causal language model, with implementations that transformers knows by these names.

        Returns the names of the folder's tensors that it does not use too. Raises GenerateError.
        """
        self._check_files()
        try:
            model, info = self._read("model", lambda: self._from_pretrained(attention, experts))
        except GenerateError as error:
            # Older models look the name up in a table of their own.
            if isinstance(error.__cause__, KeyError) and attention in error.__cause__.args:
                raise GenerateError(
                    f"--model: the model in {self.folder} does not use transformers' attention interface; "
                    "accepted: models that do"
                ) from error
            raise
        if missing := info["missing_keys"]:
            raise GenerateError(
                f"--model: {self.folder} lacks tensors of its model: {some(missing)}; accepted: all of them"
            )
        if mismatched := info["mismatched_keys"]:
            shapes = (f"{name} is {list(got)} and not {list(wanted)}" for name, got, wanted in mismatched)
            raise GenerateError(
                f"--model: {self.folder} has tensors of other shapes than its config.json says: {some(shapes)}"
            )
        return model.eval(), info["unexpected_keys"]

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises GenerateError."""
        tokenizer = self._read(
            "tokenizer",
            lambda: AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=self.trust_remote_code
            ),
        )
        # For some models transformers makes an empty tokenizer where the files are missing.
        if not self._read("tokenizer", lambda: tokenizer("a", add_special_tokens=False).input_ids):
            raise GenerateError(
                f"--model: {self.folder} has no tokenizer; accepted: a folder with tokenizer files"
            )
        return tokenizer

    def _check_files(self) -> None:
        """Refuse what transformers would read in ways that are not safe, or would pass over."""
        pickles = [path.name for path in self.folder.glob("*.bin")]
        if pickles and not any(self.folder.glob("*.safetensors")):
            raise GenerateError(
                f"--model: got {self.folder} with pickled weights ({some(pickles)}); accepted: weights in "
                "safetensors files"
            )
        if any(self.folder.glob(_DISTRIBUTED)):
            raise GenerateError(
                f"--model: got {self.folder} with a distributed checkpoint ({_DISTRIBUTED}); accepted: weights that "
                "save_pretrained wrote"
            )
        # Without this, transformers goes on without a file that it cannot read.
        if (self.folder / "generation_config.json").is_file():
            self._read(
                "generation_config.json",
                lambda: GenerationConfig.from_pretrained(self.folder, local_files_only=True),
            )

    def _from_pretrained(self, attention: str, experts: str | None) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            self.folder,
            dtype=self.dtype,
            attn_implementation=attention,
            # Given even if None: config.json must not choose one.
            experts_implementation=experts,
            local_files_only=True,
            trust_remote_code=self.trust_remote_code,
            use_safetensors=True,
            # For errors that name the tensors.
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )

    def _read(self, what: str, read: Callable[[], Any]) -> Any:
        """Call transformers, whose errors here are of many types and all speak of the folder's files."""
        try:
            with warnings.catch_warnings(action="ignore"):
                return read()
        except Exception as error:
            if "`trust_remote_code=True`" in str(error) and not self.trust_remote_code:
                raise GenerateError(
                    f"--model: {self.folder} holds Python code that it cannot be loaded without; "
                    "accepted: such folders only with --trust-remote-code, which runs that code"
                ) from error
            if names := _unconverted(error):
                raise GenerateError(
                    f"--model: {self.folder} has tensors whose parts are missing or do not fit together: {some(names)}"
                ) from error
            raise GenerateError(
                f"--model: the {what} in {self.folder} could not be loaded: {describe(error)}"
            ) from error


def _unconverted(error: Exception) -> list[str]:
    """The tensors that transformers could not put together, of which its error only says that there are some."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if errors := getattr(frame.f_locals.get("loading_info"), "conversion_errors", None):
            return list(errors)
    return []


def some(names: Iterable[str]) -> str:
    """The first few names and how many there are."""
    names = sorted(names)
    more = f", ... ({len(names)} in all)" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
