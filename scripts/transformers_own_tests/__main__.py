"""Run transformers' own tests, first with its own attention and then with flashxla's.

python -m scripts.transformers_own_tests CHECKOUT
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from . import checkout, outcomes
from .exceptions import Exceptions
from .suites import SUITES, Suite


def main() -> int:
    """Returns 1 if a test came to what it should not."""
    arguments = _arguments()
    folder = checkout.folder_of(arguments.checkout)
    environment = checkout.environment(folder, checkout.packages_for(folder))
    table, problems = Exceptions(), 0
    for name in arguments.suites:
        records = {}
        for attention in ("sdpa", "flashxla"):
            path = checkout.BUILD / f"{name}-{attention}.json"
            print(f"== {name} with {attention}: {path.with_suffix('.log')}", flush=True)
            _run(SUITES[name], attention, folder, environment, arguments.jobs, path)
            records[attention] = json.loads(path.read_text(encoding="utf-8"))
        print(*outcomes.report(name, records["flashxla"], records["sdpa"], table), sep="\n", flush=True)
        problems += outcomes.problems(records["flashxla"], records["sdpa"], table)
    return int(problems > 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.transformers_own_tests", description=__doc__)
    parser.add_argument(
        "checkout", help="a folder with a checkout of transformers, or a tag to clone from GitHub"
    )
    names = ", ".join(SUITES)
    parser.add_argument(
        "--suites", nargs="+", choices=SUITES, default=list(SUITES), metavar="NAME", help=names
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    return parser.parse_args()


def _run(
    suite: Suite, attention: str, folder: Path, environment: dict[str, str], jobs: int, records: Path
) -> None:
    """Run a suite. Raises SystemExit if it did not come to its end."""
    records.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "transformers_own_tests.plugin",
        "-p",
        "no:cacheprovider",
    ]
    command += ["--quiet", f"-n{jobs}", "--timeout=300", f"--attention={attention}", f"--records={records}"]
    command += [f"--without={name}" for name in suite.without]
    files = [file for file in suite.files if (folder / file.split("::")[0]).is_file()]
    with records.with_suffix(".log").open("w", encoding="utf-8") as log:
        done = subprocess.run(
            [*command, *files], cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    # 1: some tests failed, of which the records say which.
    if done.returncode not in (0, 1) or not records.is_file():
        raise SystemExit(
            f"pytest came to no end (exit status {done.returncode}): {records.with_suffix('.log')}"
        )


if __name__ == "__main__":
    sys.exit(main())
