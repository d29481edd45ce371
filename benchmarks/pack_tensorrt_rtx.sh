#!/bin/sh
# Carry TensorRT-RTX, engines to probe a GPU with, and what the tests import to a machine without a package index, in
# calls of 64 MiB each.
#
#   with an index:       sh benchmarks/pack_tensorrt_rtx.sh pack             # build/rtx/1, build/rtx/2, ...; minutes
#   on the GPU machine:  sh benchmarks/pack_tensorrt_rtx.sh take build/rtx/1 # once for each part, in any order
#                        sh benchmarks/gpu_suite.sh                          # unpacks them
#
# A call carries this checkout too, so a part is what then is left of 64 MiB: move models/*/*/*.safetensors out of it
# first, 63 MB that nothing here reads. Unpacked parts are kept in KEEP, outside of the
# repository, until a part of another pack replaces them. The libraries are packed unmodified, as their licence requires,
# and are not committed.
set -eu
cd "$(dirname "$0")/.."
KEEP=${KEEP:-$HOME/.cache/d2sd-gpu}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/rtx}
VERSION=1.7.1.116
LIMIT=67108864
LIST=pack.sha256 # every part has the list of all files of its pack
SPARE=6291456 # bytes: prompts beside the checkout, names, folders, that list, and what changes until the call

# Wheels for the GPU machine: fetch FOLDER NAME...
fetch() {
    folder=$1 && shift
    $PYTHON -m pip download --quiet --only-binary :all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --dest "$folder" "$@"
}

pack() {
    all=$OUT/all
    rm -rf "$OUT" && mkdir -p "$all"
    room=$(room)
    fetch "$all" pytest hypothesis pydantic pyyaml
    fetch "$OUT/wheels" --no-deps tensorrt-rtx-cu13-libs==$VERSION tensorrt-rtx-cu13-bindings==$VERSION
    for wheel in "$OUT"/wheels/*.whl; do $PYTHON -m zipfile -e "$wheel" "$OUT/site"; done
    libs=site/tensorrt_rtx_libs bindings=site/tensorrt_rtx_bindings
    # Engines need no GPU to be built, but the TensorRT-RTX of this Python.
    PYTHONPATH=$PWD $PYTHON -m benchmarks.gpu.rtx_engine build "$OUT/engines"
    tar -C "$OUT" -cf "$all/rest.tar" engines $libs/__init__.py $bindings/__init__.py
    # The filter for x86 code and the large dictionary bring the library from 234 to 62 MB.
    xz -T1 --x86 --lzma2=preset=9e,dict=256MiB -c "$OUT/$libs/libtensorrt_rtx.so.1" >"$OUT/rtx.xz"
    split -b "$room" "$OUT/rtx.xz" "$all/rtx.xz." && rm "$OUT/rtx.xz"
    xz -T1 --x86 --lzma2=preset=9e -c "$OUT/$libs/libtensorrt_onnxparser_rtx.so.1" >"$all/parser.xz"
    xz -T1 --x86 --lzma2=preset=9e -c "$OUT/$bindings/tensorrt_rtx.so" >"$all/bindings.xz"
    rm -rf "$OUT/site" "$OUT/wheels" "$OUT/engines"
    parts "$room"
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

# Share out the files of OUT/all over folders of at most $1 bytes each: large ones first, small ones fill the last.
parts() {
    part=1 filled=0
    (cd "$OUT/all" && sha256sum -- *) >"$OUT/$LIST"
    for name in $(ls -S "$OUT/all"); do
        file=$OUT/all/$name
        size=$(stat -c %s "$file")
        [ "$size" -le "$1" ] || { echo "$file has $size bytes, a part takes $1" >&2; exit 1; }
        if [ $((filled + size)) -gt "$1" ]; then part=$((part + 1)) filled=0; fi
        mkdir -p "$OUT/$part" && mv "$file" "$OUT/$part/"
        filled=$((filled + size))
        echo "part $part: $name $size"
    done
    rmdir "$OUT/all"
    for part in "$OUT"/[0-9]*; do cp "$OUT/$LIST" "$part/"; done
    rm "$OUT/$LIST"
}

# What was unpacked, and parts of another pack, are gone then.
take() {
    [ -e "$1/$LIST" ] || { echo "$1 is no part of a pack: it has no $LIST" >&2; exit 1; }
    cmp -s "$1/$LIST" "$KEEP/rtx/taken/$LIST" || rm -rf "$KEEP/rtx/taken"
    rm -rf "$KEEP/rtx/unpacked" "$KEEP/rtx/site" "$KEEP/rtx/engines"
    mkdir -p "$KEEP/rtx/taken" && cp "$1"/* "$KEEP/rtx/taken/"
    ls "$KEEP/rtx/taken"
}

# Into KEEP/rtx/site and KEEP/rtx/engines, once, when all parts are there; nothing where nothing was taken.
unpack() {
    taken=$KEEP/rtx/taken
    [ -e "$taken/$LIST" ] && [ ! -e "$KEEP/rtx/unpacked" ] || return 0
    (cd "$taken" && sha256sum --check --quiet $LIST) >&2 ||
        { echo "the pack is not whole: take the parts that have these files" >&2; exit 1; }
    site=$KEEP/rtx/site
    mkdir -p "$site"
    tar -C "$KEEP/rtx" -xf "$taken/rest.tar"
    cat "$taken"/rtx.xz.* | _unxz >"$site/tensorrt_rtx_libs/libtensorrt_rtx.so.1"
    _unxz <"$taken/parser.xz" >"$site/tensorrt_rtx_libs/libtensorrt_onnxparser_rtx.so.1"
    _unxz <"$taken/bindings.xz" >"$site/tensorrt_rtx_bindings/tensorrt_rtx.so"
    ln -sf libtensorrt_rtx.so.1 "$site/tensorrt_rtx_libs/libtensorrt_rtx.so"
    for wheel in "$taken"/*.whl; do $PYTHON -m zipfile -e "$wheel" "$site"; done
    touch "$KEEP/rtx/unpacked"
}

# Not every machine has xz; Python's own decoder reads the same.
_unxz() { $PYTHON -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.stdin.buffer), sys.stdout.buffer, 1 << 22)'; }

"$@"
