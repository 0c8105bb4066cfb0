"""Tests of flashxla-vllm, in an environment of their own: make test-vllm."""
