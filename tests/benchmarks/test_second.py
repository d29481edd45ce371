"""The comparison of second drafters counts what their restarts give, block by block."""

from __future__ import annotations

import pytest
import torch

from benchmarks.second import ARMS, RECIPE, report, restarts, settings_of
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.train.data.draws import SeededOrder
from d2sd.train.data.features import TrainingData
from d2sd.train.data.packing import pack_blocks
from d2sd.train.dflash import block_hidden
from d2sd.train.dist import Dist
from tests.train.helpers import BLOCK, VOCAB, exact_features, greedy_responses, new_drafter, settings, target

WHOLE = settings(frequent=VOCAB)


def counted(first: Drafter, second: Drafter, data: TrainingData) -> list[list[int]]:
    """Tokens of each restart, by the slot of the rejection, in loops over blocks, slots and tokens."""
    found: list[list[int]] = [[] for _ in range(BLOCK)]
    for index in range(len(data)):
        drawn = SeededOrder(0, len(data), 1, Dist()).blocks([data[index]], [index], 32, BLOCK, "restarts")
        for anchor in drawn.positions[0, :, 0].tolist():
            text = data[index].tokens.tolist()[anchor : anchor + BLOCK]

            def said(drafter: Drafter, visible: int, anchor: int = anchor, index: int = index) -> torch.Tensor:
                packed = pack_blocks([data[index]], [torch.tensor([anchor])], BLOCK)
                hidden = block_hidden(drafter, target().embed_tokens.weight, packed, torch.tensor([[visible]]))
                return target().logits(hidden).view(BLOCK, -1)

            tokens = said(first, 1).argmax(-1).tolist()
            slot = 1
            while slot < len(text) and tokens[slot] == text[slot]:
                slot += 1
            if slot < len(text):
                logits = said(second, slot)
                logits[slot, tokens[slot]] = -torch.inf
                again, end = logits.argmax(-1).tolist(), slot
                while end < len(text) and again[end] == text[end]:
                    end += 1
                found[slot].append(end - slot)
    return found


@torch.no_grad()
def test_restarts_are_counted_as_by_loops() -> None:
    data = exact_features(greedy_responses())
    first, second = new_drafter(), new_drafter(0.9)
    for parameter in second.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    told = restarts(first, second, target(), data, WHOLE)
    rows = counted(first, second, data)
    assert told.tokens == pytest.approx(sum(map(sum, rows)) / sum(map(len, rows)))
    assert told.at == pytest.approx([sum(row) / max(1, len(row)) for row in rows[1:]])
    assert told.tokens > 0, "something is right, or nothing was compared"


def test_arms_change_what_they_are_named_for() -> None:
    base = settings(objective={"slots": "dpace", "ce": 1}, on_correction=0.2)
    unchanged = settings_of(base, {}, 5, 2)
    assert (unchanged.steps, unchanged.seed) == (5, 2)
    same = [name for name, changes in ARMS.items() if settings_of(base, changes, 5, 2) == unchanged]
    assert same == [RECIPE, "from new weights"]
    assert settings_of(base, ARMS["four times the rate"], 5, 2).learning_rate == 4 * base.learning_rate


def test_arms_are_compared_with_the_recipe() -> None:
    told = restarts(new_drafter(), new_drafter(0.9), target(), exact_features(greedy_responses()), WHOLE)
    seen = {"before training": 1.0, RECIPE: 2.0, "one layer": 1.5}
    rows = report({name: [told._replace(tokens=tokens)] for name, tokens in seen.items()}).splitlines()[2:]
    assert [row.split("|")[4].strip() for row in rows] == ["-50.0%", "+0.0%", "-25.0%"]
