"""Cuts draft vocabularies: the head's rows of fewer ids are all that a draft reads of it.

What is proposed decides nothing about what is accepted: a token that no drafter can propose comes from the target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

from d2sd.errors import RecipeError
from d2sd.modeling.config import DrafterConfig
from d2sd.modeling.drafters.flexdraft_config import FlexConfig
from d2sd.prompts import OWN_PROMPTS, read_turns
from d2sd.recipe import Recipe

C = TypeVar("C", DrafterConfig, FlexConfig)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Token ids, those first that texts have most often, then those that the tokenizer's training merged first.

    `seen` counts the tokens of every second text, of which the order was not made.
    """

    order: tuple[int, ...]
    seen: Counter[int]

    def coverage(self, ids: Iterable[int]) -> float:
        """Share of the tokens of those texts that are among these ids."""
        return sum(self.seen[token] for token in ids) / max(self.seen.total(), 1)


def rank(recipe: Recipe, tokenizer: Any, vocab_size: int) -> Ranking:
    """The order in which a recipe with `drafters.vocabulary` keeps ids.

    A byte-pair tokenizer numbers its tokens in the order of its merges, which is that of their frequency in what it was
    trained on. Raises D2SDError for a file of texts that cannot be read.
    """
    cut = recipe.drafters.vocabulary
    assert cut is not None
    texts = read_turns(recipe.path(cut.texts) if cut.texts else OWN_PROMPTS)
    tokens = [[token for turn in turns for token in tokenizer(turn)["input_ids"]] for _, turns in texts]
    counts, seen = (Counter(token for text in tokens[start::2] for token in text) for start in (0, 1))
    frequent = dict.fromkeys(token for token, _ in counts.most_common() if token < vocab_size)
    return Ranking(tuple(frequent | dict.fromkeys(range(vocab_size))), seen)


def narrowed(config: C, order: Iterable[int], size: int) -> C:
    """The config of a drafter that drafts the first `size` ids of this order that it can draft.

    Of a drafter that can draft no more, it is its own. Raises RecipeError for one whose tensors are made for its ids.
    """
    own = config.draft_vocabulary
    if size >= (config.vocab_size if own is None else len(own)):
        return config
    if isinstance(config, FlexConfig) and config.calibration_size:
        raise RecipeError(
            "This head's calibration network was trained for its draft vocabulary.",
            where="recipe: drafters.vocabulary",
            fix="remove drafters.vocabulary",
        )
    able = set(range(config.vocab_size) if own is None else own)
    if isinstance(config, DrafterConfig):
        able.discard(config.mask_token_id)
    return replace(config, draft_vocabulary=tuple(sorted(islice((token for token in order if token in able), size))))
