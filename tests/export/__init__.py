"""These tests have an environment of their own: make test-torchtpu."""
