"""The training loop of one drafter: resumable, seeded, on cached features.

Memory and time go to the head, so logits are taken over the ids that occur in the answers plus a fresh random draw of
the others each step, whose logits are raised by log(others / drawn): the softmax's denominator stays unbiased
(sampled softmax).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from d2sd.errors import D2SDError
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafter import Drafter
from d2sd.train.blocks import Blocks, attend_in_sequence, draw_blocks
from d2sd.train.features import FeatureCache, TrainingSequence
from d2sd.train.objectives import draw_prefixes, first_errors, slot_weights, soft_cross_entropy
from d2sd.train_recipe import TrainSettings

# Shape letters: A blocks, G block size γ, C candidate ids, E hidden.


class Trainer:
    """Trains `drafter`; with `first` given, as a second drafter on variable prefixes."""

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter,
        data: FeatureCache,
        settings: TrainSettings,
        first: Drafter | None = None,
    ) -> None:
        self.target, self.drafter, self.data, self.settings, self.first = target, drafter, data, settings, first
        self.step = 0
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
        )
        occurs = torch.zeros(target.config.vocab_size, dtype=torch.bool)
        for index in range(len(data)):
            occurs[data[index].tokens] = True
        self._seen, self._unseen = occurs.nonzero()[:, 0], (~occurs).nonzero()[:, 0]
        self._where = torch.zeros_like(occurs, dtype=torch.long)  # id -> candidate index, for the seen ids
        self._where[self._seen] = torch.arange(len(self._seen))
        self._embedding = target.embed_tokens.weight.detach()

    def run(self, folder: Path, report: Callable[[int, float], None]) -> None:
        """Train to the last step, saving to `folder`; `report(step, loss)` after each step."""
        self._resume(folder)
        while self.step < self.settings.steps:
            generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.step)
            loss = self._update(generator)
            self.step += 1
            report(self.step, loss)
            if self.step % self.settings.save_every == 0 or self.step == self.settings.steps:
                self._save(folder)

    def _update(self, generator: torch.Generator) -> float:
        candidates, correction = self._candidates(generator)
        head = self.target.head.detach()[candidates].to(torch.bfloat16)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * self._schedule()
        total = 0.0
        for index in self._sequences():
            with torch.autocast("cpu", torch.bfloat16):
                loss = self._loss(self.data[index], head, correction, generator)
            (loss / self.settings.batch).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach()) / self.settings.batch
        if not math.isfinite(total):
            raise D2SDError(
                "the loss is not finite",
                where=f"step {self.step}",
                found=total,
                fix="lower the learning rate, or look for damaged answers",
            )
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def _loss(self, sequence: TrainingSequence, head: Tensor, correction: Tensor, generator: torch.Generator) -> Tensor:
        blocks = draw_blocks(sequence, self.drafter.config.block_size, self.settings.blocks, generator)
        visible = torch.ones(len(blocks.tokens), dtype=torch.long)
        rejected = None
        if self.first is not None:
            visible, rejected = self._prefixes(self.first, sequence, blocks, generator)
        weights = slot_weights(visible, self.drafter.config.block_size, self.settings.decay) * blocks.inside
        used = weights > 0
        logits = F.linear(self._hidden(self.drafter, sequence, blocks, visible)[used], head) + correction
        if rejected is not None:
            row = (rejected[used] >= 0).nonzero()[:, 0]
            logits[row, rejected[used][row]] = float("-inf")
        # Row t of the target predicts token t + 1: slot k at position p reads row p - 1.
        target_logits = F.linear(sequence.hidden[(blocks.positions - 1)[used]], head) + correction
        loss = soft_cross_entropy(logits, target_logits, self._where[blocks.tokens[used]], self.settings.hard)
        return (loss * weights[used]).sum() / weights.sum().clamp(min=1e-6)

    def _hidden(self, drafter: Drafter, sequence: TrainingSequence, blocks: Blocks, visible: Tensor) -> Tensor:
        """[A, G, E]: the drafter over the blocks, `visible [A]` real tokens at the head of each, masks behind."""
        slots = torch.arange(drafter.config.block_size)
        tokens = torch.where(slots < visible[:, None], blocks.tokens, drafter.config.mask_token_id)
        attend = attend_in_sequence(drafter, sequence.features, blocks.positions)
        out: Tensor = drafter(self._embedding[tokens], blocks.positions, attend)
        return out

    @torch.no_grad()
    def _prefixes(
        self, first: Drafter, sequence: TrainingSequence, blocks: Blocks, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Visible tokens [A] of each block, and its rejected token [A, G] as a candidate index, -1 elsewhere."""
        count, size = blocks.tokens.shape
        hidden = self._hidden(first, sequence, blocks, torch.ones(count, dtype=torch.long))
        head = self.target.head[self._seen].to(hidden.dtype)
        guesses = F.linear(hidden, head).argmax(-1)  # indices into the seen ids
        errors = first_errors(self._seen[guesses], blocks.tokens)
        drawn = draw_prefixes(count, size, self.settings.prefix_base, generator)
        take = (torch.rand(count, generator=generator) < self.settings.on_rejection) & (errors < size)
        visible = torch.where(take, errors, drawn)
        at_error = take[:, None] & (torch.arange(size) == visible[:, None])
        return visible, torch.where(at_error, guesses, -1)

    def _candidates(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(ids [C], what is added to their logits [C])."""
        drawn = min(self.settings.negatives, len(self._unseen))
        picked = self._unseen[torch.randperm(len(self._unseen), generator=generator)[:drawn]]
        correction = torch.zeros(len(self._seen) + drawn)
        if drawn:
            correction[len(self._seen) :] = math.log(len(self._unseen) / drawn)
        return torch.cat([self._seen, picked]), correction

    def _sequences(self) -> Sequence[int]:
        """The sequences of this step: epochs are seeded shuffles laid end to end."""
        indices = []
        for number in range(self.step * self.settings.batch, (self.step + 1) * self.settings.batch):
            epoch, place = divmod(number, len(self.data))
            order = torch.randperm(
                len(self.data), generator=torch.Generator().manual_seed(self.settings.seed + 7919 * epoch)
            )
            indices.append(int(order[place]))
        return indices

    def _schedule(self) -> float:
        """Linear warm-up, then cosine to a twentieth."""
        warm = max(1, round(self.settings.warmup * self.settings.steps))
        if self.step < warm:
            return (self.step + 1) / warm
        done = (self.step - warm) / max(1, self.settings.steps - warm)
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))

    def _save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"drafter.{k}": v.detach().contiguous() for k, v in self.drafter.named_parameters()}
        for name, parameter in self.drafter.named_parameters():
            moments = self.optimizer.state[parameter]
            tensors |= {f"optimizer.{kind}.{name}": moments[kind] for kind in ("exp_avg", "exp_avg_sq")}
        partial = folder / "state.partial"
        identity = {key: json.dumps(value) for key, value in self._identity().items()}
        save_file(tensors, partial, {"step": str(self.step)} | identity)
        partial.replace(folder / "state.safetensors")

    def _identity(self) -> dict[str, dict[str, object]]:
        """What a resumed run must share with the one that began; data may have grown."""
        return {
            "settings": self.settings.model_dump(),
            "drafter": asdict(self.drafter.config),
            "first drafter": {"sha256": None if self.first is None else _digest(self.first)},
        }

    def _resume(self, folder: Path) -> None:
        path = folder / "state.safetensors"
        if not path.is_file():
            return
        from safetensors import safe_open

        with safe_open(path, "pt") as handle:
            found = handle.metadata()
        for what, mine in self._identity().items():
            now = json.loads(json.dumps(mine))
            then = json.loads(found[what]) if what in found else now
            if changed := [key for key in then | now if then.get(key) != now.get(key)]:
                raise D2SDError(
                    f"the {what} changed since this training began", where=path,
                    found={key: now.get(key) for key in changed}, expected={key: then.get(key) for key in changed},
                    fix="restore the recipe, or train into another folder",
                )  # fmt: skip
        tensors = load_file(path)
        self.step = int(found["step"])
        with torch.no_grad():
            for name, parameter in self.drafter.named_parameters():
                parameter.copy_(tensors[f"drafter.{name}"])
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(self.step)),
                    "exp_avg": tensors[f"optimizer.exp_avg.{name}"],
                    "exp_avg_sq": tensors[f"optimizer.exp_avg_sq.{name}"],
                }


def _digest(drafter: Drafter) -> str:
    """SHA-256 of a drafter's weights: a second drafter learns where this very first one goes wrong."""
    digest = hashlib.sha256()
    for parameter in drafter.parameters():
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()
