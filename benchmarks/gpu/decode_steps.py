"""Time of a decode step of Qwen3-8B's geometry with random weights: operator by operator, and as a CUDA graph.

It is what a request waits for: inputs packed and uploaded, the step, the result read. Random drafters are never right,
so the rows of a step are real and its tokens are not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.cases import Case, Note
from d2sd.modeling.config import BodyConfig, DecoderConfig, DrafterConfig, RopeConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafter import Drafter
from d2sd.policies import PolicyName
from d2sd.runtime.backends.graphs import CudaGraphs
from d2sd.runtime.backends.model_runner import ModelRunner
from d2sd.runtime.batch import Batch
from d2sd.runtime.captured import DecodeSteps
from d2sd.runtime.request import Limits
from d2sd.runtime.speculation.policy import make_policy

BODY = BodyConfig(
    hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128,
    rms_norm_eps=1e-6, rope=RopeConfig(1e6), max_positions=40960, qk_norm=True, qkv_bias=False, o_bias=False,
)  # fmt: skip
VOCABULARY, BLOCK, BRANCHES, NODES, FEATURES = 151936, 16, 4, 64, (1, 9, 17, 25, 33)
POLICIES: tuple[PolicyName, ...] = ("off", "chain", "d2sd", "hybrid")
CONTEXT, BATCHES = 2048, (1, 8)
LIMITS = Limits(max_batch=8, max_context=4096, page_size=16, prefill_chunk=512)
WARM, REPEATS = 3, 15


def cases() -> Iterator[Case]:
    for batch in BATCHES:
        for policy in POLICIES:
            yield f"steps/{policy} x{batch}", partial(timed, policy, batch)


def timed(policy: PolicyName, batch: int, note: Note) -> dict[str, Any]:
    """Median milliseconds without and with a graph."""
    runner = qwen3_8b()
    pages = LIMITS.pages_for(CONTEXT + BLOCK)
    runner.allocate(1 + batch * pages, LIMITS.page_size)
    inputs = replace(
        Batch.dummy(batch, pages, CONTEXT, VOCABULARY, "cuda"),
        page_table=1 + torch.arange(batch * pages).view(batch, pages), active=torch.ones(batch, dtype=torch.bool),
    )  # fmt: skip
    found: dict[str, Any] = {"batch": batch, "context": CONTEXT, "nodes": NODES}
    for name, capture in (("eager_ms", None), ("captured_ms", CudaGraphs("cuda"))):
        runner.capture = capture
        found[name] = _milliseconds(runner, policy, inputs)
        note(**found)
    return found


def _milliseconds(runner: ModelRunner, name: PolicyName, inputs: Batch) -> float:
    policy = make_policy(name, block_size=BLOCK, branches=BRANCHES, row_budget=NODES)
    steps, taken = DecodeSteps(runner, LIMITS), []
    for _ in range(WARM + REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        runner.sync_drafters(policy.required_drafters)
        steps.run(policy, inputs).read()
        taken.append(time.perf_counter() - start)
    return 1000 * median(taken[WARM:])


@cache
def qwen3_8b(device: str = "cuda", body: BodyConfig = BODY, vocabulary: int = VOCABULARY) -> ModelRunner:
    """The target and two drafters of five layers in bf16, with random weights."""
    drafter = DrafterConfig(
        replace(body, num_layers=5), vocabulary, BLOCK, mask_token_id=vocabulary - 1, target_layer_ids=FEATURES,
        num_target_layers=body.num_layers, role="first",
    )  # fmt: skip
    second = replace(drafter, role="variable_prefix", prefix_weight_base=0.9)
    with _bf16(), torch.device(device):
        models = Decoder(DecoderConfig("qwen3", body, vocabulary, False)), Drafter(drafter), Drafter(second)
    target, *drafters = (model.to(device).eval().requires_grad_(False) for model in models)
    return ModelRunner(target, *drafters)  # type: ignore[arg-type]


@contextmanager
def _bf16() -> Iterator[None]:
    """Models are made in bf16: in fp32 they would take twice the memory for a moment."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
