"""The response object and the items of its output."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from d2sd.serve.openai.generation import usage_of

if TYPE_CHECKING:
    from d2sd.serve.openai.generation import Choice
    from d2sd.serve.openai.responses_api.protocol import ResponsesBody


def response(
    head: dict[str, Any], body: ResponsesBody, choice: Choice, output: list[dict[str, Any]], *, ended: bool
) -> dict[str, Any]:
    """The response with its id, time and model as `head`, so far or `ended`."""
    sampling = choice.stream.request.sampling
    cut = choice.finish == "length"
    return head | {
        "object": "response",
        "status": ("incomplete" if cut else "completed") if ended else "in_progress",
        "completed_at": int(time.time()) if ended and not cut else None,
        "incomplete_details": {"reason": "max_output_tokens"} if ended and cut else None,
        "error": None,
        "output": output,
        "usage": _usage(choice) if ended else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "seed": choice.seed,
        "service_tier": "default",
        "background": False,
        "store": False,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "truncation": body.truncation,
        "user": body.user,
    }


def message(status: str, text: str | None, logprobs: list[dict[str, Any]], name: str | None = None) -> dict[str, Any]:
    """An item of text; without text, one that begins."""
    content = [] if text is None else [text_part(text, logprobs)]
    return {
        "id": name or f"msg_{uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def function_call(call: dict[str, Any]) -> dict[str, Any]:
    """An item of a tool call in a chat's form."""
    return {
        "id": f"fc_{uuid4().hex}",
        "type": "function_call",
        "status": "completed",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
    }


def _usage(choice: Choice) -> dict[str, Any]:
    """The usage; the counts of speculation are extensions."""
    usage = usage_of([choice])
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"] | {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
