"""`flashxla doctor`."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from flashxla import install, native, output_file
from flashxla.doctor import kernels, probe, vllm
from flashxla.doctor.finding import Finding
from flashxla.platforms import CPU, CUDA, PLATFORMS
from flashxla.xla import cpu, gpu, pjrt_adapter, torch_tpu

PACKAGES = ("flashxla", "jax", "jaxlib", "torch", "torch_xla", "torch_tpu", "torchax", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flashxla doctor`."""
    parser.add_argument("--json", metavar="FILE", help="also write the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if everything that is present works, 2 for a file that cannot be written."""
    try:
        output_file.check("--json", args.json)
    except output_file.OutputError as error:
        print(f"flashxla doctor: error: {error}", file=sys.stderr)
        return 2
    # Where TorchTPU is installed, `import torch` would start it, which only the probes of it may.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    findings = []
    for finding in _findings():
        findings.append(finding)
        mark = {True: "ok", False: "FAIL", None: "-"}[finding.ok]
        first, *rest = finding.text.splitlines() or [""]
        print(
            f"{mark:>4}  {finding.topic:<34} {first}",
            *(f"{'':40} {line}" for line in rest),
            sep="\n",
            flush=True,
        )
    if args.json:
        output_file.write_json(args.json, [f._asdict() for f in findings])
    failed = [f.topic for f in findings if f.ok is False]
    print(f"\n{'Not working: ' + ', '.join(failed) if failed else 'Everything that is present works.'}")
    return 1 if failed else 0


def _findings() -> Iterator[Finding]:
    yield Finding("python", True, f"{platform.python_version()} on {platform.machine()}")
    for package in PACKAGES:
        version = install.version(package)
        yield Finding(package, True if version else None, version or "not installed")
    for name, where in PLATFORMS.items():
        if where is CPU or native.is_installed(name):
            yield _try(f"native library ({name})", functools.partial(_library, name))
        else:
            yield Finding(f"native library ({name})", None, f"not installed; {where.how_to_build}")
    yield _try("XLA runtime of jaxlib", _jax_runtime)
    yield from _kernels()
    yield from _torch_xla()
    yield from _torch_tpu()
    yield from _torchax()
    yield _try("in place: jax", functools.partial(_in_place, "jax"))
    yield from _plain_torch()
    yield from vllm.findings()


def _try(topic: str, check: Callable[[], tuple[bool | None, str]]) -> Finding:
    try:
        return Finding(topic, *check())
    except Exception as error:
        return Finding(topic, False, f"{type(error).__name__}: {error}")


def _library(name: str) -> tuple[bool, str]:
    library = native.library(name)
    # With the package that it is of: flashxla, flashxla_cuda12 or flashxla_cuda13.
    place = "/".join(library.path.parts[-3:])
    return (
        True,
        f"{place}, XLA FFI API {library.ffi_api_version}, targets: {', '.join(library.ffi_targets)}",
    )


def _jax_runtime() -> tuple[bool, str]:
    import jax

    from flashxla.xla import registration

    registration.register_jax()
    return True, f"devices: {', '.join(map(str, jax.devices()))}; targets registered"


def _kernels() -> Iterator[Finding]:
    """Every kind of kernel, on each device, through each framework that has it."""
    found = [("jax", "cpu")]
    if any(name in _jax_platforms() for name in ("gpu", "cuda")):
        found.append(("jax", "cuda"))
    if importlib.util.find_spec("torch") is not None:
        import torch

        found.append(("torch", "cpu"))
        if torch.cuda.is_available():
            found.append(("torch", "cuda"))
    for framework, device in found:
        if native.is_installed(device):
            yield _try(
                f"kernels: {framework} on {device}", functools.partial(_run_kernels, framework, device)
            )


def _jax_platforms() -> set[str]:
    import jax

    return {device.platform for device in jax.devices()}


def _run_kernels(framework: str, device: str) -> tuple[bool, str]:
    rows = kernels.run(framework, device)
    by_kernel: dict[str, list[str]] = {}
    for row in rows:
        by_kernel.setdefault(row.kernels, []).append(row.call)
    wrong = [f"WRONG: {row.call}: {row.error:.3g} times the error it may have" for row in rows if not row.ok]
    text = f"{len(rows) - len(wrong)} of {len(rows)} kinds of call right, by {'; '.join(by_kernel)}"
    return not wrong, "\n".join([text, *wrong])


def _torch_xla() -> Iterator[Finding]:
    """PyTorch/XLA on the CPU and, where there is one and a plugin for it, on a GPU."""
    if importlib.util.find_spec("torch_xla") is None:
        yield Finding("in place: lazy, openxla", None, "torch_xla is not installed")
        return
    yield _try("torch_xla on CPU", _torch_xla_cpu)
    devices = {"CPU": "CPU"}
    topic = "torch_xla on GPU"
    try:
        plugin = pjrt_adapter.find_plugin()
    except pjrt_adapter.PluginError as error:
        yield Finding(topic, None, str(error).removeprefix("flashxla: "))
    else:
        yield _try(topic, functools.partial(_torch_xla_gpu, plugin))
        if gpu.count(os.environ):
            devices["GPU"] = gpu.DEVICE
    for name, pjrt_device in devices.items():
        for frontend in ("lazy", "openxla"):
            yield _try(f"in place: {frontend} on {name}", functools.partial(_in_place, frontend, pjrt_device))


def _torch_xla_cpu() -> tuple[bool, str]:
    from flashxla.xla import registration, torch_xla_runtime

    registration.register_torch_xla_on("cpu")
    version = native.library("cpu").runtime_api_version(torch_xla_runtime.ffi_api())
    return True, f"XLA:CPU, FFI API {version}; targets registered"


def _torch_xla_gpu(plugin: Path) -> tuple[bool | None, str]:
    from flashxla.xla import registration

    adapter = pjrt_adapter.load()
    text = f"{_package_of(plugin)}, PJRT API {adapter.api_version} (accepted: {adapter.accepted_versions})"
    if not native.is_installed("cuda"):
        return (
            None,
            f"{text}; no targets: libflashxla_cuda.so is not installed, {CUDA.how_to_build}",
        )
    registration.register_torch_xla_on("cuda")
    targets = ", ".join(native.library("cuda").ffi_targets)
    return True, f"{text}; {gpu.count(os.environ)} GPUs; targets registered: {targets}"


def _torch_tpu() -> Iterator[Finding]:
    """TorchTPU on the CPU and on GPUs, where there is a plugin for them."""
    if not torch_tpu.is_installed():
        yield Finding("in place: torchtpu", None, "torch_tpu is not installed")
        return
    devices = {"CPU": ("CPU", cpu.find_plugin)}
    if gpu.count(os.environ):
        devices["GPU"] = (gpu.DEVICE, pjrt_adapter.find_plugin)
    for name, (pjrt_device, find_plugin) in devices.items():
        for frontend in ("torchtpu", "torchtpu_compiled"):
            topic = f"in place: {frontend} on {name}"
            try:
                find_plugin()
            except pjrt_adapter.PluginError as error:
                yield Finding(topic, None, str(error).removeprefix("flashxla: "))
            else:
                yield _try(topic, functools.partial(_in_place, frontend, pjrt_device))


def _torchax() -> Iterator[Finding]:
    topic = "in place: torchax"
    if not install.version("torchax"):  # PyTorch/XLA brings a module of that name, which does not import
        yield Finding(topic, None, "torchax is not installed")
    else:
        yield _try(topic, functools.partial(_in_place, "torchax"))


def _package_of(plugin: Path) -> str:
    """The package that brought a plugin, with its version, or the file's name."""
    package = "jax-cuda13-pjrt" if "cuda13" in str(plugin) else "jax-cuda12-pjrt"
    version = install.version(package)
    return f"{package} {version}" if version else plugin.name


def _plain_torch() -> Iterator[Finding]:
    """Eager PyTorch on the CPU and, where there is one, on a GPU."""
    topic = "in place: torch on {}"
    if importlib.util.find_spec("torch") is None:
        yield Finding(topic.format("cpu"), None, "torch is not installed")
        return
    yield _try(topic.format("cpu"), functools.partial(_in_place, "torch_cpu"))
    import torch

    if torch.cuda.is_available():
        yield _try(topic.format("cuda"), functools.partial(_in_place, "torch_cuda"))
    else:
        yield Finding(topic.format("cuda"), None, "torch sees no GPU")


def _in_place(frontend: str, pjrt_device: str | None = None) -> tuple[bool, str]:
    result = probe.run(frontend, pjrt_device=pjrt_device)
    pointers = "the pointers stayed" if result.pointers_stay else "THE POINTERS CHANGED"
    parts = [f"on {result.device}: {pointers} over 3 layers x 3 steps"]
    if result.programs:
        parts += [
            f"{len(result.cache_copies)} copies of a cache ({result.cache_bytes >> 10} KiB) in the compiled program",
            f"temporary memory {result.temp_bytes >> 10} KiB",
        ]
    parts.append(f"largest error {result.largest_error:.1e}")
    return result.in_place, "\n".join(["; ".join(parts), *result.cache_copies])
