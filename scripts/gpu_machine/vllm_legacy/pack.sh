#!/usr/bin/env bash
# pack.sh: vLLM 0.13 on PyTorch/XLA with flashxla and its tests, into .gpu/vllm_legacy/part0, part1, part2 (53 MB each; 2 minutes).
# Needs make vllm-legacy, make cuda-for-test and, once, pack_torch.sh. PACK: another folder. CUDA_LIBRARY: another library, of the same sources.
. "$(dirname "$0")/../packing.sh"
no_arguments "$@"
begin vllm_legacy
environment .venv-vllm-legacy vllm-legacy
torch=$(torch_archive)
.venv-vllm-legacy/bin/python "$tools/carry.py" "$(site_packages .venv-vllm-legacy)" "$work/site" \
  --leave "$tools/machine.txt" "$tools/vllm_legacy/left.txt"
install_own .venv-vllm-legacy build/vllm-legacy vllm-legacy flashxla_vllm_legacy "$work/site"
find "$work/site" -name '*.so*' -size +1M -exec strip --strip-unneeded {} \;
mkdir "$work/tree"
git archive HEAD tests vllm-legacy vllm-plugin/pyproject.toml pyproject.toml docs/benchmarks | tar -C "$work/tree" -xf -
pack_folder "$work" "$work/site.tar.xz" site tree
cp "$tools/carry.py" "$tools/vllm_legacy/links.py" "$tools/machine.txt" "$pack/"
in_parts "$torch" "$work/site.tar.xz"
