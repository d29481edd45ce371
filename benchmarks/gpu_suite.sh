#!/bin/sh
# Run the GPU measurements in five calls of eight minutes. Needs torch, and no package index.
#
#   sh benchmarks/gpu_suite.sh [--call 1|2|3|4|5] [--parts NAME ...] [--out build/gpu] [--resume FOLDER]
#   sh benchmarks/gpu_suite.sh --dry    # without a GPU: everything but the launches, in OUT/dry
#
# Each call ends with tables in OUT/gpu.md, and everything in OUT/gpu.json.
# Another call with the same OUT, or with the OUT of an earlier one as --resume, measures what is missing. A machine whose
# Triton the kernels refuse (torch 2.11 has 3.6.0), or without pydantic, needs `sh benchmarks/gpu_pack.sh pack triton`,
# carried there and `take`n; the second call needs the pack `weights`; `compiled` saves the time of compilers; the pack
# `rtx` is for the probe of TensorRT-RTX alone.
#
# The exit status is 0 where everything asked for was measured or cannot be here, 4 where kernels of d2sd would not have
# run (`refused` in the tables: such a part has no figures), 2 for figures of another machine, else 1.
set -eu
cd "$(dirname "$0")/.."
KEEP=${KEEP:-$HOME/.cache/d2sd-gpu}
PYTHON=${PYTHON:-python3}
D2SD_COMMIT=${D2SD_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || true)}
root=$PWD
# The code is this checkout's: packages are top-level folders here, and inside d2sd when installed.
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
cp -r d2sd tools tests benchmarks plugins recipes models pyproject.toml "$tree/"
[ ! -d data ] || cp -r data "$tree/"
for package in plugins modeling convert runtime train; do
    rm -rf "$tree/d2sd/$package" && cp -r $package "$tree/d2sd/$package"
done
about="$tree/d2sd-0.dist-info" && mkdir "$about" # a bundle names the version that built it
sed -n "s/^name = \"d2sd\"/Metadata-Version: 2.1\nName: d2sd/p; s/^version = \"\(.*\)\"/Version: \1/p" pyproject.toml >"$about/METADATA"
sh benchmarks/gpu_pack.sh unpack || echo "what was taken could not be unpacked: it is not used" >&2
weights=$KEEP/weights/unpacked compiled=$KEEP/compiled/unpacked/cache
if [ -d "$weights" ]; then
    cp -r "$weights/models" "$weights/data" "$tree/"
    export D2SD_CACHE="${D2SD_CACHE:-$weights/cache}"
fi
[ ! -d "$KEEP/flex/unpacked" ] || cp -r "$KEEP/flex/unpacked/models" "$tree/"
if [ -d "$compiled" ]; then
    PYTHONPATH="$tree" $PYTHON -m benchmarks.gpu.compiled relocate "$compiled"
    export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$compiled}"
fi
PYTHONPATH="$tree:$KEEP/triton/unpacked/site:$KEEP/rtx/unpacked/site:$weights/site${PYTHONPATH:+:$PYTHONPATH}"
# No part may measure PyTorch in place of the kernels.
D2SD_NO_FALLBACK=1
export PYTHONPATH D2SD_COMMIT D2SD_NO_FALLBACK
D2SD_BROUGHT_TRITON=$(cd "$tree" && $PYTHON -m benchmarks.gpu.brought "$KEEP/triton/unpacked/triton")
export D2SD_BROUGHT_TRITON
[ -z "$D2SD_BROUGHT_TRITON" ] || PYTHONPATH="$D2SD_BROUGHT_TRITON:$PYTHONPATH"
# Relative folders count from here.
absolute() { case $1 in /*) echo "$1" ;; *) echo "$root/$1" ;; esac }
OUT=build/gpu
next=
dry=
resume=
for argument in "$@"; do
    case $next in --out) OUT=$argument ;; --resume) resume=$argument ;; esac
    case $argument in --out=*) OUT=${argument#--out=} ;; --resume=*) resume=${argument#--resume=} ;; --dry) dry=/dry ;; esac
    next=$argument
done
OUT=$(absolute "$OUT")$dry
mkdir -p "$OUT"
cd "$tree"
$PYTHON -m benchmarks.gpu.suite --engines "$KEEP/rtx/unpacked/engines" "$@" --out "$OUT" \
    ${resume:+--resume "$(absolute "$resume")"}
