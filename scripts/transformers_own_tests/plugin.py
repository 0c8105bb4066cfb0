"""A pytest plugin for transformers' tests: their models get the attention of --attention, and its calls are counted.

Wherever a model would get "sdpa", because that is transformers' default or because a test asks for it, it gets the
attention named on the command line. What a test asks to be eager stays eager, so what is compared with eager attention
still is. Beside that, the plugin lets tests run that need no more than what a CPU has, see `without`.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from . import hub, replacement
from .exceptions import LEFT_OUT, Exceptions

# Where this package is there, transformers traces its steps with it, which no program without a break can hold. It must
# be hidden before transformers is imported, and so before the conftest of its tests is.
sys.modules["opentelemetry"] = None  # type: ignore[assignment]

# transformers' decorators for tests that an accelerator would be needed for, were it not for tiny models.
_REQUIREMENTS = ("require_torch_accelerator", "require_flash_attn")

_CALLS = {"flashxla": 0, "sdpa": 0}


def pytest_addoption(parser: pytest.Parser) -> None:
    """--attention and --records."""
    group = parser.getgroup("flashxla")
    group.addoption("--attention", choices=("sdpa", "flashxla"), default="flashxla", help="in place of sdpa")
    group.addoption("--records", type=Path, help="file for what became of each test, as JSON")
    group.addoption("--without", action="append", default=[], choices=_REQUIREMENTS, help="not required")


def pytest_configure(config: pytest.Config) -> None:
    """Before transformers' tests are imported, which takes its decorators and functions by name."""
    import transformers.testing_utils

    for name in config.getoption("without"):
        setattr(transformers.testing_utils, name, lambda test: test)
    replacement.replace(config.getoption("attention"))
    if not torch.cuda.is_available():
        _without_graphs()
    _count()
    hub.serve((config.rootpath / "tests/generation").glob("test_*.py"))
    config.pluginmanager.register(_Records(config.getoption("records")), "flashxla records")


def _without_graphs() -> None:
    """Continuous batching on a CPU has no CUDA graphs, and a test that asks for them would end at once."""
    from transformers import ContinuousBatchingConfig

    original = ContinuousBatchingConfig.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.use_cuda_graph = False

    ContinuousBatchingConfig.__init__ = init  # type: ignore[method-assign]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the table says."""
    table = Exceptions()
    for item in items:
        if reason := table.left_out(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=LEFT_OUT + reason))
    # Tests look by themselves, too, for a package of flash-attention, in whose place there is another attention.
    if "require_flash_attn" in config.getoption("without"):
        parents = {item.getparent(pytest.Module) for item in items}
        for module in (parent.obj for parent in parents if parent):
            if hasattr(module, "is_flash_attn_2_available"):
                module.is_flash_attn_2_available = lambda: True


def _count() -> None:
    """Count the calls of the native library, and those of PyTorch's attention.

    The former are those of programs, too, that torch.compile has made: their calls of an operation end there.
    """
    from transformers import AttentionInterface

    from flashxla.torch_calls import Prepared

    Prepared.run = _counted(Prepared.run, "flashxla")  # type: ignore[method-assign]
    functions = AttentionInterface._global_mapping
    for name in ("sdpa", "paged|sdpa"):
        if name in functions:
            AttentionInterface.register(name, _counted(functions[name], "sdpa"))


def _counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _CALLS[name] += 1
        return function(*args, **kwargs)

    return call


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note with a test how many calls there were."""
    _CALLS.update(dict.fromkeys(_CALLS, 0))
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """The calls travel with the report, from the process that ran the test to that which writes the records."""
    report: Any = yield
    report.flashxla_calls = dict(_CALLS)
    return report


class _Records:
    """What became of each test, by its name: outcome, the reason if there is one, and calls."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the worst of a test's reports: it has one for each phase, and for each subtest."""
        is_skip_of_a_part = report.skipped and type(report) is not pytest.TestReport
        if is_skip_of_a_part or (report.when != "call" and report.passed):
            return
        record = {
            "outcome": "xfailed" if hasattr(report, "wasxfail") else report.outcome,
            "reason": _reason(report),
            "calls": getattr(report, "flashxla_calls", {}),
        }
        if self._tests.get(report.nodeid, {}).get("outcome") != "failed":
            self._tests[report.nodeid] = record

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file, in the process that has all reports."""
        if self._path and not hasattr(session.config, "workerinput"):
            self._path.write_text(json.dumps(self._tests, indent=1), encoding="utf-8")


def _reason(report: Any) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        return crash.message if crash else str(report.longrepr)
    return ""
