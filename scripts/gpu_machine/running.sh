# Sourced by every run.sh, on the GPU machine. Without stages run.sh prints its first lines.
#   OUT     folder of the results           WORK  folder to unpack to, used again by the next run
#   LIMIT   seconds for everything          DEVICE, PYTHON
# Not -e: what comes after a stage that failed is to run, too.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
case ${1:---help} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
DEVICE=${DEVICE:-cuda} PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-570} WORK=${WORK:-/tmp/flashxla-$name}
OUT=${OUT:-$WORK/out}
LOGS=${LOGS:-$OUT}
export DEVICE OUT PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
begun=$SECONDS failed=()

# A pack in parts: `run.sh stash N` of part 0 and part 1 puts them where part 2 finds them.
if [ "$1" = stash ]; then
  mkdir -p "$WORK"
  cp "$here/part_${2:?the number of the part}" "$WORK/" && ls -la "$WORK"
  exit
fi

say() { echo "== $(date +%T) $*"; }
left() { echo $((LIMIT - SECONDS + begun)); }

begin() {  # STAGES...: each has a function; nothing is unpacked for a name that has none
  local stage
  for stage in ${*//,/ }; do
    declare -F "stage_$stage" > /dev/null || { echo "no such stage: $stage" >&2; exit 2; }
  done
  mkdir -p "$OUT" "$WORK" "$LOGS"
}

run_stages() {
  local stage from
  for stage in "$@"; do
    say "$stage, $(left) s left"
    from=$SECONDS
    "stage_$stage" || { failed+=("$stage"); say "FAILED $stage"; }
    say "$stage took $((SECONDS - from)) s"
  done
  say "failed: ${failed[*]:-none}"
  [ ${#failed[@]} -eq 0 ]
}

# limited SECONDS LOG COMMAND...: at most that long, and never beyond LIMIT. INT first: pytest then says what failed. A process that was started
# in the background ignores INT, so that is put back.
limited() {
  local seconds=$1 log=$LOGS/$2.log rest from=$SECONDS code
  shift 2
  rest=$(($(left) - 15))
  ((rest >= seconds)) || seconds=$rest
  ((seconds >= 5)) || { echo "$log: not begun, no time is left" | tee "$log"; return 124; }
  timeout -s INT -k 12 "$seconds" env --default-signal=INT "$@" > "$log" 2>&1
  code=$?
  echo "== exit $code after $((SECONDS - from)) s (limit $seconds): $*" | tee -a "$log" | cut -c1-300
  return $code
}

# shown LINES SECONDS LOG COMMAND...: the same, with the log's end on the screen.
shown() {
  local lines=$1 log=$3 code
  shift
  limited "$@"
  code=$?
  tail -n $((lines + 1)) "$LOGS/$log.log" | head -n -1 | cut -c1-300  # the last line is there already
  return $code
}

# tests LOG SECONDS WORDS...: pytest, a line a test. ENVIRONMENT: words for env.
tests() {
  local log=$1 seconds=$2 code
  shift 2
  # shellcheck disable=SC2086
  limited "$seconds" "$log" env ${ENVIRONMENT:-} "$PYTHON" -m pytest -v --tb=short -p no:benchmark -p no:cacheprovider --device "$DEVICE" \
    --timeout 170 "$@"
  code=$?
  counts "$log"
  return $code
}

# How many passed, also of a run that was cut off.
counts() {
  local log=$LOGS/$1.log
  echo "-- $1: $(grep -aoE '(^| )(PASSED|FAILED|SKIPPED|ERROR)( |$)' "$log" | tr -d ' ' | sort | uniq -c | tr '\n' ' ')"
  # With workers "[gw0] [ 1%] FAILED tests/...", without "tests/... FAILED".
  grep -aE '(\] (FAILED|ERROR) tests/)|(^tests/.* (FAILED|ERROR) +\[)' "$log" | sed 's/^.*\(tests\/[^ ]*\).*$/   failed: \1/' | sort -u | head -n "${SHOWN:-25}"
  grep -aE '^E  ' "$log" | cut -c1-200 | sort | uniq -c | sort -rn | head -6
}

# unpack_flashxla: $RUN as a checkout is, flashxla in $RUN/src, so that its benchmarks are found beside it. $WORK/wheels has what else the wheel holds.
unpack_flashxla() {
  RUN=$WORK/run
  rm -rf "$RUN" "$WORK/wheels"
  mkdir -p "$RUN/src"
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/wheels" "$here"/flashxla-*.whl || return 1
  tar -xJf "$here/tree.tar.xz" -C "$RUN" || return 1
  mv "$WORK/wheels/flashxla" "$RUN/src/flashxla" || return 1
  xz -dc "$here/cuda.xz" > "$RUN/src/flashxla/lib/libflashxla_cuda.so" || return 1
  export PYTHONPATH=$RUN/src:$WORK/wheels
}

# unpack_parts: what the three parts hold, into $WORK.
unpack_parts() {
  say unpack
  cp "$here/part_2" "$WORK/" || return 1
  [ "$(cat "$WORK"/part_[0-2] | sha256sum | cut -d' ' -f1)" = "$(cat "$here/sum.txt")" ] || { echo "parts are missing or broken: $(ls "$WORK")"; return 1; }
  # Archives one after the other: -i goes on after the end of the first.
  cat "$WORK"/part_[0-2] | xz -T0 -dc | tar -C "$WORK" -xif - || return 1
  rm "$WORK"/part_[0-2]
}

# bundle_libraries: what PyTorch/XLA 2.9 of pack_torch.sh links to, its own and NVIDIA's of the machine.
bundle_libraries() {
  local site
  site=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  export LD_LIBRARY_PATH=$WORK/bundle/lib:$(ls -d "$site"/nvidia/*/lib | paste -sd:)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
}

machine() {
  [ "$DEVICE" != cuda ] || nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
  echo "$(nproc) cores; $(cat "${1:-$here/commit.txt}")"
}

versions() {  # PYTHON PACKAGE...
  "$1" -c 'import sys, importlib.metadata as m; print(sys.version.split()[0], *(f"{n} {m.version(n)}" for n in sys.argv[1:]))' "${@:2}"
}
