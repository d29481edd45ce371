"""Whole decode steps at the geometry of Qwen3-8B with two drafters of 5 layers: random weights, which change no time.

Each policy's step is timed as the engine serves it, inputs uploaded and result read: operator by operator (eager: what
the host needs is in it) and as one CUDA graph. It is compared with the bytes that it must read: every weight once, at
the copy rate.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.gpu.cases import Case, Note
from d2sd.modeling.config import BodyConfig, DecoderConfig, DrafterConfig, RopeConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafter import Drafter
from d2sd.modeling.fp8 import Fp8Linear, linear_names
from d2sd.modeling.fused import FusedLayers
from d2sd.plugins.dispatch import NO_FALLBACK
from d2sd.policies import PolicyName
from d2sd.runtime.backends.graphs import CudaGraphs
from d2sd.runtime.backends.model_runner import ModelRunner
from d2sd.runtime.batch import Batch
from d2sd.runtime.captured import DecodeSteps
from d2sd.runtime.request import Limits, SamplingParams
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.speculation.policy import Policy, make_policy

#: Tokens of context of every request, and of a page.
CONTEXT, PAGE_SIZE = 2048, 16
BATCHES = (1, 8, 32)
POLICIES: tuple[PolicyName, ...] = ("off", "chain", "d2sd", "ddtree", "hybrid")
BLOCK_SIZE, BRANCHES, ROWS = 16, 4, 64
LIMITS = Limits(max(BATCHES), CONTEXT, PAGE_SIZE, prefill_chunk=512)


def cases() -> Iterator[Case]:
    for kind in ("bf16", "fp8"):
        for batch in BATCHES:
            for name in POLICIES:
                yield f"steps/{kind} {name} x{batch}", partial(step, kind, name, batch, 0.0)
        yield f"steps/{kind} d2sd x8 T=1", partial(step, kind, "d2sd", 8, 1.0)


@torch.inference_mode()
def step(kind: str, name: PolicyName, batch: int, temperature: float, note: Note) -> dict[str, Any]:
    """Milliseconds of a step, eager and captured, its kernels, and the bytes of the weights it reads.

    Raises where a replay of the graph gives other tokens than the eager step.
    """
    runner = made(kind)
    policy = make_policy(name, block_size=BLOCK_SIZE, branches=BRANCHES, row_budget=ROWS)
    inputs, steps = requests(runner, batch, temperature), DecodeSteps(runner, LIMITS)

    def run() -> torch.Tensor:
        runner.sync_drafters(policy.required_drafters)
        return steps.run(policy, inputs).packed

    runner.capture = None
    expected = run().clone()
    eager = median(_seconds(run) for _ in range(8))
    figures: dict[str, Any] = {
        "eager_ms": eager * 1000, "kernels": _kernels(run), "weights_gb": weight_bytes(runner, policy) / 1e9
    }  # fmt: skip
    note(**figures)
    runner.capture = CudaGraphs(runner.device)
    with patch.dict(os.environ, {NO_FALLBACK: "1"}):
        captured = run()
    if not torch.equal(captured, expected):
        raise RuntimeError("the captured step commits other tokens than the eager step")
    figures["graph_ms"] = median(_seconds(run) for _ in range(15)) * 1000
    return figures


@cache
def made(kind: str) -> ModelRunner:
    """The runner; of the kinds only the last is kept in memory."""
    made.cache_clear()
    torch.cuda.empty_cache()
    rope = RopeConfig(1e6)
    body = BodyConfig(4096, 12288, 36, 32, 8, 128, 1e-6, rope, 40960, qk_norm=True, qkv_bias=False, o_bias=False)
    ids = (1, 9, 17, 25, 33)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            target = Decoder(DecoderConfig("qwen3", body, 151936, tie_word_embeddings=False))
            drafters = [
                Drafter(DrafterConfig(replace(body, num_layers=5), 151936, BLOCK_SIZE, 151669, ids, 36, role))
                for role in ("first", "variable_prefix")
            ]
    finally:
        torch.set_default_dtype(default)
    for model in (target, *drafters):
        model.to("cuda").eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.02)
        if kind == "fp8":
            _quantize(model)
    runner = ModelRunner(target, *drafters)
    runner.allocate(1 + max(BATCHES) * _columns(), PAGE_SIZE)
    return runner


def requests(runner: ModelRunner, batch: int, temperature: float) -> Batch:
    """Requests with pages of their own, that are full up to CONTEXT tokens."""
    columns = _columns()
    dummy = Batch.dummy(batch, columns, CONTEXT, runner.vocab_size, runner.device)
    pages = 1 + torch.arange(batch * columns).view(batch, columns)
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(batch)]
    sampling = Sampling.pack(params, runner.vocab_size, runner.device)
    anchor = 1000 + torch.arange(batch)
    return replace(dummy, anchor=anchor, page_table=pages, active=~dummy.active, sampling=sampling)


def weight_bytes(runner: ModelRunner, policy: Policy) -> int:
    """Bytes of the layers and heads of the models that the policy runs, each once; the embedding is not read whole."""
    models: list[nn.Module] = [runner.target, *(runner._drafters[i] for i in policy.required_drafters)]
    others = sum(p.nbytes for model in models for name, p in model.named_parameters() if "embed" not in name)
    return others + sum(one.nbytes for model in models for one in model.modules() if isinstance(one, FusedLayers))


def _columns() -> int:
    return CONTEXT // PAGE_SIZE + 2


def _quantize(model: nn.Module) -> None:
    for name in linear_names(model):
        if name == "fc":
            continue
        old = model.get_submodule(name)
        assert isinstance(old, nn.Linear)
        new = Fp8Linear(old.in_features, old.out_features, bias=False)
        new.weight = nn.Parameter(old.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
        new.weight_scale, new.input_scale = (torch.ones((), device="cuda") for _ in range(2))
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, new)


def _seconds(run: Any) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _kernels(run: Any) -> int:
    """Kernels, copies and fills on the device."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages())
