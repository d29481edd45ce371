"""d2sd's tree in the stand-in's path: plain greedy text, and steps as of d2sd's own runtime."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from d2sd.convert.checkpoint.quantization import Quantization
from d2sd.convert.kinds import DFLASH
from d2sd.integrations.trtllm.tree_drafters import TreeDrafters
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.fp8 import linear_names
from d2sd.policies import DrafterRole
from tests.convert.checkpoint.test_quantization import fp8_tensors
from tests.d2sd.integrations.trtllm.shop import Shop, make_shop, random_requests, registered
from tests.d2sd.integrations.trtllm.standin.batcher import Request, Server, Settings
from tests.tiny import greedy_text


def serve(shop: Shop, server: Server, requests: list[Request], *, own: bool = True) -> None:
    """Serve requests, whose texts are plain decoding's, and whose steps are d2sd's own."""
    server.run(requests)
    assert not server.worker.drafting_failed
    for request in requests:
        assert request.answer == greedy_text(server.decoder, request.prompt, request.new_tokens)
    if own:
        same_steps(requests, shop.own(requests, server.drafters.policy))


def same_steps(requests: list[Request], own: list[Request]) -> None:
    for request, other in zip(requests, own, strict=True):
        assert request.answer == other.answer
        assert request.counts == other.counts


@pytest.mark.sampled(9)
@pytest.mark.parametrize("sm", [90, 100])
@pytest.mark.parametrize(
    ("policy", "rows"), [("hybrid", 15), ("hybrid", 40), ("d2sd", 64), ("reanchor", 12), ("ddtree", 33), ("chain", 16)]
)
def test_text_and_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Any, rows: int, sm: int) -> None:
    shop = make_shop(tmp_path, policy=policy, rows=rows)
    server = shop.server(registered(monkeypatch, shop.bundle), Settings(sm=sm, padding=2))
    assert isinstance(server.drafters, TreeDrafters)
    assert server.drafters.policy == shop.arguments()[1]
    requests = random_requests(random.Random(rows + sm), 9, shop.decoder.config.vocab_size)
    serve(shop, server, requests)
    assert max(max(r.counts, default=0) for r in requests) > 1, "drafts must have been accepted"


def test_one_drafter_has_trees_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = make_shop(tmp_path, second=False, policy="auto")
    arguments, made = shop.arguments()
    assert str(made) == f"ddtree+lookup of {arguments['max_total_draft_tokens'] + 1} rows"
    server = shop.server(registered(monkeypatch, shop.bundle), Settings())
    serve(shop, server, random_requests(random.Random(1), 5, shop.decoder.config.vocab_size))


def test_another_policy_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = make_shop(tmp_path)
    server = shop.server(registered(monkeypatch, shop.bundle, "reanchor"), Settings())
    assert server.drafters.policy.name == "reanchor"
    assert not server.worker.set_guided_decoder(object()), "guided decoding is declined"
    assert server.worker.guided_decoder is None
    serve(shop, server, random_requests(random.Random(1), 4, shop.decoder.config.vocab_size), own=False)


def test_committed_state_equals_a_dense_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K/V after compaction, and the context that the drafters read, both computed anew for the whole text."""
    shop = make_shop(tmp_path, rows=40)
    server = shop.server(registered(monkeypatch, shop.bundle), Settings())
    request = Request([3, 1, 4, 1, 5, 9, 2], 24)
    server.requests = [request]
    for _ in range(9):
        server.step()
        if request.in_context or request.py_seq_slot is None:
            continue
        layers = server.drafters.runner.aux_layer_ids
        dense = shop.decoder.full_pass(torch.tensor([request.tokens[: request.cached]]), layers)
        for found, expected in zip(server.cached_keys(request), (dense.k, dense.v), strict=True):
            torch.testing.assert_close(found, expected[:, 0], rtol=1e-4, atol=1e-5)
        positions = torch.arange(request.cached)
        table = server.drafters._table[request.py_seq_slot]
        for role in (DrafterRole.FIRST, DrafterRole.SECOND):
            k, v = server.drafters.runner.drafters[role].context_keys_values(dense.features, positions[None])
            pool = server.drafters.runner.drafts._pools[role]
            for found, expected in ((pool.k, k), (pool.v, v)):
                held = found[:, table[positions // pool.page_size], positions % pool.page_size]
                torch.testing.assert_close(held, expected[:, 0], rtol=1e-4, atol=1e-5)
    assert max(request.counts) > 1


def test_a_target_that_walks_in_circles_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = make_shop(tmp_path, vocab=7, policy="ddtree", rows=12)
    server = shop.server(registered(monkeypatch, shop.bundle), Settings())
    serve(shop, server, [Request([1, 2, 3] * 6, 40)])


@pytest.mark.parametrize(("name", "works"), [("draft", 4), ("write_context", 0)])
def test_drafters_that_fail_leave_plain_decoding(
    name: str, works: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After so many calls, of which the first that fails is the last."""
    shop = make_shop(tmp_path)
    server = shop.server(registered(monkeypatch, shop.bundle), Settings())
    calls, method = [], getattr(server.drafters, name)

    def fails(*args: Any) -> Any:
        calls.append(args)
        if len(calls) > works:
            raise RuntimeError("out of memory, say")
        return method(*args)

    monkeypatch.setattr(server.drafters, name, fails)
    requests = random_requests(random.Random(5), 6, shop.decoder.config.vocab_size)
    capsys.readouterr()
    server.run(requests)
    for request in requests if not works else requests[-1:]:
        assert request.counts == [1] * len(request.counts)
    for request in requests:
        assert request.answer == greedy_text(server.decoder, request.prompt, request.new_tokens)
    assert len(calls) == works + 1
    assert server.worker.drafting_failed
    assert not server.storage.has_tree.any()
    told = capsys.readouterr().err
    assert told.count("drafting failed") == 1
    assert "out of memory, say" in told


def of_files(shop: Shop, write: Callable[[Path, Drafter], None]) -> Shop:
    """The shop with drafters written anew by `write`, and read from there."""
    made = []
    for role, drafter in zip((DrafterRole.FIRST, DrafterRole.SECOND), (shop.first, shop.second), strict=True):
        assert isinstance(drafter, Drafter)
        write(shop.bundle / role.folder, drafter)
        made.append(DFLASH.load(shop.bundle / role.folder, torch.float32))
    return replace(shop, first=made[0], second=made[1])


def reduced(folder: Path, drafter: Drafter) -> None:
    """A drafter of every other token."""
    config = replace(drafter.config, draft_vocabulary=tuple(range(0, drafter.config.vocab_size, 2)))
    DFLASH.write(folder, config, drafter.state_dict())


def in_fp8(folder: Path, drafter: Drafter) -> None:
    """A drafter with all its layers in FP8, of which the checkpoint holds some in 16 bits."""
    quantization = Quantization(DFLASH.unquantized, kv=False, producer=("modelopt", "0.47.0"))
    names = linear_names(drafter)
    rounded = {name: 8 / 448 for name in names if name not in quantization.of(names)}
    tensors = fp8_tensors(drafter.state_dict(), quantization.of(names))
    DFLASH.write(folder, drafter.config, tensors, quantization, rounded)


@pytest.mark.slow
@pytest.mark.parametrize("write", [reduced, in_fp8])
def test_drafters_of_their_own_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, Drafter], None]
) -> None:
    shop = of_files(make_shop(tmp_path, vocab=12), write)
    server = shop.server(registered(monkeypatch, shop.bundle), Settings())
    requests = random_requests(random.Random(4), 6, shop.decoder.config.vocab_size)
    serve(shop, server, requests)
    assert max(max(r.counts, default=0) for r in requests) > 1
