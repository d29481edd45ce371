"""The contract of OpenAI's API, held by its own client; answers are those of the Python API."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
import torch

from d2sd import LLM, SamplingParams
from d2sd.bundle.load import Bundle
from tests.d2sd.serve.http import Running
from tests.tiny import full_logits

USER: Any = {"role": "user", "content": "w5 w7"}


def test_a_chat_equals_the_python_api(server: Running, llm: LLM) -> None:
    found = server.openai.chat.completions.create(
        model="tiny", messages=[{"role": "system", "content": "w1"}, USER], temperature=0.8, seed=5, max_tokens=9
    )
    (expected,) = llm.chat(
        [{"role": "system", "content": "w1"}, USER], SamplingParams(temperature=0.8, seed=5, max_tokens=9)
    )
    choice = found.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert (choice.finish_reason, choice.index) == (expected.finish_reason, 0)
    assert found.object == "chat.completion"
    assert found.model == "tiny"
    assert found.id.startswith("chatcmpl-")
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert found.usage.completion_tokens == len(expected.token_ids)
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    details = found.usage.completion_tokens_details
    assert details is not None
    steps = expected.stats.steps
    assert details.accepted_prediction_tokens in (len(expected.token_ids) - steps, len(expected.token_ids) - steps + 1)
    assert details.rejected_prediction_tokens


def test_a_stream_adds_up(server: Running) -> None:
    options: Any = {"model": "tiny", "messages": [USER], "seed": 3, "temperature": 1.0, "max_tokens": 12}
    whole = server.openai.chat.completions.create(**options)
    chunks = list(server.openai.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    raw = server.http.post("/v1/chat/completions", json=options | {"stream": True})
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.text.endswith("data: [DONE]\n\n")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("prompt", ["w5 w7 w9", [5, 7, 9], ["w5 w7 w9", "w31"], [[5, 7, 9], [31]]])
@pytest.mark.parametrize("stream", [False, True])
def test_completions_take_text_and_tokens(server: Running, llm: LLM, prompt: Any, stream: bool) -> None:
    texts = ["w5 w7 w9", "w31"][: 1 if prompt in ("w5 w7 w9", [5, 7, 9]) else 2]
    expected = [answer.text for answer in llm.generate(texts, SamplingParams(max_tokens=8))]
    found = server.openai.completions.create(model="tiny", prompt=prompt, max_tokens=8, stream=stream)
    if isinstance(found, openai.Stream):
        parts = [""] * len(texts)
        for chunk in found:
            parts[chunk.choices[0].index] += chunk.choices[0].text
        assert parts == expected
    else:
        assert [choice.text for choice in found.choices] == expected
        assert found.object == "text_completion"


def test_n_answers_have_seeds_of_their_own(server: Running, llm: LLM) -> None:
    found = server.openai.chat.completions.create(
        model="tiny", messages=[USER], n=3, seed=7, temperature=1.0, max_tokens=10
    )
    seeds = [choice.model_extra["seed"] for choice in found.choices if choice.model_extra]
    assert len(set(seeds)) == 3
    for choice, seed in zip(found.choices, seeds, strict=True):
        (expected,) = llm.chat([USER], SamplingParams(temperature=1.0, seed=seed, max_tokens=10))
        assert choice.message.content == expected.text
    assert found.usage is not None
    assert found.usage.prompt_tokens == 4


def test_a_seed_that_is_left_out_is_fresh_and_reported(server: Running) -> None:
    options: Any = {"model": "tiny", "messages": [USER], "temperature": 1.0, "max_tokens": 12}
    first, second = (server.openai.chat.completions.create(**options).choices[0] for _ in range(2))
    assert first.model_extra is not None
    assert second.model_extra is not None
    assert first.model_extra["seed"] != second.model_extra["seed"]
    again = server.openai.chat.completions.create(**options, seed=first.model_extra["seed"])
    assert again.choices[0].message.content == first.message.content


def test_defaults_are_the_recipes(server: Running, llm: LLM) -> None:
    found = server.http.post("/v1/completions", json={"prompt": "w5 w7", "return_token_ids": True}).json()
    assert found["choices"][0]["token_ids"] == llm.generate("w5 w7")[0].token_ids
    assert found["system_fingerprint"].startswith("d2sd-")


def test_sixteen_clients_get_the_answers_of_the_python_api(server: Running, llm: LLM) -> None:
    prompts = [f"w{3 + i} w{9 + i}" for i in range(16)]
    params = [SamplingParams(temperature=i % 3 / 2, seed=i, max_tokens=6 + i) for i in range(16)]

    async def one(number: int) -> str:
        stream = await server.async_openai.completions.create(
            model="tiny",
            prompt=prompts[number],
            temperature=params[number].temperature,
            seed=number,
            max_tokens=6 + number,
            stream=True,
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everyone() -> list[str]:
        return await asyncio.gather(*map(one, range(16)))

    assert asyncio.run(everyone()) == [answer.text for answer in llm.generate(prompts, params)]


def test_models_and_tokens(server: Running) -> None:
    (model,) = server.openai.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert server.openai.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as raised:
        server.openai.models.retrieve("gpt")
    assert raised.value.code == "model_not_found"
    found = server.http.post("/tokenize", json={"prompt": "w5 w7"}).json()
    assert found == {"tokens": [5, 7], "count": 2, "max_model_len": 64}
    assert server.http.post("/tokenize", json={"messages": [USER]}).json()["tokens"] == [11, 5, 7, 12]
    assert server.http.post("/detokenize", json={"tokens": [5, 7]}).json() == {"prompt": "w5 w7"}
    assert server.http.get("/version").json()["model"] == "tiny"


def test_conversations_sent_back_by_the_client_are_accepted(server: Running) -> None:
    first = server.openai.chat.completions.create(model="tiny", messages=[USER], max_tokens=3)
    message: Any = first.choices[0].message.model_dump()
    parts: Any = {"role": "user", "content": [{"type": "text", "text": "w3 "}, {"type": "text", "text": "w4"}]}
    found = server.openai.chat.completions.create(model="tiny", messages=[USER, message, parts], max_tokens=3)
    assert found.usage is not None
    assert found.usage.prompt_tokens > 8


def test_logprobs_are_those_of_the_python_api(server: Running, llm: LLM) -> None:
    options: Any = {"model": "tiny", "temperature": 1.0, "seed": 4, "max_tokens": 6}
    (expected,) = llm.chat([USER], SamplingParams(temperature=1.0, seed=4, max_tokens=6, logprobs=2))
    assert expected.logprobs is not None
    found = server.openai.chat.completions.create(**options, messages=[USER], logprobs=True, top_logprobs=2)
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == len(expected.token_ids)
    for token, entry, wanted in zip(expected.token_ids, logprobs.content, expected.logprobs, strict=True):
        assert entry.token.strip() == f"w{token}"
        assert entry.logprob == pytest.approx(wanted[token].logprob, abs=1e-5)
        best = sorted((one.logprob for one in wanted.values()), reverse=True)[:2]
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(best, abs=1e-5)
    stream = server.openai.chat.completions.create(
        **options, messages=[USER], logprobs=True, top_logprobs=2, stream=True
    )
    streamed = [one for chunk in stream if (lp := chunk.choices[0].logprobs) for one in lp.content or ()]
    assert streamed == logprobs.content


def test_logprobs_of_completions_have_offsets_into_the_text(server: Running) -> None:
    found = server.openai.completions.create(
        model="tiny", prompt="w5 w7", max_tokens=6, logprobs=3, extra_body={"prompt_logprobs": 1}
    )
    choice = found.choices[0]
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
    assert tokens is not None
    assert offsets is not None
    assert len(tokens) == len(offsets) == len(choice.logprobs.token_logprobs or ()) == 6
    assert all(len(top) == 3 for top in choice.logprobs.top_logprobs or ())
    assert choice.model_extra is not None
    first, second = choice.model_extra["prompt_logprobs"]
    assert first is None
    assert second["7"]["decoded_token"].strip() == "w7"


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "extra",
    [
        {"min_p": 0.2},
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.5},
        {"logit_bias": {"56": -100, "18": 5.5}},
        {"bad_words": ["w56"]},
        {"min_tokens": 8},
        {"stop_token_ids": [56, 18]},
        {"ignore_eos": True},
        {"top_k": 3, "top_p": 0.9},
        {"stop": "w56", "include_stop_str_in_output": True},
    ],
    ids=str,
)
def test_every_parameter_reaches_the_engine(server: Running, llm: LLM, extra: dict[str, Any]) -> None:
    body = {"prompt": "w5 w7", "temperature": 1.0, "seed": 2, "max_tokens": 12, "return_token_ids": True, **extra}
    found = server.http.post("/v1/completions", json=body).json()["choices"][0]
    if "logit_bias" in extra:
        extra = {"logit_bias": {int(token): bias for token, bias in extra["logit_bias"].items()}}
    (expected,) = llm.generate("w5 w7", SamplingParams(temperature=1.0, seed=2, max_tokens=12, **extra))
    assert (found["token_ids"], found["text"]) == (expected.token_ids, expected.text)


PROMPTS = [[5, 7, 9, 11, 3], [31, 4], [6]]


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


@pytest.mark.sampled(3)
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
    """lm-eval's `parse_logprobs` takes a token for greedy when its value is the largest of its alternatives."""
    (greedy,) = complete(server, prompt=[5, 7], max_tokens=4, return_token_ids=True, ignore_eos=True)["choices"]
    prompts = [[5, 7, *greedy["token_ids"]], [5, 7, *(63 - token for token in greedy["token_ids"])]]
    answers = complete(server, prompt=prompts, max_tokens=1, logprobs=1, echo=True)["choices"]
    for choice, wanted in zip(answers, (True, False), strict=True):
        values, top = (choice["logprobs"][name][2:-1] for name in ("token_logprobs", "top_logprobs"))
        assert len(values) == 4
        assert all(value == max(best.values()) for value, best in zip(values, top, strict=True)) == wanted
