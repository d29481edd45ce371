"""Errors of the kind that would serve wrong text, or none, each seen by the tests' checks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from d2sd.integrations.trtllm import tree_slots, tree_worker
from tests.d2sd.integrations.trtllm.shop import Shop, make_shop, random_requests, registered
from tests.d2sd.integrations.trtllm.standin.batcher import Request, Server, Settings
from tests.tiny import greedy_text

Break = Callable[[pytest.MonkeyPatch, Server], None]


def _stored(change: Callable[[Any, torch.Tensor], None]) -> Break:
    """Change what was just written to the slots."""

    def broken(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
        store = tree_slots.store_tree

        def store_and_change(storage: Any, slots: torch.Tensor, tree: Any) -> torch.Tensor:
            drafts = store(storage, slots, tree)
            change(storage, slots)
            return drafts

        monkeypatch.setattr(tree_worker, "store_tree", store_and_change)

    return broken


def no_compaction(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setattr(server.worker, "_relocate_kv_eagerly", lambda *args: None)


def siblings_visible(storage: Any, slots: torch.Tensor) -> None:
    nodes = storage.packed_mask.shape[1]
    before = torch.ones(nodes, nodes, dtype=torch.bool).tril()
    storage.packed_mask[slots] = tree_slots.pack_bits(before, storage.packed_mask.shape[2])


def offsets_by_node(storage: Any, slots: torch.Tensor) -> None:
    storage.position_offsets[slots] = torch.arange(storage.position_offsets.shape[1]).int()


def wrong_word(storage: Any, slots: torch.Tensor) -> None:
    storage.packed_mask[slots] = storage.packed_mask[slots].flip(-1)


def link_to_an_invalid_node(storage: Any, slots: torch.Tensor) -> None:
    """Behind its last child every node has the padding behind the tree, which sees itself alone."""
    siblings, last = storage.retrieve_next_sibling[slots], storage.retrieve_index.shape[1] - 1
    siblings = torch.where(siblings < 0, last, siblings).int()
    siblings[:, last] = -1
    storage.retrieve_next_sibling[slots] = siblings


def stale_slot(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """The mask of the tree before: as where a slot's row is not written in every step."""
    store, last = tree_slots.store_tree, {}

    def store_late(storage: Any, slots: torch.Tensor, tree: Any) -> torch.Tensor:
        before = storage.packed_mask.clone()
        drafts = store(storage, slots, tree)
        for slot in slots.tolist():
            if slot in last:
                storage.packed_mask[slot] = before[slot]
            last[slot] = True
        return drafts

    monkeypatch.setattr(tree_worker, "store_tree", store_late)


def validity_not_reset(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """Drafting fails with half of a row written, and the slots keep their validity."""
    store, calls = tree_slots.store_tree, []

    def half_written(storage: Any, slots: torch.Tensor, tree: Any) -> torch.Tensor:
        calls.append(slots)
        if len(calls) < 6:
            return store(storage, slots, tree)
        storage.packed_mask[slots] = tree_slots.pack_bits(torch.eye(server.nodes).bool(), storage.packed_mask.shape[2])
        raise RuntimeError

    monkeypatch.setattr(tree_worker, "store_tree", half_written)
    monkeypatch.setattr(tree_worker, "undrafted", lambda *args: None)
    draw = torch.Generator().manual_seed(1)  # some of them are accepted, which few draws leave out
    drafts = torch.randint(0, 7, (64, server.nodes - 1), dtype=torch.int32, generator=draw)
    monkeypatch.setattr(torch, "zeros", _first_zeros(drafts, server.nodes - 1))


def _first_zeros(drafts: torch.Tensor, width: int) -> Any:
    zeros = torch.zeros

    def made(*shape: Any, **kwargs: Any) -> torch.Tensor:
        out = zeros(*shape, **kwargs)
        return drafts[: len(out)] if out.dim() == 2 and out.shape[1] == width and out.dtype == torch.int32 else out

    return made


def wrong_feature_row(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    rows_of = tree_worker.committed_rows

    def shifted(*args: Any) -> Any:
        found = rows_of(*args)
        return found._replace(rows=(found.rows + 1).clamp(max=len(args[1]) - 1))

    monkeypatch.setattr(tree_worker, "committed_rows", shifted)


def rows_of_another_slot(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    rows_of = tree_worker.committed_rows
    monkeypatch.setattr(
        tree_worker, "committed_rows", lambda *args: (f := rows_of(*args))._replace(slots=torch.zeros_like(f.slots))
    )


def layout_of_another_architecture(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """The mask is written for one and read as of another."""
    update = server.metadata.update_spec_dec_param

    def swapped(**arguments: Any) -> None:
        server.metadata.sm = 100
        update(**arguments)
        server.metadata.sm = 90

    monkeypatch.setattr(server.metadata, "update_spec_dec_param", swapped)


class Seen(NamedTuple):
    """Findings of a run."""

    texts: bool  # are the target's
    state: bool  # K/V of what is committed equals a dense pass's, after every step
    steps: bool  # are those of d2sd's own runtime


def served(shop: Shop, broken: Break | None, monkeypatch: pytest.MonkeyPatch) -> Seen:
    server = shop.server(registered(monkeypatch, shop.bundle), Settings(), padding=25)
    requests = random_requests(random.Random(11), 12, shop.decoder.config.vocab_size, longest=30)
    server.requests, state = list(requests), True
    with monkeypatch.context() as patch:
        if broken is not None:
            broken(patch, server)
        while server.requests:
            server.step()
            state = state and all(dense(server, r) for r in server.requests if r.py_seq_slot is not None)
    texts = all(r.answer == greedy_text(shop.decoder, r.prompt, r.new_tokens) for r in requests)
    own = shop.own(requests, server.drafters.policy) if texts else requests
    return Seen(texts, state, all(r.counts == o.counts for r, o in zip(requests, own, strict=True)))


def dense(server: Server, request: Request) -> bool:
    """Whether a request's K/V is that of one pass over its tokens."""
    if not request.cached:
        return True
    out = server.decoder.full_pass(torch.tensor([request.tokens[: request.cached]]))
    pairs = zip(server.cached_keys(request), (out.k, out.v), strict=True)
    return all(torch.allclose(found, expected[:, 0], rtol=1e-3, atol=1e-4) for found, expected in pairs)


#: Each commits what the target did not compute.
WRONG_TEXT: dict[str, Break] = {
    "no compaction": no_compaction,
    "siblings visible": _stored(siblings_visible),
    "offsets by node": _stored(offsets_by_node),
    "stale slot": stale_slot,
    "wrong word of the mask": _stored(wrong_word),
    "link to an invalid node": _stored(link_to_an_invalid_node),
    "validity not reset": validity_not_reset,
    "layout of another architecture": layout_of_another_architecture,
}
#: Each costs tokens a step and no text.
WRONG_DRAFTS: dict[str, Break] = {
    "wrong feature row": wrong_feature_row,
    "rows of another slot": rows_of_another_slot,
    "no sibling links": _stored(lambda storage, slots: storage.retrieve_next_sibling.index_fill_(0, slots, -1)),
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return make_shop(tmp_path_factory.mktemp("shop"), vocab=7, rows=40, seed=5, policy="d2sd")


@pytest.mark.slow
@pytest.mark.full
def test_unbroken(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served(shop, None, monkeypatch) == (True, True, True)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", WRONG_TEXT)
def test_wrong_text_or_state_is_noticed(name: str, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = served(shop, WRONG_TEXT[name], monkeypatch)
    assert not seen.texts or not seen.state


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", WRONG_DRAFTS)
def test_wrong_drafts_cost_tokens_a_step_and_no_text(name: str, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = served(shop, WRONG_DRAFTS[name], monkeypatch)
    assert seen == (True, True, False)
