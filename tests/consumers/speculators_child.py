"""Run in an environment with `speculators`: python speculators_child.py FOLDER TARGET IN OUT [CONVERTED].

Loads FOLDER by speculators' own loader, drafts one block behind a prompt of TARGET's, and writes its logits to OUT.
IN holds `tokens` [S] and `anchor` (its place). With CONVERTED, FOLDER is a z-lab directory that speculators' own
converter first turns into CONVERTED.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file


def main(folder: str, target: str, given: str, out: str, converted: str | None = None) -> None:
    from speculators.convert.dflash import DFlashConverter  # type: ignore[import-not-found,unused-ignore]
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig  # type: ignore[import-not-found,unused-ignore]
    from transformers import AutoModelForCausalLM

    if converted:
        DFlashConverter().convert(folder, converted, target)
        folder = converted
    config = DFlashSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # flex attention wants a compiler
    model = DFlashDraftModel.from_pretrained(folder, config=config).eval()
    values = load_file(given)
    tokens, anchor = values["tokens"][None], int(values["anchor"])
    states = AutoModelForCausalLM.from_pretrained(target)(tokens, output_hidden_states=True).hidden_states
    only_anchor = torch.zeros_like(tokens)
    only_anchor[0, anchor] = 1  # the one place where a block may start
    with torch.no_grad():
        logits = model._backbone_forward(
            torch.cat([states[i] for i in config.aux_hidden_state_layer_ids], dim=-1),
            tokens,
            only_anchor,
            states[-1],
            torch.zeros_like(tokens),
            max_anchors=1,
        )[1]
    ids = model.d2t + torch.arange(len(model.d2t)) if model.d2t is not None else torch.arange(logits.shape[-1])
    save_file({"logits": logits[0].contiguous(), "ids": ids}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
