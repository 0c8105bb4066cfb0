"""What can be measured: each section is a module with `run(section, case, settings)`."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import kv_write, llama, shape_lists
from benchmarks.compare import Row
from benchmarks.settings import Settings
from flashxla import install

_MODULES = {
    "prefill": "attention",
    "decode": "attention",
    "mixed": "attention",
    "kv_write": "kv_write",
    "overhead": "overhead",
    "plan": "plan",
    "step": "step",
}
SECTIONS = tuple(_MODULES)


@dataclasses.dataclass(frozen=True)
class Job:
    """A case to measure. frontend: PyTorch's, for a step."""

    section: str
    case: str
    frontend: str = ""


def processes(sections: Sequence[str], settings: Settings) -> list[list[Job]]:
    """The jobs of each process: one has all cases, and each step through PyTorch has its own.

    Two frameworks must not share a GPU's PJRT client.
    """
    jobs = [
        Job(section, case)
        for section in sections
        for case in cases(section, settings)
        if settings.only in case
    ]
    frontends = [
        *(llama.FRONTENDS if importlib.util.find_spec("torch_xla") else ()),
        *((llama.TORCHTPU,) if importlib.util.find_spec("torch_tpu") else ()),
        *((llama.TORCHAX,) if install.version("torchax") else ()),
    ]
    steps = [job for job in jobs if job.section == "step"]
    return [
        *filter(None, [jobs]),
        *([dataclasses.replace(job, frontend=name)] for job in steps for name in frontends),
    ]


def cases(section: str, settings: Settings) -> list[str]:
    """The names of a section's cases."""
    if section in shape_lists.FULL:
        return [shape.name for shape in shape_lists.of_section(section, settings)]
    return kv_write.cases(settings) if section == "kv_write" else llama.cases(settings)


def run(job: Job, settings: Settings) -> Iterator[Row]:
    """The rows of a job, and {"begin": what} between them."""
    if job.frontend:
        yield from _module("step_torch").run(job.frontend, job.case, settings)
    else:
        yield from _module(_MODULES[job.section]).run(job.section, job.case, settings)


def _module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")
