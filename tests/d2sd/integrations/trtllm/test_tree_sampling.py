"""T = 1 in the stand-in's path: with rejection sampling and without, tokens have the target's distribution."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.d2sd.integrations.trtllm.shop import Shop, make_shop, registered
from tests.d2sd.integrations.trtllm.standin import ops
from tests.d2sd.integrations.trtllm.standin.batcher import Request, Settings

PROMPT, VOCAB, LENGTH = [3, 1, 2], 4, 4


def distribution(shop: Shop) -> torch.Tensor:
    """Probability of every answer of LENGTH tokens, [VOCAB ** LENGTH] in fp64."""
    texts = torch.tensor([PROMPT + list(text) for text in itertools.product(range(VOCAB), repeat=LENGTH)])
    logits = shop.decoder.logits(shop.decoder.full_pass(texts).hidden).double().log_softmax(-1)
    said = logits[:, len(PROMPT) - 1 : -1].gather(-1, texts[:, len(PROMPT) :, None])
    return said.sum(dim=(1, 2)).exp()


def sampled_counts(shop: Shop, modules: object, answers: int, *, rejection: bool) -> tuple[torch.Tensor, float]:
    """How often each answer was given, and tokens a step."""
    torch.manual_seed(1)
    ops.COINS.manual_seed(2)
    settings = Settings(slots=8, temperature=1.0, rejection=rejection)
    server = shop.server(modules, settings, nodes=12, max_batch=8)  # type: ignore[arg-type]
    requests = [Request(PROMPT, LENGTH) for _ in range(answers)]
    server.run(requests)
    counts = torch.zeros(VOCAB**LENGTH)
    for request in requests:
        counts[int("".join(map(str, request.answer)), VOCAB)] += 1
    steps = [count for request in requests for count in request.counts]
    return counts, sum(steps) / len(steps)


def check(shop: Shop, modules: object, answers: int, *, rejection: bool) -> float:
    expected = distribution(shop) * answers
    assert expected.sum() == pytest.approx(answers)
    counts, tau = sampled_counts(shop, modules, answers, rejection=rejection)
    # answers that are expected too rarely for the statistic share a cell
    common = expected >= 5
    cells = torch.cat([expected[common], expected[~common].sum()[None]])
    found = torch.cat([counts[common], counts[~common].sum()[None]])
    statistic = float(((found - cells) ** 2 / cells).sum())
    freedom = len(cells) - 1
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5, f"chi-square {statistic:.0f} of {freedom}"
    return tau


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return make_shop(tmp_path_factory.mktemp("shop"), vocab=VOCAB, block_size=5, seed=8)


@pytest.mark.full
def test_twenty_thousand_tokens(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = registered(monkeypatch, shop.bundle)
    by_rejection = check(shop, modules, 5_000, rejection=True)
    by_match = check(shop, modules, 1_000, rejection=False)
    assert by_rejection > by_match > 1


@pytest.mark.slow
@pytest.mark.full
def test_the_check_can_fail(shop: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An acceptance that takes every first child is seen."""
    modules = registered(monkeypatch, shop.bundle)
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: torch.tensor(0.0))
    with pytest.raises(AssertionError, match="chi-square"):
        check(shop, modules, 400, rejection=True)
