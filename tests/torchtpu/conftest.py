"""These tests have an environment of their own: make test-torchtpu."""

import importlib.util
import os
import tempfile

if importlib.util.find_spec("torch_tpu") is None:
    collect_ignore_glob = ["test_*.py"]

# Graphs that earlier runs compiled would hide what this one does.
_compiled_graphs = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compiled_graphs.name
