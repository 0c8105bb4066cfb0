"""Batched text generation with a paged cache: what `flashxla generate` runs."""
