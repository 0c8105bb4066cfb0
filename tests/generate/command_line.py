"""Runs the command in this process and reads its JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from flashxla.generate import cli


def run(*options: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(options))


def run_json(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    code = run(*options, "--json", "-")
    return code, json.loads(capsys.readouterr().out)


def run_error(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The message of a command that must end with exit code 2 and one line of its own, the last."""
    capsys.readouterr()  # What the test wrote before is not the command's.
    assert run(*options) == 2
    # A framework that the command starts may have told of its start before.
    *before, last = capsys.readouterr().err.splitlines()
    assert not any("flashxla" in line or "Traceback" in line for line in before), before
    assert last.startswith("flashxla generate: error: ")
    return last.removeprefix("flashxla generate: error: ")
