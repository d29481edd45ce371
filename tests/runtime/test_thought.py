"""The budget of a thought: its end is forced where plain decoding forces it, anywhere in a step and its tree."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from d2sd.errors import RequestError
from d2sd.runtime import thought
from d2sd.runtime.request import Request
from d2sd.runtime.sampling.penalties import Text
from d2sd.runtime.sampling.sample import Sampling, token_scores
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.thought import Markers
from tests.runtime.cheating import Knowing
from tests.runtime.helpers import BLOCK, all_pages, cheater, expected, free_pages, honest, make_engine, placed, plain
from tests.runtime.helpers import run_staggered as staggered
from tests.runtime.oracle import forced
from tests.runtime.recorded_graphs import RecordedGraphs
from tests.runtime.soak import Thirds
from tests.tiny import CASES

VOCAB = 6
THINK = Markers("", "", 1, 2)


def test_a_step_forces_the_end_behind_every_text() -> None:
    """All of a text or its beginning is known, and the rest is a path of the step's tree: the scores are the same."""
    dice, seen = random.Random(1), set[tuple[bool, bool]]()
    for _ in range(1_500):
        text = dice.choices(range(VOCAB), (3, 3, 1, 1, 1, 1), k=dice.randrange(1, 12))
        prompt_len = dice.randrange(1, len(text) + 1)
        budget = max(0, len(text) - prompt_len - dice.randrange(4))
        logits = torch.randn(1, VOCAB)
        wanted = forced(text, prompt_len, budget, THINK)
        for known in range(prompt_len, len(text) + 1):
            params = SamplingParams(thinking_token_budget=budget)
            sampling = Sampling.of([params], VOCAB, "cpu", [Text(text[:known], prompt_len, markers=THINK)])
            for token in text[known:]:
                sampling = sampling.after(torch.tensor([token]))
            scores = token_scores(logits, torch.tensor([len(text)]), sampling, None)
            if wanted is None:
                assert torch.equal(scores, logits), (text, prompt_len, budget, known)
            else:
                assert scores[0].softmax(-1).tolist() == [0, 0, 1, 0, 0, 0], (text, prompt_len, budget, known)
            seen.add((wanted is not None, known < len(text)))
    assert len(seen) == 4


def test_a_budget_costs_nothing_until_it_ends() -> None:
    """So steps stay graphs: the table is empty while no step reaches the place, and behind it."""
    text = [5, 1, *[3] * 2000]
    for known in range(2, len(text), 7):
        params = SamplingParams(thinking_token_budget=1000)
        sampling = Sampling.of([params], VOCAB, "cpu", [Text(text[:known], 2, markers=THINK)])
        assert sampling.changes_logits == (1002 - thought._REACH < known <= 1002)
        assert sampling.changes_logits or sampling.is_argmax


LENGTH = 12


@cache
def requests() -> list[Request]:
    """Thoughts that begin in the prompt, at its end or before a token of white space, or with the answer's first or
    second token; each budget of every place in the first steps; thoughts that end before, by themselves, and after.
    """
    found = list[Request]()
    for prompt, heat in (((3, 9, 41), 0.0), ((17, 5), 0.8)):
        for budget in range(LENGTH):
            params = SamplingParams(heat, seed=1000 + len(found), thinking_token_budget=budget)
            text = plain(prompt, replace(params, thinking_token_budget=None), LENGTH)
            begin = (prompt[-1], prompt[-2], text[0], text[1])[budget % 4]
            end = next(token for token in text[2:] if token != begin) if budget % 3 == 0 else 62
            found.append(Request(prompt, LENGTH, params, markers=Markers("", "", begin, end)))
    return found


def test_budgets_change_the_texts() -> None:
    """And the oracle keeps them: no thought has more tokens than its budget and its markers."""
    changed = 0
    for request in requests():
        assert request.markers is not None
        answer, budget = expected(request), request.sampling.thinking_token_budget or 0
        assert request.markers.tokens(request.prompt, answer) <= budget + 3
        free = replace(request, sampling=replace(request.sampling, thinking_token_budget=None))
        changed += answer != expected(free)
    assert changed > len(requests()) / 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pages", [None, 9])
@pytest.mark.parametrize("case", CASES)
def test_trees_keep_the_budget(case: str, pages: int | None) -> None:
    """In a batch, after preemption and behind cached prefixes; two thirds of the drafts are what the oracle says."""
    engine = make_engine(cheater(requests(), case), case, max_batch=6, pages=pages)
    sequences = staggered(engine, requests(), gap=0 if pages else 1)
    for request, sequence in zip(requests(), sequences, strict=True):
        assert sequence.answer == expected(request), request
    assert any(s.stats.preemptions for s in sequences) == (pages is not None)
    assert free_pages(engine) == all_pages(engine)


@pytest.mark.usefixtures("layers_of_pytorch")
@pytest.mark.parametrize("reach", [2 * BLOCK, 0])
def test_graphs_run_until_the_budget_ends(reach: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is launched before the tokens of the last one are read ends no thought; else this would show."""
    monkeypatch.setattr(thought, "_REACH", reach)
    prompt, end = (3, 9, 41), next(t for t in range(64) if t not in plain((3, 9, 41), SamplingParams(seed=1), 30))
    asked = [
        Request(prompt, 34, SamplingParams(seed=n, thinking_token_budget=n), markers=Markers("", "", prompt[-1], end))
        for n in range(20, 26)
    ]
    texts = {r.seed: [*r.prompt, *expected(r)] for r in asked}
    graphs = RecordedGraphs(rerun=True)
    engine = graphs.guard(make_engine(Knowing(*placed("chain"), texts), "chain", max_batch=1))
    right = [sequence.answer for sequence in engine.generate(asked)] == [expected(r) for r in asked]
    assert right == (reach > 0)
    assert engine.stats.steps / 3 < graphs.replays < engine.stats.steps or not right


@pytest.mark.parametrize("end", [5, 6])
def test_a_demanded_form_comes_first(end: int) -> None:
    """A grammar that leaves no room for the end, as this one for 5 in the third place, goes on without it."""
    params = SamplingParams(seed=4, thinking_token_budget=2)
    request = Request((3, 9), 9, params, grammar=Thirds(), markers=Markers("", "", 9, end))
    free = replace(request, sampling=SamplingParams(seed=4))
    (found,), (other,) = (make_engine(honest(), "chain").generate([one]) for one in (request, free))
    assert found.finish == "length"
    assert (found.answer == other.answer) == (end == 5)
    assert (found.answer[2] == end) == (end == 6)


@pytest.mark.parametrize("markers", [None, Markers("", "", 1, 64)])
def test_models_without_markers_are_refused(markers: Markers | None) -> None:
    request = Request((1,), 9, SamplingParams(thinking_token_budget=3), markers=markers)
    with pytest.raises(RequestError, match=r"think|vocabulary") as refused:
        make_engine(honest(), "off").submit(request)
    assert refused.value.where == "thinking_token_budget"
