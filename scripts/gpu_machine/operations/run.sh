#!/usr/bin/env bash
# run.sh STAGE...: the operations through PyTorch and JAX, and the CUDA library. Stages: ops engines gradients cuda sanitizer racecheck tables prefill short calls backward train compare profile growth limits
# DEVICE=cuda|cpu PYTHON=python3 OUT=FOLDER LIMIT=570 JOBS=14; ONE_IN=4: a random fourth of `ops`; FRONTENDS=torch,jax_jit
# TOPICS="prefill decode ...", TOPIC_SECONDS and ROUNDS of `tables`; CALLED="decode chunks ..." of `calls`; QUICK=1
name=operations
. "$(dirname "$0")/running.sh"
JOBS=${JOBS:-14} FRONTENDS=${FRONTENDS:-torch,jax_jit}
export TORCH_DEVICE_BACKEND_AUTOLOAD=0

stage_ops() { tests ops 500 -n "$JOBS" --one-in "${ONE_IN:-1}" tests/ops --frontends "$FRONTENDS" --random-seconds 150; }
stage_engines() {  # the tests that choose kernels, for a change of these
  tests engines 150 -n "$JOBS" tests/ops/test_engines.py tests/ops/test_batch_invariance.py tests/ops/test_few_queries.py tests/test_explain.py \
    tests/ops/test_random_calls.py tests/ops/test_ragged_paged_attention.py --frontends "$FRONTENDS" --random-seconds 150
}
stage_gradients() {  # the same for gradients
  tests gradients 150 -n "$JOBS" tests/ops/test_gradient_engines.py tests/ops/test_flash_attn_backward.py tests/ops/test_gradients.py \
    tests/ops/test_flash_attn_forms.py tests/cuda/test_gradient_graphs.py --frontends "$FRONTENDS"
}
stage_cuda() { tests cuda 300 -n 4 tests/cuda --ignore tests/cuda/test_sanitizer.py; }  # some fill the memory
stage_sanitizer() {
  shown 4 90 sanitizer compute-sanitizer --tool memcheck --leak-check no --padding 4096 --error-exitcode 9 \
    "$PYTHON" -m tests.cuda.smoke "${SEED:-$RANDOM}" "${CALLS:-45}"
}
stage_prefill() { shown 60 120 prefill "$PYTHON" "$here/prefill.py" time ab; }
stage_short() { shown 20 60 short "$PYTHON" "$here/prefill.py" short; }
stage_calls() { shown 100 150 calls "$PYTHON" "$here/calls.py" ${CALLED:-decode queries chunks mixed}; }
stage_backward() { shown 20 90 backward "$PYTHON" "$here/backward.py" time; }
stage_train() { shown 70 120 train "$PYTHON" "$here/backward.py" train; }
stage_racecheck() {
  shown 4 200 racecheck compute-sanitizer --tool racecheck --error-exitcode 9 "$PYTHON" -m tests.cuda.smoke "${SEED:-$RANDOM}" "${CALLS:-30}"
}
stage_tables() {  # docs/benchmarks/h200-*.json: each topic in time, or as far as it came
  local topic tables=$WORK/tables code=0
  rm -rf "$tables"
  mkdir -p "$tables"
  for topic in ${TOPICS:-prefill decode mixed kv_write plan overhead}; do
    LOGS=$tables shown 3 "${TOPIC_SECONDS:-260}" "$topic" "$PYTHON" -m flashxla bench "$topic" --device "$DEVICE" --peers --all ${ROUNDS:+--rounds "$ROUNDS"} ${QUICK:+--quick} \
      --json "$tables/h200-$topic.json" --plot "$tables/h200-$topic.svg" || code=1
  done
  tar -C "$WORK" -czf "$OUT/tables.tar.gz" tables
  return $code
}
stage_growth() {
  shown 45 150 growth "$PYTHON" -m flashxla bench growth --device "$DEVICE" \
    ${QUICK:+--quick} --rounds 5 --json "$OUT/growth.json" --plot "$OUT/growth.svg"
}
stage_limits() {  # how fast the pages of a decode step can be read at all
  nvcc -O3 -std=c++17 -arch=sm_90a -I"$RUN/csrc" "$here/read_limit.cu" -o "$WORK/read_limit" && shown 20 60 limits "$WORK/read_limit"
}
stage_profile() {  # by ncu: a report of the engine wide for each of CASES (see prefill.py one), and its instructions with their samples
  local each report
  for each in ${CASES:-64x128 16x512}; do
    report=$OUT/wide-${each/:/-}
    limited 60 "profile-$each" ncu --set full -k regex:WideKernel -s 2 -c 1 -f -o "$report" "$PYTHON" "$here/prefill.py" one "$each" || return 1
    ncu -i "$report.ncu-rep" --page details > "$report.txt"
    ncu -i "$report.ncu-rep" --page source --csv > "$report.csv"
  done
}
stage_compare() {  # in turns: a GPU's clock drifts. COMPARED="SCRIPT TABLE...", by default `ab`
  local library=$RUN/src/flashxla/lib/libflashxla_cuda.so script tables round which code=0
  read -r script tables <<< "${COMPARED:-prefill}"
  [ -f "$here/base.xz" ] || { echo "no base.xz: pack with BASE_LIBRARY"; return 1; }
  for round in 1 2 3; do
    for which in base cuda; do
      xz -dc "$here/$which.xz" > "$library"
      # shellcheck disable=SC2086
      shown 40 60 "compare-$which-$round" "$PYTHON" "$here/$script.py" ${tables:-ab} || code=1
    done
  done
  return $code
}

begin "$@"
unpack_flashxla || exit 1
cd "$RUN" || exit 1
export PYTHONPATH=$PYTHONPATH:$RUN  # for the scripts beside this one, which use benchmarks
machine
versions "$PYTHON" torch jax numpy
run_stages "$@"
