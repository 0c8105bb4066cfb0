"""A library that comes in a package of its own: flashxla finds it, if it is of flashxla's version."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from flashxla import install, native

VERSION = install.version("flashxla")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Site-packages where flashxla has no library for GPUs."""
    monkeypatch.delenv("FLASHXLA_LIBRARY_DIR", raising=False)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "flashxla" / "native.py"))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def add(site: Path, package: str, version: str | None = VERSION) -> Path:
    """Install a package with a library, and return the library's path."""
    library = site / package / "lib" / "libflashxla_cuda.so"
    library.parent.mkdir(parents=True)
    library.touch()
    (site / package / "__init__.py").touch()
    info = site / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return library


@pytest.mark.parametrize(
    ("packages", "found"),
    [
        (["flashxla_cuda12"], "flashxla_cuda12"),
        (["flashxla_cuda13"], "flashxla_cuda13"),
        (["flashxla_cuda12", "flashxla_cuda13"], "flashxla_cuda13"),
        (["flashxla_cuda13", "flashxla"], "flashxla"),  # as make cuda leaves it
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_it_is_found(packages: list[str], found: str, site: Path) -> None:
    libraries = {package: add(site, package) for package in packages}
    assert native.library_path("cuda") == libraries[found]


def test_another_version_is_refused(site: Path) -> None:
    add(site, "flashxla_cuda13", "0.0.1")
    with pytest.raises(ImportError, match=rf"flashxla-cuda13 0.0.1 does not fit flashxla {VERSION}: install"):
        native.library_path("cuda")


def test_none_is_there(site: Path) -> None:
    with pytest.raises(
        ImportError, match=r"libflashxla_cuda.so not found in .*; build it with 'make cuda', or"
    ):
        native.library_path("cuda")
