"""The PyTorch executor's verbs on tiny models: what they compute, what they commit, what they leave alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafter import Drafter
from d2sd.runtime.accept import Accepted
from d2sd.runtime.boundaries import Draft
from d2sd.runtime.executor import Batch, TorchExecutor
from d2sd.runtime.request import SamplingParams
from d2sd.runtime.sampling import Sampling
from d2sd.runtime.tree import merge
from tests.runtime.helpers import BLOCK, check_pages, copies, honest, models, poison
from tests.tiny import full_logits, full_pass

PAGE = 4
TEXTS = [[5, 9, 1, 33, 20, 7, 41, 8, 2], [60, 3], [11, 12, 13, 14, 15, 16]]  # the last token is the anchor
TABLE = torch.tensor([[9, 2, 7, 4], [5, 1, 0, 0], [3, 8, 6, 0]])


def prefilled(texts: list[list[int]], table: Tensor) -> tuple[TorchExecutor, Batch]:
    """Each text in one chunk, padded to 8 tokens; all slots hold NaN before, and page 0 afterwards too."""
    executor = honest()
    executor.allocate(10, PAGE)
    poison(executor, slice(None))
    for row, text in enumerate(texts):
        chunk = torch.zeros(1, 8, dtype=torch.long)
        chunk[0, : len(text) - 1] = torch.tensor(text[:-1])
        executor.prefill(chunk, torch.tensor([len(text) - 1]), table[row : row + 1], torch.tensor([0]))
    poison(executor, 0)
    batch = Batch(
        anchor=torch.tensor([t[-1] for t in texts]),
        page_table=table,
        context_len=torch.tensor([len(t) - 1 for t in texts]),
        active=torch.ones(len(texts), dtype=torch.bool),
        sampling=Sampling.of([SamplingParams()] * len(texts), executor.vocab_size, "cpu"),
    )
    return executor, batch


@pytest.fixture
def ready() -> tuple[TorchExecutor, Batch]:
    return prefilled(TEXTS, TABLE)


def fresh_draft(drafter: Drafter, text: list[int], blocks: list[list[int]]) -> Tensor:
    """Logits [K, G-1, V] of blocks behind the text's context, everything computed from nothing, one block at a time."""
    target: Decoder = models()[0]
    context = len(text) - 1
    taps = drafter.config.target_layer_ids
    out = full_pass(target, torch.tensor([text[:-1]]), taps=taps) if context else None
    positions = torch.arange(context + BLOCK)[None]
    body, logits = drafter.config.body, []
    for block in blocks:

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if out is not None:
                keys, values = drafter.context_keys_values(out.features, positions[:, :context])
                k, v = torch.cat([keys[layer], k], 1), torch.cat([values[layer], v], 1)
            k, v = (x.repeat_interleave(body.num_heads // body.num_kv_heads, 2).transpose(1, 2) for x in (k, v))
            weights = (q.transpose(1, 2) @ k.transpose(2, 3) * body.head_dim**-0.5).softmax(-1)
            heads: Tensor = (weights @ v).transpose(1, 2)
            return heads

        hidden = drafter(target.embed_tokens(torch.tensor([block])), positions[:, context:], attend)
        logits.append(target.logits(hidden[0, 1:]))
    return torch.stack(logits)


def test_first_draft_equals_drafting_from_nothing(ready: tuple[TorchExecutor, Batch]) -> None:
    executor, batch = ready
    draft = executor.draft_first(batch)
    _, first, _ = models()
    for row, text in enumerate(TEXTS):
        logits = fresh_draft(first, text, [[text[-1], *[first.config.mask_token_id] * (BLOCK - 1)]])[0]
        assert draft.tokens[row].tolist() == [text[-1], *logits.argmax(-1).tolist()]
        assert float(draft.confidence[row, 0]) == 1.0
        torch.testing.assert_close(draft.confidence[row, 1:], logits.softmax(-1).amax(-1), atol=1e-5, rtol=1e-4)


BOUNDARIES = torch.tensor([[0, 2, 3], [3, 1, 0], [1, 2, 0]])


def test_second_draft_equals_drafting_each_branch_from_nothing(ready: tuple[TorchExecutor, Batch]) -> None:
    """So branches do not see each other, and nothing but the rejected token is kept from them."""
    executor, batch = ready
    first = executor.draft_first(batch)
    branches = executor.draft_second(batch, first, BOUNDARIES)
    _, _, second = models()
    for row, text in enumerate(TEXTS):
        for branch, boundary in enumerate(BOUNDARIES[row].tolist()):
            kept = first.tokens[row, : boundary + 1].tolist()
            logits = fresh_draft(second, text, [kept + [second.config.mask_token_id] * (BLOCK - len(kept))])[0]
            logits[boundary, first.tokens[row, boundary + 1]] = -torch.inf
            assert branches.tokens[row, branch].tolist() == kept + logits.argmax(-1).tolist()[boundary:]
            confidence = torch.cat([first.confidence[row, : boundary + 1], logits.softmax(-1).amax(-1)[boundary:]])
            torch.testing.assert_close(branches.confidence[row, branch], confidence, atol=1e-5, rtol=1e-4)


def test_second_draft_never_repeats_the_rejected_token(ready: tuple[TorchExecutor, Batch]) -> None:
    """Even where it is what the second drafter likes best."""
    executor, batch = ready
    first = executor.draft_first(batch)
    liked = 0
    for turn in range(4):
        boundaries = (BOUNDARIES + turn) % (BLOCK - 1)
        wish = executor.draft_second(batch, first, boundaries).tokens.gather(2, boundaries[..., None] + 1)
        tokens = first.tokens.clone()
        for branch in range(boundaries.shape[1]):
            # Pretend that the first drafter had proposed just what this branch wants.
            tokens = first.tokens.scatter(1, boundaries[:, branch : branch + 1] + 1, wish[:, branch])
            asked = Draft(tokens, first.confidence)
            again = executor.draft_second(batch, asked, boundaries[:, branch : branch + 1])
            got = again.tokens[:, 0].gather(1, boundaries[:, branch : branch + 1] + 1)
            assert (got != wish[:, branch]).all()
            liked += len(got)
    assert liked == 36


def tree_of(batch: Batch) -> Tensor:
    dice = torch.Generator().manual_seed(1)
    candidates = torch.randint(0, 3, (len(batch.anchor), 4, BLOCK), generator=dice)
    candidates[:, :, 0] = batch.anchor[:, None]
    return candidates


def test_verification_says_what_each_path_alone_would(ready: tuple[TorchExecutor, Batch]) -> None:
    executor, batch = ready
    tree = merge(tree_of(batch), 12)
    verified = executor.verify(batch, tree)
    assert verified.logits.shape == (3, 12, 64)
    for row, text in enumerate(TEXTS):
        for node in range(int(tree.valid[row].sum())):
            path = tree.tokens[row][tree.visible[row, node]].tolist()  # ancestors stand before their children
            alone = full_logits(models()[0], torch.tensor([text[:-1] + path]))[0, -1]
            torch.testing.assert_close(verified.logits[row, node], alone, atol=1e-4, rtol=1e-4)
    assert verified.logits.isfinite().all()  # padding rows as well: they see themselves


def test_prefill_commits_the_context(ready: tuple[TorchExecutor, Batch]) -> None:
    executor, _ = ready
    for row, text in enumerate(TEXTS):
        check_pages(executor, TABLE[row], text[:-1])
    for pool in (executor._target_pool, *executor._pools):  # and nothing else: what was not written is NaN
        assert int(pool.k[0, :, :, 0, 0].isfinite().sum()) == sum(len(text) - 1 for text in TEXTS)


def test_commit_appends_the_path_and_nothing_else(ready: tuple[TorchExecutor, Batch]) -> None:
    executor, batch = ready
    tree = merge(tree_of(batch), 12)
    verified = executor.verify(batch, tree)
    before = [(p.k.clone(), p.v.clone()) for p in (executor._target_pool, *executor._pools)]
    deepest = tree.depth.argmax(1)
    paths = [tree.visible[b, n].nonzero().flatten().tolist() for b, n in enumerate(deepest.tolist())]
    paths = [paths[0], paths[1][:2], paths[2]]
    path = torch.tensor([p + [0] * (BLOCK - len(p)) for p in paths])
    count = torch.tensor([len(p) for p in paths])
    batch.active[2] = False  # a padding row: nothing of it may be kept
    executor.commit(batch, verified, Accepted(path, count, path, count))
    for row in (0, 1):
        tokens = TEXTS[row][:-1] + [int(tree.tokens[row, n]) for n in paths[row]]
        check_pages(executor, TABLE[row], tokens)
    written: set[tuple[int, int]] = {(0, slot) for slot in range(PAGE)}
    for row in (0, 1):
        start = len(TEXTS[row]) - 1
        written |= {(int(TABLE[row, p // PAGE]), p % PAGE) for p in range(start, start + len(paths[row]))}
    for pool, (k, v) in zip((executor._target_pool, *executor._pools), before, strict=True):
        same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
        for page in range(10):
            for slot in range(PAGE):
                if (page, slot) not in written:
                    same(pool.k[:, page, slot], k[:, page, slot])
                    same(pool.v[:, page, slot], v[:, page, slot])


@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_chunked_prefill_commits_the_same(chunk: int) -> None:
    executor = honest()
    executor.allocate(10, PAGE)
    poison(executor, slice(None))
    text = TEXTS[0]
    for start in range(0, len(text), chunk):
        piece = text[start : start + chunk]
        tokens = torch.tensor([piece + [63] * (chunk - len(piece))])
        executor.prefill(tokens, torch.tensor([len(piece)]), TABLE[:1], torch.tensor([start]))
    check_pages(executor, TABLE[0], text)


def test_requests_of_a_batch_do_not_touch_each_other() -> None:
    """In another order and on other pages, all that is said about a request stays."""
    order = [2, 0, 1]
    executor, batch = prefilled(TEXTS, TABLE)
    moved, shuffled = prefilled([TEXTS[i] for i in order], torch.tensor([[1, 2, 0, 0], [8, 7, 3, 6], [4, 0, 0, 0]]))
    first, first_moved = executor.draft_first(batch), moved.draft_first(shuffled)
    assert torch.equal(first.tokens[order], first_moved.tokens)
    second = executor.draft_second(batch, first, BOUNDARIES)
    second_moved = moved.draft_second(shuffled, first_moved, BOUNDARIES[order])
    assert torch.equal(second.tokens[order], second_moved.tokens)
    tree = merge(torch.cat([first.tokens[:, None], second.tokens], 1), 14)
    tree_moved = merge(torch.cat([first_moved.tokens[:, None], second_moved.tokens], 1), 14)
    torch.testing.assert_close(
        executor.verify(batch, tree).logits[order], moved.verify(shuffled, tree_moved).logits, atol=1e-5, rtol=1e-5
    )


def test_drafters_go_in_order() -> None:
    target, _, second = copies()
    with pytest.raises(AssertionError):
        TorchExecutor(target, None, second)
    assert TorchExecutor(target).block_size == 1
