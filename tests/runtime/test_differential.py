"""Every pair of features in a sample of engines, each answer against plain decoding; and that a fault would be found.

Configurations are in `configurations.py`, and what is compared in `differential.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from d2sd.modeling.mixers.delta_net import DeltaStateRows
from d2sd.modeling.state_pool import StatePool
from d2sd.plugins import choice
from d2sd.plugins.trees import Accepted, Tree
from d2sd.runtime import decode
from d2sd.runtime.batch import Batch
from d2sd.runtime.cuda_graphs.inputs import Link
from d2sd.runtime.grammar.step import StepGrammar
from d2sd.runtime.model_runner import ModelRunner, Verified
from d2sd.runtime.pages import PageGroup
from d2sd.runtime.sampling.bias import TokenBias
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.speculation import accept
from tests.runtime.configurations import APART, FEATURES, Configuration, all_pairs, any_of, sample
from tests.runtime.differential import Episode


def test_the_sample_has_every_pair() -> None:
    found = set().union(*(one.pairs for one in sample()))
    assert found == all_pairs()
    assert len(sample()) < 145
    for name, values, other, others in APART:
        assert {*values} <= {*FEATURES[name]}
        assert {*others} <= {*FEATURES[other]}


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.slow if n % 5 else ()) for n in range(len(sample()))]
)
def test_requests_end_as_they_end_alone(number: int) -> None:
    episode = Episode(number, sample()[number]).run()
    assert not episode.differing
    assert not episode.seen["leaked"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_other_configurations_do_too(seed: int) -> None:
    """`python -m tests.runtime.differential` runs as many as one likes."""
    assert not Episode(100 + seed).run().differing


@pytest.mark.slow
def test_drafts_and_copies_are_accepted_and_pages_are_missed_and_hit() -> None:
    """Else the tests above would show little."""
    seen = Episode(0, any_of(random.Random(1), drafts="right", weights="whole", turns="policies")).seen
    for seed in range(12):
        given = {"drafts": "right", "weights": "whole", "prefixes": "cached", "room": "tight", "switch": "on"}
        seen += Episode(seed, any_of(random.Random(seed), **given)).run().seen
    assert seen["accepted"] > seen["steps"] / 2
    assert min(seen[name] for name in ("preempted", "hits", "ended by stop", "ended by length")) > 5


# -- faults ------------------------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def _verified(patch: Patch, change: Callable[[Tree], Tree]) -> None:
    """Verify other trees than those that are accepted."""
    verify = ModelRunner.verify

    def changed(self: ModelRunner, batch: Batch, tree: Tree, *more: Any) -> Verified:
        return verify(self, batch, change(tree) if tree.tokens.shape[1] > 1 else tree, *more)

    patch.setattr(ModelRunner, "verify", changed)


def _drafts_are_taken(patch: Patch) -> None:
    sample_target = accept.sample_target

    def taken(tree: Tree, *given: Any, **more: Any) -> Accepted:
        found = sample_target(tree, *given, **more)
        if tree.tokens.shape[1] > 1:
            found.tokens[:, 0] = tree.tokens[:, 1].where(tree.valid[:, 1], found.tokens[:, 0])
        return found

    patch.setattr(decode, "sample_target", taken)


def _siblings_are_seen(patch: Patch) -> None:
    _verified(patch, lambda tree: replace(tree, attn_mask=tree.attn_mask | torch.ones_like(tree.attn_mask).tril()))


def _parents_are_hidden(patch: Patch) -> None:
    _verified(patch, lambda tree: replace(tree, attn_mask=torch.eye(tree.tokens.shape[1]).bool() & tree.attn_mask))


def _nodes_stand_further_on(patch: Patch) -> None:
    _verified(patch, lambda tree: replace(tree, depth=2 * tree.depth))


def _other_last_bits(patch: Patch) -> None:
    verify = ModelRunner.verify

    def changed(self: ModelRunner, batch: Batch, tree: Tree, *more: Any) -> Verified:
        verified = verify(self, batch, tree, *more)
        return replace(verified, logits=verified.logits * (1 + 2e-7)) if tree.tokens.shape[1] > 1 else verified

    patch.setattr(ModelRunner, "verify", changed)


def _windows_end_early(patch: Patch) -> None:
    first = PageGroup.first
    patch.setattr(PageGroup, "first", lambda self, committed, size: first(self, committed + 4, size))


def _states_are_of_all_nodes(patch: Patch) -> None:
    commit = DeltaStateRows.commit

    def whole(self: DeltaStateRows, pool: StatePool, state_ids: Tensor, path: Tensor, count: Tensor) -> None:
        commit(self, pool, state_ids, path, count.where(count == 0, path.shape[1]))

    patch.setattr(DeltaStateRows, "commit", whole)


def _prefixes_are_alike(patch: Patch) -> None:
    def extend(keys: list[bytes], tokens: Any, page_size: int, count: int, salt: str) -> None:
        keys += [bytes([number]) for number in range(len(keys), count)]

    patch.setattr("d2sd.runtime.kv_cache.extend_keys", extend)


def _no_row_is_late(patch: Patch) -> None:
    pack = Link.pack

    def packed(*given: Any) -> Link:
        link = pack(*given)
        return replace(link, late=torch.zeros_like(link.late))

    patch.setattr(Link, "pack", packed)


def _grammars_end_at_the_root(patch: Patch) -> None:
    mask = StepGrammar.mask

    def at_root(self: StepGrammar, *given: Any) -> Tensor:
        found = mask(self, *given)
        found[:, 1:] = -1
        return found

    patch.setattr(StepGrammar, "mask", at_root)


def _noise_is_of_the_next_position(patch: Patch) -> None:
    sample_target = accept.sample_target

    def moved(tree: Tree, logits: Tensor, context_len: Tensor, *given: Any, **more: Any) -> Accepted:
        return sample_target(tree, logits, context_len + (tree.tokens.shape[1] > 1), *given, **more)

    patch.setattr(decode, "sample_target", moved)


def _filters_are_those_of_all(patch: Patch) -> None:
    def apply_filters(scaled: Tensor, sampling: Sampling) -> Tensor:
        least = scaled.amax(-1, keepdim=True) + sampling.min_p.max().log()
        return scaled.masked_fill(scaled < least, -torch.inf)

    patch.setattr("d2sd.plugins.choice.reference.apply_filters", apply_filters)


def _biases_are_of_the_first_rows(patch: Patch) -> None:
    select = TokenBias.select
    patch.setattr(TokenBias, "select", lambda self, rows: select(self, torch.arange(len(rows))))


def _texts_do_not_grow(patch: Patch) -> None:
    patch.setattr(Sampling, "after", lambda self, tokens: self)


def _what_is_not_finite_is_a_token(patch: Patch) -> None:
    choose = choice.choose

    def chosen(*given: Any) -> Tensor:
        found = choose(*given)
        return found.clamp(min=0) if found.numel() > 1 else found

    patch.setattr(choice, "choose", chosen)


def _all_requests_speculate(patch: Patch) -> None:
    pack = Batch.pack
    patch.setattr(Batch, "pack", staticmethod(lambda *given: pack(*given[:3])))


#: By what is broken: the features without which nobody could notice.
FAULTS: tuple[tuple[Callable[[Patch], None], dict[str, str]], ...] = (
    (_drafts_are_taken, {"policy": "chain", "drafts": "right"}),
    (_drafts_are_taken, {"policy": "lookup"}),
    (_drafts_are_taken, {"policy": "flex", "drafts": "right"}),
    (_drafts_are_taken, {"ranks": "two"}),
    (_siblings_are_seen, {"policy": "ddtree"}),
    (_parents_are_hidden, {"policy": "d2sd", "drafts": "right"}),
    (_parents_are_hidden, {"family": "gpt_oss", "drafts": "right"}),
    (_parents_are_hidden, {"steps": "recorded", "drafts": "right"}),
    (_nodes_stand_further_on, {"family": "gemma3_text", "drafts": "right"}),
    (_other_last_bits, {"kernels": "compiled", "type": "fp32", "steps": "eager"}),
    (_windows_end_early, {"windows": "all", "ranks": "one"}),  # two would exchange tensors of other sizes, and abort
    (_windows_end_early, {"windows": "drafters", "steps": "eager", "weights": "whole", "ranks": "one"}),
    (_states_are_of_all_nodes, {"family": "qwen3_5_text"}),
    (_prefixes_are_alike, {"prefixes": "cached"}),
    (_no_row_is_late, {"steps": "late"}),
    (_grammars_end_at_the_root, {"grammar": "guided", "drafts": "right"}),
    (_noise_is_of_the_next_position, {"sampling": "sampled", "policy": "reanchor"}),
    (_filters_are_those_of_all, {"sampling": "parameters", "kernels": "compiled"}),
    (_biases_are_of_the_first_rows, {"sampling": "parameters", "drafts": "right", "weights": "whole", "room": "batch"}),
    (_texts_do_not_grow, {"sampling": "parameters", "drafts": "right"}),
    (_all_requests_speculate, {"switch": "mixed", "drafts": "right", "steps": "eager"}),
    (_all_requests_speculate, {"switch": "mixed", "drafts": "right", "steps": "late"}),
    (_what_is_not_finite_is_a_token, {"weights": "broken"}),
)


def notices(number: int, one: Configuration) -> bool:
    try:
        return bool(Episode(number, one).run().differing)
    except (AssertionError, IndexError):
        return True


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "features"), FAULTS, ids=lambda given: getattr(given, "__name__", None))
def test_a_fault_is_found(fault: Callable[[Patch], None], features: dict[str, str], monkeypatch: Patch) -> None:
    """By the sample's configurations with these features, or by some others with them."""
    fault(monkeypatch)
    having = [(number, one) for number, one in enumerate(sample()) if asdict(one).items() >= features.items()]
    others = ((seed, any_of(random.Random(seed), **features)) for seed in range(10))
    assert any(notices(number, one) for number, one in (*having, *others)), f"of {len(having)} and 10 others"
