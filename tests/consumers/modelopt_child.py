"""Run in an environment with `nvidia-modelopt`: python modelopt_child.py FOLDER TARGET IN OUT EXPORTED.

Reads the drafter of FOLDER into ModelOpt's own DFlash model of TARGET, every tensor or none, drafts one block behind a
prompt with it, writes its anchor and its logits to OUT, and exports it to EXPORTED. IN holds `tokens` [S], of which
those before the place `anchor` are the prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

#: Keys of FOLDER's config.json that ModelOpt is told; the others it takes from the target.
_ARCHITECTURE = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "rope_theta",
)


def main(folder: str, target: str, given: str, out: str, exported: str) -> None:
    import modelopt.torch.speculative as mtsp  # type: ignore[import-not-found,unused-ignore]
    from modelopt.torch.export import export_speculative_decoding  # type: ignore[import-not-found,unused-ignore]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target)
    model = mtsp.convert(model, [("dflash", settings(folder))]).eval()
    said: list[torch.Tensor] = []  # by the head: of the prompt, then of the block
    model._base_model_lm_head.register_forward_hook(lambda head, inputs, logits: said.append(logits))
    values = load_file(given)
    anchor, _ = model.pseudo_speculative_generate(values["tokens"][None, : int(values["anchor"])])
    save_file({"anchor": anchor[0], "logits": said[1][0].contiguous()}, out)
    export_speculative_decoding(model, export_dir=exported)


def settings(folder: str) -> dict[str, Any]:
    """ModelOpt's DFlash settings of a drafter's directory."""
    config = json.loads((Path(folder) / "config.json").read_text())
    inside = config["dflash_config"]
    architecture = {key: config[key] for key in _ARCHITECTURE}
    return {
        "dflash_architecture_config": architecture | {"target_layer_ids": inside["target_layer_ids"]},
        "dflash_block_size": config["block_size"],
        "dflash_init_checkpoint": folder,
        "dflash_mask_token_id": inside["mask_token_id"],
        "dflash_use_torch_compile": False,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
