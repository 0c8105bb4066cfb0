"""The extras in pyproject.toml, the table of plugins in the docs and the adapter's versions belong together."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from flashxla.xla.pjrt_adapter import PluginError
from tests.pjrt.caller import FreshAdapter, Stub

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def measured() -> dict[Version, tuple[int, int]]:
    """The PJRT API of each plugin that was looked at, by the version that it shares with JAX."""
    text = (ROOT / "docs/pytorch-xla-gpu.md").read_text()
    rows = re.findall(r"^\| jax-cuda13-pjrt (\S+) \| (\d+)\.(\d+) \|", text, re.M)
    return {Version(version): (int(major), int(minor)) for version, major, minor in rows}


def bounds(extra: str) -> dict[str, Version]:
    """The versions of JAX that an extra takes."""
    (requirement,) = map(Requirement, EXTRAS[extra])
    return {bound.operator: Version(bound.version) for bound in requirement.specifier}


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_an_extra_takes_no_plugin_that_was_not_looked_at(extra: str) -> None:
    taken = bounds(extra)
    assert set(taken) == {">=", "<="}
    assert taken[">="] in measured()
    assert taken["<="] == max(measured())


def test_the_adapter_accepts_every_plugin_of_the_table(fresh: FreshAdapter, stub: Stub) -> None:
    accepted = fresh.load(stub.path).accepted_versions
    oldest, newest = (tuple(map(int, version.split("."))) for version in accepted.split(" to "))
    assert {version for version, api in measured().items() if not oldest <= api <= newest} == set()


def test_a_refusal_names_the_plugins_of_the_table(
    fresh: FreshAdapter, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_VERSION", "0.118")
    plugins = f"jax-cuda13-pjrt {min(measured())} to {max(measured())} have"
    with pytest.raises(PluginError, match=rf"{re.escape(plugins)}$"):
        fresh.load(stub.path)
