"""The PyTorch executor's verbs on tiny models: what they compute, what they commit, what they leave alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from d2sd.errors import CheckpointError
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.kv_pool import PoolSizes
from d2sd.modeling.where import Where
from d2sd.plugins.trees import Accepted, Branches, Draft, Source, Tree, best_first_tree, from_candidates
from d2sd.policies import DrafterRole
from d2sd.runtime.batch import Batch
from d2sd.runtime.drafting import context as module
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.accept import sample_target
from tests.modeling.test_flex import reference as flex_reference
from tests.runtime.helpers import BLOCK, check_pages, copies, honest, models, poison, sync_drafters
from tests.tiny import runner_of, tiny_drafter

PAGE = 4
FIRST, SECOND, *_ = DrafterRole
TEXTS = [[5, 9, 1, 33, 20, 7, 41, 8, 2], [60, 3], [11, 12, 13, 14, 15, 16]]  # the last token is the anchor
TABLE = torch.tensor([[9, 2, 7, 4], [5, 1, 0, 0], [3, 8, 6, 0]])


def prefill(runner: ModelRunner, texts: list[list[int]] = TEXTS, table: Tensor = TABLE) -> None:
    """Each text in one chunk, all but its anchor."""
    for row, text in enumerate(texts):
        runner.prefill(torch.tensor(text[:-1]), [len(text) - 1], Where(table[row : row + 1], torch.tensor([0])))


def batch_of(runner: ModelRunner, params: Sequence[SamplingParams], table: Tensor = TABLE) -> Batch:
    """A step of as many texts behind what is prefilled of them."""
    texts = TEXTS[: len(params)]
    context = torch.tensor([len(text) - 1 for text in texts])
    active, sampling = torch.ones(len(texts), dtype=torch.bool), Sampling.of(params, runner.vocab_size, "cpu")
    return Batch(torch.tensor([text[-1] for text in texts]), Where(table, context), active, sampling)


def prefilled(texts: list[list[int]], table: Tensor, *, paid: bool = True, case: str = "") -> tuple[ModelRunner, Batch]:
    """Each text in one chunk; all slots hold NaN before, and page 0 afterwards too."""
    runner = honest(case=case)
    runner.allocate(PoolSizes(10, PAGE))
    poison(runner, slice(None))
    prefill(runner, texts, table)
    if paid:
        sync_drafters(runner)
    poison(runner, 0)
    return runner, batch_of(runner, [SamplingParams()] * len(texts), table)


@pytest.fixture
def ready() -> tuple[ModelRunner, Batch]:
    return prefilled(TEXTS, TABLE)


def fresh_draft(drafter: Drafter, text: list[int], blocks: list[list[int]]) -> Tensor:
    """Logits [K, S, V] of the slots of blocks behind the text's context, everything computed from nothing, one block at
    a time.
    """
    target: Decoder = models()[0]
    context = len(text) - 1
    aux_layer_ids = drafter.config.target_layer_ids
    out = target.full_pass(torch.tensor([text[:-1]]), aux_layer_ids=aux_layer_ids) if context else None
    positions = torch.arange(context + len(blocks[0]))[None]
    body, logits = drafter.config.body, []
    for block in blocks:

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
            if out is not None:
                keys, values = drafter.context_keys_values(out.features, positions[:, :context])
                k, v = torch.cat([keys[layer], k], 1), torch.cat([values[layer], v], 1)
            k, v = (x.repeat_interleave(body.num_heads // body.num_kv_heads, 2).transpose(1, 2) for x in (k, v))
            scores = q.transpose(1, 2) @ k.transpose(2, 3) * body.head_dim**-0.5
            window, causal = body.views[layer]
            distance = torch.arange(context, context + q.shape[1])[:, None] - torch.arange(k.shape[2])
            scores = scores.masked_fill((distance >= (window or 10**6)) | (causal & (distance < 0)), -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None, None].expand(1, -1, q.shape[1], 1)], -1)
            weights = scores.softmax(-1)[..., : k.shape[2]]
            heads: Tensor = (weights @ v).transpose(1, 2)
            return heads

        hidden = drafter(drafter.embedded(torch.tensor([block]), target.embed_tokens), positions[:, context:], attend)
        logits.append(target.logits(hidden[0, 0 if drafter.config.sample_from_anchor else 1 :]))
    return torch.stack(logits)


WIDTH = 3


def check_slot(draft: Draft, place: tuple[int, ...], logits: Tensor) -> None:
    """The candidates of one slot are the likeliest tokens of these logits."""
    logprob, tokens = logits.log_softmax(-1).topk(WIDTH)
    assert draft.tokens[place].tolist() == tokens.tolist()
    torch.testing.assert_close(draft.logprob[place], logprob, atol=1e-4, rtol=1e-4)


def test_first_draft_equals_drafting_from_nothing(ready: tuple[ModelRunner, Batch]) -> None:
    runner, batch = ready
    draft = runner.drafts.first(batch, WIDTH)
    assert draft.tokens.shape == (3, BLOCK - 1, WIDTH)
    first = models()[1]
    for row, text in enumerate(TEXTS):
        logits = fresh_draft(first, text, [[text[-1], *[first.config.mask_token_id] * (BLOCK - 1)]])[0]
        for slot in range(BLOCK - 1):
            check_slot(draft, (row, slot), logits[slot])


def test_flex_draft_equals_drafting_from_nothing() -> None:
    runner, batch = prefilled(TEXTS, TABLE, case="flex")
    draft = runner.drafts.first(batch, WIDTH)
    assert draft.tokens.shape == (3, BLOCK - 1, WIDTH)
    target, _, _, flex = models()
    for row, text in enumerate(TEXTS):
        _, logits = flex_reference(target, flex, text)
        for slot in range(BLOCK - 1):
            check_slot(draft, (row, slot), torch.from_numpy(logits[slot]).float())


def test_heads_get_rows_in_one_piece(ready: tuple[ModelRunner, Batch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a view PyTorch multiplies batch by batch: the same numbers, sixty times slower in bf16 on a CPU."""
    runner, batch = ready
    whole: list[bool] = []

    def watched(hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        whole.append(hidden.is_contiguous())
        return head(hidden)

    tables = {role: own._replace(head=partial(watched, head=own.head)) for role, own in runner.drafts.tables.items()}
    monkeypatch.setattr(runner.drafts, "tables", tables)
    first = runner.drafts.first(batch, WIDTH)
    runner.drafts.second(batch, branches_behind(first, torch.tensor([[1, 2], [0, 3], [2, 1]])), SECOND, WIDTH)
    assert whole == [True, True]


def branches_behind(first: Draft, length: Tensor) -> Branches:
    """Restarts like D²SD: behind drafts of the best chain, the next one rejected."""
    slots = first.top1.shape[1]
    rejected = first.top1.gather(1, length.clamp(max=slots - 1)).where(length < slots, -1)
    return Branches(first.top1[:, None].expand(-1, length.shape[1], -1), length, rejected)


LENGTHS = torch.tensor([[0, 2, 3], [3, 1, 4], [1, 2, 0]])  # 4: nothing left to draft


@pytest.mark.parametrize("role", [FIRST, SECOND])
def test_second_draft_equals_drafting_each_branch_from_nothing(
    ready: tuple[ModelRunner, Batch], role: DrafterRole
) -> None:
    """By either drafter. So branches do not see each other, and nothing but the rejected token is kept from them."""
    runner, batch = ready
    first = runner.drafts.first(batch, 1)
    branches = branches_behind(first, LENGTHS)
    second = runner.drafts.second(batch, branches, role, WIDTH)
    assert second.tokens.shape == (3, 3, BLOCK - 1, WIDTH)
    _, *drafters, _ = models()
    model = drafters[role]
    for row, text in enumerate(TEXTS):
        for branch, length in enumerate(LENGTHS[row].tolist()):
            kept = [text[-1], *first.top1[row, :length].tolist()]
            logits = fresh_draft(model, text, [kept + [model.config.mask_token_id] * (BLOCK - len(kept))])[0]
            if length < BLOCK - 1:
                logits[length, first.top1[row, length]] = -torch.inf
            for slot in range(length, BLOCK - 1):
                check_slot(second, (row, branch, slot), logits[slot])


def test_branches_need_not_follow_the_best_chain(ready: tuple[ModelRunner, Batch]) -> None:
    """Any tokens may be kept, and nothing may be rejected."""
    runner, batch = ready
    kept = torch.tensor([[[11, 22, 33, 44]]]).expand(3, -1, -1)
    branches = Branches(kept, torch.full((3, 1), 2), torch.full((3, 1), -1))
    second = runner.drafts.second(batch, branches, SECOND, WIDTH)
    model = models()[2]
    for row, text in enumerate(TEXTS):
        logits = fresh_draft(model, text, [[text[-1], 11, 22] + [model.config.mask_token_id] * 2])[0]
        for slot in (2, 3):
            check_slot(second, (row, 0, slot), logits[slot])


def test_second_draft_never_repeats_the_rejected_token(ready: tuple[ModelRunner, Batch]) -> None:
    """Even where it is what the second drafter likes best, and all other tokens are asked for."""
    runner, batch = ready
    first = runner.drafts.first(batch, 1)
    for length in range(BLOCK - 1):
        branches = branches_behind(first, torch.full((3, 1), length))
        free = Branches(branches.tokens, branches.prefix_len, torch.full_like(branches.rejected, -1))
        wish = runner.drafts.second(batch, free, SECOND, 1).top1[:, 0, length]
        asked = Branches(branches.tokens, branches.prefix_len, wish[:, None])
        got = runner.drafts.second(batch, asked, SECOND, runner.vocab_size)
        proposed = got.tokens[:, 0, length].where(got.logprob[:, 0, length].isfinite(), -1)
        assert ((proposed >= 0).sum(-1) == runner.vocab_size - 1).all()
        assert (proposed != wish[:, None]).all()


def tree_of(batch: Batch) -> Tree:
    """Twelve rows, a few of them padding."""
    dice = torch.Generator().manual_seed(1)
    candidates = torch.randint(0, 3, (len(batch.anchor), 4, BLOCK), generator=dice)
    candidates[:, :, 0] = batch.anchor[:, None]
    return from_candidates(candidates, torch.zeros(candidates.shape), 12)


def test_padding_of_trees_is_not_verified(ready: tuple[ModelRunner, Batch]) -> None:
    """Nor multiplied with the head; what is left has the same logits, and the choices are the same."""
    runner, batch = ready
    tree = tree_of(batch)
    cut = tree.cut(torch.tensor((5, 1, 12)))
    assert cut.valid.sum(1).tolist() == [5, 1, int(tree.valid[2].sum())]
    whole, verified = runner.verify(batch, tree), runner.verify(batch, cut)
    assert verified.logits.shape == (int(cut.valid.sum()), 64)
    for row, node in cut.valid.nonzero().tolist():
        assert torch.equal(verified.at(row, node), whole.at(row, node))
    for temperature in (0.0, 1.0):
        sampling = Sampling.pack([SamplingParams(temperature, seed=row) for row in range(3)], 64, "cpu")
        expected, found = (
            sample_target(
                cut, of.logits, batch.where.context_len, sampling, BLOCK, places=of.places, static_shapes=False
            )
            for of in (whole, verified)
        )
        assert torch.equal(found.path, expected.path)
        assert torch.equal(found.packed(), expected.packed())


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_the_first_nodes_are_the_tree_of_that_budget(ready: tuple[ModelRunner, Batch], rows: int) -> None:
    """`auto` cuts some requests' nodes off trees that grow."""
    runner, batch = ready
    sources = [Source(runner.drafts.first(batch, 4))]
    grown, own = (best_first_tree(batch.anchor, sources, size) for size in (12, rows))
    cut = grown.cut(torch.full_like(batch.anchor, rows))
    for name in ("tokens", "parent", "depth", "valid", "score", "branch_id"):
        assert torch.equal(getattr(cut, name)[:, :rows], getattr(own, name)), name
    assert torch.equal(cut.attn_mask[:, :rows, :rows], own.attn_mask)
    assert not cut.valid[:, rows:].any()


def test_drafters_pages_are_paid_before_they_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill owes them their K/V; a drafter that is not run stays in debt until the debt is long."""
    runner, batch = prefilled(TEXTS[:2], TABLE[:2], paid=False)
    settled, _ = prefilled(TEXTS[:2], TABLE[:2])
    with pytest.raises(AssertionError, match="inject"):
        runner.drafts.first(batch, WIDTH)
    runner.context.inject((FIRST,))
    one, other = (e.drafts.first(batch, WIDTH) for e in (runner, settled))
    assert torch.equal(one.tokens, other.tokens)
    torch.testing.assert_close(one.logprob, other.logprob, atol=1e-5, rtol=1e-5)
    assert runner.pools[1].k[:, 5, 0].isfinite().all()
    assert runner.pools[2].k[:, 5, 0].isnan().all()
    branches = branches_behind(one, LENGTHS[:2])
    runner.context.inject((SECOND,))
    second, other_second = (e.drafts.second(batch, branches, SECOND, WIDTH) for e in (runner, settled))
    assert torch.equal(second.tokens, other_second.tokens)
    monkeypatch.setattr(module, "MAX_PENDING_ROWS", 64)
    for _ in range(9):  # 8 rows each
        runner.prefill(torch.zeros(8, dtype=torch.long), [8], Where(TABLE[2:], torch.tensor([0])))
        runner.context.inject(())
    assert runner.pools[2].k[:, 3, 0].isfinite().all()


def test_commit_appends_the_path_and_nothing_else(ready: tuple[ModelRunner, Batch]) -> None:
    runner, batch = ready
    tree = tree_of(batch)
    verified = runner.verify(batch, tree)
    sync_drafters(runner)
    before = [(p.k.clone(), p.v.clone()) for p in runner.pools]
    deepest = tree.depth.argmax(1)
    paths = [tree.attn_mask[b, n].nonzero().flatten().tolist() for b, n in enumerate(deepest.tolist())]
    paths = [paths[0], paths[1][:2], paths[2]]
    path = torch.tensor([p + [0] * (BLOCK - len(p)) for p in paths])
    count = torch.tensor([len(p) for p in paths])
    batch.active[2] = False  # a padding row: nothing of it may be kept
    runner.commit(batch, verified, Accepted(path, count, path, count))
    for row in (0, 1):
        tokens = TEXTS[row][:-1] + [int(tree.tokens[row, n]) for n in paths[row]]
        check_pages(runner, TABLE[row], tokens)
    written: set[tuple[int, int]] = {(0, slot) for slot in range(PAGE)}
    for row in (0, 1):
        start = len(TEXTS[row]) - 1
        written |= {(int(TABLE[row, p // PAGE]), p % PAGE) for p in range(start, start + len(paths[row]))}
    for pool, (k, v) in zip(runner.pools, before, strict=True):
        same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
        for page in range(10):
            for slot in range(PAGE):
                if (page, slot) not in written:
                    same(pool.k[:, page, slot], k[:, page, slot])
                    same(pool.v[:, page, slot], v[:, page, slot])


def test_without_drafters_a_block_has_the_size_asked_for() -> None:
    target, *_ = copies()
    assert runner_of(target).block_size == 1
    assert runner_of(target, block_size=6).block_size == 6


def test_drafters_that_do_not_fit_each_other() -> None:
    target, first, *_ = copies()
    second = tiny_drafter(target.config, role="variable_prefix", block_size=BLOCK, target_layer_ids=(1,))
    with pytest.raises(CheckpointError, match="target_layer_ids") as caught:
        runner_of(target, first, second)
    assert caught.value.found == (1,)
    assert str(caught.value.where).startswith("drafters.second")
