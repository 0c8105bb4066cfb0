"""What the records of two runs of a suite say: with transformers' own attention, and with flashxla's."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from typing import Any

from .exceptions import LEFT_OUT, Exceptions

Records = dict[str, dict[str, Any]]

# What a test can come to with flashxla. Those of PROBLEMS should not be.
PASSED, WITHOUT_ATTENTION, REFUSED, NOT_RUN = "passed", "passed, without attention", "refused", "not run"
FAILS_ANYWAY = "fails with sdpa, too"
PROBLEMS = (
    "failed",
    "passed without a call of flashxla",
    "called sdpa",
    "not refused",
    "skipped, not in the table",
)


def outcomes(mine: Records, baseline: Records, table: Exceptions) -> dict[str, tuple[str, str]]:
    """For each test what it came to, and why."""
    return {test: _outcome(test, record, baseline.get(test), table) for test, record in mine.items()}


def _outcome(
    test: str, record: dict[str, Any], baseline: dict[str, Any] | None, table: Exceptions
) -> tuple[str, str]:
    outcome, message, calls = record["outcome"], record["reason"], record["calls"]
    refusal = table.refused(test)
    if outcome in ("skipped", "xfailed"):
        if message.startswith(LEFT_OUT):
            return NOT_RUN, message.removeprefix(LEFT_OUT)
        reason = table.skipped(message)
        return (NOT_RUN, reason) if reason else (PROBLEMS[4], message)
    if outcome == "failed":
        if refusal and re.search(refusal.message, message):
            return REFUSED, refusal.reason
        return (FAILS_ANYWAY if baseline and baseline["outcome"] == "failed" else PROBLEMS[0]), message
    if refusal:
        return PROBLEMS[3], refusal.reason
    if calls["sdpa"]:
        return PROBLEMS[2], f"{calls['sdpa']} calls"
    if calls["flashxla"]:
        return PASSED, ""
    if baseline and baseline["calls"]["sdpa"]:
        return PROBLEMS[1], f"with sdpa: {baseline['calls']['sdpa']} calls"
    return WITHOUT_ATTENTION, ""


def report(name: str, mine: Records, baseline: Records, table: Exceptions) -> Iterator[str]:
    """Lines to print: counts, reasons with counts, and problems test by test."""
    found = outcomes(mine, baseline, table)
    counts = collections.Counter(outcome for outcome, _ in found.values())
    with_sdpa = sum(record["outcome"] == "passed" for record in baseline.values())
    called = counts[PASSED]
    yield f"{name}: {called + counts[WITHOUT_ATTENTION]} passed with flashxla, {with_sdpa} with sdpa"
    yield f"  {called} of them called flashxla's operations; the others have nothing to do with sdpa's place"
    for outcome in (REFUSED, NOT_RUN):
        yield f"  {outcome}: {counts[outcome]}"
        reasons = collections.Counter(reason for kind, reason in found.values() if kind == outcome)
        yield from (f"    {count:4} {reason}" for reason, count in reasons.most_common())
    for test, (outcome, message) in found.items():
        if outcome in (*PROBLEMS, FAILS_ANYWAY):
            yield f"  {outcome}: {test}: {message.splitlines()[0] if message else ''}"
    fell_with_sdpa = [
        test
        for test, record in baseline.items()
        if record["outcome"] == "failed" and found[test][0] == PASSED
    ]
    yield from (f"  passed, and fails with sdpa: {test}" for test in fell_with_sdpa)


def problems(mine: Records, baseline: Records, table: Exceptions) -> int:
    """How many tests came to what they should not."""
    return sum(outcome in PROBLEMS for outcome, _ in outcomes(mine, baseline, table).values())
