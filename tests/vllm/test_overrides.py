"""The overrides fit the installed packages; other versions get a clear message."""

import importlib
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
from flashxla_vllm import overrides, versions

from tests.vllm import upstream


@pytest.mark.parametrize("override", overrides.OVERRIDES)
def test_upstream_is_what_the_override_relies_on(override):
    """When this fails, read the new source, revisit the override, then run python -m tests.vllm.upstream."""
    recorded, installed = upstream.recorded(), upstream.installed()
    for name in overrides.OVERRIDES[override]:
        assert installed[name] != "missing", f"{name} is gone"
        assert recorded.get(name) == installed[name], f"{name} has changed"


@pytest.mark.parametrize("override", overrides.OVERRIDES)
def test_each_override_states_its_reason(override):
    stage = getattr(overrides, override)
    assert stage.__doc__ and len(stage.__doc__.split()) > 8
    assert overrides.OVERRIDES[override]


def test_only_overrides_replaces_internals():
    """No other module of the package assigns into tpu_inference, torchax, torch or vLLM."""
    for file in Path(overrides.__file__).parent.glob("*.py"):
        if file.name != "overrides.py":
            assert not upstream.replacements(file), file.name
            assert "setattr(" not in file.read_text()


def test_supported_versions_are_installed():
    for name, version in versions.SUPPORTED.items():
        assert metadata.version(name).partition("+")[0] == version
    versions.check()


def test_other_versions_are_refused(monkeypatch):
    monkeypatch.setitem(versions.SUPPORTED, "vllm", "0.34.0")
    monkeypatch.setitem(versions.SUPPORTED, "missing-package", "1")
    with pytest.raises(
        RuntimeError, match=r"vllm 0\.33\.0 \(needs 0\.34\.0\).*missing-package is not installed"
    ):
        versions.check()
    monkeypatch.setenv(versions.ANY_VERSION, "1")
    versions.check()


def test_other_versions_are_refused_at_start():
    code = "from flashxla_vllm import versions; versions.SUPPORTED['vllm'] = '0.1'; import vllm; vllm.LLM"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode != 0
    assert "vllm 0.33.0 (needs 0.1)" in ended.stderr


def test_kernels_of_tpus_are_not_imported(monkeypatch):
    name = "tokamax._src.ops.experimental.gmm_v2.gmm_v2"
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tokamax", None)  # its import fails
    overrides.kernels_of_tpus_are_not_imported()
    with pytest.raises(NotImplementedError, match="kernel for TPUs"):
        importlib.import_module(name).gmm_v2()


@pytest.mark.parametrize(
    "program",
    [
        "from vllm import EngineArgs; EngineArgs(model='.')",
        """
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        """,
    ],
    ids=["LLM", "serve"],
)
def test_pytorch_does_not_start_cuda(program):
    """As on a machine with a GPU, where Triton asks PyTorch for the current device."""
    code = """
        import sys, types, torch
        started = []
        torch.cuda._lazy_init = lambda: started.append(True)
        def get_current_target():
            torch.cuda._lazy_init()
            return types.SimpleNamespace(backend="cuda")
        active = types.SimpleNamespace(get_current_target=get_current_target)
        import triton
        triton.runtime = types.SimpleNamespace(driver=types.SimpleNamespace(active=active))
    """
    after = """
        assert "vllm.third_party.flash_linear_attention.ops.utils" in sys.modules
        from vllm.third_party.flash_linear_attention.ops import utils
        print(utils.device, started)
        torch.cuda._lazy_init()
        print(started)
    """
    code = "".join(map(textwrap.dedent, (code, program + "\n", after)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-2:] == ["cpu []", "[True]"], done.stderr[-2000:]
