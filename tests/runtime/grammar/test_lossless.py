"""Speculation under a grammar equals plain decoding under it, in trees inside it; others notice nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from d2sd.policies import FACTS
from d2sd.runtime.decode import decode_step, sources_of
from d2sd.runtime.engine import Engine, Launched
from d2sd.runtime.grammar.step import StepGrammar
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.stats import COPY, SequenceStats
from tests.runtime.grammar.tokens import END, guidance, ids
from tests.runtime.grammar.watched import WatchedRunner, constrained_text, drafted, is_inside, models
from tests.runtime.helpers import BUDGET, all_pages, free_pages, make_engine, run_staggered
from tests.tiny import CASES, policy_name

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Bob"]},
        "ages": {"type": "array", "items": {"enum": [1, 31]}, "maxItems": 2},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}


@cache
def requests() -> tuple[Request, ...]:
    """Greedy and sampled, five with a grammar and three without; answers that end, and that the limit cuts."""
    tool = guidance()
    grammars = (
        tool.json_schema(json.dumps(SCHEMA), "json"),
        None,
        tool.regex("[a-f]{3,9}(-[0-9]{2}){2}", "regex"),
        tool.lark('start: "yes" | "no, never" | "maybe"', "choice"),
        None,
        tool.json_schema('{"type": "object"}', "json"),
        None,
        tool.regex("[a-z ]+", "regex"),
    )
    return tuple(
        Request(
            ids(["Who?", '{"a": 1}', "2024"][n % 3]),
            24,
            SamplingParams([0.0, 1.0, 0.8][n % 3], [1.0, 0.9][n % 2], [0, 0, 40][n % 3], seed=n + 1),
            frozenset({END}),
            grammar=grammar,
        )
        for n, grammar in enumerate(grammars)
    )


@cache
def expected() -> list[list[int]]:
    return [constrained_text(models()[0], request) for request in requests()]


def answers() -> dict[int, list[int]]:
    return {request.seed: answer for request, answer in zip(requests(), expected(), strict=True)}


def engine_for(
    policy: str, kept: tuple[Request, ...], *, errors: float = 0.3, row_budget: int = BUDGET, lookup: bool = False
) -> Engine:
    texts = {r.seed: [*r.prompt, *answers()[r.seed], *[7] * 32] for r in kept}
    runner = WatchedRunner(kept, texts, errors, policy)
    engine = make_engine(runner, policy, max_batch=8, row_budget=row_budget, lookup=lookup)
    runner.policy = engine.policy
    return engine


def run(policy: str, kept: tuple[Request, ...], *, errors: float = 0.3, lookup: bool = False) -> SequenceStats:
    """Run requests under a policy whose drafters are often right; returns the statistics of constrained ones."""
    engine = engine_for(policy, kept, errors=errors, lookup=lookup)
    sequences = run_staggered(engine, kept, gap=1)
    assert [s.answer for s in sequences] == [answers()[r.seed] for r in kept]
    assert free_pages(engine) == all_pages(engine)
    runner = engine.runner
    assert isinstance(runner, WatchedRunner)
    assert runner.outside == 0, f"of {runner.inside + runner.outside} nodes"
    assert runner.inside > 0 or policy in ("off", "lookup") or all(r.grammar is None for r in kept)
    return SequenceStats.merged(s.stats for s in sequences if s.request.grammar is not None)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("policy", CASES)
def test_speculation_equals_plain_decoding(policy: str) -> None:
    stats = run(policy, requests())
    assert stats.tau > (1.5 if policy not in ("off", "lookup") else 0.9)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", [name for name in CASES if FACTS[policy_name(name)].copies])
def test_a_copy_that_the_grammar_forbids_is_no_node(policy: str) -> None:
    """Prompts hold what answers may not say, and what they may."""
    stats = run(policy, requests(), lookup=True)
    assert stats.tau > 1.5
    assert stats.accepted_branches[COPY] > 0


def test_a_small_tree_is_filled() -> None:
    """No node is left empty while the drafts have another one inside the grammar."""
    kept = tuple(request for request in requests() if request.grammar is not None)
    engine = engine_for("hybrid", kept, row_budget=9, errors=0.9)
    for request in kept:
        engine.submit(request)
    moved_up = 0
    for _ in range(12):
        running = engine.admit()
        prepared = engine.prepare(running)
        batch = prepared.batch
        engine.runner.context.inject(engine.policy.drafters)
        result = decode_step(engine.runner, engine.policy, batch)
        sources = sources_of(*result.drafted[:3])
        everything = replace(engine.policy, num_nodes=100).build(batch, sources)
        for row, one in enumerate(running):
            paths = drafted(everything, row)
            inside = [path for path in paths if is_inside(one.request, one.answer, path)]
            assert drafted(result.drafted.tree, row) == inside[:8]
            moved_up += inside[:8] != [path for path in paths[:8] if path in inside]
        engine.retire(Launched(prepared, result, result.read))
    assert moved_up > 2


@pytest.mark.slow
def test_guided_drafts_are_accepted_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same drafters, wrong nine times of ten."""
    kept = tuple(request for request in requests() if request.grammar is not None)
    guided = run("chain", kept, errors=0.9).tau
    monkeypatch.setattr(StepGrammar, "guide", lambda self, draft, width, branches=None: _first(draft, width))
    assert guided > 1.2 * run("chain", kept, errors=0.9).tau


def _first(draft: object, width: int) -> object:
    from d2sd.plugins.trees import Draft

    assert isinstance(draft, Draft)
    return Draft(draft.tokens[..., :width], draft.logprob[..., :width])
