"""TensorRT-LLM's DFlash worker with a second pass, at its hook for refining a block's logits. Not yet run there.

Only the draft is changed. Acceptance, K/V and its rewind stay TensorRT-LLM's, so a wrong draft costs speed, never text.
If the second pass raises, the worker uses the first draft alone from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from d2sd.integrations.trtllm.chain import spliced
from d2sd.integrations.trtllm.drafters import DualDrafter


def dual_worker(base: type[Any], log_linear: Callable[[list[str]], None]) -> type[Any]:
    """Subclass the installed `DFlashWorker`, which cannot be imported here.

    `log_linear` is called with the reasons when the second pass is disabled.
    """

    class DualDFlashWorker(base):  # type: ignore[misc]
        """With one drafter it behaves like its base class."""

        #: Stays set: a captured CUDA graph cannot switch the second pass on again.
        second_failed = False

        def prepare_1st_drafter_inputs(
            self, input_ids: Any, position_ids: Any, hidden_states: Any, accepted_tokens: Any,
            num_accepted_tokens: Any, attn_metadata: Any, spec_metadata: Any, draft_model: Any,
            total_target_tokens: int = 0,
        ) -> dict[str, Any]:  # fmt: skip
            """Add `attn_metadata`, which the refining hook needs for the head and does not get otherwise."""
            inputs = super().prepare_1st_drafter_inputs(
                input_ids, position_ids, hidden_states, accepted_tokens, num_accepted_tokens, attn_metadata,
                spec_metadata, draft_model, total_target_tokens,
            )  # fmt: skip
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
