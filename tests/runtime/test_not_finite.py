"""Logits that are not finite numbers end the request that they belong to, and no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from d2sd.errors import UnexpectedError
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.policies import PolicyName
from d2sd.runtime.engine import Engine
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.sequence import Sequence
from tests.runtime.cheating import Knowing
from tests.runtime.helpers import BLOCK, all_pages, free_pages, make_engine
from tests.runtime.recorded_graphs import RecordedGraphs
from tests.runtime.soak import Thirds
from tests.tiny import of_case, runner_of, tiny_decoder, tiny_drafter, tiny_flex

KINDS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(1.0),
    "filtered": SamplingParams(1.0, top_p=0.9, top_k=20, min_p=0.01),
    "penalised": SamplingParams(0.8, repetition_penalty=1.2, logprobs=2),
}
HEALTHY = (Request((1, 2, 3), 14, SamplingParams(seed=1)), Request((4, 5), 14, SamplingParams(1.0, min_p=0.1, seed=2)))


def models(bad: int | None = None) -> tuple[Decoder, Drafter, Drafter, FlexHead]:
    """Arguments of a runner whose target makes NaN once it has read the token `bad`."""
    target = tiny_decoder("qwen3", layers=2, head_dim=16, tie=False)
    if bad is not None:
        with torch.no_grad():
            target.embed_tokens.weight[bad] = torch.nan
    first = tiny_drafter(target.config, block_size=BLOCK, layers=1)
    second = tiny_drafter(target.config, block_size=BLOCK, layers=1, role="variable_prefix", seed=2)
    return target, first, second, tiny_flex(target, block_size=BLOCK)


@cache
def plain(request: Request) -> list[int]:
    """The answer of the healthy target."""
    (sequence,) = make_engine(runner_of(*models()[:3]), "off").generate([request])
    return sequence.answer


def failing(kind: SamplingParams) -> tuple[Request, int, list[int]]:
    """A request, a token of its answer that no healthy one has, and the answer up to that token."""
    others = {token for one in HEALTHY for token in (*one.prompt, *plain(one))}
    for start in range(6, 64):
        request = Request((start,), 14, replace(kind, seed=9))
        answer = plain(request)
        first = [t for t in answer[3:11] if t not in {*others, start, *answer[:3]}]
        if start not in others and first:
            return request, first[0], answer[: answer.index(first[0]) + 1]
    raise AssertionError("no such request")


def check(kind: SamplingParams, policy: PolicyName, guard: Callable[[Engine], Engine] = lambda engine: engine) -> None:
    """The request answers up to the token that makes NaN, then ends; its neighbours keep their tokens."""
    request, bad, answer = failing(kind)
    asked = [HEALTHY[0], request, HEALTHY[1]]
    texts = {r.seed: [*r.prompt, *plain(r), *[0] * BLOCK] for r in asked}
    target, *drafters = models(bad)
    engine = guard(make_engine(Knowing(target, *of_case(policy, *drafters), texts), policy))
    first, failed, last = engine.generate(asked)
    assert [first.answer, last.answer] == [plain(HEALTHY[0]), plain(HEALTHY[1])]
    assert failed.answer == answer
    check_error(failed)
    while engine.busy:
        engine.step()
    assert free_pages(engine) == all_pages(engine)


def check_error(sequence: Sequence) -> None:
    assert sequence.finish == "error"
    assert isinstance(sequence.error, UnexpectedError)  # no fault of the request
    assert sequence.error.where == "logits"


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["off", "chain", "d2sd", "flex_parallel"])
def test_one_request_ends_and_its_neighbours_do_not_notice(kind: str, policy: PolicyName) -> None:
    check(KINDS[kind], policy)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["off", "d2sd", "flex_parallel"])
@pytest.mark.parametrize("kind", ["greedy", "filtered"])
def test_one_step_late_too(kind: str, policy: PolicyName) -> None:
    """The steps are graphs: the row ends on the device, and the host reads why with its tokens."""
    graphs = RecordedGraphs(rerun=True)
    check(KINDS[kind], policy, graphs.guard)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_does_not_hide_it(temperature: float) -> None:
    """Nor does it get the blame: it excludes a third of the tokens, and the message is not about it."""
    runner = runner_of(*models(7)[:3])
    request = Request((7, 1), 9, SamplingParams(temperature, seed=1), grammar=Thirds())
    check_error(make_engine(runner, "d2sd").generate([request])[0])


@pytest.mark.parametrize("grammar", [None, Thirds()])
def test_parameters_that_exclude_every_token_are_named(grammar: Thirds | None) -> None:
    banned = tuple((token,) for token in range(64))
    runner = runner_of(*models()[:3])
    params = SamplingParams(bad_words_token_ids=banned)
    (sequence,) = make_engine(runner).generate([Request((1,), 9, params, grammar=grammar)])
    assert sequence.finish == "error"
    assert "parameters" in str(sequence.error)
    assert ("grammar" in str(sequence.error)) == (grammar is not None)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_a_trace_shows_tokens_alone(value: float) -> None:
    """Readers of a trace look its tokens up in a vocabulary."""
    target, *drafters, _ = models()
    with torch.no_grad():
        assert target.lm_head is not None
        target.lm_head.weight[:] = value
    engine = make_engine(runner_of(target, *drafters), "d2sd")
    engine.record_trace = True
    engine.submit(Request((1,), 9))
    (output,) = engine.step()
    check_error(output.sequence)
    assert engine.trace is not None
    assert engine.trace.accepted.tokens.min() >= 0
