"""Choosing NVIDIA GPUs for PyTorch/XLA, without one: options, places among processes, what is missing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashxla.xla import gpu, pjrt_adapter
from tests.pjrt.caller import Stub

ROOT = Path(__file__).parents[2]
DEFAULTS = {"platform_name": "cuda", "allocator": "default"}
LAUNCHED = {"PJRT_LOCAL_PROCESS_RANK": "1", "PJRT_LOCAL_PROCESS_COUNT": "4"}  # by torch_xla.launch
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One that says nothing about GPUs or processes, and is put back after the test."""
    for name in list(os.environ):
        if name.startswith(("PJRT_", "XLA_", "JAX_", "CUDA_", "FLASHXLA_PJRT")) or name in TORCHRUN:
            monkeypatch.delenv(name)
    # monkeypatch does not see what use_gpu sets by itself.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    return monkeypatch


@pytest.fixture
def not_started(environment: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As before the first XLA device, whatever other tests have started in this process; with a plugin."""
    runtime = SimpleNamespace(_xla_runtime_is_initialized=lambda: False)
    environment.setitem(sys.modules, "torch_xla", SimpleNamespace(_XLAC=runtime))  # type: ignore[arg-type]
    environment.setenv(pjrt_adapter.PLUGIN_VARIABLE, __file__)
    return environment


# The plugin's options


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ({}, {}),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, {"memory_fraction": 0.5}),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "1.5"}, {"memory_fraction": 1.5}),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ""}, {}),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, {"preallocate": True}),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "1"}, {"preallocate": True}),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "False"}, {"preallocate": False}),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "0"}, {"preallocate": False}),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}, {"allocator": "cuda_async"}),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "BFC"}, {"allocator": "bfc"}),
        ({"JAX_CUDA_VISIBLE_DEVICES": "all"}, {}),
        ({"JAX_CUDA_VISIBLE_DEVICES": "2"}, {"visible_devices": [2]}),
        ({"JAX_CUDA_VISIBLE_DEVICES": "0, 3"}, {"visible_devices": [0, 3]}),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, {"visible_devices": [1]}),
    ],
)
def test_client_options(variables: dict[str, str], options: dict[str, Any]) -> None:
    assert gpu.client_options(variables) == {**DEFAULTS, **options}


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("XLA_CLIENT_MEM_FRACTION", "half", "a number above 0"),
        ("XLA_CLIENT_MEM_FRACTION", "0", "a number above 0"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "-1", "a number above 0"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "malloc", "default, platform, bfc, cuda_async, vmm"),
        ("JAX_CUDA_VISIBLE_DEVICES", "", "numbers such as 0,1, or all"),
        ("JAX_CUDA_VISIBLE_DEVICES", "GPU-1", "numbers such as 0,1, or all"),
    ],
)
def test_refused_options(name: str, value: str, accepted: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} \(\w+\): got '{value}'; accepted: {accepted}"):
        gpu.client_options({name: value})


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ({}, {}),
        ({"memory_fraction": 0.5}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
        ({"preallocate": False}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
        ({"preallocate": True}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}),
        ({"visible_devices": [1, 2]}, {"JAX_CUDA_VISIBLE_DEVICES": "1,2"}),
        ({"allocator": "platform"}, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}),
    ],
    ids=str,
)
def test_use_gpu_sets_variables(
    not_started: pytest.MonkeyPatch, options: dict[str, Any], variables: dict[str, str]
) -> None:
    before = dict(os.environ)
    gpu.use_gpu(**options)
    assert dict(os.environ) == {**before, "PJRT_DEVICE": "CUDA", **variables}
    assert gpu.client_options(os.environ) == {**DEFAULTS, **options}


def test_use_gpu_takes_the_name_that_is_there(not_started: pytest.MonkeyPatch) -> None:
    """JAX refuses both names of the memory fraction at once."""
    not_started.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.1")
    gpu.use_gpu(memory_fraction=0.2)
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.2"
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ


def test_use_gpu_keeps_what_variables_say(not_started: pytest.MonkeyPatch) -> None:
    not_started.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    gpu.use_gpu(preallocate=False)
    assert gpu.client_options(os.environ) == {**DEFAULTS, "allocator": "platform", "preallocate": False}


@pytest.mark.parametrize(
    "options", [{"memory_fraction": 0}, {"allocator": "malloc"}, {"visible_devices": []}], ids=str
)
def test_use_gpu_refuses_before_it_sets_anything(
    not_started: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    before = dict(os.environ)
    with pytest.raises(ValueError, match="accepted:"):
        gpu.use_gpu(**options)
    assert dict(os.environ) == before


def test_use_gpu_without_a_plugin(not_started: pytest.MonkeyPatch) -> None:
    """It says so before PyTorch/XLA starts, which aborts the process at the second attempt."""
    not_started.setenv(pjrt_adapter.PLUGIN_VARIABLE, "/nowhere/some.so")
    before = dict(os.environ)
    with pytest.raises(pjrt_adapter.PluginError, match=r"'/nowhere/some\.so', which is no file"):
        gpu.use_gpu()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({"JAX_CUDA_VISIBLE_DEVICES": "0,2,3"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "1,2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2", "JAX_CUDA_VISIBLE_DEVICES": "1"}, 1),
    ],
)
def test_count_of_gpus(variables: dict[str, str], count: int) -> None:
    assert gpu.count(variables) == count


# Places among processes


@pytest.fixture
def plugin() -> Any:
    pytest.importorskip("torch_xla")  # before flashxla.xla.plugin, which it loads itself
    from flashxla.xla import plugin

    return plugin


@pytest.mark.parametrize("gpus", ["0,1", ""])
def test_a_process_for_each_gpu(plugin: Any, environment: pytest.MonkeyPatch, gpus: str) -> None:
    environment.setenv("CUDA_VISIBLE_DEVICES", gpus)
    if gpus:
        assert plugin.CudaPlugin().physical_chip_count() == 2
    else:
        with pytest.raises(RuntimeError, match=r"^torch_xla\.launch: got .* no GPU; accepted: at least one$"):
            plugin.CudaPlugin().physical_chip_count()


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (0, 1, 0)),
        (LAUNCHED, (1, 4, 1)),
        (TORCHRUN, (5, 8, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, (1, 2, 0)),  # two hosts with a GPU each
        ({**LAUNCHED, "RANK": "5", "WORLD_SIZE": "8"}, (5, 8, 1)),  # launched on each of two hosts
    ],
)
def test_place(plugin: Any, variables: dict[str, str], place: tuple[int, int, int]) -> None:
    assert plugin.Place.of(variables) == place


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ({}, {}),
        ({"JAX_CUDA_VISIBLE_DEVICES": "3"}, {"visible_devices": [3]}),
        (LAUNCHED, {"visible_devices": [1], "node_id": 1, "num_nodes": 4}),
        (TORCHRUN, {"visible_devices": [1], "node_id": 5, "num_nodes": 8}),
        (
            {**TORCHRUN, "JAX_CUDA_VISIBLE_DEVICES": "4,6,7"},
            {"visible_devices": [6], "node_id": 5, "num_nodes": 8},
        ),
        (
            {**LAUNCHED, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            {"visible_devices": [1], "node_id": 1, "num_nodes": 4, "preallocate": False},
        ),
    ],
)
def test_options_of_a_process(
    plugin: Any, environment: pytest.MonkeyPatch, variables: dict[str, str], options: dict[str, Any]
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    assert plugin.CudaPlugin().client_create_options() == {**DEFAULTS, **options}
    assert plugin.CudaPlugin().requires_xla_coordinator() == ("num_nodes" in options)


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ({}, None),
        ({"XLA_FLAGS": "--xla_a=1"}, "--xla_a=1"),
        (LAUNCHED, "--xla_gpu_shard_autotuning=false"),
        ({**TORCHRUN, "XLA_FLAGS": "--xla_a=1"}, "--xla_a=1 --xla_gpu_shard_autotuning=false"),
        (
            {**LAUNCHED, "XLA_FLAGS": "--xla_gpu_shard_autotuning=true"},
            "--xla_gpu_shard_autotuning=true",
        ),
    ],
)
def test_flags_of_a_group(
    plugin: Any, environment: pytest.MonkeyPatch, variables: dict[str, str], flags: str | None
) -> None:
    """Set before the plugin is loaded, once, and never over what the user says."""
    environment.setattr(
        pjrt_adapter, "load", lambda: SimpleNamespace(path=Path(os.environ.get("XLA_FLAGS", "")))
    )
    for name, value in variables.items():
        environment.setenv(name, value)
    for _ in range(2):
        assert plugin.CudaPlugin().library_path() == str(Path(flags or ""))
        assert os.environ.get("XLA_FLAGS") == flags


# Finding the plugin


def install(folder: Path, package: str) -> Path:
    """A package as JAX's plugins are: in a folder jax_plugins without __init__.py."""
    path = folder / "jax_plugins" / package
    path.mkdir(parents=True)
    (path / "__init__.py").touch()
    (path / "xla_cuda_plugin.so").touch()
    return path / "xla_cuda_plugin.so"


@pytest.fixture
def no_packages(environment: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which JAX's plugins are not installed."""
    environment.setattr(pjrt_adapter, "_PACKAGES", ("jax_plugins_of_a_test.xla_cuda13",))
    return environment


@pytest.mark.parametrize("names", [("cuda13", "cuda12"), ("cuda12",)], ids=["the newer of two", "one"])
def test_find_installed_plugin(
    environment: pytest.MonkeyPatch, tmp_path: Path, names: tuple[str, ...]
) -> None:
    (first, *_) = [install(tmp_path, f"xla_{name}") for name in names]
    environment.setattr(sys, "path", [str(tmp_path)])  # and not what else is installed
    environment.delitem(sys.modules, "jax_plugins", raising=False)
    assert pjrt_adapter.find_plugin() == first
    environment.delitem(sys.modules, "jax_plugins", raising=False)


def test_find_the_plugin_that_is_named(no_packages: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "some.so"
    path.touch()
    no_packages.setenv(pjrt_adapter.PLUGIN_VARIABLE, str(path))
    assert pjrt_adapter.find_plugin() == path


def test_the_plugin_that_is_named_is_missing(no_packages: pytest.MonkeyPatch) -> None:
    no_packages.setenv(pjrt_adapter.PLUGIN_VARIABLE, "/nowhere/some.so")
    with pytest.raises(
        pjrt_adapter.PluginError, match=r"FLASHXLA_PJRT_PLUGIN: got '/nowhere/some\.so', which is no"
    ):
        pjrt_adapter.find_plugin()


def test_no_plugin(no_packages: pytest.MonkeyPatch) -> None:
    expected = (
        r"jax-cuda13-pjrt.*pip install '\.\[torch-xla,cuda13\]' in a checkout of flashxla \(or cuda12\)"
    )
    with pytest.raises(pjrt_adapter.PluginError, match=expected):
        pjrt_adapter.find_plugin()


# Through torch_xla


# torch_xla takes seconds to import and can be started once a process, so each start has a fork of one process.
STARTS = """
import os, sys
import torch_xla
import flashxla

def report(name, function):
    try:
        result = str(function())
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    os.write(1, f"{name}\\t{result.splitlines()[0]}\\n".encode())

def start(name, then=lambda: None, **variables):
    process = os.fork()
    if process == 0:
        os.environ.update(variables)
        report(name, torch_xla.device)
        then()
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0, name

start("cpu", PJRT_DEVICE="CPU", then=lambda: report("late", flashxla.use_gpu))
start("none", PJRT_DEVICE="CUDA")
os.environ["FLASHXLA_PJRT_PLUGIN"] = sys.argv[1]
flashxla.use_gpu()
start("refused")
"""


@pytest.fixture(scope="module")
def starts(stub_library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What happened at each start of STARTS."""
    pytest.importorskip("torch_xla")
    plugin = Stub(stub_library, tmp_path_factory.mktemp("starts") / "plugin.so")
    unset = (pjrt_adapter.PLUGIN_VARIABLE, "PJRT_DEVICE", *LAUNCHED, *TORCHRUN)
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", STARTS, str(plugin.path)],
        env={**environment, "STUB_VERSION": "0.118"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line)


def has_plugin() -> bool:
    return importlib.util.find_spec("jax_plugins") is not None and any(
        importlib.util.find_spec(package) for package in pjrt_adapter._PACKAGES
    )


@pytest.mark.skipif(has_plugin(), reason="JAX's CUDA plugin is installed")
def test_torch_xla_without_a_plugin_says_what_to_install(starts: dict[str, str]) -> None:
    assert "jax-cuda13-pjrt or jax-cuda12-pjrt" in starts["none"]
    assert "pip install '.[torch-xla,cuda13]'" in starts["none"]


def test_torch_xla_with_a_plugin_that_is_too_new(starts: dict[str, str]) -> None:
    assert "plugin.so: it has version 0.118 of the PJRT C API; accepted: 0.76 to 0.117" in starts["refused"]


def test_use_gpu_is_too_late_once_torch_xla_runs(starts: dict[str, str]) -> None:
    assert starts["cpu"] == "xla:0"
    assert starts["late"].startswith("RuntimeError: flashxla.use_gpu: PyTorch/XLA runs already, on CPU")
