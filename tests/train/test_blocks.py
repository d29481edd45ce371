"""Blocks in training: their mask against loops in float64, and the whole forward pass against the serving executor."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from d2sd.modeling.drafter import Drafter
from d2sd.runtime.batch import Batch
from d2sd.runtime.executor import TorchExecutor
from d2sd.runtime.request import SamplingParams
from d2sd.runtime.sampling import Sampling
from d2sd.train.blocks import attend_in_sequence, blocks_at, draw_blocks
from d2sd.train.features import TrainingSequence
from d2sd.train.loop import Trainer
from tests.tiny import full_pass, random_tokens, tiny_decoder, tiny_drafter
from tests.train.helpers import BLOCK, exact_features, greedy_answers, settings

TARGET = tiny_decoder("qwen3", layers=4)
DRAFTER = tiny_drafter(TARGET.config, block_size=BLOCK)
LENGTH = 12


def sequence(length: int = LENGTH, prompt: int = 1) -> TrainingSequence:
    """Random text, and what the target makes of it in fp32."""
    tokens = random_tokens(TARGET, 1, length, seed=5)
    out = full_pass(TARGET, tokens, taps=DRAFTER.config.target_layer_ids)
    return TrainingSequence(tokens[0], prompt, out.features[0], out.hidden[0])


# --- The attention -------------------------------------------------------------------------------------------------


def attention_by_loops(
    keys: Any, values: Any, q: Any, k: Any, v: Any, anchors: list[int]
) -> list[list[list[list[float]]]]:
    """[block][slot][head][coordinate] in Python's floats. keys, values [token][K/V head][D] of the sequence."""
    out: list[list[list[list[float]]]] = []
    for block, anchor in enumerate(anchors):
        out.append([])
        for slot in range(len(q[block])):
            out[-1].append([])
            for head, query in enumerate(q[block][slot]):
                shared = head // (len(q[block][slot]) // len(k[block][slot]))
                seen = [(keys[t][shared], values[t][shared]) for t in range(anchor)]  # strictly before the anchor
                seen += [(k[block][s][shared], v[block][s][shared]) for s in range(len(k[block]))]  # no order
                scores = [
                    sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(len(query)) for key, _ in seen
                ]
                total = sum(math.exp(score) for score in scores)
                mixed = [0.0] * len(query)
                for score, (_, value) in zip(scores, seen, strict=True):
                    mixed = [m + math.exp(score) / total * x for m, x in zip(mixed, value, strict=True)]
                out[-1][-1].append(mixed)
    return out


def test_attention_equals_loops_over_the_drawn_mask() -> None:
    """Anchors at the first token (no context at all), inside, and at the last token."""
    features, body = sequence().features, DRAFTER.config.body
    anchors = torch.tensor([0, 3, 4, LENGTH - 1])
    positions = anchors[:, None] + torch.arange(BLOCK)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, BLOCK, body.num_heads, body.head_dim, generator=generator)
    k, v = torch.randn(2, 4, BLOCK, body.num_kv_heads, body.head_dim, generator=generator)
    attend = attend_in_sequence(DRAFTER, features, positions)
    keys, values = DRAFTER.context_keys_values(features[None], torch.arange(LENGTH)[None])
    for layer in range(body.num_layers):
        expected = attention_by_loops(
            keys[layer, 0].double().tolist(), values[layer, 0].double().tolist(),
            q.double().tolist(), k.double().tolist(), v.double().tolist(), anchors.tolist(),
        )  # fmt: skip
        found = attend(layer, q, k, v).double()
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-5)


def hidden_of(drafter: Drafter, features: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    out = drafter(TARGET.embed_tokens(tokens), positions, attend_in_sequence(drafter, features, positions))
    assert isinstance(out, Tensor)
    return out


def test_a_block_sees_no_other_block_and_nothing_from_its_anchor_on() -> None:
    features = sequence().features
    positions = torch.tensor([[3], [7]]) + torch.arange(BLOCK)
    tokens = random_tokens(TARGET, 2, BLOCK)
    plain = hidden_of(DRAFTER, features, tokens, positions)

    def changed(where: slice) -> list[bool]:
        other = features.clone()
        other[where] += 3
        out = hidden_of(DRAFTER, other, tokens, positions)
        return [bool((out[i] - plain[i]).abs().max() > 1e-3) for i in range(2)]

    assert changed(slice(7, None)) == [False, False]
    assert changed(slice(3, 7)) == [False, True]
    assert changed(slice(2, 3)) == [True, True]
    for block in range(2):
        other = tokens.clone()
        other[block, -1] = (other[block, -1] + 1) % 64
        difference = (hidden_of(DRAFTER, features, other, positions) - plain).abs()
        assert difference[block, 0].max() > 1e-3, "inside a block there is no order"
        assert difference[1 - block].max() < 1e-6


def test_gradients_reach_the_fusion_through_the_context() -> None:
    drafter = tiny_drafter(TARGET.config, block_size=BLOCK).requires_grad_(True)
    features, tokens = sequence().features, random_tokens(TARGET, 1, BLOCK)

    def loss(anchor: int) -> Tensor:
        positions = torch.tensor([[anchor]]) + torch.arange(BLOCK)
        return hidden_of(drafter, features, tokens, positions).square().sum()

    fusion = [drafter.fc.weight, drafter.hidden_norm.weight]
    for weight, gradient in zip(fusion, torch.autograd.grad(loss(6), fusion), strict=True):
        direction = torch.sign(gradient)
        step = 1e-3 / float(gradient.abs().sum()) ** 0.5
        with torch.no_grad():
            weight += step * direction
            above = float(loss(6))
            weight -= 2 * step * direction
            below = float(loss(6))
            weight += step * direction
        slope = (above - below) / (2 * step)
        assert slope > 1e-2
        assert slope == pytest.approx(float(gradient.abs().sum()), rel=0.05)
    for gradient in torch.autograd.grad(loss(0), fusion):
        assert not gradient.any(), "a block at the first token has no context"


# --- Training computes what serving computes ------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("anchor", [0, 1, 4, 7, LENGTH - 2])
def test_training_forward_equals_the_serving_executor(which: int, anchor: int) -> None:
    """One sequence, every number of visible tokens: `Trainer._hidden` against prefill and draft through the pages."""
    second = tiny_drafter(TARGET.config, block_size=BLOCK, role="variable_prefix", seed=2)
    drafter = (DRAFTER, second)[which]
    text = sequence()
    visible = torch.arange(1, BLOCK)
    blocks = blocks_at(text, torch.full_like(visible, anchor), BLOCK)
    trainer = Trainer(TARGET, drafter, exact_features(greedy_answers()), settings())
    hidden = trainer._hidden(drafter, text, blocks, visible)
    trained = TARGET.logits(hidden[:, 1:])  # [A, G-1, V]

    executor = TorchExecutor(deepcopy(TARGET), deepcopy(DRAFTER), deepcopy(second))  # it may repack weights
    executor.allocate(pages=6, page_size=4)
    page_table, nothing = torch.tensor([[5, 2, 4, 1]]), torch.tensor([0])
    if anchor:
        executor.prefill(text.tokens[None, :anchor], torch.tensor([anchor]), page_table, nothing)
    sampling = Sampling.of([SamplingParams()], TARGET.config.vocab_size, "cpu")
    batch = Batch(text.tokens[anchor : anchor + 1], page_table, torch.tensor([anchor]), torch.tensor([True]), sampling)
    branches = torch.where(torch.arange(BLOCK) < visible[:, None], blocks.tokens, drafter.config.mask_token_id)
    executor.settle((which,))
    served = executor._draft(which, batch, branches[None])[0]
    torch.testing.assert_close(trained, served, rtol=0, atol=1e-4)
    if which == 0:
        assert trained[0].argmax(-1).tolist() == executor.draft_first(batch, 1).best[0].tolist()


# --- Where blocks lie ------------------------------------------------------------------------------------------------


def test_anchors_are_distinct_and_cover_the_answer() -> None:
    """From the prompt's last token to the last but one, whose next token is the last there is to predict."""
    text, seen = sequence(prompt=5), set()
    for seed in range(40):
        drawn = draw_blocks(text, BLOCK, 3, torch.Generator().manual_seed(seed))
        anchors = drawn.positions[:, 0].tolist()
        assert anchors == sorted(set(anchors))
        assert len(anchors) == 3
        seen |= set(anchors)
    assert seen == set(range(4, LENGTH - 1))
    everything = draw_blocks(text, BLOCK, 99, torch.Generator())
    assert everything.positions[:, 0].tolist() == list(range(4, LENGTH - 1))


def test_slots_past_the_end_are_marked() -> None:
    text = sequence()
    blocks = blocks_at(text, torch.tensor([2, LENGTH - 2]), BLOCK)
    assert blocks.inside.tolist() == [[True] * 4, [True, True, False, False]]
    assert blocks.tokens[0].tolist() == text.tokens[2:6].tolist()
    assert blocks.tokens[1, :2].tolist() == text.tokens[-2:].tolist()
