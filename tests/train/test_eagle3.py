"""An EAGLE-3 head in training: it computes what is served, begins as an early exit, and learns."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from d2sd.errors import D2SDError
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.eagle3 import Eagle3
from d2sd.train.data.packing import pack_blocks
from d2sd.train.eagle3 import eagle_added, eagle_head, eagle_hidden
from d2sd.train.loop import Trainer
from d2sd.train.pipeline.evaluate import as_written
from tests.modeling.test_eagle3 import Reference
from tests.tiny import tiny_eagle
from tests.train.helpers import BLOCK, TAPS, exact_features, greedy_responses, settings, share_of_blocks, target
from tests.train.helpers import GEOMETRY as PLAIN

GEOMETRY = PLAIN.model_copy(update={"kind": "eagle3"})


def fresh(decoder: Decoder) -> Eagle3:
    return eagle_head(GEOMETRY, decoder, exact_features(greedy_responses()), seed=0)


def test_training_computes_what_is_served() -> None:
    """Each slot behind the text's tokens, for anchors at the beginning, in the middle and at the end of two texts."""
    head = tiny_eagle(target().config, steps=BLOCK - 1, target_layer_ids=TAPS)
    head.target_head = target().head
    known = greedy_responses(2)
    data, table = exact_features(known), target().embed_tokens.weight
    anchors = [torch.tensor([1, 4, 11]), torch.tensor([3, 8])]
    packed = pack_blocks([data[0], data[1]], anchors, BLOCK)
    hidden = eagle_hidden(head, table, packed, torch.ones(packed.tokens.shape[:2]))
    logits = F.linear(hidden, target().head) + eagle_added(head, hidden, table, packed).logits(torch.float32)
    for row, starts in enumerate(anchors):
        text = known[row].prompt_ids + known[row].response_ids
        for block, anchor in enumerate(starts.tolist()):
            reference = Reference(head, target(), text[: anchor + 1])
            expected = torch.tensor(np.array(reference.draft(text[anchor + 1 :], BLOCK - 1)))
            torch.testing.assert_close(logits[row, block, 1:].double(), expected, atol=1e-4, rtol=0)


def test_the_first_head_is_an_early_exit() -> None:
    """A head passes the last layer that it reads to the target's last attention and its head."""
    head, theirs = fresh(target()), target().state_dict()
    last = f"layers.{target().config.body.num_layers - 1}"
    for part in ("q", "k", "v"):
        weight = head.get_parameter(f"layers.0.self_attn.{part}_proj.weight")
        assert not weight[:, :32].any()
        assert torch.equal(weight[:, 32:], theirs[f"{last}.self_attn.{part}_proj.weight"])
    assert torch.equal(head.draft_head.weight, target().head)
    features = torch.randn(4, 64, generator=torch.Generator().manual_seed(9))
    torch.testing.assert_close(head.fc(features), features[:, 32:], atol=0.2, rtol=0)  # 7 sigma
    assert not eagle_added(head, features, features, None).weight.any()  # type: ignore[arg-type]


@pytest.mark.parametrize(("key", "value"), [("target_layer_ids", [0, 3]), ("layers", 2)])
def test_shapes_that_do_not_fit(key: str, value: object) -> None:
    with pytest.raises(D2SDError) as caught:
        eagle_head(GEOMETRY.model_copy(update={key: value}), target(), exact_features(greedy_responses()), seed=0)
    assert caught.value.where == f"drafter.{key}"


def test_answers_are_learnt_and_the_target_stays(tmp_path: Path) -> None:
    """Drafts behind its own drafts are accepted, and a smaller head drafts the same."""
    known, before = greedy_responses(), deepcopy(target().state_dict())
    head = fresh(target())
    assert share_of_blocks(target(), head, known) < 0.4
    losses = []
    given = exact_features(known), settings(steps=150, learning_rate=3e-3)
    Trainer(target(), head, *given).run(tmp_path, lambda _, metrics: losses.append(metrics["loss"]))
    assert losses[-1] < 0.3 * losses[0]
    said = sorted({token for one in known for token in one.response_ids})
    assert share_of_blocks(target(), head, known) > 0.8
    assert share_of_blocks(target(), as_written(head, tuple(said), torch.float32), known) > 0.8
    assert all(torch.equal(tensor, before[name]) for name, tensor in target().state_dict().items())
