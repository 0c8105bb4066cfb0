#!/usr/bin/env bash
# pack.sh: TorchTPU and torchax with flashxla, its tests and benchmarks, into .gpu/torchtpu (45 MB; minutes).
# Needs make torchtpu and make cuda-for-test. PACK: another folder. CUDA_LIBRARY: another library, of the same sources.
# pack.sh --own: only flashxla and the tests anew (half a minute).
. "$(dirname "$0")/../packing.sh"
own=${1:-}
[ "$own" != --own ] || shift
no_arguments "$@"
begin torchtpu
environment .venv-torchtpu torchtpu
if [ -z "$own" ]; then
  # The rest the machine has. The lists of files of these packages have everything: nothing is made when they are installed.
  .venv-torchtpu/bin/python "$tools/carry.py" "$(site_packages .venv-torchtpu)" "$work/site" \
    --only torch-tpu torchax frozendict immutabledict portpicker pyzmq
  find "$work/site/torch_tpu" -name '*_2_1[2345]_0*' -prune -exec rm -rf {} +  # for other versions of PyTorch
  find "$work/site" -name '*.so*' -exec strip --strip-unneeded {} + 2> /dev/null || true
  pack_folder "$work/site" "$pack/torchtpu.tar.xz" .
fi
[ -f "$pack/torchtpu.tar.xz" ] || fail "no $pack/torchtpu.tar.xz: pack once without --own"
pack_flashxla .venv-torchtpu build/torchtpu tests benchmarks examples pyproject.toml
ls -la "$pack"
