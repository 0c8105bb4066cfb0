"""Ctrl-C, also where a library swallows it or makes an error of its own of it.

torch.compile's tracer and Python's lazy imports do the latter, functions called by the garbage collector the former.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType, TracebackType
from typing import Self


class Interrupts:
    """While entered, Ctrl-C raises KeyboardInterrupt as ever, and is remembered."""

    def __init__(self) -> None:
        self.pressed = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed and nothing came of it."""
        if self.pressed:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        self._handler = signal.getsignal(signal.SIGINT)
        self._hook = sys.unraisablehook
        # Not where a program handles it in its own way, or a shell made a background process deaf to it.
        if self._handler is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._press)
            sys.unraisablehook = self._report_unraisable
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handler)
            sys.unraisablehook = self._hook

    def _press(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        raise KeyboardInterrupt

    def _report_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        # It is not lost: check raises it again.
        if unraisable.exc_type is not KeyboardInterrupt:
            self._hook(unraisable)
