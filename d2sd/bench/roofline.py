"""Step costs on a GPU by arithmetic: a product takes the longer of reading its bytes and computing; so does attention.

Bytes are the weights, once a pass, and the K/V of the context; operations are two for every weight and row, and those
of attention. Of both peaks a pass reaches an assumed share, and its products the shares that the user's GPU has
measured, if it has. Of experts, a row computes those that it chose, and a pass reads as many as random choices of its
rows would be on average. To that comes the time of the small kernels of every layer. A decode step is the passes of
both drafters and of the target one after the other. Not counted: activations, sampling, building trees, injecting
context into the drafters' K/V (1 to 2 % of a prefill), and the host, whose work a CUDA graph hides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from d2sd.build.plan import Part, Plan
from d2sd.build.shares import table_weights
from d2sd.bundle.serving import auto_policies, candidate_policies, check_policy, forecasts, policy_of_tree
from d2sd.convert.checkpoint.weights import DTYPES
from d2sd.errors import D2SDError
from d2sd.modeling.config import DecoderConfig
from d2sd.modeling.drafters.interface import block_rows
from d2sd.policies import DrafterRole
from d2sd.recipe import Policy
from d2sd.runtime.policy_selector import PolicySelector, forecast_tau
from d2sd.runtime.request import buckets, power_of_two
from d2sd.runtime.speculation.policy import Off
from d2sd.runtime.speculation.policy import Policy as TreePolicy
from d2sd.runtime.step_times import Forecast, StepTimes

#: Assumptions, until docs/gpu.md has measurements.
#: Seconds of a small kernel behind another in a CUDA graph, 1.5 to 2.5 µs.
NODE_SECONDS = 2e-6
#: Seconds of a small sum over the GPUs of one machine; bytes a second that each sends over NVLink 4.
EXCHANGE_SECONDS, LINK = 10e-6, 450e9
#: Seconds of the small kernels of one layer: ten launches (`d2sd.modeling.fused`).
LAYER_SECONDS = 10 * NODE_SECONDS


@dataclass(frozen=True, slots=True)
class GpuPeaks:
    """Peak rates from NVIDIA's data sheets, of the SXM or HGX version; products are dense."""

    bandwidth: float  # bytes a second
    fp32: float  # operations a second
    half: float  # bf16 and fp16
    fp8: float


#: By the names of `d2sd.build.plan.GPUS`.
PEAKS = {
    "H100": GpuPeaks(3.35e12, 67e12, 989e12, 1979e12),
    "H200": GpuPeaks(4.8e12, 67e12, 989e12, 1979e12),
    "B200": GpuPeaks(8.0e12, 75e12, 2250e12, 4500e12),
}


#: Products whose share of the peaks is known where the user's GPU has measured it.
Kind = Literal["16-bit weights", "FP8 weights"]
#: Share of the peaks that all other work is assumed to reach. On one H100 steps of one request read at 0.71 of the data
#: sheet's rate in bf16, and at 0.56 in FP8 (docs/results/gpu-2026-11-26.md).
EFFICIENCY = 0.7


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds of the passes of a plan's models on one GPU."""

    plan: Plan
    gpu: str
    efficiency: float = EFFICIENCY
    #: Shares that products of these weights, and up to so many rows, reach on the user's GPU instead: of the longer of
    #: reading and computing.
    measured: Mapping[tuple[Kind, int], float] = field(default_factory=dict)

    def decode_seconds(self, policy: TreePolicy, batch: int, context: int) -> float:
        """A decode step of `batch` requests of `context` tokens."""
        assert self.plan.target is not None
        block = self.plan.recipe.tree.block_size
        seconds = self._seconds(self.plan.target, batch, policy.num_nodes, context, policy.num_nodes)
        if policy.drafts_ahead is not None:  # a block behind every node, one of which passes the head
            part = self._drafter(policy.drafts_ahead)
            seconds += self._seconds(part, batch, policy.num_nodes * block, context, block)
        elif policy.drafters:
            part = self._drafter(DrafterRole.FIRST)
            rows = block_rows(part.draft_config, block)
            seconds += self._seconds(part, batch, rows, context, rows)
        if policy.second_pass is not None:
            part = self._drafter(policy.second_pass)
            rows = policy.num_branches * block_rows(part.draft_config, block)
            seconds += self._seconds(part, batch, rows, context, rows)
        return seconds

    def prefill_seconds(self, rows: int, context: int) -> float:
        """A chunk of `rows` prompt tokens behind `context` others; it computes no logits."""
        assert self.plan.target is not None
        return self._seconds(self.plan.target, 1, rows, context, 0)

    def _drafter(self, role: DrafterRole) -> Part:
        """A drafter, with the MLPs that it borrows of the target's last layers, and the K/V of theirs that it reads."""
        part, target = self.plan.drafters[role], self.plan.target
        assert target is not None
        body, model = part.body, part.kind.model
        shared = 3 * body.num_layers * body.hidden_size * body.intermediate_size if model.borrows_mlps else 0
        read = 0 if model.has_context else target.kv_token_bytes * body.num_layers // target.body.num_layers
        return replace(
            part,
            parameters=part.parameters + shared,
            kv_token_bytes=part.kv_token_bytes + read,
            weight_bytes=part.weight_bytes + round(shared * target.weight_bytes / target.parameters),
        )

    def _seconds(self, part: Part, batch: int, rows: int, context: int, logits: int) -> float:
        """One pass over `batch` requests of `rows` rows each, `logits` of which pass the head.

        Its products, its attention, and the small kernels of its layers.
        """
        every, body = batch * rows, part.body
        seconds = sum(self._product(*work) for work in self._work(part, batch, rows, batch * logits))
        seen = part.seen(context)
        read = batch * seen * part.kv_token_bytes // len(body.attention_layers)
        read += 3 * batch * part.state_bytes  # the rows read states, a commit reads and writes them
        computed = 4 * every * seen * body.num_heads * body.head_dim / self._half
        seconds += max(read / PEAKS[self.gpu].bandwidth, computed) / self.efficiency
        kernels = body.num_layers * LAYER_SECONDS
        return seconds + kernels + self._exchange_seconds(part, every, batch * logits)

    def _product(self, kind: Kind, rows: int, weights: float, read: float) -> float:
        """Products of `rows` rows with so many weights, of which `read` bytes are read."""
        peak = PEAKS[self.gpu].fp8 if kind == "FP8 weights" else self._half
        share = self.measured.get((kind, power_of_two(max(rows, 1))), self.efficiency)
        return max(read / PEAKS[self.gpu].bandwidth, 2 * rows * weights / peak) / share

    def _exchange_seconds(self, part: Part, rows: int, logits: int) -> float:
        """Sums of the target's layers over GPUs that share it, and the logits that they gather."""
        if self.plan.ranks == 1:
            return 0.0
        sums = 0 if part.role is not None else 2 * part.body.num_layers
        size = sums * rows * part.body.hidden_size + logits * part.config.vocab_size
        return sums * EXCHANGE_SECONDS + size * self._size / (LINK * self.efficiency)

    @property
    def _size(self) -> int:
        """Bytes of a weight that is not FP8."""
        return DTYPES[self.plan.recipe.precision].itemsize

    @property
    def _half(self) -> float:
        """The peak of operations that are not FP8."""
        peaks = PEAKS[self.gpu]
        return peaks.fp32 if self._size == 4 else peaks.half

    def _work(self, part: Part, batch: int, rows: int, logits: int) -> list[tuple[Kind, int, float, float]]:
        """A pass's products: what they read, of how many rows, weights that a row computes with, bytes that are read.

        `logits` rows of all requests pass the head.
        """
        body, size = part.body, self._size
        stored, weights = part.weight_bytes, part.parameters
        narrow = min((weights * size - stored) / (size - 1), weights) if size > 1 else 0  # weights in FP8, or narrower
        narrow_bytes = stored - (weights - narrow) * size
        if isinstance(part.config, DecoderConfig):  # the embedding is looked up; if it is tied, it is the head
            tables = table_weights(part.config, self.plan.ranks)
            stored, weights = stored - tables * size, weights - tables
        if (experts := body.experts) is not None:  # of the experts, those are read that a row chose
            share = experts.chosen / experts.count
            stored -= round(body.expert_weights * size * (1 - share) ** (batch * rows))
            weights -= round(body.expert_weights * (1 - share))
        narrow, narrow_bytes = min(narrow, weights), min(narrow_bytes, stored)
        head = self._head_weights(part) if logits else 0
        in_fp8 = narrow > 0 and part.role is not None and part.draft_config.draft_vocabulary is not None
        return [
            ("16-bit weights", batch * rows, weights - narrow, stored - narrow_bytes),
            ("FP8 weights", batch * rows, narrow, narrow_bytes),
            ("FP8 weights" if in_fp8 else "16-bit weights", max(logits, 1), head, head * (1 if in_fp8 else size)),
        ]

    def _head_weights(self, part: Part) -> int:
        """Weights of the head over the vocabulary or the draft vocabulary."""
        ids = None if part.role is None else part.draft_config.draft_vocabulary
        rows = -(-part.config.vocab_size // self.plan.ranks) if ids is None else len(ids)
        return rows * part.body.hidden_size


@dataclass(frozen=True, slots=True)
class StepCost:
    """The policy that an engine serves in one batch bucket, with the costs and tokens of a step."""

    policy: str
    seconds: float  # of a decode step
    tokens: float  # that each request gains in it
    measured: bool = False  # else computed


#: Policies and batch buckets -> step times of the user's GPU, if there are any of them all.
Measured = Callable[[Sequence[TreePolicy], Sequence[int]], StepTimes | None]


def step_costs(
    roofline: Roofline,
    policy: Policy,
    max_batch: int,
    context: int,
    tau: float | None = None,
    measured: Measured | None = None,
) -> dict[int, StepCost]:
    """Costs of an engine of `policy` by batch bucket, for requests of `context` tokens each: `measured`, or computed.

    `tau` is the tokens a step of the policy, in place of the calibration's forecast at the recipe's temperature. Raises
    D2SDError if there is neither.
    """
    plan = roofline.plan
    tree, temperature = plan.recipe.tree, plan.recipe.sampling.temperature
    drafters, named = {role: part.draft_config for role, part in plan.drafters.items()}, plan.recipe.drafters.sources
    if policy == "auto":
        candidates = candidate_policies(tree, tree.row_budget, auto_policies(drafters, plan.calibration), named)
    else:
        check_policy(drafters, policy, Path(plan.recipe.name))
        candidates = [policy_of_tree(tree, policy, tree.row_budget, named)]
    largest = candidates[-1]
    if policy != "auto" or tau is not None or plan.calibration is None:
        candidates = [largest] if isinstance(largest, Off) else [Off(1), largest]
    forecast = _forecast(plan, candidates, tau)
    batches = buckets(max_batch)
    of_gpu = measured and _measured_seconds(measured, candidates, batches, context, all_of=policy != "auto")
    seconds = of_gpu or {
        (one, size): roofline.decode_seconds(one, size, context) for one in candidates for size in batches
    }
    selector = PolicySelector(candidates, StepTimes.of(seconds), forecast)
    chosen = {size: selector.choose(size, temperature).policy if policy == "auto" else largest for size in batches}
    return {
        size: StepCost(
            str(choice), seconds[choice, size], forecast_tau(forecast, choice, temperature), measured=bool(of_gpu)
        )
        for size, choice in chosen.items()
    }


def _measured_seconds(
    measured: Measured, candidates: Sequence[TreePolicy], batches: Sequence[int], context: int, *, all_of: bool
) -> dict[tuple[TreePolicy, int], float] | None:
    """Seconds of the steps that a GPU has measured: trees that did not pay there are missing, unless `all_of` them."""
    times = measured(candidates, batches)
    if times is None:
        return None
    found = {(one, size): times.step(one, size, context) for one in candidates for size in batches}
    known = {step: seconds for step, seconds in found.items() if seconds is not None}
    return None if all_of and len(known) < len(found) else known


def _forecast(plan: Plan, policies: Sequence[TreePolicy], tau: float | None) -> Forecast:
    if tau is not None:
        if not 1 <= tau <= plan.recipe.tree.block_size:
            raise D2SDError(
                "Tokens a step are out of range.",
                where="--tau",
                found=tau,
                expected=f"1 .. {plan.recipe.tree.block_size}, the block size",
            )
        return {policy.name: ([tau], [tau]) for policy in policies if not isinstance(policy, Off)}
    known = {} if plan.calibration is None else forecasts(plan.calibration, plan.recipe.tree.branches)
    missing = [str(policy) for policy in policies if policy.drafters and policy.name not in known]
    if missing:
        raise D2SDError(
            "The tokens a step are unknown: they depend on the drafters.",
            where=plan.recipe.name,
            found=f"no calibration of {', '.join(missing)}",
            fix="name a calibration in the recipe (d2sd calibrate), or pass --tau",
        )
    return known
