"""transformers' own tests, run with flashxla's attention: docs/transformers.md, "transformers' own tests"."""
