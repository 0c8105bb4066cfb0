#!/usr/bin/env bash
# run.sh stash N: puts part N, 0 or 1, where part 2 finds it.
# run.sh STAGE...: vLLM 0.13 on PyTorch/XLA 2.9 with flashxla. Of part2, after the others. Stages: tokens serve doctor
# OUT=FOLDER LIMIT=570
name=vllm_legacy
. "$(dirname "$0")/running.sh"

unpack() {
  local packages=$WORK/bundle/site
  unpack_parts || return 1
  # An environment of its own: what was carried, torch 2.9, and links to packages of the machine; not its torch, torchvision, transformers.
  "$PYTHON" "$here/links.py" "$WORK/machine" || return 1
  "$PYTHON" -m venv --without-pip "$WORK/venv" || return 1
  printf '%s\n' "$WORK/site" "$packages" "$WORK/machine" > "$WORK/venv/lib/python3.12/site-packages/carried.pth"
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
  bundle_libraries
  export PATH=$WORK/venv/bin:$PATH PYTHONDONTWRITEBYTECODE= PYTHONPATH= PJRT_DEVICE=${PJRT_DEVICE:-CUDA} VLLM_NO_USAGE_STATS=1
  cd "$WORK/tree" || return 1
  say "$(cat "$here/commit.txt"); $(versions python vllm torch torch_xla jax transformers)"
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
