"""Packed blocks: where they lie, their mask against loops in float64, what packing may not change, and the whole
forward pass against the serving executor.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.kv_pool import PoolSizes
from d2sd.modeling.layers import Attend
from d2sd.modeling.where import Where
from d2sd.policies import DrafterRole
from d2sd.runtime.batch import Batch
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.train.data.draws import SeededOrder, draw_prefixes, first_errors
from d2sd.train.data.features import TrainingSequence
from d2sd.train.data.packing import Packed, attend_packed, draw_anchors, pack_blocks
from d2sd.train.dense_attention import attend_dense, token_context
from d2sd.train.dflash import block_hidden
from d2sd.train.dist import Dist
from tests.modeling.loops import draft
from tests.tiny import random_tokens, runner_of, tiny_decoder, tiny_drafter
from tests.train.helpers import BLOCK

# Shape letters: B sequences, A blocks of each, G block size γ, S tokens, Hq/Hkv heads, D head size.

TARGET = tiny_decoder("qwen3", layers=4)
DRAFTER = tiny_drafter(TARGET.config, block_size=BLOCK)
WINDOWED = tiny_drafter(
    TARGET.config,
    block_size=BLOCK,
    sample_from_anchor=True,
    mask_embedding=True,
    attention={"windows": (5, None), "causal": (True, False), "sinks": True},
)
WITHOUT_SINKS = tiny_drafter(TARGET.config, block_size=BLOCK, attention={"windows": (None, 5), "causal": (True, False)})
EMBEDDING = TARGET.embed_tokens.weight.detach()
LENGTH = 12
#: Of a long sequence and of a short one, in tokens; anchors from the first token (no context at all) to the last.
LENGTHS = (LENGTH, 9)
ANCHORS = (torch.tensor([0, 3, 4, LENGTH - 1]), torch.tensor([2, 7, 8]))

Way = Callable[[Drafter, Packed], Attend]


def by_blocks(drafter: Drafter, packed: Packed) -> Attend:
    return attend_packed(drafter, packed.features, packed.positions)


def by_one_kernel(drafter: Drafter, packed: Packed) -> Attend:
    return attend_dense(drafter, packed, *token_context(drafter, packed))


def sequence(length: int = LENGTH, prompt: int = 1) -> TrainingSequence:
    """Random text, and what the target makes of it in fp32."""
    tokens = random_tokens(TARGET, 1, length, seed=length)
    out = TARGET.full_pass(tokens, aux_layer_ids=DRAFTER.config.target_layer_ids)
    return TrainingSequence(tokens[0], prompt, out.features[0], out.hidden[0])


def packed_pair() -> Packed:
    """Two packed sequences; the short one is padded in its tokens and in its blocks."""
    return pack_blocks([sequence(length) for length in LENGTHS], ANCHORS, BLOCK)


def hidden_of(packed: Packed, visible: int = BLOCK, drafter: Drafter = DRAFTER) -> Tensor:
    """[B, A, G, E]; unless told, all tokens are shown."""
    return block_hidden(drafter, EMBEDDING, packed, torch.full(packed.tokens.shape[:2], visible))


# --- Where blocks lie ------------------------------------------------------------------------------------------------


def test_anchors_are_distinct_and_cover_the_answer() -> None:
    """From the prompt's last token to the last but one, whose next token is the last there is to predict."""
    text, seen = sequence(prompt=5), set()
    for seed in range(40):
        anchors = draw_anchors(text, 3, torch.Generator().manual_seed(seed)).tolist()
        assert anchors == sorted(set(anchors))
        assert len(anchors) == 3
        seen |= set(anchors)
    assert seen == set(range(4, LENGTH - 1))
    assert draw_anchors(text, 99, torch.Generator()).tolist() == list(range(4, LENGTH - 1))


def test_blocks_hold_their_sequences_tokens_and_what_the_target_knew() -> None:
    """Padding holds no slot inside."""
    packed = packed_pair()
    assert packed.positions.shape == (2, 4, BLOCK)
    for row, (length, anchors) in enumerate(zip(LENGTHS, ANCHORS, strict=True)):
        text = sequence(length)
        torch.testing.assert_close(packed.features[row, :length], text.features)
        assert not packed.features[row, length:].any()
        for block, anchor in enumerate(anchors.tolist()):
            for slot in range(BLOCK):
                place = anchor + slot
                assert int(packed.positions[row, block, slot]) == place
                assert bool(packed.inside[row, block, slot]) == (place < length)
                if place < length:
                    assert int(packed.tokens[row, block, slot]) == int(text.tokens[place])
                if 0 < place < length:
                    assert torch.equal(packed.target_hidden[row, block, slot], text.hidden[place - 1])
    assert not packed.inside[1, 3].any()


# --- The attention ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("way", "drafter"),
    [(by_blocks, DRAFTER), (by_blocks, WINDOWED), (by_one_kernel, DRAFTER), (by_one_kernel, WITHOUT_SINKS)],
    ids=["blocks", "blocks, windows and sinks", "one kernel", "one kernel, windows"],
)
def test_packed_blocks_equal_loops_over_each(way: Way, drafter: Drafter) -> None:
    """Two sequences of unequal length: a block by itself, behind the tokens strictly before its anchor."""
    packed, body = packed_pair(), drafter.config.body
    embedded = EMBEDDING[packed.tokens]
    hidden = drafter(embedded.flatten(1, 2), packed.positions.flatten(1), way(drafter, packed), BLOCK)
    hidden = hidden.view(embedded.shape).double()
    weights = {
        name.replace(".sinks", ".attention_sink_bias"): x.double().numpy() for name, x in drafter.state_dict().items()
    }
    for row, anchors in enumerate(ANCHORS):
        features, blocks = list(packed.features[row].double().numpy()), embedded[row].double().numpy()
        for block, anchor in enumerate(anchors.tolist()):
            places, before = list(range(anchor, anchor + BLOCK)), list(range(anchor))
            loops = draft(weights, body, features[:anchor], before, list(blocks[block]), places, views=body.views)
            torch.testing.assert_close(hidden[row, block], torch.from_numpy(np.array(loops)), rtol=0, atol=1e-4)


def test_a_sequence_does_not_feel_what_it_is_packed_with() -> None:
    """Values, and what a loss of it alone teaches the drafter."""
    drafter = tiny_drafter(TARGET.config, block_size=BLOCK).requires_grad_(True)
    texts, anchors = [sequence(length) for length in (7, *LENGTHS)], [torch.tensor([1]), *ANCHORS]
    wrap_ddp = hidden_of(pack_blocks(texts, anchors, BLOCK), 2, drafter)
    for row, (text, starts) in enumerate(zip(texts, anchors, strict=True)):
        alone = hidden_of(pack_blocks([text], [starts], BLOCK), 2, drafter)[0]
        found = wrap_ddp[row, : len(starts)]
        # Sums over padded keys are grouped otherwise: a few eps.
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
        gradients = [
            torch.autograd.grad(out.square().sum(), list(drafter.parameters()), retain_graph=True)
            for out in (found, alone)
        ]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_gradients_reach_the_fusion_through_the_context() -> None:
    drafter = tiny_drafter(TARGET.config, block_size=BLOCK).requires_grad_(True)

    def loss(anchor: int) -> Tensor:
        return hidden_of(pack_blocks([sequence()], [torch.tensor([anchor])], BLOCK), drafter=drafter).square().sum()

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


# --- Training computes what serving computes -------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1, 2], ids=["first", "second", "windowed and shifted"])
@pytest.mark.parametrize("anchor", [0, 1, 4, 7, LENGTH - 2])
def test_training_forward_equals_the_serving_executor(which: int, anchor: int) -> None:
    """One sequence, every number of visible tokens: `block_hidden` against prefill and draft through the pages."""
    second = tiny_drafter(TARGET.config, block_size=BLOCK, role="variable_prefix", seed=2)
    first = WINDOWED if which == 2 else DRAFTER
    drafter, which = (first, second)[which % 2], which % 2
    text = sequence()
    visible = torch.arange(1, BLOCK)
    packed = pack_blocks([text], [torch.full_like(visible, anchor)], BLOCK)
    hidden = block_hidden(drafter, EMBEDDING, packed, visible[None])[0]
    trained = TARGET.logits(hidden[:, 1:])  # [A, G-1, V]

    runner = runner_of(TARGET, first, second)
    runner.allocate(PoolSizes(6, 4))
    page_table, nothing = torch.tensor([[5, 2, 4, 1]]), torch.tensor([0])
    if anchor:
        runner.prefill(text.tokens[:anchor], [anchor], Where(page_table, nothing))
    sampling = Sampling.of([SamplingParams()], TARGET.config.vocab_size, "cpu")
    batch = Batch(
        text.tokens[anchor : anchor + 1], Where(page_table, torch.tensor([anchor])), torch.tensor([True]), sampling
    )
    branches = torch.where(torch.arange(BLOCK) < visible[:, None], packed.tokens[0], drafter.config.mask_token_id)
    runner.context.inject((DrafterRole(which),))
    served = runner.drafts._pass(DrafterRole(which), batch, branches[None])[0][0][:, : BLOCK - 1]
    torch.testing.assert_close(trained, served, rtol=0, atol=1e-4)
    if which == 0:
        assert trained[0].argmax(-1).tolist() == runner.drafts.first(batch, 1).top1[0, : BLOCK - 1].tolist()


def test_processes_share_every_step() -> None:
    alone = SeededOrder(0, 10, 6, Dist())
    parts = [SeededOrder(0, 10, 6, Dist(rank, 3)) for rank in range(3)]
    for step in range(5):
        shares = [list(part.numbers(step)) for part in parts]
        assert [len(share) for share in shares] == [2, 2, 2]
        assert sorted(number for share in shares for number in share) == list(alone.numbers(step))
        assert all(part.index(n) == alone.index(n) for part, share in zip(parts, shares, strict=True) for n in share)


def test_epochs_are_different_shuffles() -> None:
    draws = SeededOrder(3, 20, 1, Dist())
    epochs = [[draws.index(epoch * 20 + place) for place in range(20)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert SeededOrder(4, 20, 1, Dist()).index(0) != draws.index(0) or SeededOrder(4, 20, 1, Dist()).index(
        1
    ) != draws.index(1)


def test_every_purpose_place_and_seed_has_a_stream_of_its_own() -> None:
    """Also far apart: PyTorch looks at the lowest 32 bits of a seed alone."""
    streams = {
        tuple(torch.rand(4, generator=SeededOrder(seed, 5, 1, Dist()).generator(purpose, number)).tolist())
        for seed in (0, 1)
        for purpose in ("anchors", "prefixes", "candidates", "epoch")
        for number in (0, 1, 1 << 32, 1 << 40)
    }
    assert len(streams) == 32
    assert torch.equal(
        torch.rand(4, generator=SeededOrder(0, 5, 1, Dist()).generator("anchors", 7)),
        torch.rand(4, generator=SeededOrder(0, 9, 2, Dist()).generator("anchors", 7)),
    )


@pytest.mark.parametrize("base", [0.9, 0.5])
def test_prefixes_follow_their_distribution(base: float) -> None:
    count, size = 20_000, 8
    drawn = draw_prefixes(count, size, base, torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == set(range(1, size))
    weights = [base**n for n in range(1, size)]
    statistic = sum(
        (int((drawn == n).sum()) - count * w / sum(weights)) ** 2 / (count * w / sum(weights))
        for n, w in enumerate(weights, 1)
    )
    assert draw_prefixes(9, 2, base, torch.Generator()).tolist() == [1] * 9, "the smallest block shows its anchor alone"
    assert statistic < 27.9  # chi-square with 6 degrees of freedom exceeds it once in 10,000


def test_first_errors() -> None:
    tokens = torch.tensor([[5, 6, 7, 8]] * 5)
    drafted = torch.tensor([[5, 6, 7, 8], [9, 6, 7, 8], [5, 0, 7, 8], [5, 6, 7, 0], [5, 6, 0, 0]])
    assert first_errors(drafted, tokens).tolist() == [4, 4, 1, 3, 2]  # slot 0 is the anchor, whatever is drafted there
