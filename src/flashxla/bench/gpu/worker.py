"""The process that measures: a JSON request as its argument, an event a line on its standard output."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from flashxla.bench.gpu.settings import Settings

DEVICE_LOST = 3

Emit = Callable[[dict[str, Any]], None]


def main() -> int:
    """Measure what the request names: {"settings": ..., "todo": [[section, [case, ...]], ...]}."""
    request = json.loads(sys.argv[1])
    # The events have the standard output for themselves; whatever libraries print goes to the error stream.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=out, flush=True)

    avoid = tuple((case, contender) for case, contender in request["settings"].pop("avoid"))
    return measure(Settings(**request["settings"], avoid=avoid), request["todo"], emit)


def measure(settings: Settings, todo: list[tuple[str, list[str]]], emit: Emit) -> int:
    """Events: facts, ceilings, begin and end of cases, rows."""
    import torch

    from flashxla.bench.gpu import ceilings, compare, facts, sections

    torch.manual_seed(0)
    emit({"event": "facts", "facts": facts.device(settings)})
    emit({"event": "ceilings", "ceilings": ceilings.measure(settings)})
    for section, cases in todo:
        for case in cases:
            print(f"{section}: {case}", file=sys.stderr, flush=True)
            emit({"event": "case", "section": section, "case": case})
            try:
                for row in sections.run(section, case, settings):
                    if "begin" in row:
                        emit({"event": "begin", "what": row["begin"]})
                    else:
                        emit({"event": "row", "row": row})
            except Exception as error:  # the other cases go on
                emit({"event": "failed", "error": compare.first_line(error)})
                print(f"  not measured: {compare.first_line(error)}", file=sys.stderr, flush=True)
                if compare.device_is_lost(settings):
                    return DEVICE_LOST
            emit({"event": "end"})
            compare.free_memory(settings)
    emit({"event": "ceilings", "ceilings": ceilings.measure(settings)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
