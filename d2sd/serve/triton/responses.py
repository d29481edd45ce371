"""The outputs of one request as arrays, by the names of TensorRT-LLM and Triton's OpenAI frontend."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from d2sd.serve.triton.names import OUTPUTS

if TYPE_CHECKING:
    from d2sd.runtime.request import Limits
    from d2sd.runtime.sequence import Output, Sequence
    from d2sd.serve.openai.generation import Choice, Generation
    from d2sd.serve.triton.requests import Call

_DTYPES = {"STRING": np.object_, "INT32": np.int32, "INT64": np.int64, "UINT32": np.uint32, "FP32": np.float32}
_LARGEST = 2**31 - 1


class Answer:
    """Collects what a request gained since the last response, and shapes it as outputs."""

    def __init__(self, call: Call, generation: Generation, limits: Limits) -> None:
        self._call, self._generation, self._limits = call, generation, limits
        self._arrival, self._first, self._last = time.monotonic_ns(), 0, 0
        self._text, self._tokens = call.echo, 0

    def add(self, output: Output) -> bool:
        """Take an output of the engine; returns whether a stream has something to send."""
        if output.tokens:
            self._last = time.monotonic_ns()
            self._first = self._first or self._last
        self._text += output.text
        self._tokens += len(output.tokens)
        return bool(self._text)

    def response(self, *, final: bool) -> dict[str, np.ndarray[Any, Any]]:
        """The outputs that the request asked for, of shape [1], since the last response."""
        call, choice = self._call, self._generation.choices[0]
        values: dict[str, Any] = {"text_output": self._text.encode()}
        if call.options.get("num_input_tokens"):
            values["num_input_tokens"] = len(choice.stream.request.prompt)
        if call.options.get("num_output_tokens"):
            values["num_output_tokens"] = self._tokens
        self._text, self._tokens = "", 0
        if final:
            values |= self._ending(choice)
        return {name: np.array([value], _DTYPES[OUTPUTS[name]]) for name, value in values.items()}

    def _ending(self, choice: Choice) -> dict[str, Any]:
        """The fields that are known at the end."""
        values: dict[str, Any] = {}
        options, sequence = self._call.options, choice.stream.sequence
        assert sequence is not None
        if options.get("finish_reason"):
            values["finish_reason"] = str(choice.finish).encode()
        if options.get("stop_reason"):
            values["stop_reason"] = self._stop_reason(sequence).encode()
        if options.get("cumulative_logprob"):
            values["cumulative_logprob"] = sum(entry.logprob for entry in choice.logprobs)
        if options.get("perf_metrics"):
            values |= self._acceptance() | self._blocks(sequence)
            values |= {
                "arrival_time_ns": self._arrival,
                "first_token_time_ns": self._first,
                "last_token_time_ns": self._last,
            }
        return values

    def _stop_reason(self, sequence: Sequence) -> str:
        """The stop string or the stop token's id; empty for an answer that ended by its length."""
        if sequence.finish != "stop":
            return ""
        ended_by = "" if sequence.text is None else sequence.text.stopped
        return ended_by or str(sequence.answer[-1])

    def _acceptance(self) -> dict[str, Any]:
        """Drafted tokens verified and accepted; the bonus tokens are neither."""
        details = self._generation.usage()["completion_tokens_details"]
        accepted = details["accepted_prediction_tokens"]
        drafted = accepted + details["rejected_prediction_tokens"]
        return {
            "acceptance_rate": accepted / drafted if drafted else 0.0,
            "total_accepted_draft_tokens": accepted,
            "total_draft_tokens": min(drafted, _LARGEST),
        }

    def _blocks(self, sequence: Sequence) -> dict[str, Any]:
        """K/V pages: the prompt's found in the prefix cache or not, and those of prompt and answer."""
        reused = sequence.stats.cached_tokens // self._limits.page_size
        missed = self._limits.pages_for(len(sequence.request.prompt)) - reused
        total = self._limits.pages_for(len(sequence.tokens))
        return {
            "kv_cache_reused_block": reused,
            "kv_cache_missed_block": missed,
            "kv_cache_hit_rate": reused / (reused + missed),
            "kv_cache_alloc_new_blocks": total - reused,
            "kv_cache_alloc_total_blocks": total,
        }
