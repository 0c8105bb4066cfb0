#!/usr/bin/env bash
# pack.sh: vLLM 0.13 on PyTorch/XLA with flashxla and its tests, into .gpu/vllm_legacy/part0, part1, part2 (53 MB each; 2 minutes).
# Needs make vllm-legacy, make cuda-for-test and, once, pack_torch.sh. PACK: another folder. CUDA_LIBRARY: another library, of the same sources.
. "$(dirname "$0")/../packing.sh"
no_arguments "$@"
begin vllm_legacy
environment .venv-vllm-legacy vllm-legacy
[ -f "$pack/torch.tar.xz" ] || fail "no $pack/torch.tar.xz: pack_torch.sh BUNDLE makes it"
.venv-vllm-legacy/bin/python "$tools/carry.py" "$(site_packages .venv-vllm-legacy)" "$work/site" \
  --leave "$tools/machine.txt" "$tools/vllm_legacy/left.txt"
install_own .venv-vllm-legacy build/vllm-legacy vllm-legacy flashxla_vllm_legacy "$work/site"
find "$work/site" -name '*.so*' -size +1M -exec strip --strip-unneeded {} \;
mkdir "$work/tree"
git archive HEAD tests vllm-legacy vllm-plugin/pyproject.toml pyproject.toml docs/benchmarks | tar -C "$work/tree" -xf -
cp "$pack/commit.txt" "$work/"
pack_folder "$work" "$work/site.tar.xz" site tree commit.txt
# One archive after the other, in three parts of one size.
cat "$pack/torch.tar.xz" "$work/site.tar.xz" > "$work/both"
split -n 3 -d -a 1 "$work/both" "$work/part_"
rm -rf "$pack"/part?
for i in 0 1 2; do
  mkdir "$pack/part$i"
  mv "$work/part_$i" "$pack/part$i/"
  cp "$pack/run.sh" "$pack/running.sh" "$pack/part$i/"
done
printf '%s %s\n' "$(stat -c %s "$pack/torch.tar.xz")" "$(sha256sum < "$work/both" | cut -d' ' -f1)" > "$pack/part2/sum.txt"
cp "$tools/carry.py" "$tools/vllm_legacy/links.py" "$tools/machine.txt" "$pack/part2/"
rm "$pack/run.sh" "$pack/running.sh" "$pack/commit.txt"  # each part has its own
du -sb "$pack"/part?
