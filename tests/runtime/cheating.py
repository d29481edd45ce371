"""A drafter that knows the answers and errs on purpose, so that long paths, winning branches and every boundary occur.

Random tiny drafters guess right once in a vocabulary: with them alone acceptance, commits of several rows and branches
would hardly be exercised. The models still run (their pages are filled and read); only what they propose is replaced.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafter import Drafter
from d2sd.runtime.boundaries import Draft
from d2sd.runtime.executor import Batch, TorchExecutor


class CheatingExecutor(TorchExecutor):
    """`texts` is prompt and plain continuation by request seed, a block longer than what will be asked for."""

    def __init__(
        self,
        target: Decoder,
        first: Drafter,
        second: Drafter,
        texts: Mapping[int, Sequence[int]],
        *,
        first_errors: float = 0.3,
        second_errors: float = 0.15,
    ) -> None:
        super().__init__(target, first, second)
        self._texts = {seed - 2**64 if seed >= 2**63 else seed: list(text) for seed, text in texts.items()}
        self._errors = first_errors, second_errors
        self.boundaries: Counter[int] = Counter()

    def draft_first(self, batch: Batch) -> Draft:
        honest = super().draft_first(batch)
        tokens, confidence = honest.tokens.tolist(), honest.confidence.tolist()
        for row, text, start, dice in self._known(batch, "first"):
            assert text[start] == tokens[row][0], "the anchor is not what plain decoding says"
            for slot in range(1, self.block_size):
                tokens[row][slot], right = self._guess(text[start + slot], self._errors[0], dice)
                # Mostly lower where the guess is wrong: all boundaries get picked, the right one often.
                confidence[row][slot] = dice.uniform(0.5, 0.99) if right else dice.uniform(0.02, 0.7)
        return Draft(torch.tensor(tokens), torch.tensor(confidence))

    def draft_second(self, batch: Batch, first: Draft, boundaries: Tensor) -> Draft:
        honest = super().draft_second(batch, first, boundaries)
        tokens = honest.tokens.tolist()
        for row, text, start, dice in self._known(batch, "second"):
            for branch, boundary in enumerate(boundaries[row].tolist()):
                self.boundaries[boundary] += 1
                for slot in range(boundary + 1, self.block_size):
                    guess, _ = self._guess(text[start + slot], self._errors[1], dice)
                    if slot == boundary + 1 and guess == int(first.tokens[row, slot]):
                        guess = (guess + 1) % self.vocab_size  # forbidden
                    tokens[row][branch][slot] = guess
        return Draft(torch.tensor(tokens), honest.confidence)

    def _known(self, batch: Batch, salt: str) -> list[tuple[int, list[int], int, random.Random]]:
        """Row, text, anchor's position and dice of every row that is not padding; the dice depend on nothing else."""
        return [
            (row, self._texts[seed], start, random.Random(f"{seed} {start} {salt}"))
            for row, (seed, start) in enumerate(
                zip(batch.sampling.seed.tolist(), batch.context_len.tolist(), strict=True)
            )
            if seed in self._texts
        ]

    def _guess(self, right: int, errors: float, dice: random.Random) -> tuple[int, bool]:
        if dice.random() < errors:
            return (right + dice.randrange(1, self.vocab_size)) % self.vocab_size, False
        return right, True
