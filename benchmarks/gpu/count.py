"""The launches of a decode step as its CUDA graph holds them, counted on meta tensors."""

from __future__ import annotations

from dataclasses import fields

import torch

from benchmarks.gpu.steps import CONTEXT, VOCABULARY, Step, host_draft, made, requests
from benchmarks.gpu.traffic import ACTIVATIONS, KV, Launch, Meter, without_gpu
from d2sd.plugins.trees import Draft
from d2sd.runtime.cuda_graphs.inputs import Link, _tensors
from d2sd.runtime.cuda_graphs.steps import Handover, captured_step


@torch.inference_mode()
def count(one: Step) -> list[Launch]:
    """All that `DecodeSteps` captures."""
    meter = Meter(CONTEXT, (VOCABULARY, *([one.drafted] if one.drafted else [])))
    with without_gpu(meter):
        runner, policy = made(one, "meta"), one.make_policy()
        for pool in runner.pools:
            meter.known(KV, pool.k, pool.v)
        batch, draft = requests(one, runner).to("meta"), host_draft(one)
        draft = draft and Draft(draft.tokens.to("meta"), draft.logprob.to("meta"))
        packed, handover = Link.pack([], len(batch.anchor)), Handover(len(batch.anchor), "meta")
        link = Link(*(getattr(packed, field.name).to("meta") for field in fields(Link)))
        meter.known(ACTIVATIONS, *_tensors(batch, link, draft), handover._state, *runner.constants)
        runner.context.reserve(*batch.page_table.shape)
        meter.known(ACTIVATIONS, *runner.context.memory)
        with meter:
            captured_step(runner, policy, batch, link, handover, draft=draft, timer=meter.stage)
    return meter.launches
