"""Training of a pair head on a frozen drafter: the same blocks and prefixes as the drafter's, without its gradients.

    classes    a slot's M likeliest tokens of the draft vocabulary, and the rest
    q(c | p)   e^(u(c) + δ(p, c)) / (rest + Σ e^(u + δ))     p: the response's own token in the slot before
    loss       -Σ t log q, weighted by e^(-distance / decay) as slots are; t: the response's token, or, for a share of
               the loss, the target's distribution over the classes

In a tree only paths with the right prefix matter, so the response's own tokens are the parents that count. The first
masked slot stands behind a token that the drafter was shown, and is trained like the others. The rest keeps its mass: a
slot whose token is likely none of the candidates stays modest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.head_configs import PairConfig
from d2sd.modeling.drafters.pair import PairHead, unit_rms
from d2sd.train.data.draws import choose_prefixes, draw_kinds
from d2sd.train.data.features import TrainingData
from d2sd.train.data.packing import Packed
from d2sd.train.dflash import block_hidden
from d2sd.train.dist import Dist
from d2sd.train.loop import Loop, Report, Told
from d2sd.train.objectives.head import Head
from d2sd.train.objectives.loss import Candidates, first_rejections
from d2sd.train.products import product_dtype
from d2sd.train.state import digest_of
from d2sd.train_recipe import PairSettings, SecondSettings

# Shape letters: B sequences, A blocks of each, G block size γ, N slots that are trained, M candidates of a slot, E
# hidden, R rank, V vocabulary, Vd draft vocabulary.

#: Logits that are held at a time: 512 MB of fp32.
_LOGITS = 1 << 27
#: The rest is never nothing, since its logarithm is taken.
_MOST = 1 - 1e-6


class Slots(NamedTuple):
    """N slots: what a frozen drafter says, and what is right."""

    hidden: Tensor  # [N, E] fp32
    before: Tensor  # [N] int64, the response's token in the slot before
    candidates: Tensor  # [N, M] int64, indices into the draft vocabulary, best first
    logits: Tensor  # [N, M], of the candidates
    rest: Tensor  # [N], the logarithm of e^logit, summed over all other tokens
    label: Tensor  # [N] int64, the candidate that is the response's token; M: none is
    wanted: Tensor  # [N, M + 1], the target's distribution over the candidates and the rest
    weight: Tensor  # [N]


def with_pair_head(
    drafter: Drafter,
    config: PairConfig,
    vocabulary: tuple[int, ...] | None,
    generator: torch.Generator,
    start: Drafter | None = None,
) -> Drafter:
    """A copy of a drafter, frozen, with the pair head of `start` if it has one of this shape, or else with one that
    adds nothing yet, on the same device; the drafter's own is replaced.

    `vocabulary`: the ids that it drafts, None for all.
    """
    assert drafter.config.head is None or isinstance(drafter.config.head, PairConfig), "the caller refuses others"
    new = Drafter(replace(drafter.config, head=config, draft_vocabulary=vocabulary))
    own = drafter.state_dict()
    new.load_state_dict({name: tensor for name, tensor in own.items() if not name.startswith("pair_head.")}, False)
    head = new.head
    assert isinstance(head, PairHead)
    if start is not None and start.config.head == config:
        assert isinstance(start.head, PairHead)
        head.load_state_dict(start.head.state_dict())
    else:
        head.start(generator)
    new.eval().requires_grad_(False)
    head.requires_grad_(True)
    return new.to(drafter.norm.weight.device)


class PairTrainer(Loop):
    """Trains the head of `drafter`, made by `with_pair_head`; with `first`, one of a second drafter, on prefixes."""

    settings: PairSettings

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter,
        data: TrainingData,
        settings: PairSettings,
        first: Drafter | None = None,
        prefixes: SecondSettings | None = None,
    ) -> None:
        """`first` is attached to its target; `prefixes` say how a second drafter's blocks begin."""
        head = drafter.head
        assert isinstance(head, PairHead)
        self._prefixes = None if prefixes is None else prefixes.model_copy(update={"blocks": settings.blocks})
        identity = {
            "prefixes": {} if self._prefixes is None else self._prefixes.model_dump(),
            "drafter": asdict(drafter.config) | {"sha256": digest_of(drafter.layers, drafter.fc)},
        }
        super().__init__(head, data, settings, first, Dist(), identity)
        self.drafter, self.head, self._embedding = drafter, head, target.embedding.detach()
        vocabulary, device = drafter.config.draft_vocabulary, target.head.device
        self._ids = torch.arange(len(target.head)) if vocabulary is None else torch.tensor(vocabulary)
        always = torch.zeros(len(target.head), dtype=torch.bool)
        always[self._ids] = True
        dtype = product_dtype(settings.precision, device)
        self._drafted = Candidates.draw(target.head.detach(), always, 0, dtype, torch.Generator())
        self._successors = unit_rms(self._embedding[self._ids.to(device)])  # [Vd, E]

    def run(self, folder: Path, report: Report, evaluate: Callable[[int], None] | None = None) -> None:
        """Train as every loop does, and freeze the head."""
        super().run(folder, report, evaluate)
        self.head.requires_grad_(False)

    def _update(self) -> Told:
        numbers = self._draws.numbers(self.step)
        loss = self._loss(self._of(self.data, [self._draws.index(number) for number in numbers], numbers))
        loss.backward()  # type: ignore[no-untyped-call]
        return self._taken({"loss": loss.detach()})

    @torch.no_grad()
    def figures(self, data: TrainingData) -> dict[str, float]:
        """Over slots of held-out data, behind the responses' own tokens: shares of slots in which the response's token
        comes first without the head and with it, or is a candidate; what is left to the rest; losses in nats.
        """
        totals = torch.zeros(7, dtype=torch.float64)
        size = self.settings.batch
        for start in range(0, len(data), size):
            numbers = range(start, min(start + size, len(data)))
            slots = self._of(data, list(numbers), numbers)
            width, label = slots.candidates.shape[1], slots.label[:, None]
            with_head, without = self._log_q(slots, self._added(slots)), self._log_q(slots, None)
            numbers_ = (
                torch.ones_like(slots.rest),
                slots.label == 0,
                with_head[:, :width].argmax(-1) == slots.label,
                slots.label < width,
                with_head[:, width].exp(),
                -without.gather(1, label)[:, 0],
                -with_head.gather(1, label)[:, 0],
            )
            totals += torch.stack([column.double().sum() for column in numbers_]).cpu()
        names = ("right without", "right", "recall", "rest", "nats without", "nats")
        return dict(zip(names, (totals[1:] / totals[0].clamp(min=1)).tolist(), strict=True))

    def _of(self, data: TrainingData, indices: Iterable[int], numbers: range) -> Slots:
        """The slots of these sequences; `numbers` seed what is drawn of each."""
        sequences, size = [data[index] for index in indices], self.drafter.config.block_size
        packed = self._draws.blocks(sequences, numbers, self.settings.blocks, size)
        generators = [self._draws.generator("prefixes", number) for number in numbers]
        with torch.no_grad():
            return self._slots(packed.to(self._embedding.device), generators)

    def _slots(self, packed: Packed, generators: list[torch.Generator]) -> Slots:
        shape, device = packed.tokens.shape, packed.tokens.device
        visible, rejected = torch.ones(shape[:2], dtype=torch.long, device=device), None
        if self.first is not None and self._prefixes is not None:
            with self._autocast(device):
                errors, drafted = first_rejections(self.first, self._embedding, packed, self._drafted)
            draws = draw_kinds(self._prefixes, shape[-1], generators).to(device)
            visible, rejected = choose_prefixes(errors, drafted, shape[-1], self._prefixes, draws)
        place = torch.arange(shape[-1], device=device)
        used = (place >= visible[..., None]) & packed.inside
        distance = (place - visible[..., None]).clamp(min=0)
        banned = torch.full(shape, -1, device=device)
        if rejected is not None:
            banned = torch.where(place == visible[..., None], rejected[..., None], -1)
        with self._autocast(device):
            hidden = block_hidden(self.drafter, self._embedding, packed, visible)
        index = self._drafted.index
        banned, tokens = banned[used], packed.tokens[used]
        banned = torch.where(banned >= 0, index[banned.clamp(min=0)], -1)
        said = hidden[used].float(), packed.target_hidden[used], index[tokens], banned
        before = packed.tokens.roll(1, dims=-1)[used]
        size = max(1, _LOGITS // len(self._ids))
        parts = [self._classes(*part) for part in zip(*(torch.split(rows, size) for rows in said), strict=True)]
        candidates, logits, rest, label, wanted = (torch.cat(column) for column in zip(*parts, strict=True))
        weight = torch.exp(-distance[used] / self.settings.decay)
        return Slots(said[0], before, candidates, logits, rest, label, wanted, weight)

    def _classes(
        self, hidden: Tensor, target_hidden: Tensor, label: Tensor, banned: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Candidates, their logits, the rest, the label among them, and the target's distribution, of rows."""
        head: Head = self._drafted.head
        logits = head.logits(hidden, banned)
        best, candidates = logits.topk(self.head.pool, dim=-1)
        rest = _outside(best, logits.logsumexp(-1))
        is_label = candidates == label[:, None]
        place = torch.where(is_label.any(-1), is_label.int().argmax(-1), self.head.pool)
        log_p = head.logits(target_hidden, banned).log_softmax(-1).gather(1, candidates)
        wanted = torch.cat([log_p, _outside(log_p, torch.zeros_like(rest))[:, None]], -1).exp()
        # what is not drafted at all is part of the rest, and the target's logits of it were not taken
        wanted = torch.where(label[:, None] >= 0, wanted, F.one_hot(place, wanted.shape[1]).to(wanted.dtype))
        return candidates, best, rest, place, wanted

    def _added(self, slots: Slots) -> Tensor:
        """δ [N, M], with the gradients of the head."""
        of_parent = self.head.project_predecessors(unit_rms(self._embedding[slots.before]))
        of_slot: Tensor = self.head.hidden_projection(slots.hidden)
        table = self.head.project_successors(self._successors)
        of_candidates = F.embedding(slots.candidates, table)  # [N, M, R]
        return (of_candidates @ (of_parent * of_slot)[..., None])[..., 0]

    def _log_q(self, slots: Slots, added: Tensor | None) -> Tensor:
        """Log-probabilities [N, M + 1] of the candidates and the rest; None: without the head."""
        scores = slots.logits if added is None else slots.logits + added
        return torch.cat([scores, slots.rest[:, None]], -1).log_softmax(-1)

    def _loss(self, slots: Slots) -> Tensor:
        log_q = self._log_q(slots, self._added(slots))
        share = self.settings.kl
        right = -log_q.gather(1, slots.label[:, None])[:, 0]
        distilled = -(slots.wanted * log_q).sum(-1)
        loss = (1 - share) * right + share * distilled
        return (loss * slots.weight).sum() / slots.weight.sum().clamp(min=1e-6)


def _outside(inside: Tensor, total: Tensor) -> Tensor:
    """The logarithm [N] of what a sum e^total [N] has besides terms e^inside [N, M]."""
    return total + torch.log1p(-(inside.logsumexp(-1) - total).exp().clamp(max=_MOST))
