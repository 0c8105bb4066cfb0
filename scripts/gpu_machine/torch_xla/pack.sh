#!/usr/bin/env bash
# pack.sh: flashxla and its tests for PyTorch/XLA 2.9, into .gpu/torch_xla/part0, part1, part2 (52 MB at most; half a minute).
# Needs make build, make cuda-for-test and, once, pack_torch.sh. PACK: another folder. CUDA_LIBRARY: another library, of the same sources.
. "$(dirname "$0")/../packing.sh"
no_arguments "$@"
begin torch_xla
environment .venv build
torch=$(torch_archive)
pack_flashxla .venv build/pack tests benchmarks examples pyproject.toml
in_parts "$torch"
