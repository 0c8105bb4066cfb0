#!/usr/bin/env bash
# run.sh STAGE...: TorchTPU 0.2 and torchax with flashxla. One stage after the other; STAGE,STAGE at the same time.
# Stages: memory doctor step steps train train32 eager generate torchax torchtpu verify two
# DEVICE=cuda|cpu PYTHON=python3 OUT=FOLDER LIMIT=570 JOBS=8; QUICK=1: small settings; ONE_IN=4: a random fourth of the tests
name=torchtpu
LOGS=${WORK:-/tmp/flashxla-torchtpu}/logs
. "$(dirname "$0")/running.sh"
QUICK=${QUICK:-} JOBS=${JOBS:-8} SITE=$WORK/site
export TF_CPP_MIN_LOG_LEVEL=2
# Each takes PyTorch's one place for another backend: a process of its own.
if [ "$DEVICE" = cuda ]; then
  TPU_ENV="PJRT_DEVICE=CUDA" AX_ENV="XLA_PYTHON_CLIENT_PREALLOCATE=false"
else
  TPU_ENV="PJRT_DEVICE=CPU JAX_PLATFORMS=cpu" AX_ENV="JAX_PLATFORMS=cpu"
fi
[ -z "$QUICK" ] || ONE_IN=12
some=()
[ -z "${ONE_IN:-}" ] || some=(--one-in "$ONE_IN")

setup() {
  rm -rf "$SITE"
  mkdir -p "$SITE"
  tar -xJf "$here/torchtpu.tar.xz" -C "$SITE" || return 1
  unpack_flashxla || return 1
  export PYTHONPATH=$PYTHONPATH:$SITE
  machine
  cd "$RUN" && RUN=$RUN SITE=$SITE TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$PYTHON" - << 'P' || return 1
import os
from importlib.util import find_spec

import flashxla
import torch

assert flashxla.__file__.startswith(os.environ["RUN"]), flashxla.__file__
for name in ("torchax", "torch_tpu"):
    assert find_spec(name).origin.startswith(os.environ["SITE"]), name
tests = ("hypothesis", "pytest", "xdist", "pytest_timeout", "rich", "safetensors", "matplotlib")
for name in (*tests, "frozendict", "immutabledict", "portpicker", "zmq", "absl"):
    if not find_spec(name):
        print("MISSING", name)
assert os.environ["DEVICE"] != "cuda" or torch.cuda.is_available()
P
  versions "$PYTHON" torch jax transformers torchax torch-tpu numpy
}
collect() { tar -czf "$OUT/.logs" -C "$LOGS" . 2> /dev/null && mv "$OUT/.logs" "$OUT/logs.tar.gz"; }

stage_memory() { ENVIRONMENT=$TPU_ENV tests memory 150 tests/torchtpu/test_memory.py; }
stage_doctor() {
  # shellcheck disable=SC2086
  limited 200 doctor env $TPU_ENV "$PYTHON" -m flashxla doctor --json "$LOGS/doctor.json"
  grep -aE 'torch|in place|Not working|Everything|FAIL' "$LOGS/doctor.log"
}
# shellcheck disable=SC2086
stage_generate() {
  limited 150 generate-torchtpu env $TPU_ENV "$PYTHON" -m flashxla generate --frontend torchtpu --verify --json "$LOGS/generate-torchtpu.json"
  limited 150 generate-torchax env $AX_ENV "$PYTHON" -m flashxla generate --frontend torchax --verify --json "$LOGS/generate-torchax.json"
  tail -n 8 "$LOGS/generate-torchtpu.log" "$LOGS/generate-torchax.log" | cut -c1-200
}
measure_step() {  # FILE SECONDS WORDS...
  local file=$1 seconds=$2 size=(--rounds 6)
  shift 2
  [ -z "$QUICK" ] || size=(--quick --rounds 1)
  limited "$seconds" "$file" "$PYTHON" -m flashxla bench step --device "$DEVICE" "${size[@]}" --profile --json "$OUT/$file.json" "$@"
  "$PYTHON" - "$OUT/$file.json" << 'P'
import json
import sys

try:
    rows = json.load(open(sys.argv[1]))["results"]["step"]
except (OSError, KeyError) as error:
    raise SystemExit(f"no rows: {error}") from None
jax = {row["case"]: row["us"] for row in rows if row["contender"] == "flashxla in JAX" and "us" in row}
for row in rows:
    head = f"   {row['case']} | {row['contender']} |"
    if row.get("ours") and "us" in row:
        ratio = row["us"] / jax[row["case"]] if row["case"] in jax else float("nan")
        print(head, f"{row['us']:.0f} us, {ratio:.3f} of JAX, host {row['host_us']:.0f} us,", end=" ")
        print(f"programs {row['programs_per_step']}, compile {row['compile_seconds']:.1f} s, eager {row.get('eager_us')}")
    elif row.get("ours"):
        print(head, row.get("failed"))
    elif "timeline" in row:
        print(head, row["timeline"])
P
}
stage_step() { if [ -n "$QUICK" ]; then measure_step step 200 --only "batch 3"; else measure_step step 240 --only "batch 16"; fi; }
stage_steps() { measure_step steps 420; }  # batches 1, 16 and 64
measure_training() {  # FILE SECONDS WORDS...
  local file=$1 seconds=$2 size=()
  shift 2
  [ -z "$QUICK" ] || size=(--quick)
  limited "$seconds" "$file" "$PYTHON" -m benchmarks.train_llama --device "$DEVICE" "${size[@]}" --json "$OUT/$file.json" "$@"
  grep -aE '^(dtype|float32|bfloat16)' "$LOGS/$file.log"
}
stage_train() { measure_training train 250 --contenders "TorchTPU, compiled"; }  # float32, then bfloat16
stage_train32() { measure_training train32 200 --dtypes float32 --contenders "TorchTPU, compiled"; }
stage_eager() { measure_training train-eager 300 --contenders "TorchTPU, eager"; }
stage_torchax() {
  local gradients=(tests/ops/test_flash_attn_backward.py tests/ops/test_gradient_engines.py)
  ENVIRONMENT=$AX_ENV tests torchax-gradients 200 -n "$JOBS" "${some[@]}" tests/torchax/test_torchax.py "${gradients[@]}" \
    -k torchax --frontends torchax,torchax_jit
  ENVIRONMENT=$AX_ENV tests torchax 400 -n "$JOBS" "${some[@]}" tests/torchax/test_execution.py tests/ops "${gradients[@]/#/--ignore=}" \
    -k torchax --frontends torchax,torchax_jit
}
stage_torchtpu() {
  ENVIRONMENT=$TPU_ENV tests torchtpu 500 -n "$JOBS" "${some[@]}" tests/torchtpu/test_torch_tpu.py tests/torchtpu/test_memory.py tests/ops \
    tests/torchtpu/test_attention.py tests/torchtpu/test_execution.py tests/torchtpu/test_programs.py tests/torchtpu/test_doctor.py \
    tests/torchtpu/test_train_llama.py -k torchtpu --frontends torchtpu,torchtpu_compiled
}
stage_verify() {  # ten kinds of models
  ENVIRONMENT=$TPU_ENV tests verify-torchtpu 200 -n "$JOBS" "${some[@]}" tests/generate/test_verify.py -k torchtpu
  ENVIRONMENT=$AX_ENV tests verify-torchax 200 -n "$JOBS" "${some[@]}" tests/generate/test_verify.py -k torchax
}
stage_two() { ENVIRONMENT=$TPU_ENV tests two 240 tests/torchtpu/test_processes.py; }  # needs 2 GPUs

begin "$@"
setup > "$LOGS/setup.log" 2>&1 || { cat "$LOGS/setup.log"; exit 1; }
cat "$LOGS/setup.log"
cd "$RUN" || exit 1
for stages in "$@"; do
  say "$stages, $(left) s left"
  from=$SECONDS running=()
  for stage in ${stages//,/ }; do
    "stage_$stage" > "$LOGS/$stage.out" 2>&1 &
    running+=($!)
  done
  wait "${running[@]}"
  for stage in ${stages//,/ }; do
    echo "--- $stage"
    cat "$LOGS/$stage.out"
  done
  say "$stages took $((SECONDS - from)) s"
  collect
done
