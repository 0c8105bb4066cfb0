"""Copies packages of an environment to a folder, without what needs a compiler, a network or a test runner.

What a package's own list of files names is copied. Give the packages to take, or files that list those to leave.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

SKIPPED = re.compile(
    r"__pycache__|\.(pyc|pyi|h|hpp|a|cu|cuh)$"
    r"|(^|/)(tests?|testing_data)/"
    r"|^tokamax/(benchmarks/|.*_test\.py$)"
    r"|^vllm/.*/configs/.*\.json$"  # settings of kernels in CUDA and Triton
    r"|^(mistral_common/data|pycountry/locales)/"
)


def main() -> None:
    """Copy, and print the largest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path, help="site-packages of the environment")
    parser.add_argument("out", type=Path, help="folder to make")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--only", nargs="+", metavar="NAME", help="packages to take")
    chosen.add_argument("--leave", nargs="+", type=Path, metavar="FILE", help="lists of packages to leave")
    args = parser.parse_args()
    there = {
        normalised(package.metadata["Name"]): package
        for package in importlib.metadata.distributions(path=[str(args.site)])
    }
    if args.only:
        wanted = {normalised(name) for name in args.only}
        if missing := wanted - set(there):
            parser.error(f"not in {args.site}: {', '.join(sorted(missing))}")
    else:
        left = set().union(*map(names, args.leave))
        wanted = {name for name in there if name not in left and not name.startswith("nvidia-")}
    args.out.mkdir(parents=True)
    sizes = Counter({name: copy(there[name].files or (), args.site, args.out) for name in wanted})
    for name, size in sizes.most_common(14):
        print(f"{size >> 10:8d} KiB {name}")
    print(f"{sizes.total() >> 20} MiB in all")


def normalised(name: str) -> str:
    """The name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def names(file: Path) -> set[str]:
    """The words of a list; a # begins a comment."""
    return {word for line in file.read_text().splitlines() for word in line.split("#")[0].split()}


def copy(files: Iterable[object], site: Path, out: Path) -> int:
    """Copy a package's files; their bytes."""
    size = 0
    for path in map(str, files):
        if path.startswith("..") or SKIPPED.search(path) or not (site / path).is_file():
            continue
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(site / path, out / path)
        size += (site / path).stat().st_size
    return size


if __name__ == "__main__":
    main()
