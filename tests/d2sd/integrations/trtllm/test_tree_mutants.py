"""Errors of the kind that would serve wrong text, or none, each seen by the tests' checks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from d2sd.integrations.trtllm import tree_slots, tree_worker
from tests.d2sd.integrations.trtllm.shop import Shop, make_shop, random_requests, registered
from tests.d2sd.integrations.trtllm.standin.batcher import Server, Settings
from tests.tiny import greedy_text

Break = Callable[[pytest.MonkeyPatch, Server], None]


def _stored(change: Callable[[Any, torch.Tensor], None]) -> Break:
    """Change what was just written to the slots."""

    def broken(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
        store = tree_worker.store_tree

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
    """Leaves get the padding behind the tree as a child: it sees itself alone."""
    children = storage.retrieve_next_token[slots]
    storage.retrieve_next_token[slots] = torch.where(children < 0, storage.retrieve_index.shape[1] - 1, children).int()


def links_of_another_tree(storage: Any, slots: torch.Tensor) -> None:
    storage.retrieve_next_token[slots] = storage.retrieve_next_token[slots].roll(1, dims=-1)


def stale_slot(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """The mask of the tree before: as where a slot's row is not written in every step."""
    store, last = tree_worker.store_tree, {}

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
    """Drafting fails between two writes, and the slots keep their validity."""
    store, calls = tree_worker.store_tree, []

    def half_written(storage: Any, slots: torch.Tensor, tree: Any) -> torch.Tensor:
        calls.append(slots)
        if len(calls) < 3:
            return store(storage, slots, tree)
        links = storage.retrieve_next_token.clone(), storage.retrieve_next_sibling.clone()
        store(storage, slots, replace(tree, parent=torch.zeros_like(tree.parent)))
        storage.retrieve_next_token[:], storage.retrieve_next_sibling[:] = links
        raise RuntimeError

    monkeypatch.setattr(tree_worker, "store_tree", half_written)
    monkeypatch.setattr(tree_worker, "undrafted", lambda *args: None)
    drafts = torch.randint(0, 3, (64, server.nodes - 1), dtype=torch.int32)
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


def served(shop: Shop, modules: Any, sm: int, broken: Break | None, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, bool]:
    """Whether texts are the target's, and whether the steps are those of d2sd's own runtime."""
    server = shop.server(modules, Settings(sm=sm))
    requests = random_requests(random.Random(11), 8, shop.decoder.config.vocab_size, longest=30)
    with monkeypatch.context() as patch:
        if broken is not None:
            broken(patch, server)
        server.run(requests)
    texts = all(r.answer == greedy_text(shop.decoder, r.prompt, r.new_tokens) for r in requests)
    own = shop.own(requests, server.drafters.policy) if texts else requests
    return texts, all(r.counts == o.counts for r, o in zip(requests, own, strict=True))


#: Each changes the text, which must be noticed.
WRONG_TEXT: dict[str, Break] = {
    "no compaction": no_compaction,
    "siblings visible": _stored(siblings_visible),
    "offsets by node": _stored(offsets_by_node),
    "stale slot": stale_slot,
    "wrong word of the mask": _stored(wrong_word),
    "link to an invalid node": _stored(link_to_an_invalid_node),
    "links of another tree": _stored(links_of_another_tree),
    "validity not reset": validity_not_reset,
}
#: Each costs tokens a step and no text.
WRONG_DRAFTS: dict[str, Break] = {
    "wrong feature row": wrong_feature_row,
    "rows of another slot": rows_of_another_slot,
    "no sibling links": _stored(lambda storage, slots: storage.retrieve_next_sibling.index_fill_(0, slots, -1)),
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return make_shop(tmp_path_factory.mktemp("shop"), vocab=7, rows=40, seed=5)


def test_unbroken(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served(shop, registered(monkeypatch, shop.bundle), 90, None, monkeypatch) == (True, True)


@pytest.mark.parametrize("name", WRONG_TEXT)
def test_wrong_text_is_noticed(name: str, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = registered(monkeypatch, shop.bundle)
    assert not served(shop, modules, 90, WRONG_TEXT[name], monkeypatch)[0]


@pytest.mark.parametrize("name", WRONG_DRAFTS)
def test_wrong_drafts_cost_tokens_a_step_and_no_text(name: str, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = registered(monkeypatch, shop.bundle)
    assert served(shop, modules, 90, WRONG_DRAFTS[name], monkeypatch) == (True, False)


def test_the_layouts_of_the_mask_are_not_interchangeable(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as of another architecture: what the layouts are for."""

    def as_of_another(patch: pytest.MonkeyPatch, server: Server) -> None:
        update = server.metadata.update_spec_dec_param

        def swapped(**arguments: Any) -> None:
            server.metadata.sm = 100
            update(**arguments)
            server.metadata.sm = 90

        patch.setattr(server.metadata, "update_spec_dec_param", swapped)

    modules = registered(monkeypatch, shop.bundle)
    assert not served(shop, modules, 90, as_of_another, monkeypatch)[0]
