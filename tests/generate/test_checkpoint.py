"""Damaged and incomplete checkpoints are refused in one line that says what is wrong."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flashxla.generate import attention
from flashxla.generate.checkpoint import Checkpoint
from flashxla.generate.errors import GenerateError
from tests.generate import checkpoints
from tests.generate.command_line import run, run_error

OPTIONS = ("--frontend", "torch", "--max-new-tokens", "2", "--prompt", "ab", "--model")
WEIGHTS = "model.safetensors"
Damage = Callable[[Path], object]


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    return lambda folder: checkpoints.edit_tensors(folder, change)


def without(*parts: str) -> Damage:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if any(part in name for part in parts)]:
            del tensors[name]

    return tensors(drop)


def config(**changes: object) -> Damage:
    return lambda folder: checkpoints.edit_json(folder / "config.json", **changes)


def content(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


def cut(size: int) -> Damage:
    def cut_weights(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[:size])

    return cut_weights


def _narrow(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()


_NAMED = "lacks tensors of its model: "
CASES = {
    "one tensor": (without("model.norm"), _NAMED + "model.norm.weight; accepted: all of them"),
    "a layer": (
        without("layers.2."),
        _NAMED + "model.layers.2.input_layernorm.weight, model.layers.2.mlp.down_proj.weight, "
        "model.layers.2.mlp.gate_proj.weight, ... (9 in all)",
    ),
    "embeddings and what is tied to them": (
        without("embed"),
        _NAMED + "lm_head.weight, model.embed_tokens.weight;",
    ),
    "lm_head that is not tied": (config(tie_word_embeddings=False), _NAMED + "lm_head.weight;"),
    "layers that config.json counts": (config(num_hidden_layers=6), "... (18 in all)"),
    "weights of another model": (config(model_type="gpt2"), _NAMED + "lm_head.weight, transformer.h.0."),
    "narrow tensor": (
        tensors(_narrow),
        "of other shapes than its config.json says: model.layers.0.self_attn.q_proj.weight is [191, 192] and not "
        "[192, 192]",
    ),
    "vocabulary": (config(vocab_size=300), "model.embed_tokens.weight is [259, 192] and not [300, 192]"),
    "empty weights": (cut(0), "the model in {folder} could not be loaded: SafetensorError: "),
    "truncated weights": (cut(-1), "the model in {folder} could not be loaded: SafetensorError: "),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "no file named model.safetensors"),
    "config.json": (
        content("config.json", '{"a": '),
        "the model in {folder} could not be loaded: OSError: ",
    ),
    "config.json's types": (config(hidden_size="a"), "Field 'hidden_size' expected int, got str"),
    "config.json's sizes": (config(num_attention_heads=0), "ZeroDivisionError"),
    "unknown model": (config(model_type="nosuch"), "model type `nosuch`"),
    "dtype": (config(dtype="nosuch"), "no attribute 'nosuch'"),
    "quantization": (config(quantization_config={"quant_method": "gptq", "bits": 4}), "ImportError: "),
    "no layers": (
        lambda folder: (without("layers.")(folder), config(num_hidden_layers=0)(folder)),
        "0 of the 0 layers",
    ),
    "forward": (config(return_dict=False), "LlamaForCausalLM could not compute one token: AttributeError"),
    "tokenizer.json": (
        content("tokenizer.json", "{}"),
        "the tokenizer in {folder} could not be loaded: KeyError: 'added_tokens'",
    ),
    "tokenizer_config.json": (
        lambda folder: checkpoints.edit_json(folder / "tokenizer_config.json", model_max_length="x"),
        "the tokenizer in {folder} could not be loaded: TypeError: ",
    ),
    "tokenizer of another kind": (
        lambda folder: checkpoints.edit_json(
            folder / "tokenizer_config.json", tokenizer_class="BertTokenizer"
        ),
        "its tokenizer could not encode prompt 1: ",
    ),
    "generation_config.json": (
        content("generation_config.json", '{"a": '),
        "the generation_config.json in {folder} could not be loaded: OSError: ",
    ),
    "eos": (
        content("generation_config.json", '{"eos_token_id": [1, "a"]}'),
        "got eos_token_id [1, 'a'] in its generation_config.json; accepted: numbers of tokens",
    ),
    "a distributed checkpoint": (
        lambda folder: (folder / WEIGHTS).rename(folder / "shard-00001-model-00001-of-00001.safetensors"),
        "with a distributed checkpoint",
    ),
}


@pytest.mark.parametrize(("damage", "message"), CASES.values(), ids=CASES)
def test_damage_is_named(
    damage: Damage, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints.copy_default(tmp_path)
    damage(folder)
    error = run_error(capsys, *OPTIONS, str(folder))
    assert error.startswith("--model: ")
    assert message.format(folder=folder) in error


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("experts.1.w1", "parts are missing or do not fit together: model.layers.0.mlp.experts.gate_up_proj"),
        ("experts.1.w2", "model.layers.0.mlp.experts.down_proj is [3, 64, 96] and not [4, 64, 96]"),
        ("block_sparse_moe.gate.", "lacks tensors of its model: model.layers.0.mlp.gate.weight"),
    ],
)
def test_missing_experts_are_named(
    lost: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints.save("mixtral", tmp_path)
    without(lost)(folder)
    assert message in run_error(capsys, *OPTIONS, str(folder))


def test_the_reference_of_verify_is_checked_too(tmp_path: Path) -> None:
    folder = checkpoints.copy_default(tmp_path)
    without("layers.2.")(folder)
    with pytest.raises(GenerateError, match="lacks tensors of its model"):
        Checkpoint(folder, torch.float32).load_model("eager", "eager")


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_tied_weights_may_be_absent(kind: str, tmp_path: Path) -> None:
    folder = checkpoints.save(kind, tmp_path)
    checkpoints.edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight", None))
    model, unused = Checkpoint(folder, torch.float32).load_model(attention.ATTENTION, None)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not unused


def test_tensors_that_are_not_used_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoints.copy_default(tmp_path)
    config(num_hidden_layers=2)(folder)
    assert run(*OPTIONS, str(folder), "--verify") == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(
        f"flashxla generate: warning: --model: {folder} has tensors that its model does"
    )
    assert lines[0].endswith("... (18 in all)")


class _Command:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> object:
        return os.system, (self.command,)


def test_pickled_weights_are_refused_unread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoints.copy_default(tmp_path / "checkpoint")
    (folder / WEIGHTS).unlink()
    marker = tmp_path / "marker"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Command(f"touch {marker}")))
    assert run_error(capsys, *OPTIONS, str(folder)) == (
        f"--model: got {folder} with pickled weights (pytorch_model.bin); accepted: weights in safetensors files"
    )
    assert not marker.exists()


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoints.copy_default(tmp_path)
    config(vocab_size=90, pad_token_id=0)(folder)

    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:90].contiguous()

    checkpoints.edit_tensors(folder, shorten)
    assert run_error(capsys, *OPTIONS, str(folder)) == (
        "--model: its tokenizer makes token 256 of prompt 1; accepted: tokens below 90, which is how many the model "
        "has"
    )
