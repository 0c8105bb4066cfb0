"""flashxla doctor without vLLM, or with a plugin that is asked. With vLLM: tests/vllm/test_doctor.py."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import types

import pytest

from flashxla.doctor import vllm
from flashxla.doctor.finding import Finding


@pytest.fixture
def no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == vllm.PLUGIN else find(name))


@pytest.mark.usefixtures("no_plugin")
def test_absent_is_one_line_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert list(vllm.findings()) == [Finding("vllm", None, "not installed; how to install it: docs/vllm.md")]


@pytest.mark.usefixtures("no_plugin")
def test_vllm_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9")
    (finding,) = vllm.findings()
    assert finding.ok is None
    assert "0.9, without flashxla's platform" in finding.text and "docs/vllm.md" in finding.text


def test_the_plugin_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("vllm", True, "0.33.0"), ("in place: vllm", False, "THE POINTERS CHANGED")]
    doctor = types.ModuleType(f"{vllm.PLUGIN}.doctor")
    doctor.findings = lambda: iter(rows)  # type: ignore[attr-defined]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, vllm.PLUGIN, types.ModuleType(vllm.PLUGIN))
    monkeypatch.setitem(sys.modules, doctor.__name__, doctor)
    assert list(vllm.findings()) == [Finding(*row) for row in rows]
