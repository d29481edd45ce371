"""Decode steps of a hybrid, counted on meta tensors: Qwen3.5-4B's geometry and that of its public drafter.

The geometry is that of `recipes/qwen3.5-4b.yaml`, but that all layers of the drafter see the whole context, which is
below its window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from benchmarks.gpu.steps import BLOCK_SIZE, BRANCHES, CONTEXT, PAGE_SIZE, ROWS, _quantize, columns, launches_of
from benchmarks.gpu.traffic import Launch, Meter, without_gpu
from d2sd.modeling.config import BodyConfig, DecoderConfig, DrafterConfig, RopeConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.kv_pool import PoolSizes
from d2sd.modeling.mixers.configs import DeltaConfig
from d2sd.modeling.prepare import prepare_for_inference
from d2sd.modeling.where import Where
from d2sd.policies import FACTS, PolicyName
from d2sd.runtime.batch import Batch
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.speculation.policy import make_policy

VOCABULARY, MASK, FEATURE_LAYERS = 248320, 248077, (1, 5, 9, 13, 17, 21, 25, 29)
_DELTA = DeltaConfig(tuple(layer for layer in range(32) if layer % 4 != 3), 16, 32, 128, 128)
BODY = BodyConfig(
    2560, 9216, 32, 16, 4, 256, 1e-6, RopeConfig(1e7), 262144, qk_norm=True, qkv_bias=False, o_bias=False,
    norm_offset=True, recurrent=_DELTA, rotary_dim=64, output_gate=True,
)  # fmt: skip
DRAFTER = BodyConfig(2560, 9216, 6, 32, 8, 128, 1e-6, RopeConfig(1e7), 262144, True, False, False)
POLICIES: tuple[PolicyName, ...] = ("off", "chain", "reanchor")


@dataclass(frozen=True)
class HybridStep:
    """A decode step."""

    policy: PolicyName
    kind: str = "bf16"  # or "fp8", every linear layer but the head
    batch: int = 1


@torch.inference_mode()
def count_hybrid(one: HybridStep) -> list[Launch]:
    """The launches of a step as its CUDA graph holds them."""
    meter, batch = Meter(CONTEXT, (VOCABULARY,)), one.batch
    with without_gpu(meter):
        target, drafter = _models(one.kind)
        chosen = dict.fromkeys(FACTS[one.policy].drafters, drafter)
        runner = ModelRunner(*prepare_for_inference(target, chosen), block_size=BLOCK_SIZE)
        runner.allocate(PoolSizes(1 + batch * columns(), PAGE_SIZE, states=1 + batch))
    dummy = Batch.dummy(Where.scratch(batch, columns(), CONTEXT, states=True), VOCABULARY, runner.device)
    policy = make_policy(one.policy, block_size=BLOCK_SIZE, branches=BRANCHES, row_budget=ROWS)
    return launches_of(meter, runner, policy, replace(dummy, active=~dummy.active))


@cache
def _models(kind: str) -> tuple[Decoder, Drafter]:
    _models.cache_clear()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            target = Decoder(DecoderConfig("qwen3_5_text", BODY, VOCABULARY, tie_word_embeddings=True))
            drafter = Drafter(
                DrafterConfig(DRAFTER, VOCABULARY, BLOCK_SIZE, MASK, FEATURE_LAYERS, BODY.num_layers, "first")
            )
    finally:
        torch.set_default_dtype(default)
    for model in (target, drafter):
        model.eval().requires_grad_(False)
        if kind == "fp8":
            _quantize(model)
    return target, drafter
