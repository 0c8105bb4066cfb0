"""The terminal display: every prompt's text, and a bar that ends full."""

from __future__ import annotations

import io

from rich.console import Console

from flashxla.generate.display import RichDisplay


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
