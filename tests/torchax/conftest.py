"""These tests have an environment of their own: make test-torchtpu."""

import importlib.util

if importlib.util.find_spec("torch_tpu") is None:  # torch_xla 2.9 brings a torchax that does not import
    collect_ignore_glob = ["test_*.py"]
