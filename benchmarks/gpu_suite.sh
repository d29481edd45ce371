#!/bin/sh
# Run the GPU measurements that one machine finishes in nine minutes. Needs torch and triton, and no package index.
#
#   sh benchmarks/gpu_suite.sh [--out build/gpu] [--budget 500]
#   sh benchmarks/gpu_suite.sh --dry    # without a GPU: everything but the launches, in OUT/dry
#
# Ends in a table; everything is in OUT/gpu.json. Another call with the same OUT measures what is missing. The TensorRT-RTX
# probe and the tests need what benchmarks/pack_tensorrt_rtx.sh packs and `take`s; without them they are skipped. The tests are
# those of the kernels and of training, not tests/runtime/backends/test_tensorrt_cuda.py.
set -eu
cd "$(dirname "$0")/.."
KEEP=${KEEP:-$HOME/.cache/d2sd-gpu}
PYTHON=${PYTHON:-python3}
D2SD_COMMIT=${D2SD_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || true)}
root=$PWD
# The code is this checkout's: packages are top-level folders here, and inside d2sd when installed.
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
cp -r d2sd tests benchmarks plugins pyproject.toml "$tree/"
for package in plugins modeling convert runtime train; do
    rm -rf "$tree/d2sd/$package" && cp -r $package "$tree/d2sd/$package"
done
sh benchmarks/pack_tensorrt_rtx.sh unpack || echo "what was taken could not be unpacked: no TensorRT-RTX" >&2
PYTHONPATH="$tree:$KEEP/rtx/site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH D2SD_COMMIT
# A relative --out counts from here.
OUT=build/gpu
next=
dry=
for argument in "$@"; do
    [ "$next" != --out ] || OUT=$argument
    case $argument in --out=*) OUT=${argument#--out=} ;; --dry) dry=/dry ;; esac
    next=$argument
done
case $OUT in /*) ;; *) OUT=$root/$OUT ;; esac
OUT=$OUT$dry
mkdir -p "$OUT"
cd "$tree"
$PYTHON -m benchmarks.gpu.suite --engines "$KEEP/rtx/engines" "$@" --out "$OUT"
