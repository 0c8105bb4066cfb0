#!/usr/bin/env bash
# pack.sh: vLLM on XLA with flashxla and its tests, into .gpu/vllm (38 MB; 3 minutes).
# Needs make vllm and make cuda-for-test. PACK: another folder. CUDA_LIBRARY: another library, of the same sources.
# pack.sh --own: only flashxla, flashxla-vllm and the tests anew (1 minute).
. "$(dirname "$0")/../packing.sh"
own=${1:-}
[ "$own" != --own ] || shift
no_arguments "$@"
begin vllm
environment .venv-vllm vllm
cp "$tools"/vllm/{start,kernels}.py "$pack/"
if [ -z "$own" ]; then
  .venv-vllm/bin/python "$tools/carry.py" "$(site_packages .venv-vllm)" "$work/site" --leave "$tools/machine.txt" "$tools/vllm/left.txt"
  # tokamax imports xprof (98 MB), and uses it for profiles alone.
  mkdir -p "$work/site/xprof/cli/tools"
  touch "$work"/site/xprof/{,cli/,cli/tools/}__init__.py "$work/site/xprof/cli/tools/get_kernel_stats_tool.py"
  pack_folder "$work/site" "$pack/site.tar.xz" .
fi
[ -f "$pack/site.tar.xz" ] || fail "no $pack/site.tar.xz: pack once without --own"
install_own .venv-vllm build/vllm vllm-plugin flashxla_vllm "$work/own"
pack_folder "$work/own" "$pack/own.tar.xz" .
pack_tree tests vllm-plugin docs/benchmarks pyproject.toml
ls -la "$pack"
