"""XLA: registration of the custom calls with each runtime, and their embedding in PyTorch/XLA."""
