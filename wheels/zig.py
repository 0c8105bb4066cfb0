"""Zig's Clang as a cross compiler: for each processor, against a glibc that is as old as wheels may ask for."""

from __future__ import annotations

from pathlib import Path

import ziglang

GLIBC = (2, 17)
PROCESSORS = ("x86_64", "aarch64")


def command(processor: str) -> str:
    """The C++ compiler for a processor, as CXX takes it.

    -s, no symbols, is part of it since Zig compiles its C++ library anew for every kind of link: a minute each.
    """
    zig = Path(ziglang.__file__).with_name("zig")
    return f"{zig} c++ -s -target {processor}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"


def platform(processor: str) -> str:
    """The platform tag of a wheel that was made by it."""
    return f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{processor}"
