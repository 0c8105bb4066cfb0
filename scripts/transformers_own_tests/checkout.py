"""A checkout of transformers, and the packages that its tests need."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

REPOSITORY = "https://github.com/huggingface/transformers"
_ROOT = Path(__file__).parents[2]
BUILD = _ROOT / "build/transformers_own_tests"
# What transformers asks for in versions that differ from one release to the next, and what its tests import.
_VERSIONED = ("huggingface-hub", "tokenizers")
_BESIDES = ("parameterized", "datasets")


def folder_of(checkout: str) -> Path:
    """A folder that is there, or the clone of a tag. Raises SystemExit."""
    folder = Path(checkout).expanduser().resolve()
    if not folder.is_dir():
        folder = BUILD / f"checkout-{checkout}"
        if not folder.is_dir():
            print(f"== {REPOSITORY} at {checkout} into {folder}", flush=True)
            command = [
                "git",
                "clone",
                "--quiet",
                "--depth=1",
                f"--branch={checkout}",
                REPOSITORY,
                str(folder),
            ]
            subprocess.run(command, check=True)
    if not (folder / "tests/causal_lm_tester.py").is_file():
        raise SystemExit(
            f"checkout: got {checkout}; accepted: a folder with transformers' tests, or a tag: v5.6.0"
        )
    return folder


def packages_for(checkout: Path) -> Path:
    """A folder of packages in the versions that the checkout asks for; all others are those of this environment."""
    table = runpy.run_path(str(checkout / "src/transformers/dependency_versions_table.py"))
    wanted = [*(table["deps"][name] for name in _VERSIONED), *_BESIDES]
    folder = BUILD / "packages"
    done = folder / "wanted.txt"
    if not done.is_file() or done.read_text(encoding="utf-8").split("\n") != wanted:
        print(f"== {', '.join(wanted)} into {folder} (about 100 MB to download)", flush=True)
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", f"--python={sys.executable}"]
        subprocess.run([*uv, f"--target={folder}", "--upgrade", *wanted], check=True)
        done.write_text("\n".join(wanted), encoding="utf-8")
    return folder


def environment(checkout: Path, packages: Path) -> dict[str, str]:
    """The variables of a run: transformers is the checkout's, nothing is taken from the network."""
    path = (packages, checkout / "src", Path(__file__).parents[1])
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "HF_HUB_OFFLINE": "1",
        # Most are slow because of the size of models on the hub, in whose place there are small ones: hub.py.
        "RUN_SLOW": "1",
    }
