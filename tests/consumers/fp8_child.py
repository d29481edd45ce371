"""Run in an environment with `nvidia-modelopt`: python fp8_child.py TARGET OUT.

Quantizes every linear layer of TARGET but the head to FP8 and exports it to OUT, with its tokenizer.
"""

from __future__ import annotations

import sys

import torch


def main(target: str, out: str) -> None:
    import modelopt.torch.quantization as mtq  # type: ignore[import-not-found,unused-ignore]
    from modelopt.torch.export import export_hf_checkpoint  # type: ignore[import-not-found,unused-ignore]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float16).eval()
    tokens = torch.arange(model.config.vocab_size)[None]  # every token once
    model = mtq.quantize(model, mtq.FP8_DEFAULT_CFG, lambda calibrated: calibrated(tokens))
    with torch.no_grad():
        export_hf_checkpoint(model, export_dir=out)
    AutoTokenizer.from_pretrained(target).save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
