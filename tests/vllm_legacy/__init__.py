"""Tests of flashxla-vllm-legacy, in an environment of their own: make test-vllm-legacy."""
