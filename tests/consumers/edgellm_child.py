"""Run in an environment with `tensorrt-edgellm`: python edgellm_child.py MODEL OUT.

Writes the floating-point initializers of the graph MODEL to OUT, under their names, and its operators' counts into the
header's metadata.
"""

from __future__ import annotations

import sys
from collections import Counter

import torch
from safetensors.torch import save_file


def main(model: str, out: str) -> None:
    import onnx  # type: ignore[import-not-found,unused-ignore]

    graph = onnx.load(model).graph
    kinds = {
        onnx.TensorProto.FLOAT: torch.float32,
        onnx.TensorProto.FLOAT16: torch.float16,
        onnx.TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    }
    tensors = {
        value.name: torch.frombuffer(bytearray(value.raw_data), dtype=kinds[value.data_type]).reshape(tuple(value.dims))
        for value in graph.initializer
        if value.data_type in kinds and value.raw_data
    }
    counts = Counter(node.op_type for node in graph.node)
    save_file(tensors, out, {kind: str(count) for kind, count in counts.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
