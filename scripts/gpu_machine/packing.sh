# Sourced by every pack.sh. `begin NAME` makes $pack, the folder to copy, and $work, a scratch folder; it goes to the checkout's root.
set -euo pipefail
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() { echo "$*" >&2; exit 1; }
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }
case ${1:-} in -h | --help) usage; exit 0 ;; esac
no_arguments() { [ $# -eq 0 ] || { usage >&2; exit 2; }; }

scratch() {
  cd "$tools/../.."
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
}

begin() {  # NAME
  local name=$1
  scratch
  pack=$(realpath -m "${PACK:-.gpu/$name}")
  # The tests come from HEAD, flashxla from the files as they are.
  [ -z "$(git status --porcelain)" ] || fail "commit first: a pack must be one commit's"
  mkdir -p "$pack"
  cp "$tools/running.sh" "$tools/$name/run.sh" "$pack/"
  git log -1 --format='%H %s' > "$pack/commit.txt"
}

environment() {  # FOLDER TARGET: that one of make's environments is there
  [ -x "$1/bin/python" ] || fail "no $1: make $2"
}

site_packages() {  # ENVIRONMENT
  "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

cuda_library() {  # FILE [LIBRARY]: stripped; symbols are most of its size
  local library=${2:-${CUDA_LIBRARY:-build/cuda/libflashxla_cuda.so}}
  [ -f "$library" ] || fail "no $library: make cuda-for-test, or name one with CUDA_LIBRARY"
  strip --strip-unneeded -o "$1" "$library"
}

pack_folder() {  # FOLDER FILE PATH...
  local folder=$1 file=$2
  shift 2
  tar -C "$folder" -cf - "$@" | xz -T2 -6 > "$file"
}

pack_tree() {  # PATH...: of HEAD
  git archive HEAD "$@" | xz -6 > "$pack/tree.tar.xz"
}

pack_flashxla() {  # ENVIRONMENT BUILD_FOLDER PATH...: wheel, CUDA library, and these paths of HEAD
  local environment=$1 build=$2
  shift 2
  rm -f "$pack"/flashxla-*.whl
  "$environment/bin/uv" build -q --wheel -o "$pack" -C build-dir="$build" .
  rm -f "$pack/.gitignore"  # uv's; some ways to copy heed it
  cuda_library "$work/cuda.so"
  xz -T2 -6 -c "$work/cuda.so" > "$pack/cuda.xz"
  pack_tree "$@"
}

install_own() {  # ENVIRONMENT BUILD_FOLDER PLUGIN MODULE SITE: flashxla with its CUDA library, and a vLLM plugin
  local python=$1/bin/python build=$2 plugin=$3 module=$4 site=$5
  "$1/bin/uv" pip install -q --python "$python" --no-deps --target "$site" --refresh-package "${module//_/-}" "./$plugin"
  "$1/bin/uv" pip install -q --python "$python" --no-deps --target "$site" --refresh-package flashxla . -C build-dir="$build"
  rm -f "$site/.lock"
  diff -rq -x __pycache__ "$plugin/src/$module" "$site/$module"  # not an older build from a cache
  cuda_library "$site/flashxla/lib/libflashxla_cuda.so"
}

in_parts() {  # ARCHIVE...: one after the other, in three folders part0 to part2 of one size; all else that $pack has goes to part2
  local i
  cat "$@" > "$work/all"
  split -n 3 -d -a 1 "$work/all" "$work/part_"
  sha256sum < "$work/all" | cut -d' ' -f1 > "$pack/sum.txt"
  rm -rf "$pack"/part?
  mkdir "$pack"/part{0,1,2}
  cp "$pack"/{run,running}.sh "$pack/part0/"
  cp "$pack"/{run,running}.sh "$pack/part1/"
  find "$pack" -maxdepth 1 -type f -exec mv -t "$pack/part2" {} +
  for i in 0 1 2; do
    mv "$work/part_$i" "$pack/part$i/"
  done
  du -sb "$pack"/part?
}

torch_archive() {  # the file of pack_torch.sh, for in_parts
  [ -f .gpu/torch.tar.xz ] || fail "no .gpu/torch.tar.xz: pack_torch.sh BUNDLE makes it"
  echo .gpu/torch.tar.xz
}
