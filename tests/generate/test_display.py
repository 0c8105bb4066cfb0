"""The displays: every prompt's text, a bar that ends full, and drawing in a thread while text comes."""

from __future__ import annotations

import io
import sys
import threading
import time

import pytest
from rich.console import Console

from flashxla.generate.display import PlainDisplay, RichDisplay


def test_panels_and_progress() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, height=40)
    with RichDisplay(["one", "two"], 8, console) as display:
        display.show(0, " red", False)
        display.show(1, " blue\x1b[31m", False)
        display.show(0, " [bold]green", True)
        for text in (" a", " b", " c"):
            display.show(1, text, text == " c")
    shown = out.getvalue()
    assert "prompt 1" in shown
    assert "prompt 2" in shown
    # Text is text: no markup, no escape sequences of the model's making.
    assert "\x1b[31m" not in shown
    assert "[bold]green" in shown
    # The first prompt ended early; its missing tokens count as done.
    assert "8/8" in shown


def test_a_drawing_is_a_copy() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=40)
    display = RichDisplay(["one"], 4, console)
    display.show(0, " before", False)
    drawing = display._live.get_renderable()
    display.show(0, " after", True)
    console.print(drawing)
    assert "before" in console.file.getvalue()
    assert "after" not in console.file.getvalue()


def test_drawing_while_text_comes() -> None:
    """rich draws in a thread; here it does without a pause, and threads take turns as often as they can."""
    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=40)
    prompts, tokens = 8, 8000
    display = RichDisplay(["text"] * prompts, tokens, console)
    done = threading.Event()
    errors: list[BaseException] = []

    def draw() -> None:
        try:
            while not done.is_set():
                # What the thread of rich does.
                console.render_lines(display._live.get_renderable())
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for count in range(tokens):
            display.show(count % prompts, f" word{count}", count >= tokens - prompts)
            time.sleep(0)
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not errors
    console.print(display._live.get_renderable())
    assert "word7999" in console.file.getvalue()
    assert "8000/8000" in console.file.getvalue()


def test_plain_text_comes_prompt_after_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainDisplay(["one", "two", "three"]) as display:
        display.show(1, " b", True)
        display.show(0, " a", False)
        assert capsys.readouterr().out == "--- prompt 1\none a"
        display.show(0, " c", True)
        display.show(2, " d", True)
    assert capsys.readouterr().out == " c\n--- prompt 2\ntwo b\n--- prompt 3\nthree d\n"


def test_plain_text_that_waited_comes_when_generation_ends_early(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), PlainDisplay(["one", "two", "three", "four"]) as display:
        display.show(0, " a", False)
        display.show(1, " b", False)
        display.show(3, " d", True)
        raise KeyboardInterrupt
    assert capsys.readouterr().out == "--- prompt 1\none a\n--- prompt 2\ntwo b\n--- prompt 4\nfour d\n"
