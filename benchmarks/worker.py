"""The process that measures: a JSON request as its argument, a JSON message a line on its standard output.

A message has one key: facts, ceilings, begin ([contender, whether it is ours]), row, end (of a job).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import compare, device, sections
from benchmarks.sections import Job
from benchmarks.settings import Settings

DEVICE_LOST = 3

Emit = Callable[[dict[str, Any]], None]


def main() -> int:
    """Measure what the request names: {"settings": ..., "jobs": [...]}."""
    request = json.loads(sys.argv[1])
    # The messages have the standard output for themselves; whatever libraries print goes to the error stream.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=out, flush=True)

    avoid = tuple((case, contender) for case, contender in request["settings"].pop("avoid"))
    settings = Settings(**request["settings"], avoid=avoid)
    return measure([Job(**job) for job in request["jobs"]], settings, emit)


def measure(jobs: Sequence[Job], settings: Settings, emit: Emit) -> int:
    """Emit everything. Returns the exit code."""
    torch.manual_seed(0)
    with_ceilings = not any(
        job.frontend for job in jobs
    )  # PyTorch/XLA's processes have no other way to the GPU
    if with_ceilings:
        emit({"facts": device.facts(settings)})
        emit({"ceilings": device.ceilings(settings)})
    for job in jobs:
        print(f"{job.section}: {job.case}", file=sys.stderr, flush=True)
        emit({"begin": [None, False]})
        try:
            for row in sections.run(job, settings):
                emit({"begin": row["begin"]} if "begin" in row else {"row": row})
        except Exception as error:  # the other cases go on
            failed = compare.first_line(error)
            print(f"  not measured: {failed}", file=sys.stderr, flush=True)
            if isinstance(error, compare.DeviceLost) or device.is_lost(settings):
                return DEVICE_LOST
            emit({"row": {"failed": failed}})
        emit({"end": None})
        device.free_memory(settings)
    if with_ceilings:
        emit({"ceilings": device.ceilings(settings)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
