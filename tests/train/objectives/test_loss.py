"""The loss of packed blocks: what a drafter is shown, which slots teach it, and the ids that logits are taken of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.dspine import Injection
from d2sd.modeling.drafters.pair import PairHead
from d2sd.train.data.packing import Packed, pack_blocks
from d2sd.train.dflash import TRAINED as DFLASH
from d2sd.train.dflash import block_hidden
from d2sd.train.objectives.loss import BlockLoss, Candidates, first_rejections
from d2sd.train_recipe import Objective
from tests.modeling.test_heads import PAIRS
from tests.tiny import HEADS, tiny_drafter
from tests.train.helpers import BLOCK, MASK, TAPS, VOCAB, exact_features, greedy_responses, new_drafter, target

# Shape letters: B sequences, A blocks of each, G block size γ, C candidate ids, V vocabulary.

EMBEDDING = target().embed_tokens.weight.detach()
HEAD = target().head.detach()
CE = Objective(slots="decay", decay=4.0, ce=1)
KL = Objective(slots="decay", decay=4.0, kl=1)


def whole_vocabulary() -> Candidates:
    return Candidates.draw(HEAD, torch.ones(VOCAB, dtype=torch.bool), 0, torch.float32, torch.Generator())


def everywhere(answers: int = 2) -> Packed:
    """Blocks at every anchor of that many answers, the last ones cut by the end."""
    data = exact_features(greedy_responses())
    texts = [data[i] for i in range(answers)]
    anchors = [torch.arange(text.prompt_length - 1, len(text.tokens) - 1) for text in texts]
    return pack_blocks(texts, anchors, BLOCK)


def replace_hidden(monkeypatch: pytest.MonkeyPatch, hidden: Callable[..., Tensor]) -> None:
    """Let drafters have these hidden states."""
    kind = replace(DFLASH, hidden=hidden)
    monkeypatch.setattr("d2sd.train.objectives.loss.trained_kind", lambda drafter: kind)


def none_rejected(visible: Tensor) -> Tensor:
    return torch.full_like(visible, -1)


# --- What is shown, and what is learnt from --------------------------------------------------------------------------


def test_real_tokens_where_visible_and_masks_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer itself must not leak."""
    data, drafter = exact_features(greedy_responses()), new_drafter()
    packed = pack_blocks([data[0], data[1]], [torch.tensor([4, 6]), torch.tensor([5, 9])], BLOCK)
    shown: list[Tensor] = []

    def forward(embedded: Tensor, positions: Tensor, attend: object, size: int) -> Tensor:
        assert size == BLOCK
        assert torch.equal(positions, packed.positions.flatten(1))
        shown.append(embedded[..., 0].long())
        return embedded

    monkeypatch.setattr(drafter, "forward", forward)
    named = torch.arange(float(VOCAB))[:, None].expand(-1, 32)
    out = block_hidden(drafter, named, packed, torch.tensor([[1, 3], [2, 4]]))
    one, other = (text.tokens.tolist() for text in (data[0], data[1]))
    expected = [
        [one[4], MASK, MASK, MASK, one[6], one[7], one[8], MASK],
        [other[5], other[6], MASK, MASK, other[9], other[10], other[11], other[12]],
    ]
    assert shown[0].tolist() == expected
    assert out[..., 0].flatten(1).tolist() == expected, "rows come back where they went in"


@pytest.mark.parametrize("least", [1, 2, 3])
def test_learns_from_the_slots_behind_what_it_sees(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss learns from slots inside the sequence; padding and visible tokens teach nothing."""
    data = exact_features(greedy_responses())
    packed = pack_blocks([data[0], data[1]], [torch.arange(4, 20), torch.tensor([18, 19])], BLOCK)
    visible = least + torch.arange(packed.tokens[..., 0].numel()).view(2, -1) % (BLOCK - least)
    hidden = torch.randn(*packed.tokens.shape, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    replace_hidden(monkeypatch, lambda *args: hidden)
    loss = BlockLoss(new_drafter(), EMBEDDING, KL)
    terms = loss(packed, visible, none_rejected(visible), whole_vocabulary())
    (gradient,) = torch.autograd.grad(terms["kl"], hidden)
    taught = gradient.abs().sum(-1) > 0
    assert torch.equal(taught, packed.inside & (torch.arange(BLOCK) >= visible[..., None]))
    assert not packed.inside[0].all(), "blocks cut by the end are among them"
    assert not packed.inside[1, 2:].any(), "and padded ones"


def test_logits_of_visible_slots_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU takes them too; one of them forbids its label."""
    data, drafter = exact_features(greedy_responses()), new_drafter()
    packed = pack_blocks([data[0], data[1]], [torch.arange(4, 20), torch.tensor([17, 19])], BLOCK)
    visible = 1 + torch.arange(packed.tokens[..., 0].numel()).view(2, -1) % (BLOCK - 1)
    rejected = packed.tokens.gather(-1, visible[..., None])[..., 0]
    wanted = Objective(slots="dpace", ce=0.3, kl=0.7, focal=0.5, chain=4)

    def found() -> list[Tensor]:
        loss = BlockLoss(drafter, EMBEDDING, wanted)
        terms = loss(packed, visible, rejected.roll(1, 1), whole_vocabulary())
        total = torch.stack(list(terms.values())).sum()
        return [*terms.values(), *torch.autograd.grad(total, list(drafter.parameters()))]

    used = found()
    monkeypatch.setattr("d2sd.train.objectives.loss.rows_of", lambda packed, used: packed.drafted)
    for one, other in zip(used, found(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_blocks_that_show_all_they_have_cost_nothing() -> None:
    """Two anchors at the end of an answer, three tokens shown: no slot is left, in a whole step."""
    data, drafter = exact_features(greedy_responses()), new_drafter()
    packed = pack_blocks([data[0]], [torch.tensor([18, 19])], BLOCK)
    visible = torch.full((1, 2), 3)
    terms = BlockLoss(drafter, EMBEDDING, CE)(packed, visible, none_rejected(visible), whole_vocabulary())
    assert float(terms["ce"].detach()) == 0
    for gradient in torch.autograd.grad(terms["ce"], list(drafter.parameters())):
        assert not gradient.any(), "every parameter still gets one, as other processes wait for it"


def test_a_drafter_that_says_what_the_target_says_has_nothing_left_to_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slot k of a block is compared with what the target knew before token k: rows are aligned."""
    packed = everywhere()
    visible = torch.ones(packed.tokens.shape[:2], dtype=torch.long)
    wanted = Objective(slots="uniform", kl=1, tv=1, nla=1, focal=1)
    loss = BlockLoss(new_drafter(), EMBEDDING, wanted)
    before = loss(packed, visible, none_rejected(visible), whole_vocabulary())
    assert all(float(term.detach()) > 0.1 for term in before.values())
    replace_hidden(monkeypatch, lambda *args: packed.target_hidden)
    after = loss(packed, visible, none_rejected(visible), whole_vocabulary())
    assert all(abs(float(term)) < 1e-5 for term in after.values())


def test_a_rejected_token_is_left_out_of_its_slot_alone() -> None:
    """By hand: one block, n = 2, a token rejected at slot 2; full vocabulary, weights 1 and e^(-1/4)."""
    data, drafter, anchor, banned = exact_features(greedy_responses()), new_drafter(), 7, 3
    packed = pack_blocks([data[0]], [torch.tensor([anchor])], BLOCK)
    visible = torch.tensor([[2]])
    hidden = block_hidden(drafter, EMBEDDING, packed, visible)[0, 0].detach()
    of_ce = of_kl = weights = 0.0
    for slot, weight in ((2, 1.0), (3, math.exp(-1 / 4))):
        logits = [target().logits(x).double() for x in (hidden[slot], data[0].hidden[anchor + slot - 1])]
        if slot == 2:
            for row in logits:
                row[banned] = float("-inf")
        log_q, log_p = (row.log_softmax(-1) for row in logits)
        of_ce -= weight * float(log_q[data[0].tokens[anchor + slot]])
        allowed = log_q.isfinite()
        of_kl += weight * float((log_p.exp() * (log_p - log_q))[allowed].sum())
        weights += weight
    for wanted, expected in ((CE, of_ce), (KL, of_kl)):
        terms = BlockLoss(drafter, EMBEDDING, wanted)(packed, visible, torch.tensor([[banned]]), whole_vocabulary())
        (found,) = (float(term.detach()) for term in terms.values())
        assert found == pytest.approx(expected / weights, rel=1e-5)


# --- Sampled candidates ----------------------------------------------------------------------------------------------


def always(packed: Packed) -> Tensor:
    marks = torch.zeros(VOCAB, dtype=torch.bool)
    marks[packed.tokens] = True
    return marks


def drawn(seed: int, marks: Tensor, negatives: int = 8) -> Candidates:
    return Candidates.draw(HEAD, marks, negatives, torch.float32, torch.Generator().manual_seed(seed))


def test_labels_are_always_among_the_candidates() -> None:
    packed = everywhere(1)
    marks = always(packed)
    for seed in range(20):
        found = drawn(seed, marks)
        assert len(set(found.ids.tolist())) == len(found.ids) == int(marks.sum()) + 8
        places = found.index[packed.tokens]
        assert torch.equal(found.ids[places], packed.tokens)
        assert not found.head.correction[places].any(), "they stand for themselves"
        assert torch.equal(found.head.weight, HEAD[found.ids])
        outside = torch.ones(VOCAB, dtype=torch.bool)
        outside[found.ids] = False
        assert (found.index[outside] == -1).all()
    assert len({tuple(drawn(seed, marks).ids.tolist()) for seed in range(20)}) == 20, "the others are drawn anew"


def test_sampled_denominators_are_unbiased() -> None:
    """400 draws of 8 among the ids that one answer does not hold; their mean within 3 standard errors of the whole."""
    packed = everywhere(1)
    logits = target().logits(packed.target_hidden[0, 6, 1])
    draws = []
    for seed in range(400):
        found = drawn(seed, always(packed))
        draws.append(float((logits[found.ids] + found.head.correction).exp().sum()))
    spread = torch.tensor(draws)
    whole = float(logits.exp().sum())
    plain = [float(logits[drawn(seed, always(packed)).ids].exp().sum()) for seed in range(20)]
    error = float(spread.std()) / 20
    assert abs(float(spread.mean()) - whole) < 3 * error
    assert whole - sum(plain) / 20 > 10 * error, "which the correction alone achieves"


def test_nothing_is_corrected_where_nothing_was_left_out() -> None:
    marks = always(everywhere(1))
    whole = drawn(0, marks, negatives=VOCAB)
    assert sorted(whole.ids.tolist()) == list(range(VOCAB))
    assert not whole.head.correction.any()
    none = drawn(0, marks, negatives=0)
    assert none.ids.tolist() == marks.nonzero()[:, 0].tolist()
    assert not none.head.correction.any()


@pytest.mark.parametrize(("wanted", "error"), [(CE, 0.02), (KL, 0.05)], ids=["ce", "kl"])
def test_sampled_losses_estimate_the_whole_vocabularys(wanted: Objective, error: float) -> None:
    """The logarithm of an unbiased estimate is a little biased, as is a divergence over a part: hence the bounds."""
    packed = everywhere(1)
    drafter = new_drafter()
    drafter.norm.weight.data *= 0.3  # a drafter that is less sure: that bias is then small
    loss, visible = BlockLoss(drafter, EMBEDDING, wanted), torch.ones(packed.tokens.shape[:2], dtype=torch.long)

    def of(candidates: Candidates) -> float:
        (term,) = loss(packed, visible, none_rejected(visible), candidates).values()
        return float(term.detach())

    exact = of(whole_vocabulary())
    draws = torch.tensor([of(drawn(seed, always(packed), 16)) for seed in range(60)])
    assert float(draws.std()) > 0.01, "a fresh draw each time"
    assert float(draws.mean()) == pytest.approx(exact, rel=error)


# --- Where the first drafter goes wrong ------------------------------------------------------------------------------


def test_rejections_are_the_first_drafters_first_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first drafter drafts the real tokens, but for slot 2 of block 1, slots 1 and 3 of block 2, and the anchor of
    block 3, which is no draft. Block 4 goes wrong behind the sequence's end, where nothing is right or wrong.
    """
    data = exact_features(greedy_responses())
    packed = pack_blocks([data[0]], [torch.tensor([4, 6, 8, 10, 18])], BLOCK)
    said = packed.tokens.clone()
    for block, slot in ((1, 2), (2, 1), (2, 3), (3, 0), (4, 3)):
        said[0, block, slot] = (said[0, block, slot] + 1) % VOCAB

    def hidden(first: Drafter, embedding: Tensor, packed: Packed, visible: Tensor) -> Tensor:
        assert (visible == 1).all(), "its draft starts at the anchor"
        return torch.nn.functional.one_hot(said, VOCAB).float()

    replace_hidden(monkeypatch, hidden)
    correction = torch.zeros(VOCAB)
    correction[-20:] = 9.0  # must not decide what is said
    shuffled = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
    index = torch.empty(VOCAB, dtype=torch.long)
    index[shuffled] = torch.arange(VOCAB)
    head = whole_vocabulary().head._replace(weight=torch.eye(VOCAB)[shuffled], correction=correction)
    errors, names = first_rejections(new_drafter(), EMBEDDING, packed, Candidates(shuffled, index, head))
    assert errors.tolist() == [[BLOCK, 2, 1, BLOCK, BLOCK]]
    assert names[0, 1] == said[0, 1, 2]
    assert names[0, 2] == said[0, 2, 1]


@pytest.mark.parametrize("head", HEADS)
def test_the_first_draft_is_the_walk_of_its_head(head: str) -> None:
    """Slot by slot: the best token behind the right one, of all; until one is wrong."""
    shape: dict[str, Any] = {"layers": 1, "block_size": BLOCK, "target_layer_ids": TAPS, "head": HEADS[head]}
    first = tiny_drafter(target().config, **shape, sample_from_anchor=head not in ("selector", "pair"))
    assert first.head is not None
    louder: torch.Tensor
    if isinstance(first.head, Injection):
        louder = first.get_parameter("injection.writes.0.weight")
    else:
        louder = first.head.successor_projection if isinstance(first.head, PairHead) else first.head.successors
    louder.mul_(4)  # or it would hardly ever be heard
    first.join(target())
    tensors, packed = first.state_dict(), everywhere()
    errors, drafted = first_rejections(first, EMBEDDING, packed, whole_vocabulary())
    visible = torch.ones(packed.tokens.shape[:2], dtype=torch.long)
    hidden = block_hidden(first, EMBEDDING, packed, visible)
    told = plain = 0
    for b, a in itertools.product(*map(range, visible.shape)):
        wrong, token = BLOCK, None
        for slot in range(1, BLOCK):
            right, h = int(packed.tokens[b, a, slot]), hidden[b, a, slot]
            added = PAIRS[head](tensors, h, int(packed.tokens[b, a, slot - 1]))
            alone = target().logits(h[: EMBEDDING.shape[1]])
            logits = alone + torch.tensor(added)
            if packed.inside[b, a, slot] and int(logits.argmax()) != right:
                wrong, token = slot, int(logits.argmax())
                plain += token != int(alone.argmax())
                break
        assert int(errors[b, a]) == wrong
        assert token in (None, int(drafted[b, a]))
        told += token is not None
    assert told > 20
    assert plain > 3, "the head has its say"
