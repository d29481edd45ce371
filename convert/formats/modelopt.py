"""ModelOpt's dialect of the DFlash layout: what `export_speculative_decoding` of nvidia-modelopt writes.

The fields are z-lab's without remote code and token ids, with the dtype under its old name and, from 0.47, always
`dflash_config.causal`. Its Domino, DSpark and windowed exports keep the architecture's name: `foreign.py` tells them by
their keys. Quantized exports carry `quantization_config`, or `hf_quant_config.json` beside it.
"""

from __future__ import annotations

from d2sd.convert.checkpoint.hf_config import HFConfig

#: Files beside the weights that change what they mean: nothing is read then.
QUANTIZED = ("hf_quant_config.json", "quantize_config.json", "quant_cfg.json")


def looks_like(config: HFConfig) -> bool:
    """Whether a DFlash layout names its dtype as ModelOpt does, and holds no remote code."""
    return "torch_dtype" in config.values and not {"dtype", "auto_map"} & config.values.keys()
