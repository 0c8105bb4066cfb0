#!/usr/bin/env bash
# pack.sh: flashxla, its tests and benchmarks, into .gpu/operations (6 MB; half a minute).
# Needs make build and make cuda-for-test. PACK: another folder. CUDA_LIBRARY: another library, of the same sources.
# BASE_LIBRARY: an older library, which the stage `compare` measures beside it.
. "$(dirname "$0")/../packing.sh"
no_arguments "$@"
begin operations
environment .venv build
cp "$tools"/operations/{prefill,calls,backward,tables}.py "$tools/operations/read_limit.cu" "$pack/"
rm -f "$pack/base.xz"
if [ -n "${BASE_LIBRARY:-}" ]; then
  cuda_library "$work/base.so" "$BASE_LIBRARY"
  xz -T2 -6 -c "$work/base.so" > "$pack/base.xz"
fi
pack_flashxla .venv build/pack tests benchmarks docs examples csrc pyproject.toml
ls -la "$pack"
