"""TensorRT-LLM's DFlash worker with a second pass, at its hook for refining a block's logits. Not yet run there.

Only the draft is changed. Acceptance, K/V and its rewind stay TensorRT-LLM's, so a wrong draft costs speed, never text.
If the second pass raises, the worker uses the first draft alone from then on.

It makes one chain out of two drafts: the first up to its likeliest rejection, then the second pass's.

    first draft            a b c d e      likeliest event: rejected after b
    second pass, a b kept  a b x y z      its block is  anchor a b mask mask mask
    chain                  a b x y z      unless the first is expected to go further

The rejected token is not masked at the boundary, as it is in a tree: a tree holds both drafters' tokens there, a chain
only one, and the second drafter may confirm the first one's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from d2sd.integrations.trtllm.drafters import DualDrafter
from d2sd.plugins.trees import Draft, chain_branches, restart_blocks

# Shape letters: B requests, S drafts a step, W width of the drafter's block (at least S + 1), V vocabulary.

#: The second pass: token ids [B, W], anchor first -> logits of slots 1 .. S, [B, S, V].
SecondPass = Callable[[Tensor], Tensor]


def spliced(logits: Tensor, anchor: Tensor, mask_token_id: int, width: int, second: SecondPass) -> Tensor:
    """Logits [B, S, V] of the first pass -> logits of the chain to propose; each slot is taken from one of the passes.

    Shapes are static and nothing is read back to the host, so a CUDA graph can capture it.
    """
    slots = logits.shape[1]
    first = _best(logits)
    branch = chain_branches(first, 1)  # at S, "everything accepted", the second pass adds nothing
    block = restart_blocks(branch, anchor, mask_token_id)[:, 0]
    again = second(pad(block, (0, width - block.shape[1]), value=mask_token_id)).to(logits.dtype)
    kept = torch.arange(slots, device=logits.device) < branch.prefix_len
    chain = torch.where(kept[..., None], logits, again)
    better = expected_length(_best(chain)) > expected_length(first)
    return torch.where(better[:, None, None], chain, logits)


def expected_length(draft: Draft) -> Tensor:
    """Expected number of accepted drafts if the drafters' confidence is calibrated: Draft of [B, S, 1] -> [B]."""
    return draft.confidence.cumsum(-1).exp().sum(-1)


def _best(logits: Tensor) -> Draft:
    """[B, S, V] -> the likeliest token of every slot."""
    wide = logits.float()
    top, tokens = wide.max(-1, keepdim=True)
    return Draft(tokens, top - wide.logsumexp(-1, keepdim=True))


def dual_worker(base: type[Any], log_linear: Callable[[list[str]], None]) -> type[Any]:
    """Subclass the installed `DFlashWorker`, which cannot be imported here.

    `log_linear` is called with the reasons when the second pass is disabled.
    """

    class DualDFlashWorker(base):  # type: ignore[misc]
        """With one drafter it behaves like its base class."""

        #: Stays set: a captured CUDA graph cannot switch the second pass on again.
        second_failed = False

        def prepare_1st_drafter_inputs(
            self,
            input_ids: Any,
            position_ids: Any,
            hidden_states: Any,
            accepted_tokens: Any,
            num_accepted_tokens: Any,
            attn_metadata: Any,
            spec_metadata: Any,
            draft_model: Any,
            total_target_tokens: int = 0,
        ) -> dict[str, Any]:
            """Add `attn_metadata`, which the refining hook needs for the head and does not get otherwise."""
            inputs = super().prepare_1st_drafter_inputs(
                input_ids,
                position_ids,
                hidden_states,
                accepted_tokens,
                num_accepted_tokens,
                attn_metadata,
                spec_metadata,
                draft_model,
                total_target_tokens,
            )
            return {**inputs, "attn_metadata": attn_metadata}

        def _refine_block_logits(
            self, draft_model: Any, gen_logits: Tensor, inputs: dict[str, Any], spec_metadata: Any
        ) -> Tensor:
            """gen_logits [B, S, V] of the first pass -> logits of the chain of both passes, same shape."""
            if not isinstance(draft_model, DualDrafter) or self.second_failed:
                return gen_logits
            try:
                return self._both_passes(draft_model, gen_logits, inputs)
            except Exception as error:  # any error: requests are in flight, and the first draft is available
                self.second_failed = True
                log_linear([f"the second pass failed with {type(error).__name__}: {error}"])
                return gen_logits

        def _both_passes(self, draft_model: DualDrafter, gen_logits: Tensor, inputs: dict[str, Any]) -> Tensor:
            requests, slots, _ = gen_logits.shape
            width = inputs["noise_embedding"].shape[1]

            def second(tokens: Tensor) -> Tensor:
                rows = draft_model.second_pass(tokens, inputs)
                rows = rows[self._draft_slot_ids(draft_model, requests, width, slots)]
                logits = draft_model.logits_processor(rows, draft_model.lm_head, inputs["attn_metadata"], True)
                out: Tensor = logits.reshape(requests, slots, -1)
                return out

            mask = draft_model.second.mask_token_id
            return spliced(gen_logits, inputs["first_prev_tokens"], int(mask), width, second)

    return DualDFlashWorker
