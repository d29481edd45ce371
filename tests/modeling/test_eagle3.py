"""EAGLE-3 against a reference that shares no line with it: loops over rows, heads and keys in float64.

A row of the reference is the authors' pair of a feature and the token behind it, at the feature's position.

Shape letters: B requests, K blocks, S slots, E hidden, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.draft_head import draft_tables
from d2sd.modeling.drafters.eagle3 import Eagle3
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.kv_pool import CommittedRows, Rows
from d2sd.modeling.prepare import prepare_for_inference
from d2sd.modeling.where import Where
from d2sd.plugins.layer_ops import Behind
from tests.modeling.loops import Vector, attention, behind_attention, heads, of_layer, rms_norm
from tests.tiny import pool_for, random_tokens, tiny_decoder, tiny_eagle

TARGET = tiny_decoder("qwen3", layers=5, hidden=16, heads=4, kv_heads=2, head_dim=6)
IDS = tuple(range(3, 60, 2))
#: Numbers that pages keep beside K/V fill their layers, or do not; and one K/V head is enough.
HEADS = {"of all tokens": tiny_eagle(TARGET.config), "of some": tiny_eagle(TARGET.config, draft_vocabulary=IDS)}
HEADS["of one K/V head"] = tiny_eagle(TARGET.config, num_heads=3, num_kv_heads=1, head_dim=4, steps=4)


class Reference:
    """One request: the head's rows so far, as the authors number them."""

    def __init__(self, head: Eagle3, target: Decoder, tokens: list[int]) -> None:
        """`tokens`: the committed ones, and the anchor."""
        self.head, self.layer = head, head.config.layer
        self.weights = {name: x.double().numpy() for name, x in head.state_dict().items()}
        self.embedding = target.embed_tokens.weight.double().numpy()
        self.keys: list[Vector] = []
        self.values: list[Vector] = []
        features = target.full_pass(torch.tensor([tokens[:-1]]), head.config.target_layer_ids).features[0]
        for feature, token in zip(features.double().numpy(), tokens[1:], strict=True):
            self.last = self.row(self.weights["fc.weight"] @ feature, token)

    def row(self, h: Vector, token: int) -> Vector:
        """The output of a row, before the last norm; its key and value join the others."""
        w, eps, place = of_layer(self.weights, 0), self.layer.rms_norm_eps, len(self.keys)
        embedded = rms_norm(self.embedding[token], w["input_layernorm.weight"], eps)
        x = np.concatenate([embedded, rms_norm(h, w["hidden_norm.weight"], eps)])
        self.keys.append(heads("k", x, place, w, self.layer))
        self.values.append(heads("v", x, place, w, self.layer))
        queries = heads("q", x, place, w, self.layer)
        return behind_attention(h + attention(queries, self.keys, self.values, w, self.layer), w, self.layer)

    def logits(self) -> Vector:
        """Logits of the slot behind the last row."""
        normed = rms_norm(self.last, self.weights["norm.weight"], self.layer.rms_norm_eps)
        found: Vector = self.weights["draft_head.weight"] @ normed
        return found

    def draft(self, known: list[int], count: int) -> list[Vector]:
        """Logits of `count` slots; the first tokens are `known`, the others the likeliest."""
        found, ids = [self.logits()], self.head.config.draft_vocabulary
        for slot in range(count - 1):
            best = int(found[-1].argmax())
            token = known[slot] if slot < len(known) else best if ids is None else ids[best]
            self.last = self.row(self.last, token)
            found.append(self.logits())
        return found


def best(head: Eagle3, logits: torch.Tensor, _slot: int) -> torch.Tensor:
    index = logits[:, :, 0].argmax(-1)
    return index if head.draft_ids is None else head.draft_ids[index]


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_logits_equal_the_reference(name: str, prepared: bool) -> None:
    """Contexts of several pages, of part of one, of one token; committed at once and in steps of several lengths. One
    block of each request, and three of which two begin with tokens of others.
    """
    head, lengths = HEADS[name], [9, 6, 1]
    heads: dict[int, DraftModel] = {0: head}
    tokens, target = random_tokens(TARGET, 3, 10), TARGET
    if prepared:
        target, heads = prepare_for_inference(TARGET, heads)
    tables, served = draft_tables(target, heads)[0], heads[0]
    assert isinstance(served, Eagle3)
    pool, table = pool_for(head.config.body, 3, 16)
    features = TARGET.full_pass(tokens, head.config.target_layer_ids).features
    for start, stop in ((0, 3), (3, 4), (4, 9)):
        places = torch.arange(start, stop).expand(3, -1)
        keep = places < torch.tensor(lengths)[:, None]
        new = CommittedRows(features[:, start:stop], (table,), places, keep, pool.page_size)
        served.extend(tokens[:, start:stop].flatten(), new.rows, new.before, pool, tables)
    size, context = head.config.block_size, torch.tensor(lengths)
    prefixes: tuple[list[list[int]], ...] = [[]], [[], [7], [11, 5]]
    for known in prefixes:
        blocks = torch.full((3, len(known), size), -1)
        blocks[:, :, 0] = tokens.gather(1, context[:, None])
        for block, prefix in enumerate(known):
            blocks[:, block, 1 : 1 + len(prefix)] = torch.tensor(prefix, dtype=torch.long)
        number = torch.arange(len(known) * size)
        same = (number[:, None] // size == number // size).expand(3, -1, -1)
        rows = Rows(Behind(context, (number % size).expand(3, -1)), same, Where(table, context))
        tables = tables._replace(choose=lambda logits, slot: best(head, logits, slot))
        hidden = served.draft_hidden(blocks, rows, pool, None, tables)
        logits = served.logits(hidden, blocks[:, :, 0], tables)
        for row, length in enumerate(lengths):
            for block, prefix in enumerate(known):
                reference = Reference(head, TARGET, tokens[row, : length + 1].tolist())
                expected = torch.tensor(np.array(reference.draft(prefix, size - 1)))
                torch.testing.assert_close(logits[row, block].double(), expected, rtol=0, atol=1e-5)
