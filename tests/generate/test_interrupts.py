"""Ctrl-C ends the command with one line and exit code 130, wherever it comes, and what there is is kept."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashxla.generate import checkpoint, command, verify
from flashxla.generate.interrupts import Interrupts
from flashxla.generate.runner import TorchRunner
from tests.generate.command_line import run

OPTIONS = (
    "--frontend",
    "torch",
    "--verify",
    "--max-new-tokens",
    "20",
    "--ignore-eos",
    "--prompt",
    "The",
    "A list",
)


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    """A shell that starts the tests in the background has SIGINT ignored, which the command respects."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def press_and_swallow() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        press()


def press_and_fail() -> None:
    try:
        press()
    except KeyboardInterrupt:
        raise UnboundLocalError("as torch._dynamo's") from None


def _after(calls: int, press: Callable[[], None], function: Callable) -> Callable:
    """The function, with Ctrl-C after so many calls."""
    count = 0

    def call(*args: object, **kwargs: object) -> object:
        nonlocal count
        count += 1
        if count == calls:
            press()
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("way", [press, press_and_swallow, press_and_fail])
@pytest.mark.parametrize(
    ("place", "calls", "tokens"),
    [
        ((command, "start_device"), 1, None),
        ((checkpoint.Checkpoint, "load_tokenizer"), 1, None),
        ((command, "warm_up"), 1, None),
        # Two calls to warm up, one for the prompts, then two tokens each.
        ((TorchRunner, "run"), 8, range(2 * 5, 2 * 6 + 1)),
        ((verify, "compare"), 1, [40]),
    ],
    ids=["start", "load", "compile", "generate", "verify"],
)
def test_anywhere(
    place: tuple[object, str],
    calls: int,
    tokens: list[int] | range | None,
    way: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    owner, name = place
    monkeypatch.setattr(owner, name, _after(calls, way, getattr(owner, name)))
    runners: list[bool] = []
    make_runner = _after(1, lambda: runners.append(True), command.make_runner)
    monkeypatch.setattr(command, "make_runner", make_runner)
    path = tmp_path / "out.json"
    assert run(*OPTIONS, "--json", str(path)) == 130
    printed = capsys.readouterr()
    assert printed.err == "flashxla generate: interrupted\n"
    # A Ctrl-C that was swallowed ends the stage that it came in.
    assert bool(runners) == (name not in ("start_device", "load_tokenizer"))
    if tokens is None:
        assert not path.exists()
        return
    report = json.loads(path.read_text())
    assert report["interrupted"] == "Ctrl-C"
    assert report["tokens"] in tokens
    assert "verify" not in report
    # Each prompt's text is there, also of the second one, whose turn to be printed had not come.
    for number, prompt in enumerate(report["prompts"], 1):
        assert prompt["text"]
        assert f"--- prompt {number}\n{prompt['prompt']}{prompt['text']}\n" in printed.out


def test_a_run_that_ends_by_itself_is_not_marked(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert run(*OPTIONS, "--json", str(path)) == 0
    assert json.loads(path.read_text())["interrupted"] is None


def test_the_handler_is_given_back() -> None:
    handler, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    with Interrupts() as interrupts:
        assert signal.getsignal(signal.SIGINT) is not handler
        press_and_swallow()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == (handler, hook)


def test_a_program_s_own_handler_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, handler)


def test_an_interrupt_in_a_callback_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    class Pressed:
        def __del__(self) -> None:
            press()

    class Broken:
        def __del__(self) -> None:
            raise ValueError("a bug")

    seen = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.exc_type))
        with Interrupts() as interrupts:
            Pressed()
            Broken()
            assert interrupts.pressed
    assert seen == [ValueError]
