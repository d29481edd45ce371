"""Inputs and outputs of the Triton model.

Two families of names for the same parameters: those of TensorRT-LLM's `llmapi` model, and those that Triton's OpenAI
frontend sends to the backends `vllm` and `tensorrtllm`. All inputs are optional and one-dimensional.
"""

from __future__ import annotations

from typing import NamedTuple

from d2sd.serve.fields import FIELDS, DataType


class Input(NamedTuple):
    """An input and where its value goes."""

    data_type: DataType
    #: A field of the OpenAI server's CompletionBody; or `@name`, an option of the adapter; or "" to refuse all values
    #: but those in `neutral`.
    field: str
    many: bool = False  # a list of values, else exactly one
    neutral: tuple[object, ...] = ()  # values that mean: not given


INPUTS: dict[str, Input] = {
    "text_input": Input("STRING", "prompt"),
    **{name: Input(row.data_type, row.name, row.many) for row in FIELDS.values() for name in row.triton},
    # TensorRT-LLM's llmapi model
    "streaming": Input("BOOL", "stream"),
    "sampling_param_best_of": Input("INT32", "", neutral=(FIELDS["best_of"].neutral,)),
    "sampling_param_exclude_input_from_output": Input("BOOL", "@exclude_input"),
    "sampling_param_return_perf_metrics": Input("BOOL", "@perf_metrics"),
    "return_finish_reason": Input("BOOL", "@finish_reason"),
    "return_stop_reason": Input("BOOL", "@stop_reason"),
    "return_cumulative_logprob": Input("BOOL", "@cumulative_logprob"),
    "stop": Input("BOOL", "@cancel"),
    "image_url": Input("STRING", "", many=True),
    "lora_id": Input("UINT64", ""),
    "lora_name": Input("STRING", ""),
    "lora_path": Input("STRING", ""),
    "lora_ckpt_source": Input("STRING", ""),
    # Triton's OpenAI frontend
    "stream": Input("BOOL", "stream"),
    "sampling_parameters": Input("STRING", "@sampling_parameters"),
    "exclude_input_in_output": Input("BOOL", "@exclude_input"),
    "return_num_input_tokens": Input("BOOL", "@num_input_tokens"),
    "return_num_output_tokens": Input("BOOL", "@num_output_tokens"),
    "guided_decoding_guide_type": Input("STRING", "@guide_type"),
    "guided_decoding_guide": Input("STRING", "@guide"),
}

#: `first_scheduled_time_ns` is declared for clients that request all of TensorRT-LLM's outputs; it is never sent.
OUTPUTS: dict[str, DataType] = {
    "text_output": "STRING",
    "finish_reason": "STRING",
    "stop_reason": "STRING",
    "cumulative_logprob": "FP32",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
    "kv_cache_reused_block": "INT32",
    "kv_cache_missed_block": "INT32",
    "kv_cache_alloc_new_blocks": "INT32",
    "kv_cache_alloc_total_blocks": "INT32",
    "kv_cache_hit_rate": "FP32",
    "arrival_time_ns": "INT64",
    "first_scheduled_time_ns": "INT64",
    "first_token_time_ns": "INT64",
    "last_token_time_ns": "INT64",
    "acceptance_rate": "FP32",
    "total_accepted_draft_tokens": "INT32",
    "total_draft_tokens": "INT32",
}
