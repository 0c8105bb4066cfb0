#!/usr/bin/env bash
# pack_torch.sh BUNDLE: .gpu/torch.tar.xz, which torch_xla/pack.sh and vllm_legacy/pack.sh put into their parts (136 MB; several minutes, once).
# BUNDLE: the trimmed torch 2.9 and torch_xla 2.9 as .tar.xz, or a folder of its pieces part_*. README.md says what is in it.
. "$(dirname "$0")/packing.sh"
[ $# -eq 1 ] || { usage >&2; exit 2; }
bundle=$(realpath "$1")
[ ! -d "$bundle" ] || bundle=("$bundle"/part_*)
[ -f "${bundle[0]}" ] || fail "no bundle at $1"
scratch
cat "${bundle[@]}" | tar -C "$work" -xJf -
for file in site/torch/version.py site/torch_xla/__init__.py lib/libcupti.so.12; do
  [ -f "$work/bundle/$file" ] || fail "the bundle has no bundle/$file"
done
# Symbols that nothing reads. _XLAC keeps its own: flashxla finds XLA's FFI API by one of them.
strip --strip-unneeded "$work"/bundle/site/torch/lib/libtorch_{cpu,python}.so
mkdir -p .gpu
pack_folder "$work" .gpu/torch.tar.xz bundle
ls -la .gpu/torch.tar.xz
