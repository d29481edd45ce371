"""Random tiny bundles in the stand-in's path: text as of plain decoding, steps as of d2sd's own runtime.

    python -m tests.d2sd.integrations.trtllm.soak STEPS [--seed S]

An episode is a random pair, policy, number of nodes, layout of the mask, chunk, padding and number of slots, and
requests that arrive while others run and take over their slots.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from d2sd.policies import PolicyName
from tests.d2sd.integrations.trtllm.shop import make_shop, random_requests, registered
from tests.d2sd.integrations.trtllm.standin.batcher import Settings
from tests.d2sd.integrations.trtllm.test_tree_slots import check_random_trees
from tests.tiny import greedy_text

POLICIES: tuple[PolicyName, ...] = ("hybrid", "d2sd", "reanchor", "ddtree", "chain")


def episode(dice: random.Random, folder: Path) -> Counter[str]:
    """Serve one random set of requests; raises AssertionError where anything differs."""
    policy, vocab = dice.choice(POLICIES), dice.choice([7, 12, 24])
    second, block_size = policy in ("hybrid", "d2sd") or dice.random() < 0.5, dice.choice([4, 5, 8])
    shop = make_shop(
        folder,
        seed=dice.randrange(10_000),
        vocab=vocab,
        block_size=block_size,
        branches=dice.randint(1, block_size - 1),
        policy=policy,
        second=second,
        rows=dice.choice([block_size, 15, 16, 31, 33, 40, 64, 65, 128]),
        lookup=dice.random() < 0.7,
    )
    settings = Settings(
        slots=dice.randint(1, 8),
        chunk=dice.randint(1, 9),
        sm=dice.choice([90, 100]),
        padding=dice.choice([0, 0, 1, 3]),
        tokens_per_block=dice.choice([2, 4, 8]),
    )
    with pytest.MonkeyPatch.context() as patch:
        modules = registered(patch, shop.bundle)
        server = shop.server(modules, settings, padding=dice.choice([0, 0, 7]), max_batch=settings.slots)
        requests = random_requests(dice, dice.randint(1, 12), vocab, longest=40)
        server.run(requests)
        assert not server.worker.drafting_failed
        own = shop.own(requests, server.drafters.policy)
    for request, other in zip(requests, own, strict=True):
        assert request.answer == greedy_text(shop.decoder, request.prompt, request.new_tokens), (request, settings)
        assert request.counts == other.counts, (request, other, settings)
    found = Counter({"requests": len(requests), "passes": server.steps, policy: 1})
    return found + Counter(
        {"steps": sum(len(r.counts) for r in requests), "tokens": sum(sum(r.counts) for r in requests)}
    )


def main() -> None:
    """Count steps until there are enough."""
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    dice, total, start = random.Random(arguments.seed), Counter[str](), time.monotonic()
    while total["steps"] < arguments.steps:
        with tempfile.TemporaryDirectory() as folder:
            total += episode(dice, Path(folder))
    check_random_trees(arguments.steps, arguments.seed)
    print(f"{dict(total)}; {arguments.steps} random trees in slots; 0 differ; {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
