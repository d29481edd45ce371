"""Fused layers: whole models against PyTorch's operators, then the times of a verification pass.

    python -m benchmarks.gpu.suite --part layers --until 9e9 --out build/gpu

Times are of 36 layers of Qwen3-8B's geometry over 2,048 tokens of context, as one CUDA graph, before and after fusing.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.call import Wrong
from benchmarks.gpu.cases import Case, Note, Refused
from benchmarks.gpu.shapes import PAGE_SIZE, TYPES
from benchmarks.gpu.timing import Times
from d2sd.modeling.config import BodyConfig, DecoderConfig, DrafterConfig, RopeConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.fp8 import kv_scales, linear_names, make_fp8, round_to_fp8
from d2sd.modeling.fused import FusedLayers, fuse
from d2sd.modeling.kv_pool import CommittedRows, KVPool, PoolSizes, Rows
from d2sd.modeling.mixers.configs import DeltaConfig
from d2sd.modeling.where import Where
from d2sd.policies import DrafterRole
from d2sd.runtime.engine import Engine
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.policy import make_policy

#: Largest ‖fused - unfused‖ / ‖unfused‖ of a model's outputs; where FP8 rounds, a bit is a 16th.
RELATIVE = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 3e-2, "fp8": 3e-1}
CONTEXT = 2048


def cases() -> Iterator[Case]:
    for kind in ("fp32", "fp16", "bf16", "fp8"):
        yield f"layers/model {kind}", partial(check_model, kind)
    yield "layers/tokens fp32", check_tokens
    yield "layers/tokens fp32 of a hybrid", partial(check_tokens, hybrid=True)


def pass_cases() -> Iterator[Case]:
    for kind in ("bf16", "fp8"):
        yield f"passes/{kind}", partial(time_pass, kind)


def models(kind: str, body: BodyConfig, vocab: int, device: str, drafters: int = 1) -> tuple[Decoder, list[Drafter]]:
    """Random models of `body` and, five layers deep at most, drafters; "fp8" is bf16 with FP8 layers and pages."""
    plain: dict[str, Any] = {"recurrent": None, "rotary_dim": None, "output_gate": False, "norm_offset": False}
    drafter = replace(body, num_layers=min(5, body.num_layers), **plain)
    ids = tuple(range(0, body.num_layers, max(1, body.num_layers // 4)))[:5]
    default = torch.get_default_dtype()
    torch.set_default_dtype(TYPES.get(kind, torch.bfloat16))
    try:
        with torch.device(device):
            target = Decoder(DecoderConfig("qwen3", body, vocab, tie_word_embeddings=False))
            made = [
                Drafter(DrafterConfig(drafter, vocab, 8, vocab - 1, ids, body.num_layers, "first"))
                for _ in range(drafters)
            ]
    finally:
        torch.set_default_dtype(default)
    draw = torch.Generator(device).manual_seed(3)
    everything: list[Decoder | Drafter] = [target, *made]
    for model in everything:
        model.to(device).eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.data.normal_(0 if parameter.dim() > 1 else 1, parameter.shape[-1] ** -0.5, generator=draw)
        if kind == "fp8":
            _quantize(model, device, cache=model is target)
    return target, made


def _quantize(model: Decoder | Drafter, device: str, *, cache: bool) -> None:
    round_to_fp8(model, dict.fromkeys(linear_names(model), 0.02))
    with torch.device(device):
        make_fp8(model, [], cache=cache)
    for name, buffer in model.named_buffers():
        if name.endswith("cache.scale"):
            buffer.fill_(0.05 if "k_cache" in name else 0.03)


def fuse_all(*made: Decoder | Drafter) -> None:
    """Fuse models; raises `Refused` where one stays as it was, whose figures would be of PyTorch's layers."""
    for model in made:
        fuse(model)
        if not isinstance(model.compiled, FusedLayers):
            raise Refused(f"the layers of a {type(model).__name__} are not fused")


def check_model(
    kind: str, _: Note, device: str = "cuda", geometry: tuple[int, int, int, int, int, int] = (512, 1024, 4, 8, 2, 64)
) -> dict[str, Any]:
    """A target's pass behind pages, and a drafter's context and draft: relative errors, fused against unfused."""
    body = BodyConfig(*geometry, 1e-6, RopeConfig(1e6), 4096, qk_norm=True, qkv_bias=False, o_bias=False)
    target, (drafter,) = models(kind, body, 512, device)
    draw = torch.Generator(device).manual_seed(2)
    tokens = torch.randint(0, 512, (3, 50), generator=draw, device=device)
    outs = []
    for fused in (False, True):
        both = deepcopy(target), deepcopy(drafter)
        if fused:
            fuse_all(*both)
        outs.append(_outputs(*both, tokens))
    found = {
        name: float((b.double() - a.double()).norm() / a.double().norm())
        for (name, a), b in zip(outs[0].items(), outs[1].values(), strict=True)
    }
    if not max(found.values()) <= RELATIVE[kind]:
        raise Wrong(str(found))
    return found


@torch.inference_mode()
def _outputs(target: Decoder, drafter: Drafter, tokens: Tensor) -> dict[str, Tensor]:
    """A chunk of 37 tokens, committed, then 13 rows, then the drafter over the chunk's context, injected before the
    draft and in it.
    """
    batch, device, ids = len(tokens), str(tokens.device), drafter.config.target_layer_ids
    dtype, columns = target.embed_tokens.weight.dtype, -(-tokens.shape[1] // PAGE_SIZE)
    pools = [
        KVPool(m.config.body, PoolSizes(1 + batch * columns, PAGE_SIZE), dtype, device, fp8=kv_scales(m))
        for m in (target, drafter, drafter)
    ]
    table = 1 + torch.arange(batch * columns, device=device).view(batch, columns)
    chunk, length = tokens[:, :37], torch.zeros(batch, dtype=torch.long, device=device)
    chain, every = Rows.chain(37, Where(table, length)), torch.ones(batch, 37, dtype=torch.bool, device=device)
    first = target(chunk, chain, pools[0], ids)
    pools[0].write(first.k, first.v, (table,), chain.positions, every)
    context = drafter.context_keys_values(first.features, chain.positions)
    pools[1].write(*context, (table,), chain.positions, every)
    rows = Rows.chain(13, Where(table, length + 37))
    out = target(tokens[:, 37:], rows, pools[0], ids)
    embedded = target.embed_tokens(tokens[:, 37:])
    drafted = drafter.draft(embedded, rows, pools[1])
    committed = CommittedRows(first.features, (table,), chain.positions, every, PAGE_SIZE)
    injected = drafter.inject_and_draft(committed, tokens[:, 37:], target.embed_tokens, rows, pools[2])
    return {
        "hidden": out.hidden,
        "features": out.features,
        "k": out.k,
        "v": out.v,
        "draft": drafted,
        "context k": context[0],
        "context v": context[1],
        "draft with context": injected,
    }


#: Qwen3.5's layers.
HYBRID: dict[str, Any] = {
    "recurrent": DeltaConfig((0, 2), key_heads=2, value_heads=4, key_size=32, value_size=32),
    "rotary_dim": 8,
    "output_gate": True,
    "norm_offset": True,
}


def check_tokens(_: Note, device: str = "cuda", *, hybrid: bool = False) -> dict[str, Any]:
    """Tokens of an engine over small fp32 models, d2sd and hybrid, greedy and not: fused equals unfused.

    `hybrid`: two layers of the target are gated delta nets.
    """
    body = BodyConfig(128, 256, 3, 4, 2, 32, 1e-6, RopeConfig(1e4), 512, qk_norm=True, qkv_bias=False, o_bias=False)
    body = replace(body, **HYBRID) if hybrid else body
    target, drafters = models("fp32", body, 128, device, drafters=2)
    requests = [Request(tuple(range(5 * i + 1, 7 * i + 9)), 40, SamplingParams(float(i % 2), seed=i)) for i in range(4)]
    count = 0
    for policy in ("d2sd", "hybrid"):
        answers = []
        for fused in (False, True):
            own_target, own = deepcopy((target, dict(zip(DrafterRole, drafters, strict=False))))
            if fused:
                fuse_all(own_target, *own.values())
            runner = ModelRunner(own_target, own)
            made = make_policy(policy, block_size=8, branches=3, row_budget=24)
            engine = Engine(runner, made, Limits(max_batch=4, max_context=128, page_size=16, prefill_chunk=32))
            answers.append([sequence.answer for sequence in engine.generate(requests)])
        if answers[0] != answers[1]:
            raise Wrong(f"{policy}: {answers}")
        count += sum(map(len, answers[0]))
    return {"tokens": count}


@torch.inference_mode()
def time_pass(kind: str, note: Note, device: str = "cuda") -> dict[str, Any]:
    """Milliseconds of the target's layers at 1, 16 and 64 rows, and of the drafter's context of 16 rows."""
    body = BodyConfig(
        4096, 12288, 36, 32, 8, 128, 1e-6, RopeConfig(1e6), 40960, qk_norm=True, qkv_bias=False, o_bias=False
    )
    target, (drafter,) = models(kind, body, 1024, device)
    columns = CONTEXT // PAGE_SIZE + 4
    pool = KVPool(body, PoolSizes(1 + columns, PAGE_SIZE), torch.bfloat16, device, fp8=kv_scales(target))
    table = 1 + torch.arange(columns, device=device)[None]
    context = torch.tensor([CONTEXT], device=device)
    ids, tokens = drafter.config.target_layer_ids, torch.arange(64, device=device)[None]
    features = torch.randn(1, 16, len(ids) * 4096, device=device, dtype=torch.bfloat16)
    chains = {count: Rows.chain(count, Where(table, context)) for count in (1, 16, 64)}
    runs = {f"rows {n}": partial(target, tokens[:, :n], rows, pool, ids) for n, rows in chains.items()}
    runs["context"] = partial(drafter.context_keys_values, features, tokens[:, :16])
    figures: dict[str, Any] = {"weights_gb": sum(p.nbytes for p in target.layers.parameters()) / 1e9}
    for state in ("unfused", "fused"):
        if state == "fused":
            before = torch.cuda.memory_allocated()
            fuse_all(target, drafter)
            figures["memory grew"] = torch.cuda.memory_allocated() / before - 1
        for name, run in runs.items():
            times = Times()
            times.add(name, run)
            times.again()
            found = times.figures()[name]
            figures[f"{name} {state}"] = round(median(found["all_ms"]), 4)
            if not found["graph"]:
                raise Wrong(f"{name} {state} cannot be captured")
            note(**figures)
    return figures
