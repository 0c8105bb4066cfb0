#!/usr/bin/env bash
# pack.sh: flashxla's wheels, programs exported here, and transformers 5.23, into .gpu/within (30 MB; 2 minutes).
# Needs make torchtpu, make cuda-for-test, make wheel, make wheel-cuda and make wheel-cuda CUDA=12 (WHEEL_CUDA_ARCHITECTURES=90a for both). PACK: another folder.
. "$(dirname "$0")/../packing.sh"
no_arguments "$@"
begin within
environment .venv-torchtpu torchtpu
cp "$tools/within/native.py" "$tools/within/speed.py" "$pack/"
rm -rf "$pack/wheels" "$pack/programs"
mkdir "$pack/wheels" "$pack/programs"
for name in flashxla flashxla_cuda12 flashxla_cuda13; do
  wheels=(dist/"$name"-*x86_64.whl)
  [ ${#wheels[@]} -eq 1 ] && [ -f "${wheels[0]}" ] || fail "dist must have one $name-*x86_64.whl: make wheel, make wheel-cuda"
  cp "${wheels[0]}" "$pack/wheels/"
done
export JAX_PLATFORMS=cpu FLASHXLA_LIBRARY_DIR="$work/lib"
mkdir "$work/lib"
cp "$(site_packages .venv-torchtpu)"/flashxla/lib/*.so "$work/lib/"
cuda_library "$work/lib/libflashxla_cuda.so"
JAX_DEFAULT_MATMUL_PRECISION=highest .venv-torchtpu/bin/python -m flashxla export --platform cuda --dtype float32 --output "$pack/programs/f32"
.venv-torchtpu/bin/python -m flashxla export --platform cuda --dtype bfloat16 --output "$pack/programs/bf16"
.venv-torchtpu/bin/python "$tools/carry.py" "$(site_packages .venv-torchtpu)" "$work/more" --only transformers torchax
pack_folder "$work/more" "$pack/more.tar.xz" .
pack_tree tests examples csrc/include csrc/pjrt pyproject.toml
ls -la "$pack"
