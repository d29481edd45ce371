"""The rejections that a second drafter is trained on: the first drafter's on text that is new to it.

When serving, the first drafter errs as on held-out responses; on its training responses it errs later, and at harder
tokens. So earlier states of its training are kept, and the one is taken that errs on training responses as often as the
trained one does on held-out ones. No response is withheld from either drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from d2sd.convert.checkpoint.headers import open_tensors
from d2sd.errors import D2SDError
from d2sd.io import atomic_write, remove_partial
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.train.data.draws import SeededOrder
from d2sd.train.data.features import TrainingData
from d2sd.train.dist import Dist
from d2sd.train.objectives.loss import Candidates, first_rejections
from d2sd.train.products import product_dtype
from d2sd.train_recipe import TrainSettings

#: Shares of the first drafter's steps after which its weights are kept.
_KEPT = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 0.75)
#: Responses that decide how often a drafter errs, of either kind.
_SAMPLE = 256
_NAME = "step-{}.safetensors"


def kept_steps(steps: int) -> set[int]:
    """The steps of a training of `steps` after which weights are kept."""
    return {max(1, round(share * steps)) for share in _KEPT}


def keep(folder: Path, step: int, drafter: DraftModel) -> None:
    """Write its weights, in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _NAME.format(step)
    remove_partial(path)
    with atomic_write(path) as partial:
        save_file({name: p.detach().to("cpu", torch.bfloat16) for name, p in drafter.named_parameters()}, partial)


@torch.no_grad()
def kept(folder: Path, steps: int, first: Drafter) -> dict[int, Drafter]:
    """The states that were kept of `first`'s training, by step, on its device. Raises D2SDError if there are none."""
    found: dict[int, Drafter] = {}
    for step in sorted(kept_steps(steps)):
        path = folder / _NAME.format(step)
        if path.is_file():
            with open_tensors(path) as handle:
                drafter = Drafter(first.config)
                for name, parameter in drafter.named_parameters():
                    parameter.copy_(handle.get_tensor(name))
            found[step] = drafter.to(first.fc.weight.device)
    if not found:
        raise D2SDError(
            "no earlier state of the first drafter was kept",
            where="second.rejections: matched",
            found=folder,
            fix="train the first drafter again in another --work folder, or set second.rejections to final",
        )
    return found


@torch.no_grad()
def mean_right(drafter: Drafter, target: Decoder, data: TrainingData, settings: TrainSettings) -> float:
    """Mean number of right tokens of its greedy drafts, over blocks at random anchors of up to 256 responses."""
    draws = SeededOrder(settings.seed, len(data), 1, Dist())
    numbers = range(min(len(data), _SAMPLE))
    head, embedding = target.head.detach(), target.embedding.detach()
    frequent = data.frequent(settings.frequent, target.config.vocab_size)
    dtype = product_dtype(settings.precision, head.device)
    right = blocks = 0
    for start in range(0, len(numbers), settings.micro_batch):
        part = numbers[start : start + settings.micro_batch]
        sequences = [data[draws.index(number)] for number in part]
        packed = draws.blocks(sequences, part, settings.blocks, drafter.config.block_size, "matching")
        always = frequent.clone()
        always[packed.tokens[packed.inside]] = True
        candidates = Candidates.draw(head, always, 0, dtype, torch.Generator())
        packed = packed.to(head.device)
        with torch.autocast(head.device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
            errors, _ = first_rejections(drafter, embedding, packed, candidates)
        counted = packed.inside[..., 1]
        right += int((errors[counted] - 1).sum())
        blocks += int(counted.sum())
    return right / max(1, blocks)


def matched(
    first: Drafter,
    earlier: Mapping[int, Drafter],
    target: Decoder,
    held_out: TrainingData,
    data: TrainingData,
    settings: TrainSettings,
) -> tuple[Drafter, str]:
    """(`first` or an earlier state, by step, which errs on `data` as `first` does on `held_out`; a line about it)."""
    wanted = mean_right(first, target, held_out, settings)
    states: dict[int | None, Drafter] = {None: first}
    states |= {step: drafter for step, drafter in earlier.items()}  # noqa: C416, of another key type
    found = {step: mean_right(drafter, target, data, settings) for step, drafter in states.items()}
    step = min(found, key=lambda step: abs(found[step] - wanted))
    which = "the trained one" if step is None else f"the one at step {step:,} of its schedule"
    return states[step], (
        f"right tokens of the first drafter: {wanted:.3f} on held-out responses, {found[None]:.3f} on training ones; "
        f"rejections are those of {which}, {found[step]:.3f}"
    )
