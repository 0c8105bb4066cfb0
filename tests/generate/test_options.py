"""What is wrong with the options is said at once: before PyTorch is imported, and before anything is computed."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from pathlib import Path

import pytest

from flashxla.generate import cli, options
from flashxla.generate.errors import GenerateError
from flashxla.output_file import OutputError

# With these modules out of reach, an import of one is another error.
_PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(["torch", "torch_xla", "transformers", "rich", "safetensors"]))
from flashxla.cli import main
sys.exit(main(["generate", *sys.argv[1:]]))
"""


def check(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    args = parser.parse_args(arguments)
    options.check(args)
    return args


def test_nothing_heavy_is_imported() -> None:
    command = [sys.executable, "-c", _PROGRAM, "--temperature", "-1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stderr == (
        "flashxla generate: error: --temperature: got -1.0; accepted: 0 (greedy) or a number > 0\n"
    )
    assert result.returncode == 2
    # The imports do fail with options that are right.
    result = subprocess.run(command[:3], capture_output=True, text=True, timeout=60)
    assert "torch is not installed: pip install '.[generate]' in a checkout of flashxla" in result.stderr
    assert result.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--temperature", "nan"), "--temperature: got nan; accepted: "),
        (("--top-k", "-1"), "--top-k: got -1; accepted: "),
        (("--top-p", "2"), "--top-p: got 2.0; accepted: "),
        (("--verify", "--temperature", "1"), "--verify: got --temperature 1.0; accepted: "),
        (
            ("--max-seqs", "9", "--max-batch-tokens", "8"),
            "--max-batch-tokens: got 8; accepted: at least --max-s",
        ),
        (("--frontend", "lazy", "--device", "cuda"), "--device: got 'cuda' with --frontend lazy; accepted: "),
        (("--frontend", "openxla", "--device", ""), "--device: got '' with --frontend openxla; accepted: "),
        (
            ("--num-blocks", "70000", "--block-size", "70000"),
            "--num-blocks: got 70000 with --block-size 70000; ",
        ),
        (("--model", "/nowhere"), "--model: got /nowhere; accepted: a folder that holds a checkpoint"),
        (
            ("--prompt", "ok", "a\udcff\udcfeb"),
            r"--prompt: got '\udcff\udcfe' at character 2 of prompt 2; accep",
        ),
        (("--prompt", "a", "--prompts-file", "-"), "--prompts-file: got it beside --prompt; accepted: one"),
        (
            ("--prompts-file", "/nowhere"),
            "--prompts-file: got /nowhere: No such file or directory; accepted: a",
        ),
        (
            ("--prompts-file", "/dev/null"),
            "--prompts-file: got /dev/null without a line; accepted: a prompt on",
        ),
        (("--system", "Be brief."), "--system: got it without --chat; accepted: both, or neither"),
        (
            ("--json", "/nowhere/x.json"),
            "--json: got '/nowhere/x.json': No such file or directory; accepted: ",
        ),
        (("--json", "/"), "--json: got '/': Is a directory; accepted: "),
        (("--json", "x" * 300), "File name too long; accepted: a file that can be written, or -"),
        (("--json", ""), "--json: got '': No such file or directory; accepted: "),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises((GenerateError, OutputError)) as error:
        check(*arguments)
    assert message in str(error.value)
    assert str(error.value).startswith("--")


def test_a_file_that_may_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    path.touch()
    # The superuser, who may run the tests, may write everywhere.
    monkeypatch.setattr(options.os, "access", lambda *_: False)
    with pytest.raises(OutputError, match=r"--json: .*: Permission denied; accepted"):
        check("--json", str(path))


def test_looking_at_the_file_changes_nothing(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("kept")
    check("--json", str(old))
    check("--json", str(new))
    assert old.read_text() == "kept"
    assert not new.exists()


def test_a_library_that_is_not_built_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHXLA_LIBRARY_DIR", str(tmp_path))
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(GenerateError, match=r"^libflashxla_cpu\.so not found"):
        check()
    with pytest.raises(GenerateError, match=r"^libflashxla_cuda\.so not found"):
        check("--frontend", "torch", "--device", "cuda:1")
    monkeypatch.setenv("PJRT_DEVICE", "CUDA")
    with pytest.raises(GenerateError, match=r"^libflashxla_cuda\.so not found"):
        check()


def test_prompts_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Grüße\n\n  two words\r\nlast"
    (tmp_path / "prompts.txt").write_bytes(text.encode())
    expected = ("Grüße", "  two words", "last")
    assert check("--prompts-file", str(tmp_path / "prompts.txt")).prompts == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert check("--prompts-file", "-").prompts == expected
    (tmp_path / "prompts.txt").write_bytes(b"ok\na\xff")
    with pytest.raises(
        GenerateError, match=r"--prompts-file: got '.udcff' at character 2 of line 2; accepted: text"
    ):
        check("--prompts-file", str(tmp_path / "prompts.txt"))
