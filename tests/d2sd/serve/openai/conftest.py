"""A server whose tiny model behaves in a tool loop: it calls a tool, and answers when it has the result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from d2sd.serve.openai.protocol import ChatBody, StructuredOutputs
from tests.d2sd.serve.conftest import build_tiny
from tests.d2sd.serve.http import Running, serving
from tests.runtime.grammar.tokens import tokenizer, vocab_size, worded_tokenizer
from tests.tiny import tiny_decoder

#: SmolLM2's: it fails on null content, and ignores tools and calls.
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
#: What the model says when it has results, or was given no tools.
ANSWERS = ("It is 21 degrees.", "It is cold.")


@pytest.fixture(scope="session")
def agent_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    decoder = tiny_decoder(vocab=vocab_size(), positions=4096)
    settings = {"limits": {"max_batch": 4, "max_context": 4096}, "sampling": {"max_new_tokens": 200}}
    return build_tiny(folder, template=TEMPLATE, decoder=decoder, words=tokenizer(), **settings)


def behaving(body: ChatBody) -> ChatBody:
    """A chat whose answer a grammar forces, where the client leaves the form free; the same each time."""
    body = body if body.seed is not None else body.model_copy(update={"seed": 1})
    if body.response_format is not None or body.structured_outputs is not None:
        return body
    if body.tools and body.tool_choice != "none" and body.messages[-1].role != "tool":
        chosen = body.tool_choice if body.tool_choice not in (None, "auto") else "required"
        # a random model adds properties without end
        closed = StructuredOutputs.model_validate({"disable_additional_properties": True})
        changes = {"tool_choice": chosen, "parallel_tool_calls": False, "structured_outputs": closed}
        return body.model_copy(update=changes)
    choice = "none" if body.tool_choice == "none" else "auto"
    form = StructuredOutputs.model_validate({"choice": list(ANSWERS)})
    return body.model_copy(update={"structured_outputs": form, "tool_choice": choice})


@pytest.fixture(scope="session")
def agent(agent_bundle: Path) -> Iterator[Running]:
    with serving(agent_bundle) as running:
        requests = running.server.requests
        chat = requests.chat
        requests.chat = lambda body: chat(behaving(body))  # type: ignore[method-assign]
        yield running


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}

#: As Qwen3's: what was thought in earlier turns is left out, and with `enable_thinking` off nothing is.
THINKING = TEMPLATE.replace("m['content']", "m['content'].split('</think>')[-1]").replace(
    "<assistant>", "<assistant>{{ '<think>\n' if begins else '' }}"
)


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model says what `say` was told."""
    decoder = tiny_decoder(vocab=vocab_size(), positions=1024)
    settings = {"limits": {"max_batch": 4, "max_context": 1024}, "sampling": {"max_new_tokens": 200}}
    folder = tmp_path_factory.mktemp("thinker")
    bundle = build_tiny(folder, template=THINKING, decoder=decoder, words=worded_tokenizer(), **settings)
    with serving(bundle) as running:
        yield running


@pytest.fixture
def say(thinker: Running, monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_answer(text: str) -> None:
        chat = type(thinker.server.requests).chat

        def forced(body: ChatBody) -> Any:
            form = StructuredOutputs.model_validate({"choice": [text]})
            changes = {"structured_outputs": form, "tool_choice": "auto"}
            return chat(thinker.server.requests, body.model_copy(update=changes))

        monkeypatch.setattr(thinker.server.requests, "chat", forced)

    return set_answer
