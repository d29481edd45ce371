"""`echo` of /v1/completions: the prompt in front of the answer, with its log-probabilities as lm-eval reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from d2sd.bundle.load import Bundle
from tests.d2sd.serve.http import Running, serving
from tests.tiny import full_logits

PROMPTS = [[5, 7, 9, 11, 3], [31, 4], [6]]


@pytest.fixture(scope="module")
def server(tiny_bundle: Path) -> Iterator[Running]:
    with serving(tiny_bundle) as running:
        yield running


def complete(server: Running, **body: Any) -> Any:
    response = server.http.post("/v1/completions", json={"temperature": 0, "seed": 3, **body})
    assert response.status_code == 200, response.text
    return response.json()


def words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


@pytest.mark.parametrize("length", [0, 1, 6])
def test_log_probabilities_are_those_of_a_full_pass(server: Running, bundle: Bundle, length: int) -> None:
    found = complete(server, prompt=PROMPTS, echo=True, logprobs=2, max_tokens=length, return_token_ids=True)
    assert found["usage"]["completion_tokens"] == length * len(PROMPTS)
    assert found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] <= length * len(PROMPTS)
    for prompt, choice in zip(PROMPTS, found["choices"], strict=True):
        tokens, lists = [*prompt, *choice["token_ids"]], choice["logprobs"]
        assert len(tokens) == len(prompt) + length
        assert choice["finish_reason"] == "length"
        assert "prompt_logprobs" not in choice
        assert [text.strip() for text in lists["tokens"]] == [f"w{token}" for token in tokens]
        assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
        rows = full_logits(bundle.target, torch.tensor([tokens]))[0].log_softmax(-1)[:-1]
        own = [row[token].item() for row, token in zip(rows, tokens[1:], strict=True)]
        assert lists["token_logprobs"][1:] == pytest.approx(own, abs=1e-4)
        for row, top in zip(rows, lists["top_logprobs"][1:], strict=True):
            best = row.topk(2)
            assert list(top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)
            assert [name.strip() for name in top] == [f"w{token}" for token in best.indices.tolist()]
        assert choice["text"].replace(" ", "") == "".join(f"w{token}" for token in tokens)
        for text, offset in zip(lists["tokens"][: len(prompt)], lists["text_offset"], strict=False):
            assert choice["text"].startswith(text, offset)


def test_log_probabilities_are_the_prompt_logprobs_of_the_same_request(server: Running) -> None:
    body: dict[str, Any] = {"prompt": "w5 w7 w9 w11", "max_tokens": 3, "logprobs": 3}
    (echoed,) = complete(server, **body, echo=True)["choices"]
    (plain,) = complete(server, **body, prompt_logprobs=3)["choices"]
    assert echoed["text"] == body["prompt"] + plain["text"]
    for place, entry in enumerate(plain["prompt_logprobs"][1:], 1):
        own = next(iter(entry.values()))
        assert echoed["logprobs"]["tokens"][place] == own["decoded_token"]
        assert echoed["logprobs"]["token_logprobs"][place] == own["logprob"]
        best = {one["decoded_token"]: one["logprob"] for one in entry.values() if one["rank"] <= 3}
        assert echoed["logprobs"]["top_logprobs"][place] == best
    offset = len(body["prompt"]) - plain["logprobs"]["text_offset"][0]
    for name, values in plain["logprobs"].items():
        moved = [value + offset for value in values] if name == "text_offset" else values
        assert echoed["logprobs"][name][4:] == moved


@pytest.mark.parametrize("prompt", ["w5 w7", ["w5 w7", "w6"], [5, 7], [[5, 7], [6]]], ids=str)
@pytest.mark.parametrize("length", [0, 4])
def test_streams_and_whole_answers_begin_with_the_prompt(server: Running, prompt: Any, length: int) -> None:
    body = {"model": "tiny", "prompt": prompt, "n": 2, "temperature": 1.0, "seed": 8}
    plain = [one.text for one in server.openai.completions.create(**body, max_tokens=max(length, 1)).choices]
    sent = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    begun = [one if isinstance(one, str) else words(one) for one in sent for _ in range(2)]
    wanted = [text + (answer if length else "") for text, answer in zip(begun, plain, strict=True)]
    whole = server.openai.completions.create(**body, max_tokens=length, echo=True)
    assert [one.text.strip() for one in whole.choices] == wanted
    assert all(one.logprobs is None for one in whole.choices)
    streamed, ends = [""] * len(wanted), [""] * len(wanted)
    for chunk in server.openai.completions.create(**body, max_tokens=length, echo=True, stream=True):
        for one in chunk.choices:
            streamed[one.index] += one.text
            ends[one.index] = one.finish_reason or ends[one.index]
    assert streamed == [one.text for one in whole.choices]
    assert ends == [one.finish_reason for one in whole.choices]
    assert length or set(ends) == {"length"}


def test_lm_eval_reads_whether_a_continuation_is_greedy(server: Running) -> None:
    """As its `parse_logprobs` does: the token's own value is the largest of its alternatives."""
    (greedy,) = complete(server, prompt=[5, 7], max_tokens=4, return_token_ids=True, ignore_eos=True)["choices"]
    prompts = [[5, 7, *greedy["token_ids"]], [5, 7, *(63 - token for token in greedy["token_ids"])]]
    answers = complete(server, prompt=prompts, max_tokens=1, logprobs=1, echo=True)["choices"]
    for choice, wanted in zip(answers, (True, False), strict=True):
        values, top = (choice["logprobs"][name][2:-1] for name in ("token_logprobs", "top_logprobs"))
        assert len(values) == 4
        assert all(value == max(best.values()) for value, best in zip(values, top, strict=True)) == wanted
