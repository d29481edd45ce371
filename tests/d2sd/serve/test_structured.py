"""Structured output and tool calls: forms that are refused, answers that parse, one grammar for a form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from d2sd import LLM, SamplingParams, StructuredOutputsParams
from d2sd.errors import GenerationError, RequestError
from d2sd.serve import structured
from d2sd.serve.openai.formats import ChatFormat
from d2sd.serve.openai.protocol import ChatBody
from d2sd.serve.structured import GrammarCompiler
from tests.d2sd.serve.conftest import build_tiny
from tests.d2sd.serve.http import Running, serving
from tests.runtime.grammar.tokens import END, tokenizer, vocab_size
from tests.tiny import tiny_decoder

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with a byte-level tokenizer in place of its words."""
    return build_tiny(
        tmp_path_factory.mktemp("structured"), decoder=tiny_decoder(vocab=vocab_size()), words=tokenizer()
    )


@pytest.fixture(scope="module")
def llm(bundle: Path) -> LLM:
    return LLM(bundle, policy="hybrid")


def ask(llm: LLM, count: int = 4, **form: Any) -> list[str]:
    """Answers at different temperatures to different prompts; all have ended."""
    params = [
        SamplingParams(temperature=n % 3 / 2, seed=n, max_tokens=40, structured_outputs=StructuredOutputsParams(**form))
        for n in range(count)
    ]
    answers = llm.generate([f"{n} a" for n in range(count)], params)
    assert {a.finish_reason for a in answers} == {"stop"}
    assert all(a.token_ids[-1] == END for a in answers)
    return [a.text for a in answers]


def test_answers_have_the_form(llm: LLM) -> None:
    for text in ask(llm, json=SCHEMA) + ask(llm, json=json.dumps(SCHEMA)):
        assert json.loads(text)["a"] in (1, 22)
    assert all(re.fullmatch("[0-9]{2}-[a-f]{1,3}", text) for text in ask(llm, regex="[0-9]{2}-[a-f]{1,3}"))
    assert set(ask(llm, choice=['say "hi"', "né\n", "\\"])) <= {'say "hi"', "né\n", "\\"}
    assert set(ask(llm, grammar='start: A "b"\nA: "x" | "y"')) <= {"xb", "yb"}
    params = SamplingParams(max_tokens=30, structured_outputs=StructuredOutputsParams(json_object=True))
    assert llm.generate("x", params)[0].text.startswith("{")


def test_ignoring_eos_does_not_go_past_the_end_of_a_grammar(llm: LLM) -> None:
    form = StructuredOutputsParams(choice=["ab"])
    (answer,) = llm.generate("x", SamplingParams(ignore_eos=True, max_tokens=20, structured_outputs=form))
    assert (answer.text, answer.finish_reason) == ("ab", "stop")


@pytest.mark.parametrize("policy", ["off", "hybrid"])
def test_a_grammar_that_other_parameters_make_impossible(bundle: Path, policy: Any) -> None:
    """min_tokens forbids the end that the grammar demands. The other request of the batch goes on."""
    form = StructuredOutputsParams(choice=["ab"])
    with LLM(bundle, policy=policy) as llm:
        with pytest.raises(GenerationError, match="no token passes both the grammar and"):
            llm.generate("x", SamplingParams(min_tokens=10, max_tokens=20, structured_outputs=form))
        (answer,) = llm.generate("x", SamplingParams(max_tokens=20, structured_outputs=form))
        assert answer.text == "ab"


@pytest.mark.parametrize(
    ("form", "where"),
    [
        ({}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "yes"}, "structured_outputs.choice"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"regex": 5}, "structured_outputs.regex"),
        ({"json": {"a": {1, 2}}}, "structured_outputs.json"),
    ],
)
def test_forms_that_are_none(form: Any, where: str) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**form)
    assert caught.value.where == where


@pytest.mark.parametrize("kind", ["json", "regex", "grammar"])
def test_a_bad_grammar_is_refused_and_leaves_nothing_queued(llm: LLM, kind: Any) -> None:
    form: dict[str, Any] = {kind: "("}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**form))
    with pytest.raises(RequestError) as caught:
        llm.generate(["x", "y"], [SamplingParams(max_tokens=2), params])
    assert caught.value.where == f"structured_outputs.{kind}"
    _, engine = llm._session.open()
    assert not engine.busy


def test_one_grammar_for_a_form(llm: LLM) -> None:
    bundle, _ = llm._session.open()
    compiler = GrammarCompiler(bundle)
    form = StructuredOutputsParams(json=SCHEMA)
    assert compiler.compile(form) is compiler.compile(StructuredOutputsParams(json=json.dumps(SCHEMA)))
    assert compiler.compile(form) is not compiler.compile(StructuredOutputsParams(choice=["a"]))
    for n in range(70):
        compiler.compile(StructuredOutputsParams(choice=[str(n)]))
    assert len(compiler._grammars) == 64


def test_a_refusal_is_remembered(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, _ = llm._session.open()
    compiler, count, compiled = GrammarCompiler(bundle), 0, structured._compile

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return compiled(*arguments)

    monkeypatch.setattr(structured, "_compile", counted)
    monkeypatch.setattr(structured, "_REFUSED", 3)
    form = StructuredOutputsParams(regex="(")
    assert not compiler.knows(form)
    for where in ("structured_outputs", "response_format"):
        with pytest.raises(RequestError, match="cannot be compiled") as caught:
            compiler.compile(StructuredOutputsParams(regex="("), where)
        assert caught.value.where == f"{where}.regex"
    assert (count, compiler.knows(form)) == (1, True)
    assert not compiler.knows(StructuredOutputsParams(grammar="("))
    for n in range(5):
        with pytest.raises(RequestError):
            compiler.compile(StructuredOutputsParams(regex="(" * (n + 2)))
    assert len(compiler._refused) == 3


def test_what_answers_have_shown_about_a_grammar(llm: LLM) -> None:
    """A worn one is compiled again; one whose masks take too long is refused."""
    bundle, _ = llm._session.open()
    compiler, form = GrammarCompiler(bundle), StructuredOutputsParams(regex="[ab]+")
    first = compiler.compile(form)
    first.worn = True
    second = compiler.compile(form)
    assert second is not first
    second.problem = "its masks take too long"
    for _ in range(2):
        with pytest.raises(RequestError, match="masks take too long"):
            compiler.compile(form)


#: What was answered with a 500, or occupied the server.
HOSTILE: list[dict[str, Any]] = [
    {"structured_outputs": {"json": {"type": "array", "maxItems": 10**400}}},
    {"structured_outputs": {"json": json.dumps({"type": "array", "minItems": 10**400})}},
    {"structured_outputs": {"json": {"$ref": "#"}}},
    {"structured_outputs": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}},
    {"structured_outputs": {"regex": r"(\p{L}\p{N}*\w+){1,60}"}, "temperature": 1.0, "n": 4},
    {"structured_outputs": {"regex": "[ab]{0,4000}c|(a|b)*a(a|b){12}"}, "temperature": 1.0, "n": 4},
    {"structured_outputs": {"regex": "(a{1000}){1000}"}},
    {"structured_outputs": {"choice": ["ab"]}, "min_tokens": 20, "stream": True},
    {"structured_outputs": {"choice": ["ab"]}, "min_tokens": 20},
    {"structured_outputs": {"grammar": "start: start"}},
    {"structured_outputs": {"grammar": 'start: "a" start | start "b"'}},
    {"structured_outputs": {"regex": ""}},
]


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Running]:
    with serving(bundle) as running:
        yield running


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_no_grammar_makes_a_server_fail(server: Running, number: int, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "0 a", "max_tokens": 30, "seed": 1} | HOSTILE[number]
    data = json.dumps(body).encode()
    for _ in range(2):
        response = server.http.post("/v1/completions", content=data, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400), response.text
        assert "internal" not in response.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert server.http.get("/health").status_code == 200


def test_an_answer_that_its_grammar_ends_is_the_clients_error(server: Running) -> None:
    body = {"prompt": "0 a", "max_tokens": 30} | HOSTILE[8]
    response = server.http.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "generation_failed")


def test_response_format() -> None:
    of = StructuredOutputsParams.of_response_format
    assert of(None) is None
    assert of({"type": "text"}) is None
    assert of({"type": "json_object"}) == StructuredOutputsParams(json_object=True)
    wrapped = {"name": "x", "strict": True, "schema": SCHEMA}
    assert of({"type": "json_schema", "json_schema": wrapped}) == StructuredOutputsParams(json=SCHEMA)
    for bad in ({"type": "xml"}, {}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 1}}):
        with pytest.raises(RequestError, match="response_format"):
            of(bad)


def test_a_tokenizer_of_words_is_refused(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle) as llm, pytest.raises(RequestError, match="tokenizer"):
        llm.generate("w1", SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))


USER: Any = {"role": "user", "content": "Say it."}

TOOL: Any = {"type": "function", "function": {"name": "now", "parameters": SCHEMA}}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools[0].function.name }}{% endif %}>"


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("forms")
    limits = {"max_batch": 4, "max_context": 256}
    decoder = tiny_decoder(vocab=vocab_size())
    with serving(build_tiny(folder, template=TEMPLATE, decoder=decoder, words=tokenizer(), limits=limits)) as running:
        yield running


def chosen(forms: Running, **options: Any) -> Any:
    values: dict[str, Any] = {"model": "tiny", "messages": [USER], "temperature": 1.0, "seed": 1, "max_tokens": 120}
    return forms.openai.chat.completions.create(**values | options)


def test_response_formats(forms: Running) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        found = chosen(forms, response_format=wanted, seed=seed)
        assert json.loads(found.choices[0].message.content)["a"] in (1, 22)
    text = chosen(forms, response_format={"type": "text"}).choices[0].message.content
    assert text == chosen(forms).choices[0].message.content
    found = forms.openai.completions.create(
        model="tiny", prompt="5", max_tokens=20, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert found.choices[0].text in ("yes", "no")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_tool_calls(forms: Running, choice: Any) -> None:
    found = chosen(forms, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    (call,) = found.choices[0].message.tool_calls
    assert (found.choices[0].finish_reason, found.choices[0].message.content) == ("tool_calls", None)
    assert (call.type, call.function.name) == ("function", "now")
    assert json.loads(call.function.arguments)["a"] in (1, 22)
    chunks = list(chosen(forms, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, stream=True))
    (streamed,) = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or ()]
    assert (streamed.index, streamed.function) == (0, replace_type(streamed.function, call.function))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    # the template renders the call that is sent back, and the tools unless they are switched off
    answer = found.choices[0].message.model_dump()
    again = [USER, answer, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    assert chosen(forms, messages=again, tools=[TOOL], max_tokens=2).usage.prompt_tokens > 0
    lengths = [chosen(forms, tools=[TOOL], tool_choice=c, max_tokens=1).usage.prompt_tokens for c in ("auto", "none")]
    assert lengths[0] > lengths[1]


def replace_type(streamed: Any, function: Any) -> Any:
    """A whole answer's function as the class that streams have."""
    return type(streamed)(name=function.name, arguments=function.arguments)


def test_text_before_a_call_streams_and_the_call_is_held_back() -> None:
    class Choice:
        index = 0

        def thought(self) -> None: ...

    class Output:
        def __init__(self, text: str, finish: str | None = None) -> None:
            self.text, self.finish = text, finish

    body = ChatBody.model_validate({"messages": [USER], "tools": [TOOL]})
    pieces = ["Let me <b>see</b>.<too", "l_c", 'all>{"name": "now", "argu', 'ments": {"a": 1}}</tool_', "call> Done"]
    shape = ChatFormat("m", "f", body, str)
    found = [shape.delta(Choice(), Output(piece))["delta"] for piece in pieces]  # type: ignore[arg-type]
    assert found == [{"content": "Let me <b>see</b>."}, {}, {}, {}, {}]
    last = shape.delta(Choice(), Output(".", "stop"))  # type: ignore[arg-type]
    assert last["finish_reason"] == "tool_calls"
    assert last["delta"]["content"].strip() == "Done."
    assert last["delta"]["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"a": 1}'}
    shape = ChatFormat("m", "f", body, str)
    texts = [shape.delta(Choice(), Output(p, f))["delta"] for p, f in (("a <tool", None), ("ing", "stop"))]  # type: ignore[arg-type]
    assert texts == [{"content": "a "}, {"content": "<tooling"}]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}}, "response"),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL], "tool_choice": "required"}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex"),
        ({"extra_body": {"structured_outputs": {"rule": "x"}}}, "structured_outputs.rule"),
    ],
)
def test_forms_that_cannot_be_are_refused(forms: Running, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        chosen(forms, **options)
    assert raised.value.param is not None
    assert param in raised.value.param
    assert forms.service.live == 0
