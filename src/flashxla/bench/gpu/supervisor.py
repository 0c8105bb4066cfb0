"""Runs the worker and collects what it finds; if it crashes or falls silent, another one goes on with the rest."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from flashxla.bench.gpu import sections
from flashxla.bench.gpu.settings import Settings

# A kernel that hangs, or the compilation of a whole step: what takes longer is given up.
SILENCE_SECONDS = 240.0
_STARTS = 12  # of workers, at most

Rows = dict[str, list[dict[str, Any]]]


@dataclasses.dataclass
class Findings:
    """Of a run so far."""

    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    ceilings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    rows: Rows = dataclasses.field(default_factory=dict)


def run(names: Sequence[str], settings: Settings, save: Callable[[Findings], None]) -> Findings:
    """Measure sections. save: called whenever a case has ended."""
    return _Supervisor(names, settings, save).run()


class _Supervisor:
    def __init__(self, names: Sequence[str], settings: Settings, save: Callable[[Findings], None]) -> None:
        self._settings, self._save = settings, save
        self._todo = [(name, case) for name in names for case in sections.cases(name, settings)]
        self._avoid: list[tuple[str, str]] = []
        self._findings = Findings(rows={name: [] for name in names})
        self._doing: str | None = None
        self._pending: list[dict[str, Any]] = []  # rows of the case that runs

    def run(self) -> Findings:
        """Until all is done, or no worker gets anywhere."""
        for _ in range(_STARTS):
            if not self._todo:
                break
            before = len(self._todo), len(self._avoid)
            last_words = self._work()
            if self._todo and last_words is not None:
                self._blame(last_words)
            if before == (len(self._todo), len(self._avoid)):
                break
        for section, case in self._todo:
            self._add(section, {"case": case, "failed": "not measured: the run ended early"})
        self._save(self._findings)
        return self._findings

    def _add(self, section: str, row: dict[str, Any]) -> None:
        defaults = {"dtype": self._settings.dtype, "contender": "all", "ours": False}
        self._findings.rows[section].append({**defaults, **row})

    def _work(self) -> str | None:
        """One worker. Returns its last words if it did not end well."""
        request = {
            "settings": {**dataclasses.asdict(self._settings), "avoid": self._avoid},
            "todo": _grouped(self._todo),
        }
        self._doing, self._pending = None, []
        process = subprocess.Popen(
            [sys.executable, "-m", "flashxla.bench.gpu.worker", json.dumps(request)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(self._settings),
            text=True,
        )
        assert process.stdout is not None and process.stderr is not None
        words: collections.deque[str] = collections.deque(maxlen=5)
        echo = threading.Thread(target=_echo, args=(process.stderr, words), daemon=True)
        echo.start()
        try:
            for event in _events(process.stdout):
                if event is None:
                    return f"nothing happened for {SILENCE_SECONDS:.0f} s"
                self._take(event)
            code = process.wait()
            echo.join(timeout=5)
            return None if code == 0 else f"the process ended with {code}: {' '.join(words)[-200:]}"
        finally:
            process.kill()
            process.wait()

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "facts":
            self._findings.facts = event["facts"]
        elif kind == "ceilings":
            self._findings.ceilings.append(event["ceilings"])
        elif kind == "case":
            self._doing = "preparing"
        elif kind == "begin":
            self._doing = event["what"]
        elif kind == "row":
            self._pending.append(event["row"])
        elif kind == "failed":
            case = self._todo[0][1]
            self._pending.append({"case": case, "contender": "all", "failed": event["error"]})
        elif kind == "end":
            self._finish()

    def _finish(self) -> None:
        """The case at the head of the list is done."""
        section, _ = self._todo.pop(0)
        for row in self._pending:
            self._add(section, row)
        self._doing, self._pending = None, []
        self._save(self._findings)

    def _blame(self, last_words: str) -> None:
        """Leave out what was going on: a contender, or if all were being timed in turn the case."""
        if self._doing is None:
            return
        section, case = self._todo[0]
        print(f"  {case}, {self._doing}: {last_words}; going on without it", file=sys.stderr, flush=True)
        lost = next((row for row in self._pending if row.pop("lost", False)), None)
        if self._doing in ("preparing", "timing", "profile") or any("us" in row for row in self._pending):
            self._pending.append({"case": case, "failed": f"{self._doing}: {last_words}"})
            self._finish()
        elif lost:
            # Its exception came first, and the device did not survive it.
            self._avoid.append((case, lost["contender"]))
            self._add(section, lost)
        else:
            self._avoid.append((case, self._doing))
            self._add(section, {"case": case, "contender": self._doing, "failed": last_words})


def _grouped(todo: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    grouped: dict[str, list[str]] = {}
    for section, case in todo:
        grouped.setdefault(section, []).append(case)
    return list(grouped.items())


def _environment(settings: Settings) -> dict[str, str]:
    environment = dict(os.environ)
    # PyTorch and JAX share the GPU's memory.
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if not settings.cuda:
        environment["JAX_PLATFORMS"] = "cpu"
    return environment


def _echo(stream: IO[str], words: collections.deque[str]) -> None:
    for line in stream:
        sys.stderr.write(line)
        sys.stderr.flush()
        if line.strip():
            words.append(line.strip())


def _events(stream: IO[str]) -> Iterator[dict[str, Any] | None]:
    """The worker's events; None when it has been silent for too long."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=SILENCE_SECONDS)
        except queue.Empty:
            yield None
            return
        if line is None:
            return
        yield json.loads(line)
