"""The overrides fit the installed packages; other versions get a clear message."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from flashxla_vllm_legacy import overrides, versions

from tests.vllm.upstream import replacements
from tests.vllm_legacy import upstream


@pytest.mark.parametrize("name", upstream.recorded())
def test_upstream_is_what_the_package_relies_on(name):
    """When this fails, read the new source, revisit what uses it, then run python -m tests.vllm_legacy.upstream."""
    installed = upstream.installed()[name]
    assert installed != "missing", f"{name} is gone"
    assert installed == upstream.recorded()[name], f"{name} has changed"


def test_everything_used_is_recorded():
    assert upstream.installed().keys() == upstream.recorded().keys()


@pytest.mark.parametrize("override", overrides.OVERRIDES)
def test_each_override_states_its_reason(override):
    stage = getattr(overrides, override)
    assert stage.__doc__ and len(stage.__doc__.split()) > 8
    assert overrides.OVERRIDES[override]


def test_only_overrides_replaces_internals():
    for file in Path(overrides.__file__).parent.glob("*.py"):
        if file.name != "overrides.py":
            assert not replacements(file), file.name
            assert "setattr(" not in file.read_text()


def test_supported_versions_are_installed():
    for name, version in versions.SUPPORTED.items():
        assert metadata.version(name).partition("+")[0] == version
    versions.check()


def test_other_versions_are_refused(monkeypatch):
    monkeypatch.setitem(versions.SUPPORTED, "vllm", "0.12.0")
    monkeypatch.setitem(versions.SUPPORTED, "missing-package", "1")
    with pytest.raises(
        RuntimeError, match=r"vllm 0\.13\.0 \(needs 0\.12\.0\).*missing-package is not installed"
    ):
        versions.check()
    monkeypatch.setenv(versions.ANY_VERSION, "1")
    versions.check()


def test_other_versions_are_refused_at_start():
    code = (
        "from flashxla_vllm_legacy import versions; versions.SUPPORTED['vllm'] = '0.1'; import vllm; vllm.LLM"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode != 0
    assert "vllm 0.13.0 (needs 0.1)" in ended.stderr
