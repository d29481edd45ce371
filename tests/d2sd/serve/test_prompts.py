"""Prompts of every form that vLLM takes, and errors of ours for everything else."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from d2sd import LLM, BundleError, D2SDError, RequestError, SamplingParams, StructuredOutputsParams
from d2sd.serve.prompts import prompt_inputs

USER = {"role": "user", "content": "w5"}
GOOD = SamplingParams(max_tokens=2)


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> LLM:
    return LLM(tiny_bundle, policy="off")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("w5", ["w5"]),
        (["w5", "w6"], ["w5", "w6"]),
        ([5, 7], [(5, 7)]),
        ((5, 7), [(5, 7)]),
        ([[5, 7], (9,)], [(5, 7), (9,)]),
        ({"prompt_token_ids": [5, 7]}, [(5, 7)]),
        ([{"prompt_token_ids": (5,)}, {"prompt": "w5"}, "w6", [7]], [(5,), "w5", "w6", (7,)]),
        (UserDict(prompt_token_ids=[5]), [(5,)]),
        (range(5, 8), [(5, 6, 7)]),
        (np.array([5, 7]), [(5, 7)]),
        (np.array([[5, 7], [9, 3]], np.uint8), [(5, 7), (9, 3)]),
        ([np.int64(5), np.int32(7)], [(5, 7)]),
        ({"prompt_token_ids": torch.tensor([5, 7])}, [(5, 7)]),
        ([torch.tensor([5])], [(5,)]),
        ([], []),
        ([[]], [()]),
    ],
)
def test_every_form_of_a_prompt(given: Any, expected: list[object]) -> None:
    assert prompt_inputs(given) == expected


def test_token_ids_give_the_answer_of_their_text(llm: LLM) -> None:
    (text,) = llm.generate("w5 w7", GOOD)
    for prompt in ([5, 7], {"prompt_token_ids": [5, 7]}, [[5, 7]], {"prompt": "w5 w7"}):
        (answer,) = llm.generate(prompt, GOOD)  # type: ignore[arg-type]
        assert (answer.prompt_token_ids, answer.token_ids) == ([5, 7], text.token_ids)
    assert "".join(llm.stream([5, 7], GOOD)) == text.text
    assert "".join(llm.stream({"prompt_token_ids": [5, 7]}, GOOD)) == text.text


WRONG: list[object] = [
    5,
    0.5,
    None,
    True,
    b"w5",
    ...,
    {5},
    {},
    {"prompt": 5},
    {"prompt_token_ids": "w5"},
    {"text": "w5"},
]
WRONG += [{"prompt": "w5", "prompt_token_ids": [5]}, {"prompt_token_ids": None}, np.array([0.5]), np.array(5)]


@pytest.mark.parametrize(
    "wrong", [*WRONG, [5, "w5"], ["w5", 5], [5, True], [5.0], [[5, "w5"]], [["w5"]], [[[5]]]], ids=str
)
def test_what_is_no_prompt(llm: LLM, wrong: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(wrong)
    with pytest.raises(RequestError, match=r"prompt|message"):
        next(llm.stream(wrong))


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_prompt_among_others_is_named(llm: LLM, wrong: Any) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(["w5", wrong])
    assert str(caught.value.where).startswith("prompts[1]")


@pytest.mark.parametrize("token", [-1, 64, 2**31, 2**63, -(2**70), 10**400])
def test_a_token_outside_the_vocabulary(llm: LLM, token: int) -> None:
    for prompt in ([token], [[5], [5, token]], {"prompt_token_ids": [token]}):
        with pytest.raises(RequestError, match="outside the vocabulary"):
            llm.generate(prompt, GOOD)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="is empty"):
        llm.generate([[]], GOOD)


CONVERSATIONS: list[object] = [5, None, "w5", b"w5", USER, {}, [], [5], ["w5"], [{}], [{"role": "user"}], [USER, None]]
CONVERSATIONS += [[{"content": "w5"}], [USER, [USER]], [{"role": 5, "content": "w5"}], [[USER], []], [[5]]]
CONVERSATIONS += [[{"role": "user", "content": 5}]]
TOOLS: list[object] = [5, "x", {}, [5], ["x"], {"type": "function"}]
PARAMS: list[object] = [5, "x", {"temperature": 1}, [5], [None], [{"n": 1}], SamplingParams]
NAMED: list[tuple[str, Any, list[object]]] = [
    ("messages", lambda llm, wrong: llm.chat(wrong, GOOD), CONVERSATIONS),
    ("tools", lambda llm, wrong: llm.chat([USER], GOOD, wrong), TOOLS),
    ("sampling_params", lambda llm, wrong: llm.generate(["w5"], wrong), PARAMS),
    ("sampling_params", lambda llm, wrong: llm.chat([USER], wrong), PARAMS),
    ("sampling_params", lambda llm, wrong: next(llm.stream("w5", wrong)), PARAMS),
]


@pytest.mark.parametrize(("name", "call", "wrong"), [(*one, value) for *one, all in NAMED for value in all])
def test_a_wrong_argument_of_a_call_is_named(llm: LLM, name: str, call: Any, wrong: object) -> None:
    with pytest.raises(RequestError, match=name):
        call(llm, wrong)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("model", [5, None, b"x", ["x"]]),
        ("policy", ["fast", "", 5, True, "AUTO"]),
        ("backend", ["x", None, 5, "cuda"]),
        ("device", ["gpu", "", None, 5, "cuda:-1", "cpu:0", "cuda:9"]),
        ("max_batch", ["2", 0, -1, 1.5, True, 2**31, 10**23, float("nan"), [2]]),
        ("verify", ["no", 1, None]),
    ],
)
def test_a_wrong_argument_of_llm_is_named(tiny_bundle: Path, name: str, wrong: list[Any]) -> None:
    for value in wrong:
        with pytest.raises(D2SDError) as caught:
            LLM(**{"model": tiny_bundle, name: value})
        assert caught.value.where == name
        assert caught.value.found is not None


def test_a_folder_as_text_and_a_batch_as_numpys_number(tiny_bundle: Path) -> None:
    llm = LLM(str(tiny_bundle), policy="off", max_batch=np.int64(3))
    assert llm._session.open()[1].limits.max_batch == 3
    assert repr(llm) == f"LLM({str(tiny_bundle)!r}, policy='off', device='cpu', backend='torch')"


def test_a_schema_class_is_told_from_a_schema(llm: LLM) -> None:
    class Answer(BaseModel):
        city: str

    for wrong in (Answer, Answer(city="w5")):
        with pytest.raises(RequestError, match="This is not a JSON schema") as refused:
            StructuredOutputsParams(json=wrong)  # type: ignore[arg-type]
        assert (refused.value.found, refused.value.fix) == ("Answer", "pass json=Answer.model_json_schema()")
    with pytest.raises(RequestError, match=r"This is not a JSON schema(.|\n)*found: int\Z"):
        StructuredOutputsParams(json=5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="This is not text"):
        StructuredOutputsParams(regex=Answer)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["org/model", "meta-llama/Llama-3.1-8B"])
def test_the_name_of_a_model_is_not_a_bundle(name: str) -> None:
    with pytest.raises(BundleError, match="the folder of a bundle, which d2sd build makes"):
        LLM(name)


def test_chat_joins_parts_of_text_and_refuses_images(llm: LLM) -> None:
    parts = [{"type": "text", "text": "w5"}, {"type": "text", "text": " w7"}]
    params = SamplingParams(max_tokens=6)
    (joined,), (whole,) = (llm.chat([{"role": "user", "content": content}], params) for content in (parts, "w5 w7"))
    assert joined.token_ids == whole.token_ids
    with pytest.raises(RequestError, match="Images are not supported"):
        llm.chat([{"role": "user", "content": [*parts, {"type": "image_url", "image_url": {"url": "x"}}]}])
