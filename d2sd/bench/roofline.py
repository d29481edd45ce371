"""Step costs on a GPU by arithmetic: a pass takes the longer of reading its bytes and computing its products.

Bytes are the weights, once a pass, and the K/V of the context; operations are two for every weight and row, and those
of attention. Of experts, a row computes those that it chose, and a pass reads as many as random choices of its rows
would be on average. To that comes the time of the small kernels of every layer. A decode step is the passes of both
drafters and of the target one after the other. Not counted: activations, sampling, building trees, injecting context
into the drafters' K/V (1 to 2 % of a prefill), and the host, whose work a CUDA graph hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from d2sd.build.plan import Part, Plan
from d2sd.build.shares import table_weights
from d2sd.bundle.serving import auto_policies, candidate_policies, check_policy, policy_of_tree
from d2sd.convert.checkpoint.weights import DTYPES
from d2sd.errors import D2SDError
from d2sd.modeling.config import DecoderConfig
from d2sd.modeling.drafters.interface import block_rows
from d2sd.policies import DrafterRole
from d2sd.recipe import Policy
from d2sd.runtime.policy_selector import PolicySelector, forecast_tau
from d2sd.runtime.request import buckets
from d2sd.runtime.speculation.policy import Off
from d2sd.runtime.speculation.policy import Policy as TreePolicy
from d2sd.runtime.step_times import Forecast, StepTimes

#: Assumptions, until docs/gpu.md has measurements. Share of both peaks that large products and reads reach: what the
#: ledger asks of the attention kernel against the copy rate.
EFFICIENCY = 0.8
#: Seconds of a small kernel behind another in a CUDA graph, 1.5 to 2.5 µs.
NODE_SECONDS = 2e-6
#: Seconds of a small sum over the GPUs of one machine, and bytes a second that each sends over NVLink 4.
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


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds of the passes of a plan's models on one GPU."""

    plan: Plan
    gpu: str
    efficiency: float = EFFICIENCY

    def decode_seconds(self, policy: TreePolicy, batch: int, context: int) -> float:
        """A decode step of `batch` requests of `context` tokens."""
        assert self.plan.target is not None
        block = self.plan.recipe.tree.block_size
        seconds = self._seconds(self.plan.target, batch, policy.num_nodes, context, policy.num_nodes)
        if policy.drafts_ahead is not None:  # a block behind every node, one of which passes the head
            part = self._drafter(policy.drafts_ahead)
            seconds += self._seconds(part, batch, policy.num_nodes * block, context, block)
        elif policy.drafters:
            part = self._drafter(policy.first_drafter)
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

        The longer of its products at their peak rate and of reading its bytes, and the small kernels of its layers.
        """
        products, read = self._work(part, batch, rows, context, logits)
        slowest = max(products, read / PEAKS[self.gpu].bandwidth)
        kernels = part.body.num_layers * LAYER_SECONDS
        return slowest / self.efficiency + kernels + self._exchange_seconds(part, batch * rows, batch * logits)

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

    def _work(self, part: Part, batch: int, rows: int, context: int, logits: int) -> tuple[float, float]:
        """Seconds of a pass's products at the peak rate, and the bytes that it reads; `logits` rows pass the head."""
        peaks, body, size = PEAKS[self.gpu], part.body, self._size
        half = peaks.fp32 if size == 4 else peaks.half
        stored, weights = part.weight_bytes, part.parameters
        narrow = min((weights * size - stored) / (size - 1), weights) if size > 1 else 0  # weights in FP8, or narrower
        if isinstance(part.config, DecoderConfig):  # the embedding is looked up; if it is tied, it is the head
            tables = table_weights(part.config, self.plan.ranks)
            stored, weights = stored - tables * size, weights - tables
        if (experts := body.experts) is not None:  # of the experts, those are read that a row chose
            share = experts.chosen / experts.count
            stored -= round(body.expert_weights * size * (1 - share) ** (batch * rows))
            weights -= round(body.expert_weights * (1 - share))
        products = 2 * batch * rows * (narrow / peaks.fp8 + (weights - narrow) / half)
        seen = part.seen(context)
        attention = 4 * batch * rows * seen * body.num_heads * body.head_dim / half
        read = stored + batch * seen * part.kv_token_bytes // body.num_layers
        if logits:
            in_fp8 = narrow > 0 and part.role is not None and part.draft_config.draft_vocabulary is not None
            products += 2 * batch * logits * self._head_weights(part) / (peaks.fp8 if in_fp8 else half)
            read += self._head_weights(part) * (1 if in_fp8 else size)
        return products + attention, read

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


def arithmetic_costs(
    roofline: Roofline, policy: Policy, max_batch: int, context: int, tau: float | None = None
) -> dict[int, StepCost]:
    """Costs of an engine of `policy` by batch bucket, for requests of `context` tokens each.

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
    seconds = {(one, size): roofline.decode_seconds(one, size, context) for one in candidates for size in batches}
    selector = PolicySelector(candidates, StepTimes.of(seconds), forecast)
    chosen = {size: selector.choose(size, temperature) if policy == "auto" else largest for size in batches}
    return {
        size: StepCost(str(choice), seconds[choice, size], forecast_tau(forecast, choice, temperature))
        for size, choice in chosen.items()
    }


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
    curves = plan.calibration.tau if plan.calibration is not None else {"0": {}, "1": {}}
    missing = [str(policy) for policy in policies if policy.drafters and policy.name not in curves["0"]]
    if missing:
        raise D2SDError(
            "The tokens a step are unknown: they depend on the drafters.",
            where=plan.recipe.name,
            found=f"no calibration of {', '.join(missing)}",
            fix="name a calibration in the recipe (d2sd calibrate), or pass --tau",
        )
    return {name: (curves["0"][name], curves["1"][name]) for name in curves["0"]}
