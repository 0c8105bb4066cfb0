#!/usr/bin/env bash
# run.sh stash N: puts part N, 0 or 1, where part 2 finds it.
# run.sh STAGE...: the front ends lazy and openxla, PyTorch/XLA 2.9. Of part2, after the others. Stages: gradients ops xla train step doctor
# DEVICE=cuda|cpu PYTHON=python3 OUT=FOLDER LIMIT=570 JOBS=14; ONE_IN=4: a random fourth of `ops`; STEP_SECONDS, ROUNDS, QUICK=1: of `step`
name=torch_xla
. "$(dirname "$0")/running.sh"
JOBS=${JOBS:-14}
GRADIENTS=(tests/ops/test_{flash_attn_backward,flash_attn_forms,gradient_engines,gradients}.py)

setup() {
  if [ ! -f "$WORK/ready" ]; then
    unpack_parts || return 1
    say compile modules
    "$PYTHON" -m compileall -q -j 16 "$WORK/bundle/site" > /dev/null 2>&1
    touch "$WORK/ready"
  fi
  unpack_flashxla || return 1
  bundle_libraries
  export PYTHONPATH=$PYTHONPATH:$WORK/bundle/site PYTHONDONTWRITEBYTECODE= TORCH_DEVICE_BACKEND_AUTOLOAD=0
  export XLA_PYTHON_CLIENT_PREALLOCATE=false PJRT_DEVICE=CUDA
  [ "$DEVICE" = cuda ] || export PJRT_DEVICE=CPU JAX_PLATFORMS=cpu
  cd "$RUN" || return 1
  machine
  versions "$PYTHON" torch torch_xla jax numpy
  "$PYTHON" -c 'import torch, torch_xla; print(torch.__file__, torch_xla.__file__, torch_xla._XLAC._xla_get_devices())'
}

both() { tests "$@" -n "$JOBS" --frontends lazy,openxla; }  # LOG SECONDS WORDS...
stage_gradients() { both gradients 300 "${GRADIENTS[@]}" tests/xla/test_short_way.py -k "lazy or openxla"; }
stage_ops() { both ops 450 --one-in "${ONE_IN:-1}" tests/ops "${GRADIENTS[@]/#/--ignore=}" -k "lazy or openxla"; }
stage_xla() {
  both xla 200 tests/xla/test_{compiled_programs,in_place_torch_xla,lazy_or_compile,spmd}.py tests/cuda/test_torch_xla_gpu.py
}
stage_train() {  # the same losses as in eager PyTorch on the CPU
  local backend code=0
  for backend in eager openxla; do
    shown 4 90 "train-$backend" "$PYTHON" examples/train_torch.py --rows 2 --tokens 256 --steps 21 --backend "$backend" || code=1
  done
  return $code
}
stage_step() {  # docs/benchmarks/h200-step.json
  shown 3 "${STEP_SECONDS:-250}" step "$PYTHON" -m flashxla bench step --device "$DEVICE" --peers --profile ${ROUNDS:+--rounds "$ROUNDS"} ${QUICK:+--quick} \
    --json "$OUT/step.json" --plot "$OUT/step.svg"
}
stage_doctor() { shown 40 120 doctor "$PYTHON" -m flashxla doctor; }

begin "$@"
setup || exit 1
run_stages "$@"
