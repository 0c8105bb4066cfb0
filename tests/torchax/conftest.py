"""These tests have an environment of their own: make test-torchtpu."""

import importlib.util

if importlib.util.find_spec("torchax") is None:
    collect_ignore_glob = ["test_*.py"]
