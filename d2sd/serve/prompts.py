"""Prompts and conversations as callers pass them to the Python API, and their requests. Names follow vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from typing_extensions import TypedDict

from d2sd.bundle.requests import default_params, each_completion, encode_input, make_request
from d2sd.errors import RequestError
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.typed import named, plain, typed

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle
    from d2sd.runtime.grammar.grammar import Grammar
    from d2sd.runtime.request import Request


class TokensPrompt(TypedDict):
    """A prompt as token ids, which are used as they are: no special token is added."""

    prompt_token_ids: Sequence[int]


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


#: One prompt: text, or token ids.
Prompt = str | Sequence[int] | TokensPrompt | TextPrompt
#: One turn of a conversation: {"role": "user", "content": "..."}.
Message = Mapping[str, Any]
#: Functions that an answer may call, in OpenAI's format.
Tools = Sequence[Mapping[str, Any]] | None
#: One set of sampling parameters for all prompts, one for each prompt, or None: the defaults of the bundle's recipe.
Sampling = SamplingParams | Sequence[SamplingParams] | None
#: A prompt or a conversation, checked: text, token ids, or messages.
Input = str | tuple[int, ...] | list[Message]


def prompt_inputs(prompts: Prompt | Sequence[Prompt]) -> list[Input]:
    """Make a list of one prompt or several. Raises `RequestError` for another type."""
    prompts = plain(prompts, 2)
    token_ids = _is_list(prompts) and prompts and all(isinstance(one, int) for one in prompts)
    if isinstance(prompts, (str, Mapping)) or token_ids:
        return [_prompt(prompts, "prompt")]
    if not _is_list(prompts):
        raise _no_prompt(prompts, "prompts")
    return [_prompt(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]


def conversation_inputs(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Input]:
    """Make a list of one conversation or several. Raises `RequestError` for another type."""
    if not _is_list(messages):
        raise RequestError(
            "This is not a conversation.",
            where="messages",
            found=named(messages),
            expected='[{"role": "user", "content": "..."}], or a list of such lists',
        )
    if messages and all(map(_is_list, messages)):
        return [list(conversation) for conversation in cast("Sequence[Sequence[Message]]", messages)]
    return [list(cast("Sequence[Message]", messages))]  # its messages are checked where they are encoded


def input_of(prompt: Prompt | Sequence[Message]) -> Input:
    """Make an input of one prompt or one conversation. Raises `RequestError` for another type."""
    if _is_list(prompt) and any(isinstance(message, Mapping) for message in prompt):
        return list(cast("Sequence[Message]", prompt))
    return _prompt(plain(prompt, 2), "prompt")


def each_params(sampling: Sampling, count: int) -> list[SamplingParams | None]:
    """Make a list of `count` sampling parameters. Raises `RequestError` for another type or another number of them."""
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling] * count
    params: list[SamplingParams | None] = list(sampling) if _is_list(sampling) else [None]
    if not all(isinstance(item, SamplingParams) for item in params):
        raise RequestError(
            "These are not SamplingParams.",
            where="sampling_params",
            found=named(sampling),
            expected="SamplingParams(...) for all prompts, or a list of one for each",
        )
    if len(params) != count:
        raise RequestError(
            "There must be one SamplingParams for each prompt.",
            where="sampling_params",
            found=len(params),
            expected=count,
            fix="pass one for all, or a list as long as the prompts",
        )
    return params


def make_requests(
    bundle: Bundle, prompt: Input, params: SamplingParams | None, grammar: Grammar | None, tools: Tools
) -> list[Request]:
    """The n requests of an input. Text is used without a template; messages go through the chat template."""
    if tools is not None and not (_is_list(tools) and all(isinstance(tool, Mapping) for tool in tools)):
        raise RequestError(
            "These are not tools.",
            where="tools",
            found=named(tools),
            expected='a list of {"type": "function", "function": {...}}',
        )
    defaults = bundle.recipe.sampling
    params = params or default_params(bundle, seed=defaults.seed)
    ids = encode_input(bundle, prompt, raw=isinstance(prompt, str), tools=tools)
    return each_completion(make_request(bundle, ids, params, defaults.max_new_tokens, grammar=grammar))


def _prompt(prompt: Any, where: str) -> str | tuple[int, ...]:
    """The text or the ids of a prompt whose numbers are Python's."""
    if isinstance(prompt, Mapping) and prompt.keys() in ({"prompt"}, {"prompt_token_ids"}):
        ((key, prompt),) = prompt.items()
        where = f"{where}.{key}"
        return typed(prompt, str, where) if key == "prompt" else tuple(typed(prompt, Sequence[int], where))
    if isinstance(prompt, str):
        return prompt
    if _is_list(prompt):
        return tuple(typed(prompt, Sequence[int], where))
    raise _no_prompt(prompt, where)


def _no_prompt(value: object, where: str) -> RequestError:
    return RequestError(
        "This is not a prompt.",
        where=where,
        found=named(value),
        expected='text, a list of token ids, {"prompt_token_ids": [...]} or {"prompt": "..."}',
    )


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
