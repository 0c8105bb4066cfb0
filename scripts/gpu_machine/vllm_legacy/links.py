"""links.py FOLDER: links to the machine's own packages of machine.txt, and to JAX's CUDA plugin.

Run on the GPU machine by its python3. They have a folder of their own: PyTorch/XLA's environment must not see the
machine's torch, torchvision and transformers, so it cannot have the whole of site-packages.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from carry import names, normalised


def main() -> None:
    """Make the links, and say what the machine lacks."""
    out = Path(sys.argv[1])
    wanted = names(Path(__file__).parent / "machine.txt")
    out.mkdir(parents=True, exist_ok=True)
    found: set[str] = set()
    for package in importlib.metadata.distributions():
        name = normalised(package.metadata["Name"] or "")
        if name in found or not (name in wanted or name.startswith(("nvidia-", "jax-cuda"))):
            continue
        found.add(name)
        for top in {str(file).split("/")[0] for file in package.files or ()} - {"..", "__pycache__"}:
            target, link = Path(str(package.locate_file(top))), out / top
            if target.exists() and not link.is_symlink():
                link.symlink_to(target.resolve())
    print("not on this machine:", " ".join(sorted(wanted - found)) or "-")


if __name__ == "__main__":
    main()
