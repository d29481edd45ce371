"""Turns request bodies into requests of the engine. Runs in the tokenizer's thread."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from d2sd.bundle.chat import encode_prompt
from d2sd.bundle.requests import default_params, each_completion, make_request
from d2sd.bundle.turns import encode_turns
from d2sd.errors import RequestError
from d2sd.runtime.grammar.forms import StructuredOutputsParams
from d2sd.runtime.grammar.guidance import added_words
from d2sd.runtime.sampling_params import MAX_LOGPROBS, SamplingParams
from d2sd.serve.openai.protocol import ChatBody, CompletionBody, GenerationBody, TokenizeBody, conversation
from d2sd.serve.structured import GrammarCompiler
from d2sd.serve.tools import tool_grammar

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle
    from d2sd.runtime.request import Request

#: Fields that bodies and `SamplingParams` share as they are.
_SHARED = {field.name for field in fields(SamplingParams)} & set(GenerationBody.model_fields)
_SHARED -= {"logit_bias", "structured_outputs"}
#: Fields of `structured_outputs` that apply to the form of another field too.
_OPTIONS = {"disable_any_whitespace", "disable_additional_properties"}


class RequestMaker:
    """Makes the requests of one bundle; parameters that a body leaves out take the defaults of the recipe."""

    def __init__(self, bundle: Bundle, max_choices: int) -> None:
        self._bundle, self._max_choices, self.grammars = bundle, max_choices, GrammarCompiler(bundle)
        self._words = added_words(bundle.tokenizer)

    def chat(self, body: ChatBody) -> list[Request]:
        """The n requests of a conversation."""
        if body.max_completion_tokens is not None and body.max_tokens is not None:
            raise RequestError("Give max_tokens or max_completion_tokens, not both.", where="max_completion_tokens")
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs.", where="top_logprobs", fix="set logprobs to true")
        if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise RequestError(
                "top_logprobs out of range",
                where="top_logprobs",
                found=body.top_logprobs,
                expected=f"0 .. {MAX_LOGPROBS}",
            )
        parameters: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
        if body.max_completion_tokens is not None:
            parameters["max_tokens"] = body.max_completion_tokens
        return self._requests(body, [self._encode_chat(body)], parameters)

    def completion(self, body: CompletionBody) -> list[Request]:
        """n requests for each prompt, in the order of the prompts."""
        prompts: list[Any] = [body.prompt] if isinstance(body.prompt, str) else list(body.prompt)
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        encoded = [self.encode_prompt(p) if isinstance(p, str) else p for p in prompts]
        parameters: dict[str, Any] = {"logprobs": body.logprobs}
        if body.echo:
            if body.logprobs is not None and body.prompt_logprobs is not None:
                raise RequestError(
                    "echo reports the log-probabilities of the prompt with those of the answer.",
                    where="prompt_logprobs",
                    fix="leave it out",
                )
            parameters["prompt_logprobs"] = body.logprobs
            if body.max_tokens == 0:  # the engine generates a token, which `Generation` leaves out
                body = body.model_copy(update={"max_tokens": 1})
        return self._requests(body, encoded, parameters)

    def form(self, body: GenerationBody) -> tuple[str, StructuredOutputsParams | None]:
        """The field that demands a form of the answer, and the form."""
        demanded = None
        if isinstance(body, ChatBody):
            options = _options(body) | {"parallel": body.parallel_tool_calls}
            demanded = tool_grammar(body.tools or [], body.tool_choice, **options, words=self._words)
        return _form(body, demanded)

    def encode(self, body: TokenizeBody) -> list[int]:
        """Token ids of a prompt, or of a conversation in the chat template."""
        if body.prompt is not None:
            return self.encode_prompt(body.prompt)
        return self._encode_chat(body)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        return encode_prompt(self._bundle.tokenizer, text)

    def _encode_chat(self, body: ChatBody | TokenizeBody) -> list[int]:
        bundle = self._bundle
        if not bundle.tokenizer.chat_template:
            raise RequestError("This model has no chat template.", where="messages", fix="use /v1/completions")
        tools, variables = body.tools, dict(bundle.recipe.target.template)
        if isinstance(body, ChatBody):
            tools = None if body.tool_choice == "none" else tools
            variables |= _effort(body)
        variables |= body.chat_template_kwargs or {}
        where = f"{bundle.recipe.name}: chat_template"
        return encode_turns(bundle.tokenizer, conversation(body.messages or []), variables, where, tools)

    def _requests(self, body: GenerationBody, prompts: list[list[int]], parameters: dict[str, Any]) -> list[Request]:
        """The requests of `prompts`; `parameters` are those that chats and completions spell differently."""
        count, bundle = body.n or 1, self._bundle
        if not 0 < len(prompts) * count <= self._max_choices:
            several = len(prompts) != 1
            raise RequestError(
                "The number of prompts is out of range." if several else "n out of range",
                where="prompt" if several else "n",
                found=f"{len(prompts)}, with n = {count}" if several else count,
                expected=f"1 .. {self._max_choices} answers in all",
            )
        if body.best_of not in (None, count):
            raise RequestError(
                "Every answer is returned.", where="best_of", found=body.best_of, expected=f"n = {count}"
            )
        values = parameters | {name: value for name in _SHARED if (value := getattr(body, name)) is not None}
        if body.stream and values.get("prompt_logprobs") is not None:
            raise RequestError(
                "A stream does not report the log-probabilities of the prompt.",
                where="echo" if body.prompt_logprobs is None else "prompt_logprobs",
                fix="do not stream",
            )
        if body.logit_bias is not None:
            values["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
        where, form = self.form(body)
        params = default_params(bundle, **values, structured_outputs=form)
        others = {"priority": body.priority, "cache_salt": body.cache_salt}
        others |= {"grammar": None if form is None else self.grammars.compile(form, where)}
        requests = []
        for prompt in prompts:
            room = max(1, bundle.recipe.limits.max_context - len(prompt))
            length = min(bundle.recipe.sampling.max_new_tokens, room)
            requests += each_completion(make_request(bundle, prompt, params, length, **others))
        return requests


def _form(body: GenerationBody, demanded: StructuredOutputsParams | None) -> tuple[str, StructuredOutputsParams | None]:
    """The field that demands a form of the answer, and the form."""
    forms = {
        "tool_choice": demanded,
        "response_format": StructuredOutputsParams.of_response_format(body.response_format, **_options(body)),
    }
    structured = body.structured_outputs
    if structured is not None and (structured.model_fields_set - _OPTIONS or not structured.model_fields_set):
        forms["structured_outputs"] = StructuredOutputsParams(**structured.model_dump(by_alias=True))
    demands = [(where, form) for where, form in forms.items() if form is not None]
    if len(demands) > 1:
        raise RequestError(
            "An answer has one form.",
            where=demands[1][0],
            found=" and ".join(where for where, _ in demands),
            fix="give one of them",
        )
    return demands[0] if demands else ("", None)


def _options(body: GenerationBody) -> dict[str, bool]:
    """The options of `structured_outputs`."""
    structured = body.structured_outputs
    return {} if structured is None else {name: getattr(structured, name) for name in _OPTIONS}


def _effort(body: ChatBody) -> dict[str, Any]:
    """The variables that templates of thinking models read; none where the effort is left to the model."""
    if body.reasoning_effort is None:
        return {}
    effort = {"reasoning_effort": body.reasoning_effort}
    return effort | {"enable_thinking": False} if body.reasoning_effort == "none" else effort
