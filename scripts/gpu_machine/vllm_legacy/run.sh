#!/usr/bin/env bash
# run.sh stash N: puts part N, 0 or 1, where part 2 finds it.
# run.sh STAGE...: vLLM 0.13 on PyTorch/XLA 2.9 with flashxla. Of part2, after the others. Stages: tokens serve doctor
# OUT=FOLDER LIMIT=570
name=vllm_legacy
. "$(dirname "$0")/running.sh"

if [ "$1" = stash ]; then
  mkdir -p "$WORK"
  cp "$here/part_${2:?the number of the part}" "$WORK/" && ls -la "$WORK"
  exit
fi

unpack() {
  local torch sum packages=$WORK/bundle/site
  cp "$here/part_2" "$WORK/" || return 1
  read -r torch sum < "$here/sum.txt"
  [ "$(cat "$WORK"/part_[0-2] | sha256sum | cut -d' ' -f1)" = "$sum" ] || { echo "parts are missing or broken: $(ls "$WORK")"; return 1; }
  say unpack
  cat "$WORK"/part_[0-2] > "$WORK/both" && rm "$WORK"/part_[0-2]
  { head -c "$torch" "$WORK/both" | xz -T0 -dc | tar -C "$WORK" -xf -; } || return 1
  { tail -c +$((torch + 1)) "$WORK/both" | xz -T0 -dc | tar -C "$WORK" -xf -; } || return 1
  rm "$WORK/both"
  # An environment of its own: what was carried, torch 2.9, and links to packages of the machine; not its torch, torchvision, transformers.
  "$PYTHON" "$here/links.py" "$WORK/machine" || return 1
  "$PYTHON" -m venv --without-pip "$WORK/venv" || return 1
  printf '%s\n' "$WORK/site" "$packages" "$WORK/machine" > "$WORK/venv/lib/python3.12/site-packages/carried.pth"
  ls -d "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/nvidia/*/lib | paste -sd: > "$WORK/libraries"
  # The bundle has no CUDA libraries of PyTorch, but vLLM makes PyTorch ask NVML, which says that there is a GPU.
  sed -i 's/^def is_available() -> bool:/&\n    return False/' "$packages/torch/cuda/__init__.py"
  grep -A1 '^def is_available() -> bool:' "$packages/torch/cuda/__init__.py" | grep -q 'return False' ||
    { echo "torch.cuda.is_available is not as expected"; return 1; }
  say compile modules
  "$WORK/venv/bin/python" -m compileall -q -j 16 "$WORK/site" "$packages" > /dev/null 2>&1
  touch "$WORK/ready"
}

setup() {
  [ -f "$WORK/ready" ] || unpack || return 1
  export LD_LIBRARY_PATH=$WORK/bundle/lib:$(cat "$WORK/libraries")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export PATH=$WORK/venv/bin:$PATH PYTHONDONTWRITEBYTECODE= PYTHONPATH= PJRT_DEVICE=${PJRT_DEVICE:-CUDA} VLLM_NO_USAGE_STATS=1
  cd "$WORK/tree" || return 1
  say "$(cat "$WORK/commit.txt"); $(versions python vllm torch torch_xla jax transformers)"
}

vllm_tests() {  # LOG SECONDS WORDS...
  shown 40 "$2" "$1" python -m pytest -c vllm-legacy/pyproject.toml --rootdir . -v --durations 5 -p no:cacheprovider "${@:3}"
}
stage_tokens() {
  local test=tests/vllm_legacy/test_families.py::test_tokens_equal_hf
  vllm_tests tokens 240 "$test[llama]" "$test[qwen3]" tests/vllm_legacy/test_offline.py
}
stage_serve() { vllm_tests serve 180 tests/vllm_legacy/test_server.py; }
stage_doctor() { shown 40 120 doctor python -m flashxla doctor; }

begin "$@"
setup || exit 1
run_stages "$@"
