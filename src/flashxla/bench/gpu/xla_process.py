"""Starts the process that measures a step in PyTorch/XLA: JAX's must not share a PJRT client's GPU with it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

from flashxla.bench.gpu import profile
from flashxla.bench.gpu.compare import Row
from flashxla.bench.gpu.settings import Settings


def is_installed() -> bool:
    """Whether PyTorch/XLA is there."""
    return importlib.util.find_spec("torch_xla") is not None


def run(frontend: str, case: str, settings: Settings) -> Iterator[Row]:
    """The rows of a front end; one that says why, if the process does not get to its end."""
    if (case, frontend) in settings.avoid:
        return
    yield {"begin": frontend}
    request = {
        "settings": {**dataclasses.asdict(settings), "avoid": ()},
        "frontend": frontend,
        "case": case,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "flashxla.bench.gpu.xla_step", json.dumps(request)],
        stdin=subprocess.PIPE,  # it ends with this one, however that ends
        stdout=subprocess.PIPE,
        env=environment(os.environ, settings),
        text=True,
    )
    assert process.stdout is not None
    doing, ours = frontend, True
    try:
        for line in process.stdout:
            row = json.loads(line)
            if row.get("contender") == frontend:
                doing, ours = profile.title(frontend), False
            yield row
        code = process.wait()
    finally:
        process.kill()
        process.wait()
    if code != 0:
        failed = f"the process ended with {code}"
        yield {"case": case, "dtype": settings.dtype, "contender": doing, "ours": ours, "failed": failed}


def environment(parent: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """Of that process: PyTorch/XLA has the device, and JAX, which lowers the operations for it, none."""
    return {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the process that waits for it holds memory, too
        **parent,
        "PJRT_DEVICE": "CUDA" if settings.cuda else "CPU",
        "JAX_PLATFORMS": "cpu",
    }
