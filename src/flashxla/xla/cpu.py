"""TorchTPU on a CPU, for tests and for machines without a GPU."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from flashxla.platforms import CPU
from flashxla.xla import pjrt_adapter, torch_tpu

_PACKAGE = "xla_plugins.xla_cpu_pjrt"


def use_cpu() -> None:
    """Run TorchTPU on this machine's CPU, through a PJRT plugin for CPUs: the package xla-cpu-pjrt, or the file that
    FLASHXLA_PJRT_PLUGIN names. Tensors have the device "tpu", which is what TorchTPU calls it.

    Call it before the first such tensor is made. It also sets torch._dynamo.config.automatic_dynamic_shapes to False:
    each shape is a graph of its own.

    Raises:
        RuntimeError: TorchTPU has started already, or TorchTPU or a plugin is not installed.
    """
    if not torch_tpu.is_installed():
        raise RuntimeError(
            f"flashxla.use_cpu: it starts TorchTPU, which is not installed: {torch_tpu.HOW_TO_INSTALL}"
        )
    if torch_tpu.platform() is None and pjrt_adapter.PLUGIN_VARIABLE not in os.environ:
        os.environ[pjrt_adapter.PLUGIN_VARIABLE] = str(find_plugin())
    torch_tpu.start("use_cpu", CPU, {})


def find_plugin() -> Path:
    """The file of a PJRT plugin for CPUs. Raises PluginError if there is none."""
    spec = importlib.util.find_spec("xla_plugins") and importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for path in sorted(Path(folder).glob("*.so")):
            return path
    raise pjrt_adapter.PluginError(
        "flashxla.use_cpu: needs a PJRT plugin for CPUs: pip install xla-cpu-pjrt, or name the file of one in "
        f"{pjrt_adapter.PLUGIN_VARIABLE}"
    )
