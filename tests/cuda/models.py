"""Decode steps on fake CUDA tensors: shapes, types and devices are those of a GPU, and there are no numbers.

tools/cuda/fake.py counts what they launch. What kernels compute is in tests/ptx.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from d2sd.modeling.config import BodyConfig, DecoderConfig, DrafterConfig, Role, RopeConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.eagle3 import Eagle3
from d2sd.modeling.drafters.eagle3_config import Eagle3Config
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.drafters.flexdraft_config import FlexConfig
from d2sd.modeling.drafters.head_configs import HeadConfig
from d2sd.modeling.fp8 import make_fp8
from d2sd.modeling.kv_pool import PoolSizes
from d2sd.modeling.layers import Rotary
from d2sd.modeling.prepare import prepare_for_inference
from d2sd.modeling.where import Where
from d2sd.policies import DrafterRole, DraftUse
from d2sd.runtime.batch import Batch
from d2sd.runtime.cuda_graphs.inputs import Link
from d2sd.runtime.cuda_graphs.steps import Handover, captured_step
from d2sd.runtime.drafting.window import Window
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.calibration import Calibration
from d2sd.runtime.speculation.policy import Policy, make_policy
from tests.tiny import of_case, policy_name
from tools.cuda.fake import Watch, fake_gpu

EAGLE = "eagle3"
BLOCK, BRANCHES, NODES, VOCABULARY = 16, 4, 64, 512

GREEDY, HOT, NARROW = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=2),
)


def models(
    layers: int,
    drafter_layers: int,
    *,
    fp8: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    scored: HeadConfig | None = None,
    behind: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> tuple[Decoder, Drafter, Drafter, FlexHead]:
    """Narrow models of this depth: launches do not depend on widths. `fp8`: all linear layers but the head.

    `scored`: a head of both drafters. `changes` are of the target's body, without a FlexDraft head, and those `behind`
    of the second drafter's.
    """
    body = BodyConfig(
        hidden_size=64,
        intermediate_size=128,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e6),
        max_positions=4096,
        qk_norm=True,
        qkv_bias=False,
        o_bias=False,
    )

    def drafter(role: Role) -> Drafter:
        return Drafter(
            DrafterConfig(
                body=replace(body, num_layers=drafter_layers, **(behind if role != "first" else {})),
                vocab_size=VOCABULARY,
                block_size=BLOCK,
                mask_token_id=VOCABULARY - 1,
                target_layer_ids=(0, layers - 1),
                num_target_layers=layers,
                role=role,
                prefix_weight_base=None if role == "first" else 0.9,
                head=scored,
            )
        )

    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            target = Decoder(DecoderConfig("qwen3", replace(body, **changes), VOCABULARY, False))
            deep = replace(body, num_layers=min(drafter_layers, layers - 1))
            head = FlexHead(FlexConfig("qwen3", deep, VOCABULARY, BLOCK, layers, 16))
            first, second = drafter("first"), drafter("variable_prefix")
            for model in (target, first, second, head):
                linears = [n for n, part in model.named_modules() if isinstance(part, nn.Linear) and n != "lm_head"]
                if fp8 and model is not head:
                    make_fp8(model, linears, cache=False)
                for part in model.modules():  # frequencies are made on the CPU and follow their model
                    if isinstance(part, Rotary):
                        part.to("cuda")
                model.eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)
    if not changes:
        head.join(target)
    if scored is not None:
        for one in (first, second):
            one.join(target)
    return target, first, second, head


def eagle(target: Decoder) -> Eagle3:
    """A head of BLOCK - 1 passes."""
    layer = replace(target.config.body.dense(1), windows=())
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            head = Eagle3(Eagle3Config(layer, VOCABULARY, BLOCK, (0, 1), tuple(range(0, VOCABULARY, 2))))
            head.rotary.to("cuda")  # made on the CPU, as are the ids
            head.draft_ids = torch.arange(0, VOCABULARY, 2)
            return head.eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


def runner(
    layers: int,
    drafter_layers: int,
    *,
    exact: bool = False,
    roles: Collection[DrafterRole] = tuple(DrafterRole),
    case: str = "",
    **of_models: Any,
) -> ModelRunner:
    """A runner of `models`. `case`: in place of the first drafter a FlexDraft head, if it is one of `FLEX_CASES`, or an
    EAGLE-3 head.
    """
    target, *drafting = models(layers, drafter_layers, **of_models)
    if case == EAGLE:
        return ModelRunner(*prepare_for_inference(target, {DrafterRole.FIRST: eagle(target)}), block_size=BLOCK)
    given = zip(DrafterRole, of_case(case, *drafting), strict=True)
    drafters = {role: drafter for role, drafter in given if drafter and role in roles}
    return ModelRunner(*prepare_for_inference(target, drafters, exact=exact), block_size=BLOCK)


def batch_of(size: int, kinds: tuple[SamplingParams, ...], *, states: bool = False) -> Batch:
    """Requests of 100 tokens in up to 16 pages; with `states`, of a target that has some."""
    params = [kinds[row % len(kinds)] for row in range(size)]
    batch = Batch.dummy(Where.scratch(size, 16, 100, states=states), VOCABULARY, "cuda")
    return replace(batch, sampling=Sampling.pack(params, VOCABULARY, "cuda")).to("cuda")


def policy_of(name: str, *, lookup: bool = False) -> Policy:
    return make_policy(policy_name(name), block_size=BLOCK, branches=BRANCHES, row_budget=NODES, lookup=lookup)


def steps(
    name: str,
    kinds: tuple[SamplingParams, ...],
    *,
    size: int = 3,
    layers: int = 2,
    drafter_layers: int = 2,
    fp8: bool = False,
    exact: bool = False,
    calibrated: bool = False,
    lookup: bool = False,
    window: Window | None = None,
    **changes: Any,
) -> Watch:
    """The second of two decode steps: the first one moves tables of positions to the device, once.

    As a graph holds them: with what takes the state of the step before and leaves it to the next, under "handover".
    """
    watch = Watch()
    with fake_gpu(watch):
        policy, calibration = policy_of(name, lookup=lookup), None
        made = runner(layers, drafter_layers, fp8=fp8, exact=exact, roles=policy.drafters, case=name, **changes)
        made.allocate(PoolSizes(64, 16, states=1 + size))
        made.drafts.window = window
        if policy.copies:
            made.keep_text()
        if calibrated:
            shape = 2, len(DraftUse), BLOCK - 1, 2
            slope, offset = torch.ones(shape), torch.zeros(shape)
            calibration = Calibration(slope, offset).to(made.device)
        batch = batch_of(size, kinds, states=made.layout.state_bytes > 0)
        handover, packed = Handover(size, made.device), Link.pack([], size)
        link = Link(*(getattr(packed, field.name).to("cuda") for field in fields(Link)))
        requests, pages = batch.where.pages.shape
        made.context.reserve(requests, pages, BLOCK)
        for _ in range(2):
            with watch:
                watch.launches.clear()
                watch.copies.clear()
                captured_step(made, policy, batch, link, handover, calibration, watch.stage)
    return watch
