"""Code that a checkpoint brings runs with --trust-remote-code only, whatever standard input says."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

from tests.generate import checkpoints
from tests.generate.command_line import run, run_error

_OPTIONS = ("--frontend", "torch", "--verify", "--max-new-tokens", "2", "--prompt", "a")
_MARK = "import pathlib\npathlib.Path({marker!r}).write_text('ran')\n"
_MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = {model_type!r}

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
_TOKENIZER = """
from transformers import PreTrainedTokenizerFast as OwnTokenizer
"""
_GENERATE = """
def generate(model, *args, **kwargs):
    raise AssertionError("not transformers' generation")
"""


def _model(folder: Path, marker: Path, model_type: str) -> None:
    code = _MARK.format(marker=str(marker)) + _MODEL.format(model_type=model_type)
    (folder / "own.py").write_text(code)
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    checkpoints.edit_json(folder / "config.json", model_type=model_type, auto_map=auto_map)


def _unknown_model(folder: Path, marker: Path) -> None:
    # transformers knows a type from then on that a run with the flag has loaded.
    _model(folder, marker, f"own_{folder.parent.name}")


def _known_model(folder: Path, marker: Path) -> None:
    _model(folder, marker, "llama")


def _known_tokenizer(folder: Path, marker: Path) -> None:
    (folder / "own.py").write_text(_MARK.format(marker=str(marker)) + _TOKENIZER)
    auto_map = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    checkpoints.edit_json(folder / "tokenizer_config.json", auto_map=auto_map)


def _unknown_tokenizer(folder: Path, marker: Path) -> None:
    _known_tokenizer(folder, marker)
    checkpoints.edit_json(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer")


def _generation(folder: Path, marker: Path) -> None:
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(_MARK.format(marker=str(marker)) + _GENERATE)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # transformers copies the code there and imports it.
    modules = tmp_path / "modules"
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    return checkpoints.copy_default(tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("bring", "needed"),
    [
        (_unknown_model, True),
        (_known_model, False),
        (_unknown_tokenizer, True),
        (_known_tokenizer, False),
        (_generation, False),
    ],
)
def test_code_runs_with_the_flag_only(
    bring, needed: bool, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "marker"
    bring(checkpoint, marker)
    options = (*_OPTIONS, "--model", str(checkpoint))
    if needed:
        assert run_error(capsys, *options) == (
            f"--model: {checkpoint} holds Python code that it cannot be loaded without; accepted: such folders only "
            "with --trust-remote-code, which runs that code"
        )
    else:
        assert run(*options) == 0
    assert not marker.exists()

    assert run(*options, "--trust-remote-code") == 0
    assert marker.read_text() == "ran"
