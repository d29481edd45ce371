"""Run in an environment with `compressed-tensors`: python compressed_child.py FOLDER IN OUT.

Loads FOLDER by transformers, which lets compressed-tensors decompress it, and writes its weights to OUT; and of
layouts other than NVFP4, `logits` of the `tokens` [1, S] in IN, with inputs rounded as the checkpoint says.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file


def main(folder: str, given: str, out: str) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    config = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config).eval()
    found = {name: tensor.float().contiguous() for name, tensor in model.state_dict().items()}
    if all(parameter.dtype == torch.float32 for parameter in model.parameters()):  # NVFP4 is decompressed to bf16
        with torch.no_grad():
            found["logits"] = model(load_file(given)["tokens"]).logits
    save_file(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
