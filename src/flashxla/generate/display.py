"""What the user sees while tokens come: live panels on a terminal, plain text elsewhere."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

# More than these would not fit on a terminal.
_PANELS = 8
# A model's output must not steer the terminal: control characters become their pictures.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_PICTURES |= {code: 0xFFFD for code in range(0x80, 0xA0)}


class Display(Protocol):
    """Takes the text of each prompt as it is generated."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, index: int, text: str, finished: bool) -> None:
        """Show more text of a prompt."""
        ...


class QuietDisplay:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, index: int, text: str, finished: bool) -> None:
        """Show nothing."""


class PlainDisplay(QuietDisplay):
    """Streams to a file or pipe, prompt after prompt: a later prompt's text waits for its turn."""

    def __init__(self, prompts: list[str]) -> None:
        self._waiting = list(prompts)
        self._begun: set[int] = set()
        self._finished: set[int] = set()
        self._current = 0
        self._open = False

    def __exit__(self, *_: object) -> None:
        """Print what still waits, which is something only where generation ended early."""
        for index in sorted(self._begun):
            if index >= self._current:
                self._current = index
                self._print_current()
                self._close_current()

    def show(self, index: int, text: str, finished: bool) -> None:
        """Show more text of a prompt, now or when its turn comes."""
        self._waiting[index] += text
        self._begun.add(index)
        if finished:
            self._finished.add(index)
        while self._current < len(self._waiting):
            self._print_current()
            if self._current not in self._finished:
                return
            self._close_current()

    def _print_current(self) -> None:
        if not self._open:
            print(f"--- prompt {self._current + 1}")
            self._open = True
        text, self._waiting[self._current] = self._waiting[self._current], ""
        print(text, end="", flush=True)

    def _close_current(self) -> None:
        print(flush=True)
        self._open = False
        self._current += 1


class RichDisplay:
    """A panel for each prompt, filled as its tokens come, over a progress bar.

    Of many prompts each is shown above the bar once it is finished. rich draws in a thread of its own: what both
    threads use is locked, and each drawing gets its own copy.
    """

    def __init__(self, prompts: list[str], total: int, console: Console) -> None:
        self._prompts = [prompt.translate(_PICTURES) for prompt in prompts]
        self._progress = Progress(
            TextColumn("tokens"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._each = total // len(prompts)
        self._counts = [0] * len(prompts)
        self._task = self._progress.add_task("tokens", total=total)
        self._lock = threading.Lock()
        self._texts = [""] * len(prompts)
        self._finished: set[int] = set()
        self._many = len(prompts) > _PANELS
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, index: int, text: str, finished: bool) -> None:
        """Show more text of a prompt."""
        with self._lock:
            self._texts[index] += text.translate(_PICTURES)
            if finished:
                self._finished.add(index)
        if finished and self._many:
            self._live.console.print(self._panel(index, self._texts[index], done=True))
        self._counts[index] += 1
        # A prompt that ends early has no more to come: count it as done. (Progress has a lock of its own.)
        self._progress.advance(self._task, 1 + (self._each - self._counts[index] if finished else 0))

    def _render(self) -> Group:
        with self._lock:
            texts, finished = list(self._texts), set(self._finished)
        shown = () if self._many else range(len(texts))
        return Group(*(self._panel(i, texts[i], i in finished) for i in shown), self._progress)

    def _panel(self, index: int, text: str, done: bool) -> Panel:
        return Panel(
            Text.assemble((self._prompts[index], "bold"), text),
            title=f"prompt {index + 1}",
            border_style="green" if done else "blue",
        )


def make_display(prompts: list[str], total: int, quiet: bool) -> Display:
    """The display that fits where standard output goes."""
    if quiet:
        return QuietDisplay()
    console = Console()
    if sys.stdout.isatty() and console.is_terminal:
        return RichDisplay(prompts, total, console)
    return PlainDisplay(prompts)
