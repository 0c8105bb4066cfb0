"""What the scripts that print tables have in common."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping


def print_chosen(tables: Mapping[str, Callable[[], None]], usage: str | None) -> None:
    """Print the tables that the command line names."""
    if not sys.argv[1:] or not set(sys.argv[1:]) <= set(tables):
        raise SystemExit(usage)
    for name in sys.argv[1:]:
        begin = time.perf_counter()
        tables[name]()
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
