#!/bin/sh
# Load d2sd's output in its real consumers: sh benchmarks/consumers.sh PYTHON, an interpreter with d2sd and pytest.
#
# Each group of consumers whose pins agree gets an environment under OUT, kept until its pins change; pip's settings
# name the index. On an index whose torch brings CUDA, name PyTorch's CPU index in PIP_EXTRA_INDEX_URL.
set -eu
PYTHON=$1
OUT=${OUT:-$(pwd)/build/consumers}

environment() {
    folder=$OUT/$1
    shift
    if [ "$(cat "$folder/pins" 2>/dev/null)" != "$*" ]; then
        "$PYTHON" -m venv --clear "$folder"
        "$folder/bin/python" -m pip install --quiet "$@"
        echo "$*" >"$folder/pins"
    fi
}

versions() {
    "$1" - <<'END'
from importlib.metadata import distributions
wanted = {"torch", "transformers", "speculators", "nvidia-modelopt", "tensorrt-edgellm", "onnx", "compressed-tensors"}
print(*sorted(f"{d.name}=={d.version}" for d in distributions() if d.name in wanted), sep="  ")
END
}

environment checkpoints torch==2.13.0 transformers==5.14.1 speculators==0.9.0 "nvidia-modelopt[hf]==0.47.0"
# speculators asks for these two; an index's may be of another torch, and then transformers cannot be imported.
"$OUT/checkpoints/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio
environment edgellm torch==2.13.0 "tensorrt-edgellm[export]==0.11.0"
environment quantized torch==2.13.0 transformers==5.14.1 accelerate==1.15.0 compressed-tensors==0.20.0
for python in "$PYTHON" "$OUT/checkpoints/bin/python" "$OUT/edgellm/bin/python" "$OUT/quantized/bin/python"; do
    versions "$python"
done
D2SD_SPECULATORS_PYTHON=$OUT/checkpoints/bin/python D2SD_MODELOPT_PYTHON=$OUT/checkpoints/bin/python \
    D2SD_EDGELLM_PYTHON=$OUT/edgellm/bin/python D2SD_COMPRESSED_PYTHON=$OUT/quantized/bin/python \
    "$PYTHON" -m pytest tests/consumers
