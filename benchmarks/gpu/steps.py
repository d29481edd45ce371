"""Whole decode steps at the geometry of Qwen3-8B with two drafters of 5 layers and a FlexDraft head of 10.

Weights are random, which changes no time.

Each step is timed as the engine serves it, with the fastest forms of its products: operator by operator (eager: what
the host needs is in it) and as one CUDA graph, whose inputs are uploaded and which is replayed ten times in a row, as
an engine does that runs one step ahead. Beside the times are its bytes and graph nodes as `count` finds them without a
GPU; docs/roofline.md has the same rows by arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from statistics import median
from typing import Any, cast

import torch

from benchmarks.gpu import traffic
from benchmarks.gpu.cases import Case, Note
from benchmarks.gpu.roofline import NODE_SECONDS, PEAKS, floor_seconds, seconds
from benchmarks.gpu.traffic import ACTIVATIONS, KV, STATES, Launch, Meter, without_gpu
from d2sd.bundle.product_times import choose_products
from d2sd.convert.kinds.flexdraft import flex_linears
from d2sd.modeling.config import BodyConfig, DecoderConfig, DrafterConfig, RopeConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.drafters.flexdraft_config import FlexConfig
from d2sd.modeling.fp8 import linear_names, round_to_fp8
from d2sd.modeling.kv_pool import PoolSizes
from d2sd.modeling.prepare import prepare_for_inference
from d2sd.modeling.where import Where
from d2sd.plugins.shared.dependent_launch import without_dependent_launch
from d2sd.policies import FACTS, DrafterRole, PolicyName
from d2sd.runtime.batch import Batch
from d2sd.runtime.cuda_graphs.capture import CudaGraphs
from d2sd.runtime.cuda_graphs.inputs import Link, _tensors
from d2sd.runtime.cuda_graphs.steps import DecodeSteps, Handover, captured_step
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.policy import Policy, make_policy

#: Tokens of context of every request, and of a page.
CONTEXT, PAGE_SIZE = 2048, 16
BLOCK_SIZE, BRANCHES, ROWS = 16, 4, 64
#: Qwen3-8B, the first drafter that is public for it, and FlexDraft's head as its authors released it.
VOCABULARY = 151936
BODY = BodyConfig(4096, 12288, 36, 32, 8, 128, 1e-6, RopeConfig(1e6), 40960, qk_norm=True, qkv_bias=False, o_bias=False)
DRAFTER_LAYERS, FLEX_LAYERS, CALIBRATION = 5, 10, 256
MASK, FEATURE_LAYERS = 151669, (1, 9, 17, 25, 33)
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=0.7, top_p=0.9, top_k=20)


@dataclass(frozen=True)
class Step:
    """A decode step. `drafted`: size of the draft vocabulary, None for the target's whole vocabulary."""

    policy: str  # flex: the chain of a FlexDraft head
    kind: str = "bf16"  # or "fp8", as `d2sd build` quantizes, or "mixed": FP8 drafters of a bf16 target
    batch: int = 1
    drafted: int | None = None
    params: SamplingParams = GREEDY
    exact: bool = False  # batch-invariant
    nodes: int = ROWS
    branches: int = BRANCHES

    @property
    def name(self) -> str:
        drafted = f" V={self.drafted}" if self.drafted else ""
        heat = f" T={self.params.temperature:g}" if self.params.temperature else ""
        tree = f" {self.nodes} nodes" if self.nodes != ROWS else ""
        tree += f" {self.branches} branches" if self.branches != BRANCHES else ""
        return f"{self.kind} {self.policy} x{self.batch}{tree}{drafted}{heat}{' exact' if self.exact else ''}"

    @property
    def runs(self) -> PolicyName:
        return "chain" if self.policy == "flex" else cast("PolicyName", self.policy)

    @property
    def roles(self) -> tuple[DrafterRole, ...]:
        """The drafters that it runs."""
        return FACTS[self.runs].drafters

    def make_policy(self) -> Policy:
        return make_policy(self.runs, block_size=BLOCK_SIZE, branches=self.branches, row_budget=self.nodes)


_IN_A_ROW = 10
#: Policy -> batch sizes. A row more here is a row more in docs/roofline.md and in the GPU suite.
BATCHES: dict[str, tuple[int, ...]] = {
    "off": (1, 8),
    "chain": (1, 8),
    "d2sd": (1, 8),
    "hybrid": (1, 8),
    "flex": (1, 2, 4, 8, 16),
    "flex_parallel": (1, 2, 4, 8, 16),
}
DRAFTED = (None, 32768)


def rows() -> list[Step]:
    """The rows of docs/roofline.md, by type and draft vocabulary; plain decoding has none."""
    return [
        Step(name, kind, batch, drafted)
        for kind in ("bf16", "fp8")
        for drafted in DRAFTED
        for name, sizes in BATCHES.items()
        for batch in sizes
        if drafted is None or name != "off"
    ]


#: Timed besides.
OTHERS = (Step("d2sd", batch=8, params=SAMPLED), Step("d2sd", batch=8, params=FILTERED), Step("d2sd", batch=32))
MOST = 32
LIMITS = Limits(MOST, CONTEXT, PAGE_SIZE, prefill_chunk=512)


#: What decides most. Models of one type and draft vocabulary in a row: they are made once.
FIRST = (
    Step("off"),
    Step("d2sd"),
    Step("hybrid"),
    Step("d2sd", batch=8),
    Step("off", "fp8"),
    Step("d2sd", "fp8", drafted=DRAFTED[1]),
)
#: Those of `FIRST` without `exact` are their measure.
EXACT = tuple(
    Step(name, kind, batch, exact=True) for kind in ("bf16", "fp8") for name in ("off", "d2sd") for batch in (1, 8)
)


def first_cases() -> Iterator[Case]:
    """Products in PyTorch's form, whose choice takes half a minute a type."""
    for one in FIRST:
        yield f"first_steps/{one.name}", partial(step, one)
    yield f"first_steps/{FIRST[1].name}, kernels start in order", partial(step_in_order, FIRST[1])


def cases() -> Iterator[Case]:
    """Products in the forms that are chosen, as a bundle is served."""
    for one in (*rows(), *OTHERS):
        yield f"steps/{one.name}", partial(step, one, choose=True)


def exact_cases() -> Iterator[Case]:
    """Drafters' products as in `first_cases`; the target's have one form."""
    for one in EXACT:
        yield f"exact/{one.name}", partial(step, one)


@torch.inference_mode()
def step(one: Step, note: Note, device: str = "cuda", choose: bool = False) -> dict[str, Any]:
    """Milliseconds of a step, eager and captured, its kernels, and its bytes, graph nodes and floors by counting.
    `choose`: the forms of its products.

    Raises where a replay of the graph gives other tokens than the eager step.
    """
    counted = count(one)
    moved = traffic.read(counted) + traffic.written(counted)
    figures: dict[str, Any] = {"gb": moved / 1e9, "nodes": len(counted), "by_arithmetic_ms": arithmetic(counted)}
    note(**figures)
    runner = made(one, device)
    if choose:
        choose_products(runner, None)
    return timed(one, runner, note, figures, eager=True)


def timed(
    one: Step, runner: ModelRunner, note: Note, figures: dict[str, Any], *, eager: bool = False
) -> dict[str, Any]:
    """`figures` and the milliseconds of a captured step. `eager`: also those of a step launched operator by operator,
    and what both launch.

    Raises where a replay of the graph gives other tokens than the eager step.
    """
    policy, inputs, steps = one.make_policy(), requests(one, runner), DecodeSteps(runner, LIMITS)

    def run() -> torch.Tensor:
        return steps.run(policy, inputs, graph=steps.graph_for(policy, inputs)).packed

    runner.capture = None
    expected = run().clone()
    if eager:
        figures |= {"eager_ms": median(_seconds(run) for _ in range(8)) * 1000}
        figures |= {"kernels": sum(count for count, _ in kernels_of(run).values())}
        note(**figures)
    runner.capture = CudaGraphs(runner.device)
    if not torch.equal(run(), expected):
        raise RuntimeError("the captured step commits other tokens than the eager step")
    figures["graph_ms"] = in_a_row(run)
    if eager:
        figures["alone_ms"] = median(_seconds(run) for _ in range(15)) * 1000
        note(**figures)
        figures["profile"] = {name: [n, round(us, 1)] for name, (n, us) in kernels_of(run).items()}
    return figures


def step_in_order(one: Step, note: Note, device: str = "cuda") -> dict[str, Any]:
    """The same without dependent launches, for which all kernels are compiled again."""
    with without_dependent_launch():
        return step(one, note, device)


def arithmetic(counted: list[Launch]) -> dict[str, list[float]]:
    """GPU -> milliseconds as in docs/roofline.md: floor, counted, with nodes."""
    each = [
        (gpu, floor_seconds(counted, peaks), seconds(counted, peaks), seconds(counted, peaks, least=NODE_SECONDS))
        for gpu, peaks in PEAKS.items()
    ]
    return {gpu: [round(1000 * one, 3) for one in three] for gpu, *three in each}


@torch.inference_mode()
def count(one: Step) -> list[Launch]:
    """The launches of a step as its CUDA graph holds them, counted on meta tensors."""
    meter = Meter(CONTEXT, (VOCABULARY, *([one.drafted] if one.drafted else [])))
    with without_gpu(meter):
        runner = made(one, "meta")
    return launches_of(meter, runner, one.make_policy(), requests(one, runner))


def launches_of(meter: Meter, runner: ModelRunner, policy: Policy, batch: Batch) -> list[Launch]:
    """The launches of a step of this runner, whose models are on the meta device."""
    with without_gpu(meter):
        for pool in runner.pools:
            meter.known(KV, pool.k, pool.v)
            meter.known(STATES, *([] if pool.states is None else pool.states.tensors))
        batch = batch.to("meta")
        packed, handover = Link.pack([], len(batch.anchor)), Handover(len(batch.anchor), "meta")
        link = Link(*(getattr(packed, field.name).to("meta") for field in fields(Link)))
        drafts = runner.drafts
        masks = [mask for of_size in drafts._block_tables.values() for rows in of_size._tables for mask in rows]
        constants = *drafts._nothing, *drafts._masks.values(), *(mask for mask in masks if mask is not None)
        meter.known(ACTIVATIONS, *_tensors(batch, link), handover._state, *constants)
        rows, pages = batch.where.pages.shape
        runner.context.reserve(rows, pages, runner.block_size)
        meter.known(ACTIVATIONS, *runner.context.memory)
        with meter:
            captured_step(runner, policy, batch, link, handover, timer=meter.stage)
    return meter.launches


def made(one: Step, device: str = "cuda") -> ModelRunner:
    """A runner with the models that the policy needs."""
    target, *pair, head = models(one.kind, one.drafted, device, one.exact)
    every = [head] if one.policy.startswith("flex") else pair
    drafters = {role: every[role] for role in one.roles}
    runner = ModelRunner(*prepare_for_inference(target, drafters, exact=one.exact), block_size=BLOCK_SIZE)
    runner.allocate(PoolSizes(1 + one.batch * columns(), PAGE_SIZE))
    return runner


@cache
def models(kind: str, drafted: int | None, device: str, exact: bool) -> tuple[Decoder, Drafter, Drafter, FlexHead]:
    """Target, drafters and FlexDraft head; of the kinds only the last is kept in memory. `exact`: they will be made so,
    and models that are fused already cannot be.
    """
    models.cache_clear()
    torch.cuda.empty_cache()
    ids = None if drafted is None else tuple(range(drafted))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            target = Decoder(DecoderConfig("qwen3", BODY, VOCABULARY, tie_word_embeddings=False))
            body = replace(BODY, num_layers=DRAFTER_LAYERS)
            first, second = (
                Drafter(
                    DrafterConfig(
                        body, VOCABULARY, BLOCK_SIZE, MASK, FEATURE_LAYERS, BODY.num_layers, role, draft_vocabulary=ids
                    )
                )
                for role in ("first", "variable_prefix")
            )
            deep, of = replace(BODY, num_layers=FLEX_LAYERS), BODY.num_layers
            flex = FlexHead(FlexConfig("qwen3", deep, VOCABULARY, BLOCK_SIZE, of, CALIBRATION, draft_vocabulary=ids))
    finally:
        torch.set_default_dtype(default)
    for model in (target, first, second, flex):
        model.to(device).eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.02)
    for model in {"fp8": (target, first, second, flex), "mixed": (first, second, flex)}.get(kind, ()):
        _quantize(model)
    flex.join(target)
    return target, first, second, flex


def requests(one: Step, runner: ModelRunner) -> Batch:
    """Requests with pages of their own, that are full up to CONTEXT tokens."""
    dummy = Batch.dummy(Where.scratch(one.batch, columns(), CONTEXT), VOCABULARY, runner.device)
    pages = 1 + torch.arange(one.batch * columns()).view(one.batch, -1)
    params = [replace(one.params, seed=seed) for seed in range(one.batch)]
    sampling = Sampling.pack(params, VOCABULARY, runner.device)
    anchor = 1000 + torch.arange(one.batch)
    return replace(
        dummy, anchor=anchor, where=replace(dummy.where, pages=pages), active=~dummy.active, sampling=sampling
    )


def columns() -> int:
    """Pages of a request."""
    return CONTEXT // PAGE_SIZE + 2


def _quantize(model: Decoder | Drafter | FlexHead) -> None:
    """Makes the layers FP8 that `d2sd build` does: all but the target's head and FlexDraft's calibration network."""
    names = flex_linears(model.config) if isinstance(model, FlexHead) else linear_names(model)
    round_to_fp8(model, dict.fromkeys(names, 1.0))


def _seconds(run: Any) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def in_a_row(run: Any) -> float:
    """Milliseconds of one of ten runs that follow each other without a wait, the median of three times."""
    run()

    def once() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(_IN_A_ROW):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / _IN_A_ROW

    return median(once() for _ in range(3))


def kernels_of(run: Any) -> dict[str, tuple[int, float]]:
    """Launches and microseconds of each kernel, copy and fill on the device, by name; none where CUPTI is missing."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    # The profile also has the host's calls, each of which launched one of them.
    events = [event for event in profile.key_averages() if str(event.device_type).endswith("CUDA")]
    return {event.key[:120]: (event.count, float(event.self_device_time_total)) for event in events}
