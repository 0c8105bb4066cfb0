"""Decodes a few steps through a front end and reports what happened to the caches, as JSON.

Of a front end that compiles no steps the proof is pointers and values, of the others their programs, too.

Run in a process of its own (`python -m flashxla.doctor.probe lazy`): XLA reads the flag that makes it dump its
programs only once, and a crash stays contained. `run` starts that process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from flashxla.doctor import decoding, hlo


@dataclasses.dataclass(frozen=True)
class Probe:
    """What a front end did with its caches.

    largest_error: see decoding.Decoded.
    targets: the custom calls of the step's program.
    """

    frontend: str
    device: str
    pointers_stay: bool
    largest_error: float
    cache_bytes: int
    cache_copies: list[str]
    temp_bytes: int
    programs: int
    targets: list[str]

    @property
    def in_place(self) -> bool:
        """Whether the writes were in place, and right."""
        return self.pointers_stay and not self.cache_copies and self.largest_error < 1e-5


def run(
    frontend: str,
    layers: int = 3,
    steps: int = 3,
    blocks: int = 64,
    pjrt_device: str | None = None,
    timeout: float = 300,
) -> Probe:
    """Probe a front end in a process of its own. Raises RuntimeError with its output if that fails.

    pjrt_device: where PyTorch/XLA or TorchTPU runs, "CPU" or "CUDA"; by default where PJRT_DEVICE says, else "CPU".
    """
    with tempfile.TemporaryDirectory(prefix="flashxla-") as dump:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text"
        command = [sys.executable, "-m", "flashxla.doctor.probe", frontend]
        command += [f"--layers={layers}", f"--steps={steps}", f"--blocks={blocks}", f"--dump={dump}"]
        # A graph that PyTorch finds compiled is not dumped.
        environment = {**os.environ, "XLA_FLAGS": flags.strip(), "TORCHINDUCTOR_CACHE_DIR": f"{dump}/graphs"}
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        environment["PJRT_DEVICE"] = pjrt_device or environment.get("PJRT_DEVICE", "CPU")
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    if done.returncode != 0:
        raise RuntimeError(f"the {frontend} probe failed:\n{done.stdout}\n{done.stderr}")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return Probe(**json.loads(line))


def main() -> None:
    """Run one probe in this process and print it as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("frontend", choices=decoding.FRONTENDS)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--dump", type=Path, required=True)
    args = parser.parse_args()
    sizes = decoding.Sizes(args.layers, args.steps, args.blocks)
    decoded = decoding.decode(args.frontend, sizes)
    cache_bytes = math.prod(sizes.cache) * 4
    # The step is the program with every layer's write; calls outside of it compile programs of their own.
    programs = [
        p for p in hlo.dumped_programs(args.dump) if p.targets().count("flashxla_kv_cache") == args.layers
    ]
    if not programs and args.frontend in decoding.OF_ONE_PROGRAM:
        raise RuntimeError("XLA dumped no program with the cache writes")
    probe = Probe(
        frontend=args.frontend,
        **decoded._asdict(),
        cache_bytes=cache_bytes,
        cache_copies=[copy for p in programs for copy in p.copies(at_least=cache_bytes)],
        temp_bytes=max((p.temp_bytes for p in programs), default=0),
        programs=len(programs),
        targets=programs[0].targets() if programs else [],
    )
    print(json.dumps(dataclasses.asdict(probe)))


if __name__ == "__main__":
    main()
