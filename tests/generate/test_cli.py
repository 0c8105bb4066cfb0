"""The command's messages, exit codes and output."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    FalconConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
)
from transformers.models.llama import modeling_llama

from flashxla.generate import attention
from tests.generate import checkpoints
from tests.generate.command_line import run, run_error, run_json


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "/nowhere"), "--model: got /nowhere; accepted: a folder that holds a checkpoint"),
        (("--max-seqs", "9", "--max-batch-tokens", "8"), "--max-batch-tokens: got 8; accepted: at least"),
        (
            ("--max-length", "513"),
            "--max-length: got 513; accepted: at most 512, the longest that the model takes",
        ),
        (
            ("--max-length", "161", "--num-blocks", "10"),
            "--max-length: got 161; accepted: at most 160, --num-blocks times --block-size",
        ),
        (("--num-blocks", "1", "--prompt", "x" * 20), "prompt 1: got 21 tokens; accepted: at most 16"),
        (("--prompt", "ok", "x" * 600), "prompt 2: got 601 tokens; accepted: at most 512"),
        (("--verify", "--temperature", "1"), "--verify: got --temperature 1.0"),
        (("--top-p", "2"), "--top-p: got 2.0"),
        (("--device", "tpu"), "--device: got 'tpu'"),
    ],
)
def test_bad_input_is_named(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--frontend", "torch", *options) == 2
    assert f"flashxla generate: error: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--num-blocks", "--max-new-tokens"])
def test_sizes_are_positive(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(option, "0")
    assert f"argument {option}: got '0'; accepted: a whole number >= 1" in capsys.readouterr().err


def test_device_is_for_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--frontend", "lazy", "--device", "cuda") == 2
    assert "--device: got 'cuda' with --frontend lazy" in capsys.readouterr().err


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    assert run("--frontend", "lazy") == 2
    assert "pip install '.[generate,torch-xla]' in a checkout of flashxla" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "transformers", None)
    for module in [name for name in sys.modules if name.startswith("flashxla.generate.")]:
        if module != "flashxla.generate.cli" and module != "flashxla.generate.errors":
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr("flashxla.generate.command", raising=False)
    assert run("--frontend", "torch") == 2
    assert "transformers is not installed: pip install '.[generate]' in a checkout" in capsys.readouterr().err


NO_INTERFACE = "whose attention does not go through transformers' attention interface"
_TINY = {"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MambaConfig(**_TINY), "has layers of type linear_attention"),
        (
            LlamaConfig(**_TINY, head_dim=640),
            "LlamaAttention: ragged_paged_attention: query: got head size 640",
        ),
        (BloomConfig(vocab_size=259, hidden_size=16, n_layer=1, n_head=2), NO_INTERFACE),
        (FalconConfig(**_TINY), NO_INTERFACE),
        (
            Llama4TextConfig(
                **_TINY, num_key_value_heads=1, head_dim=8, intermediate_size=16, num_local_experts=1
            ),
            "has layers of type chunked_attention",
        ),
    ],
    ids=["mamba", "wide", "bloom", "falcon", "llama4"],
)
def test_models_that_would_be_answered_wrongly_are_refused(
    config: PreTrainedConfig, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert run("--frontend", "torch", "--model", str(tmp_path)) == 2
    error = capsys.readouterr().err
    assert "error: --model: " in error
    assert message in error


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.own_cache, "attention", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        run("--frontend", "torch")


def test_a_missing_tokenizer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoints.save("gpt2", tmp_path)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert run("--frontend", "torch", "--model", str(folder)) == 2
    assert f"--model: {folder} has no tokenizer" in capsys.readouterr().err


def test_a_folder_that_does_not_load_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BertConfig().save_pretrained(tmp_path)
    assert run("--frontend", "torch", "--model", str(tmp_path)) == 2
    assert f"--model: the model in {tmp_path} could not be loaded" in capsys.readouterr().err


def test_plain_output(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--frontend", "torch", "--max-new-tokens", "4", "--ignore-eos", "--prompt", "ab", "cd")
    assert run(*options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("torch on cpu: nothing compiled, 2 shapes: 8 and 256 tokens")
    assert lines[1] == "--- prompt 1"
    assert lines[2].startswith("ab")
    assert "--- prompt 2" in lines
    assert lines[-1].startswith("8 tokens in ")
    assert "tokens/s" in lines[-1]


def test_json_goes_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    options = ("--frontend", "torch", "--max-new-tokens", "4", "--ignore-eos", "--prompt", "ab")
    assert run(*options, "--json", str(path)) == 0
    capsys.readouterr()
    _, printed = run_json(capsys, *options)
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["prompts"] == printed["prompts"]


def test_a_file_for_json_is_looked_at_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flashxla.generate.command.run", None)
    assert "--json: got '/nowhere/x.json'" in run_error(capsys, "--json", "/nowhere/x.json")


def test_text_is_not_lost_with_the_file_for_json(capsys: pytest.CaptureFixture[str]) -> None:
    # A file that can be opened, on a disk that is full.
    assert run("--frontend", "torch", "--max-new-tokens", "4", "--prompt", "ab", "--json", "/dev/full") == 2
    printed = capsys.readouterr()
    assert "--json: got '/dev/full': No space left on device" in printed.err
    assert "--- prompt 1\nab" in printed.out
    assert "4 tokens in " in printed.out


@pytest.mark.parametrize("options", [(), ("--json", "-")], ids=["text", "json"])
def test_standard_output_need_not_be_utf8(options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert run("--frontend", "torch", "--max-new-tokens", "2", "--prompt", "é€", *options) == 0
    out.seek(0)
    if options:
        assert json.load(out)["prompts"][0]["prompt"] == "é€"
    else:
        assert "--- prompt 1\n??" in out.read()


def test_a_reader_that_has_enough_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert run("--frontend", "torch", "--max-new-tokens", "2") == 141
        # Python does the same when it exits.
        print("more", flush=True)
    assert capsys.readouterr().err == ""


def test_what_torch_compile_cannot_trace_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch_xla")
    forward = modeling_llama.LlamaMLP.forward

    def untraceable(*args: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return forward(*args)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", untraceable)
    message = run_error(capsys, "--frontend", "openxla", "--prompt", "a")
    assert message.startswith(
        "--frontend: got openxla with a model that torch.compile cannot make one program of: "
    )
    assert message.endswith("accepted: --frontend lazy or torch with this model")


TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str], system: str | None) -> None:
    """A message is what the template makes of it."""
    folder = checkpoints.copy_default(tmp_path)
    options = ("--frontend", "torch", "--model", str(folder), "--max-new-tokens", "5")
    assert run(*options, "--chat", "--prompt", "Hello") == 2
    assert (
        "--chat: got a model without a chat template; accepted: models that have" in capsys.readouterr().err
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    more = () if system is None else ("--system", system)
    _, chat = run_json(capsys, *options, "--chat", *more, "--prompt", "Hello")
    written = "<user>Hello<answer>" if system is None else "<system>Be brief.<user>Hello<answer>"
    _, plain = run_json(capsys, *options, "--prompt", written)
    assert chat["prompts"][0]["tokens"] == plain["prompts"][0]["tokens"]
    assert chat["prompts"][0]["prompt"] == "Hello"


def test_texts_that_end_at_the_longest_length(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--frontend", "torch", "--max-new-tokens", "40", "--ignore-eos", "--prompt", "A list", "A")
    assert run(*options, "--max-length", "42") == 0
    assert (
        "--max-new-tokens: got 40; 1 of 2 texts end earlier, at the 42 tokens that" in capsys.readouterr().err
    )
    assert run(*options) == 0
    assert "--max-new-tokens" not in capsys.readouterr().err
