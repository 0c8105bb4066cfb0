"""The upstream code that the package relies on, as hashes: python -m tests.vllm_legacy.upstream writes them anew."""

from __future__ import annotations

import json
from pathlib import Path

from tests.vllm.upstream import hash_of

FILE = Path(__file__).with_name("upstream.json")


def recorded() -> dict[str, str]:
    """The hashes of the versions that the package was written for."""
    return json.loads(FILE.read_text())


def installed() -> dict[str, str]:
    """The hashes of what is installed; a name that is gone has the hash "missing"."""
    from flashxla_vllm_legacy.overrides import OVERRIDES, USED

    names = {name for names in OVERRIDES.values() for name in names} | set(USED)
    return {name: hash_of(name) for name in sorted(names)}


if __name__ == "__main__":
    FILE.write_text(json.dumps(installed(), indent=1) + "\n")
