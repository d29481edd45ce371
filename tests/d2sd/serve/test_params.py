"""The public sampling parameters: what reaches the engine, n and seeds, log-probabilities, refusals."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from d2sd import LLM, SamplingParams
from d2sd.bundle.requests import encode_bad_words
from d2sd.errors import RequestError

PROMPT = "w5 w7 w9"


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> LLM:
    return LLM(tiny_bundle, policy="hybrid", max_batch=4)


def ids(llm: LLM, **params: Any) -> list[int]:
    return llm.generate(PROMPT, SamplingParams(**{"max_tokens": 8, **params}))[0].token_ids


def test_a_drawn_seed_is_reported_and_gives_the_text_again(llm: LLM) -> None:
    first, second = (llm.generate(PROMPT, SamplingParams(1.5, max_tokens=8))[0] for _ in range(2))
    assert first.seed != second.seed
    assert 0 <= first.seed < 2**63
    assert ids(llm, temperature=1.5, seed=first.seed) == first.token_ids != second.token_ids


def test_n_completions_have_consecutive_seeds(llm: LLM) -> None:
    params = SamplingParams(1.5, seed=2**64 - 2, n=3, max_tokens=8)
    several, single = llm.generate([PROMPT, "w31"], [params, SamplingParams(max_tokens=2)])
    assert [one.index for one in several.outputs] == [0, 1, 2]
    assert [one.seed for one in several.outputs] == [2**64 - 2, 2**64 - 1, 0]
    with pytest.raises(RequestError, match="one completion"):
        next(llm.stream(PROMPT, params))
    assert several.outputs[0] is several
    assert single.outputs == [single]
    for one in several.outputs:
        assert one.token_ids == ids(llm, temperature=1.5, seed=one.seed)
        assert one.prompt_token_ids == several.prompt_token_ids
    assert len({tuple(one.token_ids) for one in several.outputs}) == 3


def test_logprobs_are_dictionaries_by_token(llm: LLM) -> None:
    (answer,) = llm.generate(PROMPT, SamplingParams(max_tokens=4, seed=1, logprobs=2, prompt_logprobs=0))
    assert answer.logprobs is not None
    assert answer.prompt_logprobs is not None
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(entry)) == token
        assert len(entry) == 2  # greedy: the chosen token is the likeliest
        assert [one.rank for one in entry.values()] == [1, 2]
        assert entry[token].decoded_token == f"w{token}"
        assert 0 > entry[token].logprob >= list(entry.values())[1].logprob
    first, *others = answer.prompt_logprobs
    assert first is None
    assert [list(entry or ()) for entry in others] == [[7], [9]]
    without = llm.generate(PROMPT, SamplingParams(max_tokens=4))[0]
    assert without.logprobs is without.prompt_logprobs is None


def test_parameters_reach_the_engine(llm: LLM) -> None:
    plain = ids(llm)
    assert ids(llm, logit_bias={33: 100}) == [33] * 8
    assert plain[0] not in ids(llm, logit_bias={plain[0]: -100})
    banned = ids(llm, bad_words=[f"w{plain[0]} w{plain[1]}"])
    assert banned[0] == plain[0]
    assert banned[1] != plain[1]
    assert ids(llm, temperature=0.7, top_k=-1, seed=3) == ids(llm, temperature=0.7, seed=3)
    assert ids(llm, temperature=5.0, min_p=1.0) == plain
    assert len(set(ids(llm, repetition_penalty=50.0))) > len(set(ids(llm, repetition_penalty=0.1)))
    assert len(set(ids(llm, frequency_penalty=-2.0, presence_penalty=-2.0))) < len(set(ids(llm, presence_penalty=2.0)))


def test_stop_tokens(llm: LLM) -> None:
    hot = SamplingParams(2.0, seed=5, max_tokens=8)
    plain = llm.generate(PROMPT, hot)[0]
    stop = plain.token_ids[2]
    assert stop not in plain.token_ids[:2]
    cut = llm.generate(PROMPT, replace(hot, stop_token_ids=[stop]))[0]
    assert (cut.token_ids, cut.finish_reason) == (plain.token_ids[:3], "stop")
    shown = llm.generate(PROMPT, replace(hot, stop_token_ids=[stop], include_stop_str_in_output=True))[0]
    assert shown.text.split() == [*cut.text.split(), f"w{stop}"]
    assert ids(llm, logit_bias={2: 100}) == [2]  # the target's own stop token
    assert ids(llm, logit_bias={2: 100}, ignore_eos=True) == [2] * 8
    later = ids(llm, logit_bias={2: 100}, min_tokens=3)
    assert len(later) == 4
    assert later.index(2) == 3


def test_a_stop_string_may_be_part_of_the_text(llm: LLM) -> None:
    whole = llm.generate(PROMPT, SamplingParams(max_tokens=8))[0].text
    stop = whole.split()[2]
    shown = llm.generate(PROMPT, SamplingParams(max_tokens=8, stop=stop, include_stop_str_in_output=True))[0].text
    assert shown == whole[: whole.index(stop) + len(stop)]


def test_bad_words_are_encoded_alone_and_after_a_space() -> None:
    """The second form counts, as in vLLM, where it has as many tokens and another first one."""
    known = {"ab": [1, 2], " ab": [3, 2], "cd": [4], " cd": [9, 4], "e": [5], " e": [5], "": [], " ": [6]}

    def tokenizer(texts: list[str], add_special_tokens: bool) -> SimpleNamespace:
        assert not add_special_tokens
        return SimpleNamespace(input_ids=[known[text] for text in texts])

    assert encode_bad_words(tokenizer, ["ab", " cd", "e"]) == [[1, 2], [3, 2], [4], [5]]
    with pytest.raises(RequestError, match="bad_words"):
        encode_bad_words(tokenizer, [" "])


FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTEGERS = ("top_k", "n", "min_tokens", "thinking_token_budget", "seed", "max_tokens", "logprobs", "prompt_logprobs")
FLAGS = ("ignore_eos", "include_stop_str_in_output")
LISTS = ("stop", "bad_words", "bad_words_token_ids", "stop_token_ids", "logit_bias")
OPTIONAL = ("seed", "max_tokens", "thinking_token_budget", "logprobs", "prompt_logprobs", "structured_outputs")
WRONG: dict[tuple[str, ...], list[Any]] = {
    FLOATS: ["1", True, None, [1.0], 1j, b"1", np.array([0.5, 0.5]), ..., float("nan"), 10**400],
    INTEGERS: ["1", True, 1.5, 1.0, [1], np.float64(1), np.True_, ..., float("inf")],
    FLAGS: ["yes", 1, 0.0, None, [], np.int64(1)],
    LISTS: [5, 0.5, True, ..., None, [None], {1: "a"}, {"a": 1}, np.array([0.5])],
    ("stop", "bad_words"): [[5], b"a", ["a", None], [b"a"], {"a"}],
    ("stop", "bad_words", "stop_token_ids", "logit_bias"): [[[1]]],
    ("bad_words_token_ids",): [["a"], [["a"]], [[1.0]], [[True]]],
    ("stop_token_ids",): ["12", [1.0], ["1"], [True], np.array(1)],
    ("logit_bias",): [[(1, 2.0)], {1.5: 1}, {1: True}, {True: 1}, {1: None}, {1: float("nan")}, {None: 1}],
    ("structured_outputs",): ["json", {"json": "{}"}, True],
    ("speculative",): ["off", 0, None, [], {"policy": 1}, {"rows": 1}],
    tuple(name for name in INTEGERS if name not in OPTIONAL): [None],
}


OUTSIDE: list[tuple[str, Any]] = [
    ("seed", -1),
    ("seed", 2**64),
    ("n", 0),
    ("n", 129),
    ("max_tokens", 0),
    ("stop", ("a", "")),
    ("top_k", -2),
    ("stop", "a\ud800"),
    ("bad_words", ["\udfff"]),
    ("bad_words", ("",)),
    ("temperature", 100.0),
    ("top_p", 1.5),
    ("min_p", 1.1),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 1e-40),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -3.0),
    ("logit_bias", {1: 101.0}),
    ("min_tokens", -1),
    ("thinking_token_budget", -2),
    ("logprobs", -1),
    ("logprobs", 21),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("speculative", {}),
]


@pytest.mark.parametrize(
    ("field", "value"),
    [*OUTSIDE, *((name, value) for names, values in WRONG.items() for name in names for value in values)],
    ids=str,
)
def test_a_refusal_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.where == field


def test_every_field_is_checked() -> None:
    names = {name for names in WRONG for name in names}
    assert names == {one.name for one in fields(SamplingParams)}
    for name in OPTIONAL:
        assert getattr(SamplingParams(**{name: cast("Any", None)}), name) is None


def test_numbers_of_numpy_and_torch() -> None:
    numbers: dict[str, Any] = {
        "temperature": np.float32(0.5),
        "top_p": np.float64(0.5),
        "top_k": np.int64(3),
        "seed": torch.tensor(5),
        "max_tokens": np.uint8(7),
        "stop_token_ids": np.array([1, 2]),
        "logit_bias": {np.int64(3): np.float16(2)},
        "ignore_eos": np.True_,
        "min_p": 0,
        "n": np.int32(2),
    }
    given = SamplingParams(**numbers)
    assert given == SamplingParams(
        0.5, 0.5, 3, 5, 7, stop_token_ids=(1, 2), logit_bias={3: 2.0}, ignore_eos=True, min_p=0.0, n=2
    )
    for name in (*FLOATS, *INTEGERS):
        assert type(getattr(given, name)) in (int, float, type(None))


def test_as_many_stop_tokens_as_are_allowed(llm: LLM) -> None:
    """The target has its own, besides."""
    assert ids(llm, stop_token_ids=range(1000, 5096))


@pytest.mark.parametrize(
    ("field", "largest", "one_more"),
    [
        ("stop", ["a" * 1024] * 64, ["a"] * 65),
        ("stop", "a" * 1024, "a" * 1025),
        ("bad_words", ["w5"] * 1024, ["w5"] * 1025),
        ("bad_words", ["a" * 32768], ["a" * 32768, "a"]),
        ("stop_token_ids", range(4096), range(4097)),
        ("logit_bias", dict.fromkeys(range(32768), 1.0), dict.fromkeys(range(32769), 1.0)),
        ("n", 128, 129),
        ("repetition_penalty", 0.01, 0.0099),
        ("repetition_penalty", 100.0, 100.1),
    ],
)
def test_what_a_request_carries_is_bounded(field: str, largest: object, one_more: object) -> None:
    SamplingParams(**{field: largest})  # type: ignore[arg-type]
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: one_more})  # type: ignore[arg-type]
    assert caught.value.where == field
    assert len(str(caught.value)) < 1000
