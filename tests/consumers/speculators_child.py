"""Run in an environment with `speculators`: python speculators_child.py FOLDER TARGET IN OUT [CONVERTED].

Loads FOLDER by speculators' own loader, drafts one block behind a prompt of TARGET's, and writes its logits to OUT; and
of a kind with a head `added`, to the logits of each slot behind one token. IN holds `tokens` [S], `anchor` (its place)
and `parents` [G], those tokens. With CONVERTED, FOLDER is a z-lab directory that speculators' own
converter first turns into CONVERTED.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def main(folder: str, target: str, given: str, out: str, converted: str | None = None) -> None:
    from speculators import SpeculatorModel, SpeculatorModelConfig  # type: ignore[import-not-found,unused-ignore]
    from speculators.convert.dflash import DFlashConverter  # type: ignore[import-not-found,unused-ignore]
    from transformers import AutoModelForCausalLM

    if converted:
        DFlashConverter().convert(folder, converted, target)
        folder = converted
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # flex attention wants a compiler
    model = SpeculatorModel.from_pretrained(folder, config=config).eval()
    values = load_file(given)
    tokens, anchor = values["tokens"][None], int(values["anchor"])
    states = AutoModelForCausalLM.from_pretrained(target)(tokens, output_hidden_states=True).hidden_states
    only_anchor = torch.zeros_like(tokens)
    only_anchor[0, anchor] = 1  # the one place where a block may start
    with torch.no_grad():
        hidden, logits = model._backbone_forward(
            torch.cat([states[i] for i in config.aux_hidden_state_layer_ids], dim=-1),
            tokens,
            only_anchor,
            states[-1],
            torch.zeros_like(tokens),
            max_anchors=1,
        )[:2]
        added = _added(model, hidden, values["parents"][None])
    ids = model.d2t + torch.arange(len(model.d2t)) if model.d2t is not None else torch.arange(logits.shape[-1])
    save_file({"logits": logits[0].contiguous(), "ids": ids, "added": added[0].contiguous()}, out)


def _added(model: Any, hidden: Any, parents: Any) -> Any:
    """[1, G, Vd] of a block's hidden states [1, G, E] behind parents [1, G]; nothing without a head."""
    if getattr(model, "markov_head", None) is not None:
        return model.markov_head.block_bias(prev_token_ids=parents, hidden_states=hidden)
    selector = getattr(model, "candidate_selector", None)
    if selector is None:
        return hidden[..., :0]
    everything = torch.arange(len(selector.successor_codebook)).expand(*parents.shape, -1)
    return selector.transition_scores(hidden, parents, everything)


if __name__ == "__main__":
    main(*sys.argv[1:])
