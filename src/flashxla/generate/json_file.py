"""Where --json writes."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from flashxla.generate.errors import GenerateError

STANDARD_OUTPUT = "-"


def check_destination(destination: str) -> None:
    """Find out whether a report can be written there, and leave all as it is. Raises GenerateError."""
    if destination == STANDARD_OUTPUT:
        return
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
        raise _not_writable(destination, error) from error


def write_json(destination: str, report: dict[str, Any]) -> None:
    """Write a report to a file, or for "-" to standard output. Raises GenerateError."""
    if destination == STANDARD_OUTPUT:
        # In ASCII, which standard output holds in every locale.
        print(json.dumps(report, indent=2), flush=True)
        return
    try:
        Path(destination).write_text(
            json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    except OSError as error:
        raise _not_writable(destination, error) from error


def _not_writable(destination: str, error: OSError) -> GenerateError:
    return GenerateError(
        f"--json: got {destination!r}: {error.strerror}; accepted: a file that can be written, "
        f"or {STANDARD_OUTPUT} for standard output"
    )
