"""Random choices of a training, each a function of the seed, its purpose and the index in the data order.

So neither an interruption nor the number of processes changes the training data.

Prefix lengths for the training of a second drafter are of three kinds:

- Variable prefix (D²SD, arXiv 2606.04446 Eq. 6-7): n visible tokens, anchor included, Pr(n) ∝ base^n. We draw n from
  {1, …, γ-1}: the published code leaves n = 1 out although inference picks boundary 0.
- Rejection-conditioned variable prefix (ours): a second drafter only ever runs from a position whose first-draft token
  is assumed rejected. So for a share of the blocks n is the first slot where the first draft is wrong, and the rejected
  token is masked out of that slot's softmax, as at inference.
- Correction (ours): one token more, and nothing masked, as behind another candidate in the rejected token's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import torch
from torch import Tensor

from d2sd.modeling.where import mapped
from d2sd.train.data.features import TrainingSequence
from d2sd.train.data.packing import Packed, draw_anchors, moved, pack_blocks
from d2sd.train.dist import Dist
from d2sd.train_recipe import SecondSettings


class SeededOrder:
    """The data order of one training over `sequences` sequences, `batch` per step over all processes."""

    def __init__(self, seed: int, sequences: int, batch: int, dist: Dist) -> None:
        self._seed, self._sequences, self._batch, self._dist = seed, sequences, batch, dist
        self._order = lru_cache(maxsize=2)(self._shuffled)  # a step may reach into the next epoch

    def numbers(self, step: int) -> range:
        """The process's indices into the data order, for one step."""
        return range(step * self._batch + self._dist.rank, (step + 1) * self._batch, self._dist.size)

    def index(self, number: int) -> int:
        """The sequence at an index of the data order: consecutive epochs, each a seeded shuffle."""
        epoch, i = divmod(number, self._sequences)
        return self._order(epoch)[i]

    def generator(self, purpose: str, number: int) -> torch.Generator:
        """A generator independent of all others. PyTorch uses 32 bits of a seed, so the seed is a hash."""
        digest = blake2b(f"{self._seed}/{purpose}/{number}".encode(), digest_size=4).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "big"))

    def blocks(
        self,
        sequences: Sequence[TrainingSequence],
        seeds: Sequence[int],
        count: int,
        size: int,
        purpose: str = "anchors",
    ) -> Packed:
        """Up to `count` blocks of `size` slots of each sequence, at anchors that its seed draws."""
        pairs = zip(sequences, seeds, strict=True)
        anchors = [draw_anchors(sequence, count, self.generator(purpose, seed)) for sequence, seed in pairs]
        return pack_blocks(sequences, anchors, size)

    def _shuffled(self, epoch: int) -> list[int]:
        order: list[int] = torch.randperm(self._sequences, generator=self.generator("epoch", epoch)).tolist()
        return order


# Shape letters: B sequences, A blocks of each, G block size γ.


def draw_prefixes(count: int, block_size: int, base: float, generator: torch.Generator) -> Tensor:
    """[count] int64 numbers of visible tokens n in {1, …, γ-1} with Pr(n) ∝ base^n."""
    weights = base ** torch.arange(1, block_size, dtype=torch.float32)
    return 1 + torch.multinomial(weights, count, replacement=True, generator=generator)


def first_errors(drafted: Tensor, tokens: Tensor) -> Tensor:
    """First slot >= 1 where the draft [A, G] differs from the real tokens [A, G]; γ if none differs. Returns [A]."""
    wrong = drafted[:, 1:] != tokens[:, 1:]
    return torch.where(wrong.any(1), wrong.int().argmax(1) + 1, tokens.shape[1])


@dataclass(frozen=True, slots=True)
class PrefixDraws:
    """Draws that decide the prefixes of a micro-batch, made before the first drafter's errors are known."""

    length: Tensor  # [B, A] int64, visible tokens of blocks of a variable prefix
    chance: Tensor  # [B, A] in [0, 1), decides between the kinds

    def to(self, device: torch.device) -> PrefixDraws:
        """Copy to a device, without waiting for it."""
        return mapped(self, lambda part: moved(part, device))


def draw_kinds(settings: SecondSettings, block_size: int, generators: Sequence[torch.Generator]) -> PrefixDraws:
    """Each sequence's generator draws once per block, so results do not depend on how sequences are batched."""
    drawn = [draw_prefixes(settings.blocks, block_size, settings.prefix_base, each) for each in generators]
    chance = [torch.rand(settings.blocks, generator=each) for each in generators]
    return PrefixDraws(torch.stack(drawn), torch.stack(chance))


def choose_prefixes(
    errors: Tensor, drafted: Tensor, block_size: int, settings: SecondSettings, draws: PrefixDraws
) -> tuple[Tensor, Tensor]:
    """(prefix length of each block [B, A], the id masked in the slot after it, -1 for none [B, A]).

    errors, drafted [B, A]: first slot where the first drafter is wrong (γ: none), and its token there. Blocks without
    an error, and those in which a correction leaves no slot, have a variable prefix.
    """
    width, rejected = errors.shape[1], settings.on_rejection
    length, chance = draws.length[:, :width], draws.chance[:, :width]
    take = (chance < rejected) & (errors < block_size)
    banned = take & settings.mask_rejected
    corrected = (chance >= rejected) & (chance < rejected + settings.on_correction) & (errors + 1 < block_size)
    visible = torch.where(corrected, errors + 1, torch.where(take, errors, length))
    return visible, torch.where(banned, drafted, -1)
