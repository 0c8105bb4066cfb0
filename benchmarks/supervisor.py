"""Runs the workers and collects what they find; if one crashes or falls silent, another one goes on with the rest."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks import llama, sections
from benchmarks.sections import Job
from benchmarks.settings import Settings

# A kernel that hangs, or the compilation of a whole step: what takes longer is given up.
SILENCE_SECONDS = 240.0
_STARTS = 12  # of workers for the same jobs, at most

Row = dict[str, Any]


@dataclasses.dataclass
class Findings:
    """Of a run so far."""

    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    ceilings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    rows: dict[str, list[Row]] = dataclasses.field(default_factory=dict)


def run(names: Sequence[str], settings: Settings, save: Callable[[Findings], None]) -> Findings:
    """Measure sections. save: called whenever a case has ended."""
    findings = Findings(rows={name: [] for name in names})
    for jobs in sections.processes(names, settings):
        _Jobs(jobs, settings, findings, save).run()
    for name, rows in findings.rows.items():
        order = sections.cases(name, settings)
        rows.sort(key=lambda row: order.index(row["case"]))
    return findings


class _Jobs:
    """Of one process, and of those that go on after it."""

    def __init__(
        self, jobs: Sequence[Job], settings: Settings, findings: Findings, save: Callable[[Findings], None]
    ) -> None:
        self._todo, self._settings, self._findings, self._save = list(jobs), settings, findings, save
        self._avoid: list[tuple[str, str]] = []
        self._begun = False
        self._doing: str | None = None  # a contender, or a stage of a case
        self._ours = False
        self._pending: list[Row] = []  # of the case that runs

    def run(self) -> None:
        """Until all is done, or a worker does not even begin."""
        last_words = "too many workers failed"
        for _ in range(_STARTS):
            if not self._todo:
                break
            self._begun, self._doing, self._pending = False, None, []
            last_words = self._work()
            if not self._begun:
                break
            if self._todo:
                self._blame(last_words)
        while self._todo:
            self._pending = [{"failed": f"not measured: {last_words}"}]
            self._finish()

    def _work(self) -> str:
        """One worker. Returns its last words."""
        settings = dataclasses.replace(self._settings, avoid=tuple(self._avoid))
        jobs = [dataclasses.asdict(job) for job in self._todo]
        request = json.dumps({"settings": dataclasses.asdict(settings), "jobs": jobs})
        process = subprocess.Popen(
            # -P: not what happens to be in the current folder.
            [sys.executable, "-P", "-m", "benchmarks.worker", request],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(os.environ, settings, self._todo[0].frontend),
            text=True,
        )
        assert process.stdout is not None and process.stderr is not None
        words: collections.deque[str] = collections.deque(maxlen=5)
        echo = threading.Thread(target=_echo, args=(process.stderr, words), daemon=True)
        echo.start()
        silent = threading.Event()
        try:
            while line := _line(process, silent):
                self._take(json.loads(line))
            code = process.wait()
            echo.join(timeout=5)
        finally:
            process.kill()
            process.wait()
        if silent.is_set():
            return f"nothing happened for {SILENCE_SECONDS:.0f} s"
        return f"the process ended with {code}: {' '.join(words)[-200:]}"

    def _take(self, message: dict[str, Any]) -> None:
        ((kind, value),) = message.items()
        if kind == "facts":
            self._findings.facts = value
        elif kind == "ceilings":
            self._findings.ceilings.append(value)
        elif kind == "begin":
            self._begun = True
            self._doing, self._ours = value
        elif kind == "row":
            self._pending.append(value)
        elif kind == "end":
            self._finish()

    def _finish(self) -> None:
        """The case at the head of the list is done."""
        job = self._todo.pop(0)
        for row in self._pending:
            self._add(job, row)
        self._doing, self._pending = None, []
        self._save(self._findings)

    def _add(self, job: Job, row: Row) -> None:
        defaults = {
            "case": job.case,
            "dtype": self._settings.dtype,
            "contender": job.frontend or "all",
            "ours": bool(job.frontend),
        }
        self._findings.rows[job.section].append({**defaults, **row})

    def _blame(self, last_words: str) -> None:
        """Leave out what was going on: a contender, or if all were being timed in turn the case."""
        job, doing = self._todo[0], self._doing
        print(f"  {job.case}, {doing}: {last_words}; going on without it", file=sys.stderr, flush=True)
        if doing in (None, "timing"):
            self._pending.append({"failed": f"{doing or 'preparing'}: {last_words}"})
            self._finish()
            return
        assert doing is not None
        row = {"contender": doing, "ours": self._ours, "failed": last_words}
        if self._pending or job.frontend:  # the case is timed, or has no other contender
            self._pending.append(row)
            self._finish()
        else:
            self._avoid.append((job.case, doing))
            self._add(job, row)


def environment(parent: Mapping[str, str], settings: Settings, frontend: str = "") -> dict[str, str]:
    """Of a worker. PyTorch/XLA and TorchTPU have the device, and JAX, which lowers their operations, has none."""
    has_the_device = bool(frontend) and frontend != llama.TORCHAX
    root = str(Path(__file__).parents[1])
    found = {
        # PyTorch and JAX share the GPU's memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # Where TorchTPU is installed, `import torch` would start it.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        **parent,
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [parent.get("PYTHONPATH")])]),
    }
    if has_the_device:
        # A lazy step makes and frees its graph each time: the heap shall not be given back and faulted in again.
        found.setdefault("MALLOC_TRIM_THRESHOLD_", str(4 * 2**30))
        found.setdefault("MALLOC_TOP_PAD_", str(2**28))
        found["PJRT_DEVICE"] = "CUDA" if settings.cuda else "CPU"
    if has_the_device or not settings.cuda:
        found["JAX_PLATFORMS"] = "cpu"
    return found


def _echo(stream: IO[str], words: collections.deque[str]) -> None:
    for line in stream:
        sys.stderr.write(line)
        sys.stderr.flush()
        if line.strip():
            words.append(line.strip())


def _line(process: subprocess.Popen[str], silent: threading.Event) -> str:
    """The next line of a process, which is killed if it is silent for too long; "" at the end."""
    assert process.stdout is not None

    def kill() -> None:
        silent.set()
        process.kill()

    watchdog = threading.Timer(SILENCE_SECONDS, kill)
    watchdog.start()
    try:
        return process.stdout.readline()
    finally:
        watchdog.cancel()
