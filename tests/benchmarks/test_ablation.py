"""The comparison of objectives plays the steps that loops count, block by block."""

from __future__ import annotations

import heapq

import pytest
import torch

from benchmarks.ablation import REFERENCE, TREES, VARIANTS, played, report
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.train.data.features import TrainingData
from d2sd.train.data.packing import pack_blocks
from d2sd.train.dflash import block_hidden
from tests.train.helpers import BLOCK, VOCAB, exact_features, greedy_responses, new_drafter, target

#: A part of the vocabulary.
DRAFTED = torch.arange(VOCAB) % 3 > 0


def drafter() -> Drafter:
    found = new_drafter()
    for parameter in found.parameters():
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
        parameter.data.add_(0.02 * noise)
    return found


def likeliest(scores: list[list[float]], nodes: int) -> set[tuple[int, ...]]:
    """The paths of the highest sums of `scores`, by slot and token, the root's () among `nodes` of them."""
    waiting, found = [(0.0, tuple[int, ...]())], set[tuple[int, ...]]()
    while waiting and len(found) < nodes:
        lost, path = heapq.heappop(waiting)
        found.add(path)
        if len(path) < len(scores):
            for token, score in enumerate(scores[len(path)]):
                heapq.heappush(waiting, (lost - score, (*path, token)))
    return found


def steps_of(data: TrainingData, index: int, nodes: int) -> int:
    """Steps over an answer, each drafted by itself."""
    text, place, steps = data[index].tokens.tolist(), data[index].prompt_length - 1, 0
    while place < len(text) - 1:
        packed = pack_blocks([data[index]], [torch.tensor([place])], BLOCK)
        hidden = block_hidden(drafter(), target().embed_tokens.weight, packed, torch.tensor([[1]]))
        logits = target().logits(hidden).view(BLOCK, -1)[1:].masked_fill(~DRAFTED, -torch.inf)
        scores = logits.log_softmax(-1).tolist()
        chain = tuple(row.index(max(row)) for row in scores)
        paths = likeliest(scores, nodes) if nodes else {chain[:length] for length in range(BLOCK)}
        right = max(length for length in range(BLOCK) if tuple(text[place + 1 :][:length]) in paths)
        place, steps = place + 1 + right, steps + 1
    return steps


@torch.no_grad()
def test_steps_are_those_of_loops() -> None:
    data = exact_features(greedy_responses())
    told = played(drafter(), target(), data, DRAFTED)
    answers = [len(one.tokens) - one.prompt_length for one in (data[index] for index in range(len(data)))]
    for name, nodes in TREES.items():
        assert told[name] == [length / steps_of(data, i, nodes) for i, length in enumerate(answers)], name
    assert max(told["chain"]) > 1, "something is right, or nothing was compared"


def test_variants_are_compared_at_equal_seeds() -> None:
    def one(tau: float) -> dict[str, list[float]]:
        return {tree: [tau, tau] for tree in TREES}

    rows = report({"uniform": [one(1.0), one(3.0)], REFERENCE: [one(2.0), one(2.0)]}).splitlines()
    cells = [cell.strip() for cell in rows[2].split("|")]
    assert cells[2:5] == ["2.00", "1.00 to 3.00 (2)", "+0.0%"]


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_differ_from_the_reference(name: str) -> None:
    assert (VARIANTS[name] == VARIANTS[REFERENCE]) == (name == REFERENCE)
