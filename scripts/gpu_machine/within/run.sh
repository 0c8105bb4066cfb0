#!/usr/bin/env bash
# run.sh STAGE...: flashxla's wheels within other programs. Stages: native transformers wheels
# DEVICE=cuda|cpu PYTHON=python3 OUT=FOLDER LIMIT=570 WORKERS=6; SCALE=5: five times the limits; ONE_IN=12: which part of the operations' tests
name=within
. "$(dirname "$0")/running.sh"
SITE=$WORK/site SITE12=$WORK/site12 MORE=$WORK/more RUN=$WORK/run SCALE=${SCALE:-1}
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0
unset PYTHONPATH FLASHXLA_LIBRARY_DIR

install() {  # SITE with CUDA 13's library, SITE12 with CUDA 12's, MORE with transformers 5.23 and torchax
  [ ! -f "$WORK/ready" ] || return 0
  local pip=("$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir)
  rm -rf "$SITE" "$SITE12" "$MORE" "$RUN"
  mkdir -p "$RUN" "$MORE"
  "${pip[@]}" --target "$SITE" "$here"/wheels/flashxla-*.whl "$here"/wheels/flashxla_cuda13-*.whl || return 1
  "${pip[@]}" --target "$SITE12" "$here"/wheels/flashxla-*.whl "$here"/wheels/flashxla_cuda12-*.whl || return 1
  tar -xJf "$here/more.tar.xz" -C "$MORE" || return 1
  tar -xJf "$here/tree.tar.xz" -C "$RUN" || return 1
  touch "$WORK/ready"
}

# step NAME SECONDS COMMAND...: PYTHONPATH and the like by env, LINES_SHOWN of its log. A step that fails does not end its stage.
step() {
  shown "${LINES_SHOWN:-6}" "$(($2 * SCALE))" "$1" "${@:3}" || { failed+=("$1"); return 1; }
}

stage_wheels() {
  local which site
  for which in cuda12 cuda13; do
    site=$SITE
    [ $which = cuda13 ] || site=$SITE12
    LINES_SHOWN=30 step "doctor-$which" 180 env PYTHONPATH="$site" "$PYTHON" -m flashxla doctor
    step "ops-$which" 100 env PYTHONPATH="$site" "$PYTHON" -m pytest -q -p no:cacheprovider -n "${WORKERS:-6}" --device "$DEVICE" \
      --frontends jax,torch --one-in "${ONE_IN:-12}" --seed 1 tests/ops/test_paged_attention.py tests/ops/test_flash_attn_varlen.py \
      tests/ops/test_engines.py tests/ops/test_kv_cache.py tests/ops/test_gradients.py tests/ops/test_merge_states.py
    [ "$DEVICE" != cuda ] || LINES_SHOWN=12 step "speed-$which" 60 env PYTHONPATH="$site" "$PYTHON" "$here/speed.py"
  done
  return 0
}

stage_native() {
  local build=$WORK/build
  step build 100 bash -c "cmake -S '$RUN/examples/run_without_python' -B '$build' && cmake --build '$build' --parallel 4" || return
  # The programs of the pack were exported without a GPU; once more here.
  rm -rf "$WORK/program-here"
  LINES_SHOWN=3 step export-here 120 env PYTHONPATH="$SITE:$MORE" JAX_DEFAULT_MATMUL_PRECISION=highest "$PYTHON" -m flashxla export \
    --platform "$DEVICE" --dtype float32 --output "$WORK/program-here"
  LINES_SHOWN=30 step native 200 env PYTHONPATH="$SITE:$MORE" "$PYTHON" "$here/native.py" "$DEVICE" "$build/run_without_python" \
    "$here/programs" "$WORK/program-here"
}

model_tests() {  # NAME SECONDS PYTHONPATH WORDS...
  step "$1" "$2" env PYTHONPATH="$3" "$PYTHON" -m pytest -q -p no:cacheprovider -n "${WORKERS:-6}" --device "$DEVICE" --frontends torch \
    --durations=3 "${@:4}"
}
stage_transformers() {  # the machine's own transformers; in MORE is the one whose continuous batching flashxla knows
  local models=tests/transformers/test_models.py
  model_tests tf-own-generate 70 "$SITE" $models -k "(test_generate or test_beam or test_static) and not test_generate_compiled"
  model_tests tf-523-batching 70 "$MORE:$SITE" tests/transformers/test_continuous_batching.py
  model_tests tf-own-training 60 "$SITE" tests/transformers/test_training.py
  model_tests tf-523-hub 60 "$MORE:$SITE" tests/transformers/test_hub_kernel.py
  model_tests tf-own-forward 60 "$SITE" $models -k "test_forward or test_packed or test_encoder or test_compiled"
  model_tests tf-own-compiled 100 "$SITE" $models -k test_generate_compiled
  model_tests tf-own-rows 40 "$SITE" tests/transformers/test_rows.py
  return 0
}

begin "$@"
install || exit 1
cd "$RUN" || exit 1
machine
run_stages "$@"
