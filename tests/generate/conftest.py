"""Skips the folder where its dependencies are missing, and keeps what tests leave in PyTorch from the next."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("rich")

from tests.tiny_models import no_compiled_code, one_thread  # noqa: F401
