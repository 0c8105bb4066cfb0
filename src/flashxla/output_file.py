"""The files that commands write: whether they can is found out before the work, not after it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

STANDARD_OUTPUT = "-"


class OutputError(ValueError):
    """A file that cannot be written; the message names the option."""


def check(option: str, destination: str | None) -> None:
    """Find out whether a file can be written there, and leave all as it is. Raises OutputError."""
    if destination in (None, STANDARD_OUTPUT):
        return
    assert destination is not None
    try:
        if not os.path.exists(destination):
            # Only the system knows all that can be wrong with a new file: its folder, its name, the disk.
            open(destination, "x").close()
            os.unlink(destination)
        elif os.path.isdir(destination):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        elif not os.access(destination, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _not_writable(option, destination, error) from error


def write_json(destination: str, content: Any, option: str = "--json") -> None:
    """Write a document to a file, or for "-" to standard output. Raises OutputError."""
    if destination == STANDARD_OUTPUT:
        # In ASCII, which standard output holds in every locale.
        print(json.dumps(content, indent=2), flush=True)
        return
    try:
        Path(destination).write_text(
            json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    except OSError as error:
        raise _not_writable(option, destination, error) from error


def _not_writable(option: str, destination: str, error: OSError) -> OutputError:
    return OutputError(
        f"{option}: got {destination!r}: {error.strerror}; accepted: a file that can be written, "
        f"or {STANDARD_OUTPUT} for standard output"
    )
