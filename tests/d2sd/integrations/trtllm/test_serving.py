"""Both drafters through the registered builder and worker: plain greedy text, and drafts as computed anew."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from d2sd.errors import D2SDError
from d2sd.integrations.trtllm.drafters import DualDrafter
from d2sd.integrations.trtllm.register import register
from d2sd.integrations.trtllm.worker import spliced
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from tests.d2sd.integrations.trtllm import fake
from tests.d2sd.integrations.trtllm.shop import Server, block_logits, models, single_process, write_bundle
from tests.tiny import greedy_text

PROMPTS = [[1, 4, 2], [3, 0, 5, 5, 1, 2, 4], [2, 2]]


def chain_of(decoder: Decoder, first: Drafter, second: Drafter, text: list[int]) -> tuple[list[int], str]:
    """The drafts behind `text` by the definition, with loops, and which pass they are of."""
    slots, mask = first.config.block_size - 1, first.config.mask_token_id
    said = block_logits(decoder, first, text, [text[-1]] + [mask] * slots).softmax(-1)
    best, sure = said.argmax(-1).tolist(), said.amax(-1).tolist()
    reached = [math.prod(sure[:i]) for i in range(slots + 1)]
    worth = [reached[i] * (1 - sure[i]) for i in range(slots)] + [reached[slots]]
    kept = worth.index(max(worth))
    block = [text[-1], *best[:kept], *[mask] * (slots - kept)]
    again = block_logits(decoder, second, text, block).softmax(-1)
    chain = best[:kept] + again.argmax(-1).tolist()[kept:]
    trust = sure[:kept] + again.amax(-1).tolist()[kept:]
    if sum(math.prod(trust[: i + 1]) for i in range(slots)) > sum(reached[1:]):
        return chain, "both"
    return best, "first"


def test_two_drafters_write_what_the_target_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = fake.install(monkeypatch)
    single_process(monkeypatch)
    decoder, first, second = models()
    bundle = write_bundle(tmp_path, first, second)
    assert register(bundle)
    server = Server(bundle, modules, decoder, PROMPTS)
    assert isinstance(server.drafter, DualDrafter)
    passes, gained = [], []
    for _ in range(16):
        gained += server.step()
        for text, drafts in zip(server.texts, server.drafts.tolist(), strict=True):
            expected, of = chain_of(decoder, first, second, text)
            assert drafts == expected
            passes.append(of)
    for prompt, text in zip(PROMPTS, server.texts, strict=True):
        assert text[len(prompt) :] == greedy_text(decoder, prompt, len(text) - len(prompt))
    assert {"both", "first"} == set(passes), "either way of making the chain must have been used"
    assert max(gained) > 1, "drafts must have been accepted, or nothing of the context was tested"


def test_unregistered_it_is_the_first_drafter_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = fake.install(monkeypatch, version="9.0")
    single_process(monkeypatch)
    decoder, first, second = models()
    bundle = write_bundle(tmp_path, first, second)
    assert not register(bundle)
    server = Server(bundle, modules, decoder, PROMPTS)
    assert type(server.drafter) is fake.DFlashForCausalLM
    for _ in range(6):
        server.step()
        mask = [first.config.mask_token_id] * (first.config.block_size - 1)
        for text, drafts in zip(server.texts, server.drafts.tolist(), strict=True):
            assert drafts == block_logits(decoder, first, text, [text[-1], *mask]).argmax(-1).tolist()
    for prompt, text in zip(PROMPTS, server.texts, strict=True):
        assert text[len(prompt) :] == greedy_text(decoder, prompt, len(text) - len(prompt))


def test_a_second_pass_that_fails_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = fake.install(monkeypatch)
    single_process(monkeypatch)
    decoder, first, second = models()
    bundle = write_bundle(tmp_path, first, second)
    assert register(bundle)
    server = Server(bundle, modules, decoder, PROMPTS)
    calls = []

    def fails(**inputs: object) -> None:
        calls.append(inputs)
        raise TypeError("no such argument")

    monkeypatch.setattr(server.drafter.second, "dflash_forward", fails)
    capsys.readouterr()
    for _ in range(4):
        server.step()
        mask = [first.config.mask_token_id] * (first.config.block_size - 1)
        for text, drafts in zip(server.texts, server.drafts.tolist(), strict=True):
            assert drafts == block_logits(decoder, first, text, [text[-1], *mask]).argmax(-1).tolist()
    assert len(calls) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "LINEAR" in line
    assert "no such argument" in line
    server.worker.second_failed = False
    monkeypatch.setenv("D2SD_TRTLLM", "require")
    with pytest.raises(D2SDError, match="no such argument"):
        server.step()


def test_our_worker_leaves_one_drafter_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the builder falls back late, our worker has been put in already."""
    modules = fake.install(monkeypatch)
    single_process(monkeypatch)
    _, first, second = models()
    bundle = write_bundle(tmp_path, first, second)
    assert register(bundle)
    worker = modules["utils"].DFlashWorker(None, None)
    logits = torch.randn(2, 4, 7)
    assert worker._refine_block_logits(object(), logits, {}, None) is logits


MASK = 3
ANCHOR = torch.tensor([2])


def logits(*sure: tuple[int, float]) -> Tensor:
    """(token, its probability) of every slot; the rest is shared evenly."""
    rows = torch.tensor([[p if token == t else (1 - p) / 3 for t in range(4)] for token, p in sure])
    return rows.log()[None]


def run(first: Tensor, second: Tensor, width: int = 4) -> tuple[Tensor, list[Tensor]]:
    blocks: list[Tensor] = []

    def again(tokens: Tensor) -> Tensor:
        blocks.append(tokens)
        return second

    return spliced(first, ANCHOR, MASK, width, again), blocks


def test_the_second_pass_continues_behind_the_likeliest_rejection() -> None:
    first = logits((0, 0.9), (1, 0.4), (1, 0.4))
    chain, (block,) = run(first, logits((2, 0.99), (0, 0.9), (2, 0.9)))
    assert block.tolist() == [[2, 0, MASK, MASK]]
    assert chain.argmax(-1).tolist() == [[0, 0, 2]]


def test_it_may_confirm_what_the_first_pass_said() -> None:
    first = logits((0, 0.9), (1, 0.4), (1, 0.4))
    chain, _ = run(first, logits((2, 0.99), (1, 0.9), (2, 0.9)))
    assert chain.argmax(-1).tolist() == [[0, 1, 2]]


def test_the_first_draft_stands_where_the_second_expects_less() -> None:
    first = logits((0, 0.9), (1, 0.45), (1, 0.45))
    chain, _ = run(first, logits((2, 0.99), (0, 0.4), (2, 0.4)))
    assert torch.equal(chain, first)


def test_a_draft_that_is_likely_right_is_left_whole() -> None:
    first = logits((0, 0.95), (1, 0.95), (1, 0.95))
    chain, (block,) = run(first, logits((2, 0.99), (0, 0.99), (2, 0.99)))
    assert block.tolist() == [[2, 0, 1, 1]]
    assert torch.equal(chain, first)


def test_a_shorter_draft_leaves_the_block_as_wide_as_it_was_captured() -> None:
    first = logits((0, 0.9), (1, 0.4), (1, 0.4))[:, :2].bfloat16()
    chain, (block,) = run(first, logits((2, 0.99), (0, 0.9)), width=5)
    assert block.tolist() == [[2, 0, MASK, MASK, MASK]]
    assert chain.shape == first.shape
    assert chain.dtype == torch.bfloat16
