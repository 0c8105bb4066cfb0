"""The table of tests that are not run, or not passed, with reasons: exceptions.toml."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

LEFT_OUT = "left out: "


class Refusal(NamedTuple):
    """A test that fails with flashxla, as is documented. message: a pattern that is in what it fails with."""

    message: str
    reason: str


class Exceptions:
    """The table. Tests go by Class::name, with * and ? as in names of files."""

    def __init__(self, path: Path | None = None) -> None:
        table = tomllib.loads(
            (path or Path(__file__).with_name("exceptions.toml")).read_text(encoding="utf-8")
        )
        self._left_out = [(name, row["reason"]) for row in table["left_out"] for name in row["tests"]]
        self._refused = [
            (name, Refusal(row["message"], row["reason"]))
            for row in table["refused"]
            for name in row["tests"]
        ]
        self._skipped = [(row["message"], row["reason"]) for row in table["skipped"]]

    def left_out(self, test: str) -> str | None:
        """Why a test is not run, None if it is."""
        return next((reason for name, reason in self._left_out if _is(test, name)), None)

    def refused(self, test: str) -> Refusal | None:
        """What a test asks for that flashxla refuses."""
        return next((refusal for name, refusal in self._refused if _is(test, name)), None)

    def skipped(self, message: str) -> str | None:
        """What a message means with which a test of transformers skips itself; None if the table does not have it."""
        return next((reason for pattern, reason in self._skipped if re.search(pattern, message)), None)


def _is(test: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(test.split("::", 1)[-1], pattern)
