#!/bin/sh
# A quarter of an hour of a GPU machine without a package index, in commands of which the next follows at once:
#
#   with an index:   make data FROM=...; for pack in triton weights flex compiled; do sh benchmarks/gpu_pack.sh pack $pack; done
#   there, call 1:   sh benchmarks/gpu_calls.sh 1   # brings triton/1, and kernels compiled before
#          2, 3, 4:  sh benchmarks/gpu_calls.sh 2   # bring weights/1, 2 and 3, and flex/1; 4 begins to build bundles
#          5:        sh benchmarks/gpu_calls.sh 5   # two drafters against one at the sizes of 8B and 32B; six minutes
#          6:        sh benchmarks/gpu_calls.sh 6   # tokens a second of SmolLM2, and is it lossless; six minutes
#   or     6:        sh benchmarks/gpu_calls.sh 7   # brings training/1, trains a pair, and brings it home
#
# `packs N` names the folders that call N brings. What runs is a copy of call 1's checkout, in RUN. What is timed waits
# until nothing else uses the GPU (benchmarks/gpu/turns.py). Figures are in OUT. Calls 1 to 4 took 78 s on 2026-11-27, and
# bundles 63. Widened models fill an H200 with 132 GB: nothing else fits beside them.
set -eu
cd "$(dirname "$0")/.."
RUN=${RUN:-$HOME/.cache/d2sd-gpu/run} OUT=${OUT:-build/gpu}
PACKS=${PACKS:-build/packs}
SECONDS_LEFT=${SECONDS_LEFT:-390} # of calls 5 and 6
TRAINING=${TRAINING:-400}         # seconds of call 7
SERVED="proof wide_8b wide_32b proof_exact flexdraft" # parts that read the bundles of the part `pair`
export D2SD_GPU_TURNS="$RUN/turns"

packs() {
    case $1 in
    1) echo "$PACKS/triton/1 $PACKS/compiled/1" ;;
    2 | 3) echo "$PACKS/weights/$(($1 - 1))" ;;
    4) echo "$PACKS/weights/3 $PACKS/flex/1" ;;
    7) echo "$PACKS/training/1" ;;
    esac
}

suite() { # FOLDER ARGUMENTS...
    name=$1 && shift
    sh benchmarks/gpu_suite.sh --out "$RUN/$name" "$@" >>"$RUN/$name.log" 2>&1 || echo "$name: exit status $?" >>"$RUN/$name.log"
}

harvest() {
    for name in pair $SERVED; do
        [ ! -e "$RUN/$name/gpu.json" ] || cp "$RUN/$name/gpu.json" "$OUT/$name.json"
    done
    find "$RUN" -maxdepth 4 \( -name '*.log' -o -name '*.out' \) ! -path '*/repo/*' | tar -czf "$OUT/logs.tgz" -P -T - 2>/dev/null || true
}

left() { echo $((began + SECONDS_LEFT - $(date +%s))); }

measure() { # PART... each in a process, until all have ended
    for part in "$@"; do
        name=$part
        [ "$part" != endtoend ] || name=pair
        suite $name --parts $part --budget $(($(left) - 15)) &
        measured="${measured-} $!"
    done
    # shellcheck disable=SC2086 # process ids
    wait $measured
}

[ "$1" != packs ] || { packs "$2" && exit; }
for part in $(packs "$1"); do sh benchmarks/gpu_pack.sh take "$part"; done
case $1 in
1)
    rm -rf "$RUN" && mkdir -p "$RUN" && cp -r . "$RUN/repo"
    cd "$RUN/repo" && sh benchmarks/gpu_pack.sh unpack
    ;;
2 | 3) ;;
4)
    cd "$RUN/repo" && sh benchmarks/gpu_pack.sh unpack
    # in a session of its own, which outlives the call
    setsid sh "$RUN/repo/benchmarks/gpu_calls.sh" builds </dev/null >>"$RUN/builds.out" 2>&1 &
    sleep 2
    ;;
builds)
    suite pair --parts bundles --until 9e9
    for name in $SERVED; do mkdir -p "$RUN/$name" && ln -sfn "$RUN/pair/"bundle-* "$RUN/pair/requests.json" "$RUN/$name/"; done
    touch "$RUN/built"
    ;;
5 | 6)
    began=$(date +%s)
    mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) && cd "$RUN/repo"
    (while sleep 5; do harvest; done) &
    harvester=$!
    while [ ! -e "$RUN/built" ] && [ "$(left)" -gt 60 ]; do sleep 1; done
    # Better to know at once than to wait for what cannot be measured.
    [ -e "$RUN/pair/bundle-bf16/manifest.json" ] || { kill $harvester; harvest; tail -n 5 "$RUN/pair.log"; exit 1; }
    if [ "$1" = 5 ]; then measure wide_8b wide_32b; else measure proof endtoend proof_exact flexdraft; fi
    kill $harvester
    harvest
    for log in "$RUN"/*.log; do tail -n 3 "$log"; done
    ;;
7)
    mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) && cd "$RUN/repo" && export RUN="$RUN/training"
    sh benchmarks/train_gpu.sh train "$TRAINING"
    sh benchmarks/train_gpu.sh results "$OUT"
    ;;
esac
