"""Drafters that know the answers and err on purpose, so that long paths, winning branches and every boundary occur.

Random tiny drafters guess right once in a vocabulary: with them alone acceptance, commits of several rows, siblings and
branches would hardly be exercised. The models still run (their pages are filled and read); only what they propose is
replaced.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.joining import Joining
from d2sd.modeling.kv_pool import PoolSizes
from d2sd.plugins.choice.reference import philox
from d2sd.plugins.trees import Accepted, Branches, Draft, Tree
from d2sd.runtime.batch import Batch
from d2sd.runtime.model_runner import ModelRunner, Verified
from tests.tiny import prepared

Slot = list[tuple[int, float]]


def changing(owner: object, name: str, change: Callable[..., Any]) -> None:
    """Let the owner's method return `change` of its result and its arguments."""
    method = getattr(owner, name)
    setattr(owner, name, lambda *arguments: change(method(*arguments), *arguments))


class CheatingRunner(ModelRunner):
    """`texts` is prompt and plain continuation by request seed, a block longer than what will be asked for.

    The right token is the best candidate of its slot, or one of the next three, or is not proposed at all.
    """

    def __init__(
        self,
        target: Decoder,
        first: DraftModel,
        second: DraftModel | None,
        texts: Mapping[int, Sequence[int]],
        *,
        first_errors: float = 0.3,
        second_errors: float = 0.3,
        block_size: int | None = None,
    ) -> None:
        super().__init__(*prepared(target, first, second), block_size=block_size)
        self._texts = {seed - 2**64 if seed >= 2**63 else seed: list(text) for seed, text in texts.items()}
        self._errors = first_errors, second_errors
        self.boundaries: Counter[int] = Counter()
        self.siblings: Counter[int] = Counter()  # accepted tokens that were not the best of their slot, by origin
        self._first: Draft | None = None
        self._second: Draft | None = None
        changing(self.drafts, "first", lambda honest, batch, width: self._corrected(batch, honest))
        changing(self.drafts, "second", self._redrafted)

    def allocate(self, sizes: PoolSizes) -> None:
        super().allocate(sizes)
        if self.parallel is not None:
            take = self.parallel.take
            self.parallel.take = lambda batch: self._corrected(batch, take(batch))  # type: ignore[method-assign]

    def _corrected(self, batch: Batch, honest: Draft) -> Draft:
        tokens, logprob = honest.tokens.tolist(), honest.logprob.tolist()
        for row, text, start, dice in self._known(batch, "first"):
            assert text[start] == int(batch.anchor[row]), "the anchor is not what plain decoding says"
            for slot, right in enumerate(text[start + 1 : start + self.block_size]):
                if logprob[row][slot][0] == -math.inf:
                    continue  # no slot of its block
                told = self._guess(right, self._errors[0], len(tokens[row][slot]), dice)
                tokens[row][slot], logprob[row][slot] = map(list, zip(*told, strict=True))
        self._first, self._second = Draft(torch.tensor(tokens), torch.tensor(logprob)), None
        return self._first

    def _redrafted(self, honest: Draft, batch: Batch, branches: Branches, *_: object) -> Draft:
        tokens, logprob = honest.tokens.tolist(), honest.logprob.tolist()
        lengths, rejected = branches.prefix_len.tolist(), branches.rejected.tolist()
        for row, text, start, dice in self._known(batch, "second"):
            for branch, length in enumerate(lengths[row]):
                self.boundaries[length] += 1
                for slot, right in enumerate(text[start + 1 : start + self.block_size]):
                    size = len(tokens[row][branch][slot])
                    if slot >= length and logprob[row][branch][slot][0] == -math.inf:
                        continue  # no slot of its block
                    told = [(-1, 0.0)] * size  # no token, and a certain one: what a branch keeps is never read here
                    if slot >= length:
                        forbidden = rejected[row][branch] if slot == length else -1
                        told = self._guess(right, self._errors[1], size, dice, forbidden)
                    tokens[row][branch][slot], logprob[row][branch][slot] = map(list, zip(*told, strict=True))
        self._second = Draft(torch.tensor(tokens), torch.tensor(logprob))
        return self._second

    def verify(self, batch: Batch, tree: Tree, joining: Joining | None = None) -> Verified:
        self._tree = tree
        return super().verify(batch, tree, joining)

    def commit(self, batch: Batch, verified: Verified, accepted: Accepted) -> None:
        """Also count who was accepted without having been the best of a slot."""
        super().commit(batch, verified, accepted)
        if self._first is None:
            return
        for row in range(int(batch.active.sum())):
            for node in accepted.path[row, 1 : accepted.count[row]].tolist():
                branch_id, slot = int(self._tree.branch_id[row, node]), int(self._tree.depth[row, node]) - 1
                second = self._second if branch_id else None  # there is none where it is a sample of the first pass
                if branch_id > (0 if second is None else second.tokens.shape[1]):
                    continue  # a copy of earlier text
                best = self._first.top1[row] if second is None else second.top1[row, branch_id - 1]
                self.siblings[branch_id] += int(self._tree.tokens[row, node]) != int(best[slot])

    def _known(self, batch: Batch, salt: str) -> list[tuple[int, list[int], int, random.Random]]:
        """Row, text, anchor's position and dice of every row that is not padding; the dice depend on nothing else."""
        return [
            (row, self._texts[seed], start, random.Random(f"{seed} {start} {salt}"))
            for row, (seed, start) in enumerate(
                zip(batch.sampling.seed.tolist(), batch.where.context_len.tolist(), strict=True)
            )
            if seed in self._texts
        ]

    def _guess(self, right: int, errors: float, width: int, dice: random.Random, forbidden: int = -1) -> Slot:
        """`width` candidates of one slot with falling probabilities, some of the last ones not proposed."""
        tokens = dice.sample([t for t in range(self.vocab_size) if t not in (right, forbidden)], width)
        rank = 0 if dice.random() >= errors else dice.randrange(1, 6)
        if rank < min(width, 4) and right != forbidden and errors < 1:
            tokens[rank] = right
        # Mostly lower where the best guess is wrong: all boundaries get picked, the right one often.
        best = dice.uniform(0.5, 0.99) if tokens[0] == right else dice.uniform(0.02, 0.7)
        rest = [(1 - best) * 0.6**n / 2.5 for n in range(1, width)]
        chances = [best, *(min(p, best) for p in rest)]
        end = dice.randint(4, max(4, width))
        logprobs = [math.log(p) if n < end else -math.inf for n, p in enumerate(chances)]
        return list(zip(tokens, logprobs, strict=True))


class Knowing(ModelRunner):
    """Drafts the text of each request, right at two thirds of the places.

    `texts` is prompt and answer by request seed, below 2^31. Random drafters are almost never right: nothing but the
    anchor would be committed.
    """

    def __init__(
        self,
        target: Decoder,
        first: DraftModel,
        second: DraftModel | None,
        texts: Mapping[int, Sequence[int]],
        *,
        block_size: int | None = None,
    ) -> None:
        super().__init__(*prepared(target, first, second), block_size=block_size)
        longest = max(map(len, texts.values()))
        padded = [[*text, *[0] * (longest - len(text))] for text in texts.values()]
        self._texts = torch.tensor(padded, device=self.device)
        self._seeds = torch.tensor(list(texts), device=self.device)
        changing(self.drafts, "first", self._drafted)
        changing(self.drafts, "second", self._redrafted)

    @torch.inference_mode()
    def _drafted(self, honest: Draft, batch: Batch, width: int) -> Draft:
        return _told(honest, *self._known(batch, 0))

    @torch.inference_mode()
    def _redrafted(self, honest: Draft, batch: Batch, branches: Branches, *_: object) -> Draft:
        right, known = (x[:, None] for x in self._known(batch, 1))
        slots = torch.arange(right.shape[-1], device=right.device)
        rejected = (slots == branches.prefix_len[..., None]) & (right == branches.rejected[..., None])
        return _told(honest, right, known & ~rejected)

    def _known(self, batch: Batch, salt: int) -> tuple[Tensor, Tensor]:
        """The right tokens [B, S], and at which slots they are drafted."""
        row = (batch.sampling.seed[:, None] == self._seeds).int().argmax(1, keepdim=True)
        place = batch.where.context_len[:, None] + 1 + torch.arange(self.block_size - 1, device=self._seeds.device)
        right = self._texts[row, place.clamp(max=self._texts.shape[1] - 1)]
        zero = torch.zeros_like(place)
        dice, *_ = philox((zero + batch.sampling.seed[:, None], zero), (place, zero + salt, zero, zero))
        return right, dice % 3 > 0


def _told(draft: Draft, right: Tensor, known: Tensor) -> Draft:
    """The draft with `right` as the best candidate of the `known` slots."""
    right, best = right[..., None].expand_as(draft.tokens[..., :1]), draft.tokens[..., :1]
    others = best.where(draft.tokens == right, draft.tokens)
    told = torch.cat([right, others[..., 1:]], -1)
    return Draft(told.where(known[..., None], draft.tokens), draft.logprob, draft.behind)
