"""Facts about the machine and the software, and this process's memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

_PACKAGES = ("flashxla", "torch", "torch_xla", "jax", "jaxlib", "numpy")
_SIMD = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def facts() -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    cpu = _colon_fields("/proc/cpuinfo")
    flags = cpu.get("flags", "").split()
    return {
        "cpu": cpu.get("model name", platform.processor() or platform.machine()),
        "simd": [name for name in _SIMD if name in flags],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _meminfo("MemTotal"),
        "load_average": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that are measured, those that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def available_memory() -> int:
    """Bytes that can be allocated without swapping."""
    return _meminfo("MemAvailable")


def reset_peak_memory() -> int | None:
    """Forget this process's high-water mark; returns the bytes resident now, None where that is forbidden."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _kilobytes("/proc/self/status", "VmRSS")


def peak_memory() -> int:
    """The most bytes resident at once since `reset_peak_memory`."""
    return _kilobytes("/proc/self/status", "VmHWM")


def _meminfo(name: str) -> int:
    return _kilobytes("/proc/meminfo", name)


def _kilobytes(path: str, name: str) -> int:
    return int(_colon_fields(path)[name].split()[0]) * 1024


def _colon_fields(path: str) -> dict[str, str]:
    """The first value of each field of a file of "name: value" lines; empty where there is no such file."""
    fields: dict[str, str] = {}
    if Path(path).exists():
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    return fields
