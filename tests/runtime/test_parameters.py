"""Every sampling parameter with every policy: speculation writes what plain decoding writes, by an oracle in Python."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from d2sd.errors import RequestError
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from tests.runtime.helpers import cheater, expected, honest, make_engine, models, plain, run_staggered
from tests.tiny import full_logits

PROMPT, LENGTH = (3, 9, 3, 41, 17), 14


def made_of(name: str, heat: float) -> SamplingParams:
    """One parameter, at a value that changes the text; those that ban or favour tokens take them from the plain one."""
    seed = 100 * (1 + list(KINDS).index(name)) + round(10 * heat)
    base = SamplingParams(temperature=heat, seed=seed)
    text = plain(PROMPT, base, LENGTH)
    value = KINDS[name]
    return replace(base, **(value(text) if callable(value) else value))


def _biased(text: tuple[int, ...]) -> dict[str, Any]:
    return {"logit_bias": {text[0]: -100.0, text[3]: 1.5, text[7]: -2.0, 5: 0.5}}


def _banned(text: tuple[int, ...]) -> dict[str, Any]:
    """One token; a pair that begins in the prompt; a pair and a triple inside the text; one that never occurs."""
    return {"bad_words_token_ids": ((text[9],), (PROMPT[-1], text[0]), text[2:4], text[5:8], (1, 2, 3, 4))}


KINDS: dict[str, Any] = {
    "repetition": {"repetition_penalty": 2.0},
    "encouraged repetition": {"repetition_penalty": 0.4},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 2.0},
    "favoured": {"frequency_penalty": -2.0, "presence_penalty": -2.0},
    "bias": _biased,
    "bad words": _banned,
    "min tokens": {"min_tokens": 8},
    "min-p": {"min_p": 0.3},
    "top-p": {"top_p": 0.6},
    "top-k": {"top_k": 3},
    "all": lambda text: (
        _biased(text)
        | _banned(text)
        | {
            "repetition_penalty": 1.2,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.3,
            "min_tokens": 5,
            "min_p": 0.02,
            "top_p": 0.9,
            "top_k": 30,
            "logprobs": 2,
        }
    ),
}
FILTERS = {"min-p", "top-p", "top-k"}


@cache
def requests(every: bool = False) -> dict[str, Request]:
    """Two that use no parameter and one of each kind, greedy and sampled in turn; with `every`, both of each kind."""
    found = {
        "plain": Request(PROMPT, LENGTH, SamplingParams(seed=1)),
        "hot": Request(PROMPT, LENGTH, SamplingParams(1.0, seed=77)),
    }
    for place, name in enumerate(KINDS):
        heats = (0.9,) if name in FILTERS else (0.0, 0.7)
        for heat in heats if every or name == "all" else heats[place % len(heats) :][:1]:
            sampling = made_of(name, heat)
            text = plain(PROMPT, replace(sampling, min_tokens=0), LENGTH)
            stop = frozenset(text[2:12:4]) if sampling.min_tokens else frozenset()
            found[f"{name} T={heat}"] = Request(PROMPT, LENGTH, sampling, stop)
    return found


def answer(request: Request) -> list[int]:
    """The oracle's text up to the stop token that may end it."""
    text = expected(request)
    ends = [n for n, t in enumerate(text, 1) if t in request.stop_tokens and n > request.sampling.min_tokens]
    return text[: ends[0]] if ends else text


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_parameter_changes_the_text(every: bool) -> None:
    unchanged = []
    for name, request in requests(every).items():
        free = SamplingParams(request.sampling.temperature, seed=request.seed)
        if request.sampling != free and answer(request) == answer(replace(request, sampling=free)):
            unchanged.append(name)
    assert unchanged == []


@pytest.mark.parametrize("policy", ["off", "hybrid"])
def test_every_parameter_is_the_oracles(policy: str) -> None:
    """Alone one token a step, and in trees beside others; test_differential.py has the other policies."""
    named = requests(every=policy == "off")
    engine = make_engine(cheater(list(named.values()), policy), policy, max_batch=1 if policy == "off" else 8)
    for (name, request), sequence in zip(named.items(), run_staggered(engine, [*named.values()], gap=1), strict=True):
        assert sequence.answer == answer(request), name
        assert sequence.finish == ("stop" if sequence.answer[-1] in request.stop_tokens else "length"), name


# --- Log-probabilities --------------------------------------------------------------------------------------------


def check_logprobs(tokens: list[int], first: int, found: SequenceOf[Any], width: int) -> None:
    """Against one causal pass over `tokens`: entry i is of the token at position first + i."""
    logprobs = full_logits(models()[0], torch.tensor([tokens]))[0].double().log_softmax(-1)
    for place, entry in enumerate(found, first):
        row = logprobs[place - 1]
        assert entry.token == tokens[place]
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
        assert entry.rank == int((row > row[entry.token]).sum()) + 1
        best = row.topk(width)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("policy", "pages"), [("off", None), ("chain", 16), ("hybrid", None), ("d2sd", 16)])
def test_logprobs_are_those_of_a_full_pass(policy: str, pages: int | None) -> None:
    """Raw ones, whatever changes the choice; of the answer and of prompts of one token and of several chunks."""
    dice = random.Random(3)
    kinds = [
        SamplingParams(seed=1, logprobs=3, prompt_logprobs=2),
        SamplingParams(0.8, 0.9, seed=2, logprobs=0, repetition_penalty=1.3),
        SamplingParams(1.0, seed=3, prompt_logprobs=0),
        SamplingParams(seed=4, logprobs=5, logit_bias={3: 9.0}, prompt_logprobs=1),
        SamplingParams(seed=5),
    ]
    prompts = [tuple(dice.randrange(64) for _ in range(length)) for length in (21, 7, 18, 1, 9)]
    asked = [Request(prompt, 16, kind) for prompt, kind in zip(prompts, kinds, strict=True)]
    engine = make_engine(cheater(asked), policy, max_batch=5, pages=pages, prefill_chunk=8)
    sequences = run_staggered(engine, asked, gap=1)
    assert any(s.stats.preemptions for s in sequences) == (pages is not None)
    for request, sequence in zip(asked, sequences, strict=True):
        assert sequence.answer == expected(request)
        params = request.sampling
        assert len(sequence.logprobs) == (0 if params.logprobs is None else 16)
        assert len(sequence.prompt_logprobs) == (len(request.prompt) - 1 if params.prompt_logprobs is not None else 0)
        check_logprobs(sequence.tokens, len(request.prompt), sequence.logprobs, params.logprobs or 0)
        check_logprobs(sequence.tokens, 1, sequence.prompt_logprobs, params.prompt_logprobs or 0)


def test_outputs_carry_the_logprobs_of_their_tokens() -> None:
    engine = make_engine(honest(), "chain")
    request = Request((1, 2, 3), 9, SamplingParams(logprobs=1))
    outputs = list(engine.stream([request, Request((4, 5), 9)]))
    for output in outputs:
        wanted = output.tokens if output.sequence.request is request else ()
        assert [entry.token for entry in output.logprobs] == list(wanted)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bad_words", ["a"]),
        ("bad_words_token_ids", ((1,),) * 2_049),
        ("bad_words_token_ids", ((1,) * 1_025,)),
        ("bad_words_token_ids", ((1,) * 1_000,) * 33),
        ("logit_bias", {64: 1.0}),
        ("bad_words_token_ids", ((),)),
        ("bad_words_token_ids", ((1, 64),)),
        ("min_tokens", 10),
    ],
)
def test_a_refusal_names_the_parameter(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        make_engine(honest(), "off").submit(Request((1,), 9, SamplingParams(**{field: value})))  # type: ignore[arg-type]
    assert caught.value.where == field


def test_prompt_logprobs_are_computed_for_cached_prefixes_too() -> None:
    """The second request finds the first one's pages and may not use them; a third without them does."""
    prompt = tuple(range(20, 40))
    engine = make_engine(honest(), "chain", prefill_chunk=8)
    asking = Request(prompt, 4, SamplingParams(prompt_logprobs=1))
    for request, hits in ((Request(prompt, 4), False), (asking, False), (Request(prompt, 4), True)):
        (sequence,) = engine.generate([request])
        assert (sequence.stats.cached_tokens > 0) == hits
        check_logprobs(sequence.tokens, 1, sequence.prompt_logprobs, 1)
        assert len(sequence.prompt_logprobs) == (19 if request is asking else 0)


def test_prompt_logprobs_are_no_work_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logprobs stay packed until read: the engine's thread would make objects while all requests wait."""
    engine = make_engine(honest(), "chain", prefill_chunk=8)
    with monkeypatch.context() as patch:
        patch.setattr("d2sd.runtime.sampling.logprobs.unpack_logprobs", None)
        (sequence,) = engine.generate([Request(tuple(range(20, 45)), 4, SamplingParams(prompt_logprobs=3))])
    whole = list(sequence.prompt_logprobs)
    assert len(sequence.prompt_logprobs) == len(whole) == 24
    assert sequence.prompt_logprobs[-4:] == whole[-4:]
    assert [sequence.prompt_logprobs[index] for index in (0, 7, 23, -1)] == [whole[i] for i in (0, 7, 23, 23)]
    with pytest.raises(IndexError):
        sequence.prompt_logprobs[24]
