"""Drafters whose candidates are scored behind their parent write the text of plain decoding, and use what they say."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.head_configs import MarkovConfig
from d2sd.modeling.joining import Joining
from d2sd.plugins.trees import Tree
from d2sd.policies import PolicyName
from d2sd.runtime.batch import Batch
from d2sd.runtime.model_runner import ModelRunner, Verified
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.stats import SequenceStats
from tests.runtime.cuda_graphs.test_capture import GREEDY, HOT, NARROW, check_same, record, running
from tests.runtime.helpers import BLOCK, last_token_decoder, make_engine, models, run_staggered, some_requests
from tests.runtime.test_lossless import Way
from tests.tiny import HEADS, greedy_text, prepared, tiny_drafter

POLICIES: tuple[PolicyName, ...] = ("chain", "reanchor", "d2sd", "ddtree", "hybrid")
IN_FLIGHT = Way(gap=2, shuffled=True)


@cache
def drafters(head: str) -> tuple[Drafter, Drafter]:
    """Drafters as released: behind a Markov head the anchor's row proposes too; a selector's layers have windows."""
    target, from_anchor = models()[0].config, isinstance(HEADS[head], MarkovConfig)
    shape: dict[str, Any] = {
        "block_size": BLOCK - from_anchor,
        "layers": 1,
        "head": HEADS[head],
        "sample_from_anchor": from_anchor,
        "attention": {} if from_anchor else {"windows": (6,)},
    }
    return tiny_drafter(target, **shape), tiny_drafter(target, **shape, role="variable_prefix", seed=2)


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("layers_of_pytorch")
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("policy", ["chain", "hybrid"])
def test_nothing_is_read_back(head: str, policy: PolicyName) -> None:
    """Greedy and sampled; and every step runs the same operators on the same shapes."""
    runner = ModelRunner(*prepared(deepcopy(models()[0]), *deepcopy(drafters(head))))
    check_same(record(running(policy, GREEDY, HOT, NARROW, batch=3, runner=runner), 3))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_silent_head_leaves_every_tree_as_it_is(policy: PolicyName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node for node, greedy and sampled: the drafter's body was trained without it."""
    trees: list[tuple[list[int], ...]] = []
    verify = ModelRunner.verify

    def watched(self: ModelRunner, batch: Batch, tree: Tree, joining: Joining | None = None) -> Verified:
        trees.append(tuple(part.flatten().tolist() for part in (tree.tokens, tree.parent, tree.valid)))
        return verify(self, batch, tree, joining)

    monkeypatch.setattr(ModelRunner, "verify", watched)
    target, (first, second) = models()[0], drafters("pair")
    made = []
    for with_head in (False, True):
        pair = []
        for drafter in (first, second):
            tensors = dict(drafter.state_dict())
            tensors["pair_head.successor_projection"] = torch.zeros_like(tensors["pair_head.successor_projection"])
            one = Drafter(drafter.config if with_head else replace(drafter.config, head=None))
            one.load_state_dict({name: tensors[name] for name in one.state_dict()})
            pair.append(one.eval().requires_grad_(False))
        engine = IN_FLIGHT.engine(ModelRunner(*prepared(deepcopy(target), *pair)), policy)
        IN_FLIGHT.run(engine, some_requests())
        made.append(trees[:])
        trees.clear()
    assert len(made[0]) > 10
    assert made[0] == made[1]


@cache
def bigrams() -> tuple[Decoder, Drafter]:
    """A target that reads its last token alone, and a drafter that knows nothing but which token follows which."""
    target = last_token_decoder(1, "qwen3", head_dim=16)
    vocabulary = target.config.vocab_size
    following = target.logits(target.full_pass(torch.arange(vocabulary)[:, None]).hidden)[:, 0].argmax(-1)
    head = MarkovConfig(rank=vocabulary)
    drafter = tiny_drafter(target.config, block_size=BLOCK - 1, layers=1, head=head, sample_from_anchor=True)
    w1, w2 = (drafter.get_parameter(f"markov_head.markov_w{n}.weight") for n in (1, 2))
    w1.copy_(torch.eye(vocabulary))
    w2.copy_(30 * torch.nn.functional.one_hot(following, vocabulary).float().T)
    drafter.norm.weight.zero_()  # all candidates are as likely, before the head has spoken
    return target, drafter


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["chain", "reanchor", "ddtree"])
def test_a_head_that_knows_the_language_is_always_right(policy: PolicyName) -> None:
    """The head alone drafts, among all tokens; and after prefix hits."""
    target, drafter = bigrams()
    drafter = deepcopy(drafter)
    drafter.pool = drafter.head.pool = target.config.vocab_size  # type: ignore[union-attr]
    requests = tuple(Request((*range(40, 49), n, 2 * n), 40, SamplingParams(seed=n)) for n in range(5))
    engine = make_engine(ModelRunner(*prepared(deepcopy(target), drafter)), policy, max_batch=3)
    sequences = run_staggered(engine, requests, gap=2)
    assert [s.answer for s in sequences] == [greedy_text(target, list(r.prompt), 40) for r in requests]
    stats = SequenceStats.merged(s.stats for s in sequences)
    assert stats.cached_tokens > 0
    assert stats.tau > BLOCK - 0.5


def test_the_same_drafter_without_its_head_knows_nothing() -> None:
    target, drafter = bigrams()
    drafter = deepcopy(drafter)
    drafter.pool = 0
    requests = tuple(Request((n, 2 * n), 40, SamplingParams(seed=n)) for n in range(5))
    engine = make_engine(ModelRunner(*prepared(deepcopy(target), drafter)), "chain")
    stats = SequenceStats.merged(s.stats for s in run_staggered(engine, requests))
    assert stats.tau < 2
