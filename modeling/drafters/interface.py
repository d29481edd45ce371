"""The interface of drafters to the runtime: a kind of drafter is one module of this folder, and a graph stands for any.

A drafter gets blocks of token ids, an anchor in front and masks behind it, and gives logits of the slots after the
anchor: of one slot less than the block has rows, or, where the anchor's row predicts the first, of as many. How it
embeds them, where it reads the context and what its head adds to the target's are its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, cast

from torch import Tensor

from d2sd.modeling.config import DraftConfig
from d2sd.modeling.inference import ServedModel
from d2sd.modeling.kv_pool import CommittedRows, ContextRows, KVPool, Rows
from d2sd.plugins.trees.types import Draft

# Shape letters: B requests, K blocks a request, G block size γ, C new context rows, E hidden, n auxiliary layers, L
# layers, S slots: the tokens that a block proposes, M candidates a slot, Hkv K/V heads, D head size, V vocabulary, Vd
# draft vocabulary.


class Tables(NamedTuple):
    """The target's tables, which drafters share."""

    embed: Callable[[Tensor], Tensor]  # ids [...] -> [..., E]
    head: Callable[[Tensor], Tensor]  # [..., E] -> [..., V or Vd], over the draft vocabulary
    #: Logits [B, K, 1, V or Vd] of a slot, and its number -> its tokens [B, K], behind which the next pass drafts;
    #: of autoregressive drafters alone.
    choose: Callable[[Tensor, int], Tensor] = cast("Any", None)


class DraftModel(ServedModel):
    """A drafter that the runtime can run: PyTorch's, or an exported graph."""

    config: DraftConfig
    draft_ids: Tensor | None  # [Vd] int64 on the model's device, `config.draft_vocabulary`; no part of the state_dict
    mask_token_id: int  # in the masked slots of a block
    #: It has pages of its own, for K/V made of the target's features; others read the target's pages.
    has_context: ClassVar[bool] = True
    #: Each slot is a pass behind a token that was chosen; `extend` takes tokens as they are committed.
    autoregressive: ClassVar[bool] = False
    #: Fewest candidates of a slot that `conditioned` is given; 0: it is not called.
    pool: int = 0
    #: Its linear layers are FP8, and so is its copy of the target's head (`draft_head`).
    in_fp8: bool = False

    def extend(self, tokens: Tensor, rows: ContextRows, before: Tensor, pool: KVPool, tables: Tables) -> None:
        """Write what committed tokens [N] add to its pages; `before` [N]: pages of the positions before theirs."""
        raise NotImplementedError

    def draft(self, x: Tensor, rows: Rows, pool: KVPool) -> Tensor:
        """Hidden states [B, T, E] of embedded rows x [B, T, E] over the context in `pool`, ready for the head."""
        raise NotImplementedError

    def draft_hidden(
        self, blocks: Tensor, rows: Rows, pool: KVPool, context: CommittedRows | None, tables: Tables
    ) -> Tensor:
        """blocks [B, K, G], rows of which are `rows`, over the context in `pool` -> hidden states [B, K, S, E] of the
        slots, as `logits` takes them; for a drafter with a `pool` in its own type.

        `pool` is its own, or the target's for a drafter without one. `context`: rows whose K/V is written to its pages
        first.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor, anchors: Tensor, tables: Tables) -> Tensor:
        """Hidden states [B, K, S, E] of slots behind `anchors [B, K]` -> their logits [B, K, S, V or Vd]."""
        raise NotImplementedError

    def conditioned(self, draft: Draft, hidden: Tensor, blocks: Tensor, temperature: Tensor, width: int) -> Draft:
        """Candidates [B, K, S, M] of `blocks [B, K, G]` with these hidden states [B, K, S, E], at `temperature [B]` ->
        `width` of them a slot, at most M: what each is worth behind those of the slot before (`Draft.behind`), and the
        best behind the best first. For kinds in which that makes a difference.
        """
        raise NotImplementedError

    def context_keys_values(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """features [B, C, n·E] of committed tokens at `positions [B, C]` -> k, v [L, B, C, Hkv, D] for the pages."""
        raise NotImplementedError
