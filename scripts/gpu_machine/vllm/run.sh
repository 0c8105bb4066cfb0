#!/usr/bin/env bash
# run.sh STAGE...: vLLM 0.33 with flashxla. Stages: tokens warm bench kernels doctor
# OUT=FOLDER LIMIT=570 BENCH_SECONDS=330; JAX_PLATFORMS=cpu QUICK=1: small settings on a CPU
name=vllm
. "$(dirname "$0")/running.sh"

setup() {
  export PYTHONPATH=$WORK/site PYTHONDONTWRITEBYTECODE= JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu} VLLM_NO_USAGE_STATS=1
  if [ ! -f "$WORK/ready" ]; then
    say unpack
    mkdir -p "$WORK/site" "$WORK/tree"
    tar -C "$WORK/site" -xJf "$here/site.tar.xz" || return 1
    tar -C "$WORK/site" -xJf "$here/own.tar.xz" || return 1
    tar -C "$WORK/tree" -xJf "$here/tree.tar.xz" || return 1
    # As pip leaves it: a start without compiled modules would be measured as slower than it is.
    PYTHONPATH= "$PYTHON" -m compileall -q -j 16 "$WORK/site" > /dev/null 2>&1
    touch "$WORK/ready"
  fi
  cd "$WORK/tree" || return 1
  say "$(cat "$here/commit.txt"); $(versions "$PYTHON" vllm torch jax transformers numpy)"
}

stage_tokens() {
  local test=tests/vllm/test_families.py::test_tokens_equal_hf
  shown 25 240 tokens "$PYTHON" -m pytest -c vllm-plugin/pyproject.toml --rootdir . -v --durations 5 -p no:cacheprovider \
    tests/vllm/test_programs.py::test_cache_is_updated_where_it_is "$test[llama]" "$test[qwen3]"
}
stage_warm() { shown 180 300 warm "$PYTHON" "$here/start.py" ${QUICK:+--quick}; }
stage_bench() {
  shown 60 "${BENCH_SECONDS:-330}" bench "$PYTHON" -m flashxla bench vllm ${QUICK:+--quick --device cpu} --json "$OUT/bench.json"
}
stage_kernels() { shown 120 200 kernels "$PYTHON" "$here/kernels.py" ${QUICK:+--quick}; }
stage_doctor() { shown 60 150 doctor "$PYTHON" -m flashxla doctor; }

begin "$@"
setup || exit 1
run_stages "$@"
