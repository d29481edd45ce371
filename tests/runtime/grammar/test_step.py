"""One step's drafts, trees and masks: constrained rows follow their grammar, the other rows keep every bit."""

from __future__ import annotations

import math

import torch

from d2sd.plugins.trees import Branches, Draft, from_candidates, from_chain
from d2sd.runtime.grammar.grammar import PathWalker, has
from d2sd.runtime.grammar.step import StepGrammar
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.accept import sample_target
from d2sd.token_codes import NONE_LEFT
from tests.runtime.drafts import nodes_of
from tests.runtime.grammar.tokens import END, guidance, ids, vocab_size

A, B, C, D = (ids(letter)[0] for letter in "abcd")


def step(pattern: str, row: int = 1) -> StepGrammar:
    return StepGrammar({row: PathWalker(guidance().regex(pattern, "regex").matcher())})


def draft(*slots: list[tuple[int, float]]) -> Draft:
    """The same slots for two requests."""
    pairs = torch.tensor([slots, slots], dtype=torch.float64)
    return Draft(pairs[..., 0].long(), pairs[..., 1].float())


def test_a_draft_is_led_along_the_grammar() -> None:
    """b, of a, b or d; then c alone, which was not drafted; then a or d, of which a was; then the end, then nothing."""
    slot = [(C, -0.5), (B, -1.0), (D, -2.0), (A, -3.0)]
    led = step("[abd]c[ad]").guide(draft(slot, slot[:2] + slot[:2], slot, slot, slot), 2)
    assert led.tokens[1].tolist() == [[B, D], [C, 0], [D, A], [END, 0], [0, 0]]
    total = math.log(math.exp(-1) + math.exp(-2) + math.exp(-3))
    torch.testing.assert_close(led.logprob[1, 0], torch.tensor([-1 - total, -2 - total]))
    assert led.logprob[1, 1].tolist() == led.logprob[1, 3].tolist() == [0.0, -math.inf]
    assert led.logprob[1, 4].tolist() == [-math.inf] * 2
    assert led.tokens[0].tolist() == [[C, B]] * 5
    assert led.logprob[0].tolist() == [[-0.5, -1.0]] * 5


def test_nothing_follows_a_slot_without_a_candidate() -> None:
    led = step("[ab][cd]").guide(draft([(C, -0.1), (D, -1.0)], [(C, -0.1), (D, -1.0)]), 2)
    assert led.logprob[1].tolist() == [[-math.inf] * 2] * 2


def test_a_branch_is_led_from_its_prefix() -> None:
    """The first keeps a, the second keeps c, which no answer begins with."""
    slot = [(C, -0.5), (B, -1.0)]
    second = draft(slot, slot)
    second = Draft(second.tokens[:, None].repeat(1, 2, 1, 1), second.logprob[:, None].repeat(1, 2, 1, 1))
    branches = Branches(torch.tensor([[[A, 7], [C, 7]]] * 2), torch.tensor([[1, 1]] * 2), torch.full((2, 2), -1))
    led = step("a[bd]").guide(second, 1, branches)
    assert led.tokens[1, 0, 1].tolist() == [B]
    assert led.logprob[1, 0, 1].tolist() == [0.0]
    assert led.logprob[1, 1, 1].tolist() == [-math.inf]
    assert led.tokens[0].tolist() == [[[C], [C]]] * 2


def test_the_forbidden_and_the_unproposed_make_room() -> None:
    """The first candidate leaves the grammar after a, the second proposes nothing after b; the third takes their place.

    The other request has the same tree without a change.
    """
    candidates = torch.tensor([[[9, A, D, B], [9, B, C, D], [9, A, C, D]]] * 2)
    score = torch.zeros(2, 3, 4)
    score[:, 1, 2:] = -math.inf
    usual, larger = (from_candidates(candidates, score, nodes) for nodes in (5, 10))
    tree, paths = step("[ab]c[ad]").prune(usual, larger)
    assert paths == {1: {(): 0, (A,): 1, (B,): 2, (A, C): 3, (A, C, D): 4}}
    nodes = nodes_of(tree, 1)
    assert [node.path[1:] for node in nodes] == [(), (A,), (B,), (A, C), (A, C, D)]
    assert [node.branch_id for node in nodes] == [0, 0, 1, 2, 2]
    assert nodes_of(tree, 0) == nodes_of(usual, 0)


def test_nothing_follows_the_end() -> None:
    chain = from_chain(torch.tensor([[9, A, END, A]] * 2), torch.zeros(2, 4))
    tree, paths = step("a").prune(chain, chain)
    assert list(paths[1]) == [(), (A,), (A, END)]
    assert tree.valid.sum(1).tolist() == [4, 3]


def test_masks_of_a_tree() -> None:
    """a b d: the grammar is left after b, so d and its child are not in the tree."""
    tree = from_chain(torch.tensor([[9, A, B, D, A]] * 2), torch.zeros(2, 5))
    grammar = step("a[bc]c")
    _, paths = grammar.prune(tree, tree)
    mask = grammar.mask(paths, 2, 5, vocab_size())
    assert mask.shape == (2, 5, -(-vocab_size() // 32))
    assert (mask[0] == -1).all()
    assert (mask[1, 3:] == -1).all()
    bits = [mask[1, node].numpy().tobytes() for node in range(3)]
    assert [[t for t in range(vocab_size()) if has(row, t)] for row in bits] == [[A], sorted([B, C]), [C]]


def test_a_mask_of_a_smaller_or_larger_vocabulary() -> None:
    tree = from_chain(torch.tensor([[9, A]] * 2), torch.zeros(2, 2))
    for size in (A + 1, vocab_size() + 200):
        grammar = step("[ab]*")
        mask = grammar.mask(grammar.prune(tree, tree)[1], 2, 2, size)
        assert mask.shape[2] == -(-size // 32)
        row = mask[1, 1].numpy().tobytes()
        assert has(row, A)
        assert not any(has(row, token) for token in range(vocab_size(), size))


def test_where_nothing_is_left_the_target_chooses_no_token() -> None:
    """The grammar allows token 0 alone, which another parameter forbids: the host must notice."""
    logits = torch.zeros(2, 1, 40)
    logits[:, :, 0] = -math.inf
    mask = torch.tensor([[[1, 0]], [[-1, -1]]], dtype=torch.int32)
    tree = from_chain(torch.tensor([[9], [9]]), torch.zeros(2, 1))
    sampling = Sampling.of([SamplingParams(), SamplingParams()], 40, "cpu")
    accepted = sample_target(tree, logits, torch.tensor([3, 3]), sampling, 1, mask)
    assert accepted.tokens[:, 0].tolist() == [NONE_LEFT, 1]  # 1 is the best of the other row


def test_scores_behind_parents_are_kept_where_nothing_is_led() -> None:
    """A guided token has one probability behind every parent; the other request keeps its table."""
    slot = [(C, -0.5), (B, -1.0), (D, -2.0)]
    plain = draft(slot, slot)
    table = -torch.arange(1.0, 1 + 2 * 2 * 4 * 3).view(2, 2, 4, 3)
    led = step("[bd]c").guide(Draft(plain.tokens, plain.logprob, table), 2)
    assert led.behind is not None
    assert led.behind.shape == (2, 2, 3, 2)
    assert torch.equal(led.behind[0], table[0, :, :3, :2])
    for parent in range(3):
        assert torch.equal(led.behind[1, :, parent], led.logprob[1])
