"""native.py PLATFORM BINARY PROGRAMS PROGRAM_HERE: the C++ program's tokens against those of `flashxla generate`.

PROGRAMS: the folder of what was exported without a GPU. PROGRAM_HERE: what was exported on this machine.
"""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from flashxla import native
from flashxla.generate.prompts import DEFAULT_PROMPTS

PROMPTS = [*DEFAULT_PROMPTS, "An iterator is an object that represents a stream of data. " * 6]
NEW = "60"
Tokens = list[list[int]]


def main() -> None:
    """Run every program, and fail where the float32 tokens are not the same."""
    platform, binary, programs, here = sys.argv[1:]
    want = expected(platform, "float32")
    same = []
    if os.path.isdir(here):
        same.append(compare("float32, exported here", run(platform, binary, here), want))
    if platform == "cuda":
        got = run(platform, binary, f"{programs}/f32")
        same.append(compare("float32, exported without a GPU", got, want))
        # XLA and PyTorch round bfloat16 at other places, so texts may part at a near tie: reported alone.
        compare("bfloat16", run(platform, binary, f"{programs}/bf16"), expected(platform, "bfloat16"))
    if not same or not all(same):
        raise SystemExit("the tokens are not the same")
    print("the tokens are the same")


def plugin(platform: str) -> str:
    """The PJRT plugin that the program loads."""
    if platform == "cpu":
        from flashxla.xla.cpu import find_plugin

        return str(find_plugin())
    import jax_plugins

    return next(f for p in jax_plugins.__path__ for f in glob.glob(f"{p}/xla_cuda*/xla_cuda_plugin.so"))


def environment(platform: str) -> dict[str, str]:
    """What the program finds: CUDA's libraries and compiler, and no Python."""
    if platform == "cpu":
        return {"PATH": "/nonexistent"}
    sites = {sysconfig.get_path("purelib"), *(p for p in sys.path if p.endswith("site-packages"))}
    libraries = sorted(
        {str(Path(f).parent) for site in sites for f in glob.glob(f"{site}/nvidia/**/*.so*", recursive=True)}
    )
    packaged = (f"{site}/nvidia/{name}" for site in sites for name in ("cu13", "cuda_nvcc"))
    toolkits = (*glob.glob("/usr/local/cuda*"), *packaged)
    cuda = next((folder for folder in toolkits if os.path.exists(f"{folder}/bin/ptxas")), None)
    print("CUDA data dir:", cuda, "; library folders:", len(libraries))
    found = {
        "PATH": f"{cuda}/bin:/usr/bin:/bin",
        "LD_LIBRARY_PATH": ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]),
    }
    return found | ({"XLA_FLAGS": f"--xla_gpu_cuda_data_dir={cuda}"} if cuda else {})


def expected(platform: str, dtype: str) -> Tokens:
    """The tokens of flashxla in PyTorch."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, "-m", "flashxla", "generate", "--frontend", "torch", "--device", platform]
        command += ["--dtype", dtype, "--max-new-tokens", NEW, "--json", out.name, "--prompt", *PROMPTS]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        return [prompt["tokens"] for prompt in json.loads(Path(out.name).read_text())["prompts"]]


def run(platform: str, binary: str, folder: str) -> Tokens:
    """The tokens of the C++ program, whose caches must be in place."""
    command = [binary, "--program", folder, "--plugin", plugin(platform)]
    command += ["--library", str(native.library_path(platform)), "--max-new-tokens", NEW, "--ids"]
    command += [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment(platform), timeout=150)
    print(f"{folder}: rc {done.returncode}, {time.perf_counter() - begin:.1f} s\n{done.stderr[-1500:]}")
    if done.returncode or "caches in place" not in done.stderr:
        raise SystemExit("it failed, or its caches are not in place")
    return [[int(token) for token in line.split(",")] for line in done.stdout.splitlines()]


def compare(name: str, got: Tokens, want: Tokens) -> bool:
    """Print where the first differences are."""
    shared = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))
        for x, y in zip(got, want, strict=False)
    ]
    lengths = [len(tokens) for tokens in want]
    print(f"{name}: equal {got == want}; tokens until the first difference {shared} of {lengths}")
    return got == want


if __name__ == "__main__":
    main()
