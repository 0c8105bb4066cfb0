"""A cache or a run that memory is too small for ends in one line; other errors keep their traceback."""

from __future__ import annotations

import pytest

from flashxla.generate import command, memory
from flashxla.generate.runner import TorchRunner
from tests.generate.command_line import run, run_error, run_json

OPTIONS = ("--frontend", "torch", "--max-new-tokens", "2", "--prompt", "a")


def test_a_cache_beyond_memory_is_not_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "machine_bytes", lambda: 2**20)
    # 4 layers, 2 heads of 32 numbers of 4 bytes, keys and values: 2 KiB a token.
    assert run(*OPTIONS, "--num-blocks", "64", "--block-size", "8") == 0
    capsys.readouterr()
    monkeypatch.setattr(command, "TorchRunner", None)
    assert run_error(capsys, *OPTIONS, "--num-blocks", "65", "--block-size", "8") == (
        "--num-blocks: got 65 with --block-size 8, 0.0009918 GiB of cache; accepted: at most 64 blocks of that size, "
        "as this machine has 0.0009766 GiB of memory"
    )


def test_the_machine_has_memory() -> None:
    assert 2**28 < memory.machine_bytes() < 2**50


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("Bad StatusOr access: RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
        (KeyError("x"), False),
    ],
)
def test_running_out_of_memory_is_told_and_bugs_are_not_hidden(
    error: Exception, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(TorchRunner, "run", fail)
    if told:
        message = run_error(capsys, *OPTIONS)
        assert message.startswith(f"out of memory: {type(error).__name__}")
        assert message.endswith("; smaller --num-blocks, --max-batch-tokens, --max-seqs or --model need less")
    else:
        with pytest.raises(type(error)):
            run(*OPTIONS)


def test_shapes_are_no_larger_than_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = (
        "--num-blocks",
        "4",
        "--block-size",
        "8",
        "--max-seqs",
        "99999999",
        "--max-batch-tokens",
        "9999999999",
    )
    code, report = run_json(capsys, *OPTIONS, *sizes)
    assert code == 0
    assert report["token_buckets"] == [4, 32]
    assert len(report["prompts"][0]["tokens"]) == 2
