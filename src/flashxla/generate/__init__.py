"""Batched text generation with a paged cache: what `flashxla generate` runs."""

from pathlib import Path

# The folder of the small model in the package.
DEFAULT_MODEL = Path(__file__).parent / "default_model"
