"""The part of the bench that the wheel has runs without the rest of the checkout, and says so where it needs it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("rich")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the packages of the wheel, as an installation has them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]
    assert settings["packages"] == ["src/flashxla"]
    for package in settings["packages"]:
        copy_of(ROOT / package, tmp_path / "site" / Path(package).name)
    return tmp_path


def copy_of(source: Path, target: Path) -> None:
    """Folders are made anew, so that no file finds the checkout by its own path."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_dir():
            copy_of(path, target / path.name)
        elif path.suffix == ".so":
            (target / path.name).symlink_to(path)
        else:
            (target / path.name).write_bytes(path.read_bytes())


def bench(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # An editable install would find the checkout first.
    only = "[f for f in sys.meta_path if not type(f).__module__.startswith('_editable')]"
    code = f"import sys; sys.meta_path[:] = {only}; from flashxla import cli; sys.exit(cli.main())"
    own = {"PYTHONPATH": str(installed / "site"), "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, "bench", *words],
        cwd=installed,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["mixed", "--device", "cpu", "--quick"], "mixed"),
        (["plan", "--device", "cpu", "--quick"], "plan"),
        (["decode", "--device", "cpu", "--profile"], "--profile"),
        (["decode", "--device", "cpu", "--all"], "--all"),
    ],
)
def test_the_study_comes_with_a_checkout(installed: Path, words: list[str], what: str):
    done = bench(installed, *words)
    assert done.returncode == 2 and not done.stdout
    last = done.stderr.splitlines()[-1]
    assert last == f"flashxla bench: {what} comes with a checkout of the repository, in its folder benchmarks"


def test_the_wheel_measures_by_itself(installed: Path):
    done = bench(installed, "kv_write", "--device", "cpu", "--quick", "--rounds", "1", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert '"case": "5 tokens"' in done.stdout


def test_nothing_of_the_package_needs_the_study():
    """But for the command, which looks for it."""
    for file in (ROOT / "src" / "flashxla").rglob("*.py"):
        assert not any(
            line.lstrip().startswith(("import benchmarks", "from benchmarks"))
            for line in file.read_text().splitlines()
        ), file
