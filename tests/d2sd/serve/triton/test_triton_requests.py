"""Input tensors become the body of a completion; what is not supported is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from d2sd.errors import RequestError
from d2sd.serve.openai.protocol import CompletionBody
from d2sd.serve.triton.names import INPUTS, OUTPUTS
from d2sd.serve.triton.requests import Call, read_call
from tests.d2sd.serve.triton.fake import Request


def read(**inputs: Any) -> Call:
    return read_call({tensor.name(): tensor.as_numpy() for tensor in Request(**inputs).inputs()}, {})


def body(**inputs: Any) -> CompletionBody:
    made = read(text_input="w3", **inputs).body
    assert made is not None
    return made


#: Inputs of TensorRT-LLM's LLM API model, of Triton's OpenAI frontend, and outputs of either.
LLMAPI = """text_input image_url streaming stop lora_id lora_name lora_path lora_ckpt_source return_finish_reason
return_stop_reason return_cumulative_logprob sampling_param_best_of sampling_param_temperature sampling_param_top_k
sampling_param_top_p sampling_param_frequency_penalty sampling_param_presence_penalty sampling_param_max_tokens
sampling_param_stop sampling_param_seed sampling_param_exclude_input_from_output sampling_param_return_perf_metrics"""
FRONTEND = """text_input stream max_tokens stop_words top_p temperature seed frequency_penalty presence_penalty
guided_decoding_guide guided_decoding_guide_type sampling_parameters exclude_input_in_output return_num_input_tokens
return_num_output_tokens"""
REPORTED = """text_output finish_reason stop_reason cumulative_logprob acceptance_rate total_accepted_draft_tokens
total_draft_tokens num_input_tokens num_output_tokens kv_cache_hit_rate first_scheduled_time_ns"""


def test_the_names_are_those_of_the_clients() -> None:
    own = "sampling_param_speculative"
    assert INPUTS.keys() == {*LLMAPI.split(), *FRONTEND.split(), own}
    assert set(REPORTED.split()) <= OUTPUTS.keys()


def test_values_of_any_shape() -> None:
    for shape in ((-1,), (1, 1), (1, 1, 1)):
        made = read(shape=shape, text_input="w3", seed=2**64 - 1, stream=True).body
        assert made is not None
        assert (made.prompt, made.seed, made.stream) == ("w3", 2**64 - 1, True)
    assert body(stop_words=["a", "b"]).stop == ["a", "b"]
    restored = body(temperature=0.7, top_p=0.95, presence_penalty=-1e-3)
    assert (restored.temperature, restored.top_p, restored.presence_penalty) == (0.7, 0.95, -0.001), "sent as float32"


def test_what_the_openai_frontend_sends() -> None:
    made = body(
        stream=False,
        exclude_input_in_output=True,
        return_num_input_tokens=True,
        sampling_parameters='{"temperature": 0.7, "n": 1, "logprobs": false, "best_of": 1, "max_tokens": 16, '
        '"stop": ["x"], "guided_decoding": "{\\"json\\": \\"{}\\", \\"regex\\": null}"}',
    )
    assert (made.temperature, made.max_tokens, made.stop, made.n) == (0.7, 16, ["x"], None)
    assert made.structured_outputs is not None
    assert made.structured_outputs.json_schema == "{}"
    made = body(guided_decoding_guide_type="json_schema", guided_decoding_guide='{"type": "object"}')
    assert made.structured_outputs is not None
    assert made.structured_outputs.json_schema == '{"type": "object"}'
    assert body(sampling_param_best_of=1, max_tokens=3, sampling_param_max_tokens=3).max_tokens == 3


@pytest.mark.parametrize(
    ("inputs", "where"),
    [
        ({"text_input": ["a", "b"]}, "text_input"),
        ({"text_input": []}, "text_input"),
        ({"text_input": "a", "image_url": ["http://x"]}, "image_url"),
        ({"text_input": "a", "lora_id": 1}, "lora_id"),
        ({"text_input": "a", "sampling_param_best_of": 2}, "sampling_param_best_of"),
        ({"text_input": "a", "top_p": 0.5, "sampling_param_top_p": 0.6}, "sampling_param_top_p"),
        ({"text_input": "a", "top_p": 0.5, "sampling_parameters": '{"top_p": 0.6}'}, "sampling_parameters"),
        ({"text_input": "a", "sampling_parameters": "[]"}, "sampling_parameters"),
        ({"text_input": "a", "sampling_parameters": "{"}, "sampling_parameters"),
        ({"text_input": "a", "sampling_parameters": '{"n": 2}'}, "sampling_parameters.n"),
        ({"text_input": "a", "sampling_parameters": '{"n": true}'}, "sampling_parameters.n"),
        ({"text_input": "a", "sampling_parameters": '{"logprobs": true}'}, "sampling_parameters.logprobs"),
        ({"text_input": "a", "sampling_parameters": '{"guided_decoding": "{"}'}, "sampling_parameters.guided_decoding"),
        ({"text_input": "a", "sampling_parameters": '{"guided_decoding": 1}'}, "sampling_parameters.guided_decoding"),
        ({"text_input": "a", "sampling_parameters": '{"top_logprobs": 3}'}, "top_logprobs"),
        ({"text_input": "a", "sampling_parameters": '{"max_tokens": "5"}'}, "max_tokens"),
        ({"text_input": "a", "temperature": float("inf")}, "temperature"),
        ({"text_input": "a", "guided_decoding_guide": "x"}, "guided_decoding_guide_type"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(inputs: dict[str, Any], where: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(**inputs)
    assert refused.value.where == where


def test_unknown_members_of_a_body_are_refused() -> None:
    """Triton passes them as parameters, and its own begin with triton_."""
    tensors = {"text_input": np.array([b"w3"], np.object_)}
    with pytest.raises(RequestError, match="UTF-8"):
        read_call({"text_input": np.array([b"\xff"], np.object_)}, {})
    assert read_call(tensors, {"triton_enable_empty_final_response": True}).body
    with pytest.raises(RequestError, match="no_such_input"):
        read_call(tensors, {"no_such_input": 1})
