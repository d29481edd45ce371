"""Step costs on a GPU by arithmetic: a pass takes the longer of reading its bytes and computing its products.

Bytes are the weights, once a pass, and the K/V of the context; operations are two for every weight and row, and those
of attention. To that comes the time of the small kernels of every layer. A decode step is the passes of both drafters
and of the target one after the other. Not counted: activations, sampling, building trees, injecting context into the
drafters' K/V (1 to 2 % of a prefill), and the host, whose work a CUDA graph hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from d2sd.bench.fleet.accepted import capped_geometric
from d2sd.bench.fleet.costs import EngineCosts, PolicyCosts, StepCosts
from d2sd.build.plan import Part, Plan
from d2sd.bundle.serving import candidate_policies
from d2sd.convert.checkpoint.weights import DTYPES
from d2sd.errors import D2SDError
from d2sd.modeling.config import DecoderConfig, DrafterConfig
from d2sd.modeling.drafters.flexdraft import FlexConfig
from d2sd.policies import FirstPass
from d2sd.recipe import Policy
from d2sd.runtime.buckets import buckets
from d2sd.runtime.policy_selector import PolicySelector, forecast_tau
from d2sd.runtime.speculation.policy import Off
from d2sd.runtime.speculation.policy import Policy as TreePolicy
from d2sd.runtime.step_times import Forecast, StepTimes

#: Assumptions, until docs/gpu.md has measurements. Share of both peaks that large products and reads reach: what the
#: ledger asks of the attention kernel against the copy rate.
EFFICIENCY = 0.8
#: Seconds of the small kernels of one layer: ten launches (`d2sd.modeling.fused`), and small dependent kernels take 1.5
#: to 2.5 µs in a CUDA graph.
LAYER_SECONDS = 10 * 2e-6


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
        block, drafters = self.plan.recipe.tree.block_size, self.plan.drafters
        if policy.first_pass is FirstPass.CARRIED:
            return self._parallel_seconds(batch, policy.num_nodes, context)
        seconds = self._seconds(self.plan.target, batch, policy.num_nodes, context, head=True)
        if policy.first_pass is FirstPass.DRAFTER:
            seconds += self._seconds(drafters[0], batch, block, context, head=True)
        if policy.first_pass is FirstPass.FLEX:
            seconds += self._seconds(self._mask_rows(), batch, block, context, head=True)
        if policy.second_pass is not None:
            seconds += self._seconds(
                drafters[policy.second_pass], batch, policy.num_branches * block, context, head=True
            )
        return seconds

    def prefill_seconds(self, rows: int, context: int) -> float:
        """A chunk of `rows` prompt tokens behind `context` others; it computes no logits."""
        assert self.plan.target is not None
        return self._seconds(self.plan.target, 1, rows, context, head=False)

    def _parallel_seconds(self, batch: int, nodes: int, context: int) -> float:
        """FlexDraft's parallel mode: one pass reads the weights and K/V of the last layers once for both kinds of rows.

        Mask rows draft behind every node, and one block of logits is computed.
        """
        assert self.plan.target is not None
        assert self.plan.flex is not None
        block = self.plan.recipe.tree.block_size
        products, read = self._work(self.plan.target, batch, nodes, context, nodes)
        masks, _ = self._work(self._mask_rows(), batch, nodes * block, context, block)
        read += self.plan.flex.weight_bytes + self._head_weights(self.plan.flex) * self._size
        layers = self.plan.target.body.num_layers + 1  # the choice of the next draft takes about a layer's launches
        return self._time(products + masks, read, layers)

    def _mask_rows(self) -> Part:
        """The layers that mask rows pass: FlexDraft's projections, and the MLPs and K/V of the target's last layers."""
        flex, target = self.plan.flex, self.plan.target
        assert flex is not None
        assert target is not None
        body = flex.body
        shared = 3 * body.num_layers * body.hidden_size * body.intermediate_size
        size = target.weight_bytes / target.parameters
        return replace(
            flex, parameters=flex.parameters + shared, weight_bytes=flex.weight_bytes + round(shared * size),
            kv_token_bytes=target.kv_token_bytes * body.num_layers // target.body.num_layers,
        )  # fmt: skip

    def _seconds(self, part: Part, batch: int, rows: int, context: int, *, head: bool) -> float:
        """One pass over `batch` requests of `rows` rows each."""
        return self._time(*self._work(part, batch, rows, context, rows if head else 0), part.body.num_layers)

    def _time(self, products: float, read: float, layers: int) -> float:
        """Seconds of products at their peak rate and of reading bytes, whichever is longer, and of small kernels."""
        return max(products, read / PEAKS[self.gpu].bandwidth) / self.efficiency + layers * LAYER_SECONDS

    @property
    def _size(self) -> int:
        """Bytes of a weight that is not FP8."""
        return DTYPES[self.plan.recipe.precision].itemsize

    def _work(self, part: Part, batch: int, rows: int, context: int, logits: int) -> tuple[float, float]:
        """Seconds of a pass's products at the peak rate, and the bytes that it reads; `logits` rows pass the head."""
        peaks, body, size = PEAKS[self.gpu], part.body, self._size
        half = peaks.fp32 if size == 4 else peaks.half
        stored, weights = part.weight_bytes, part.parameters
        if isinstance(part.config, DecoderConfig):  # the embedding is looked up; if it is tied, it is the head
            tables = part.config.vocab_size * body.hidden_size * (1 if part.config.tie_word_embeddings else 2)
            stored, weights = stored - tables * size, weights - tables
        narrow = (weights * size - stored) / (size - 1) if size > 1 else 0  # weights in FP8
        products = 2 * batch * rows * (narrow / peaks.fp8 + (weights - narrow) / half)
        attention = 4 * batch * rows * context * body.num_heads * body.head_dim * body.num_layers / half
        read = stored + batch * context * part.kv_token_bytes
        if logits:
            products += 2 * batch * logits * self._head_weights(part) / half
            read += self._head_weights(part) * size
        return products + attention, read

    def _head_weights(self, part: Part) -> int:
        """Weights of the head over the vocabulary or the draft vocabulary."""
        ids = part.config.draft_vocabulary if isinstance(part.config, DrafterConfig | FlexConfig) else None
        return (part.config.vocab_size if ids is None else len(ids)) * part.body.hidden_size


def arithmetic_costs(
    roofline: Roofline, policy: Policy, max_batch: int, context: int, tau: float | None = None
) -> StepCosts:
    """Costs of an engine of `policy`, linear in the context between 0 and `context` tokens.

    `tau` is the tokens a step of the policy, in place of the calibration's forecast at the recipe's temperature. Raises
    D2SDError if there is neither.
    """
    plan = roofline.plan
    tree, temperature = plan.recipe.tree, plan.recipe.sampling.temperature
    found = candidate_policies(tree, len(plan.drafters), policy, tree.row_budget, flex=plan.flex is not None)
    largest = found[-1]
    if policy != "auto" or tau is not None or plan.calibration is None:
        found = [largest] if isinstance(largest, Off) else [Off(1), largest]
    forecast = _forecast(plan, found, tau)
    sizes = buckets(max_batch)
    seconds = {(one, size): roofline.decode_seconds(one, size, context) for one in found for size in sizes}
    selector = PolicySelector(found, StepTimes.of(seconds), forecast)
    chosen = {size: selector.choose(size, temperature) if policy == "auto" else largest for size in sizes}
    costs = {}
    for one in dict.fromkeys(chosen.values()):
        lines = {}
        for size in sizes:
            empty = roofline.decode_seconds(one, size, 0)
            lines[size] = empty, max(0.0, seconds[one, size] - empty) / context
        tokens = forecast_tau(forecast, one, temperature)
        costs[str(one)] = PolicyCosts(seconds=lines, accepted=[capped_geometric(tokens, tree.block_size)])
    rows = buckets(plan.recipe.limits.prefill_chunk)
    largest_chunk = roofline.prefill_seconds(rows[-1], context) - roofline.prefill_seconds(rows[-1], 0)
    engine = EngineCosts(
        served={size: str(one) for size, one in chosen.items()}, policies=costs,
        prefill=[(count, roofline.prefill_seconds(count, 0)) for count in rows],
        prefill_context=max(0.0, largest_chunk) / (rows[-1] * context),
    )  # fmt: skip
    source = f"{roofline.gpu} at {roofline.efficiency:g} of its peaks, {1e6 * LAYER_SECONDS:g} µs more a layer"
    return StepCosts(kind="arithmetic", source=source, engines={policy: engine})


def _forecast(plan: Plan, policies: Sequence[TreePolicy], tau: float | None) -> Forecast:
    if tau is not None:
        if not 1 <= tau <= plan.recipe.tree.block_size:
            raise D2SDError(
                "Tokens a step are out of range.", where="--tau", found=tau,
                expected=f"1 .. {plan.recipe.tree.block_size}, the block size",
            )  # fmt: skip
        return {one.name: ([tau], [tau]) for one in policies if not isinstance(one, Off)}
    curves = plan.calibration.tau if plan.calibration is not None else {"0": {}, "1": {}}
    missing = [str(one) for one in policies if not isinstance(one, Off) and one.name not in curves["0"]]
    if missing:
        raise D2SDError(
            "The tokens a step are unknown: they depend on the drafters.", where=plan.recipe.name,
            found=f"no calibration of {', '.join(missing)}",
            fix="name a calibration in the recipe (d2sd calibrate), or pass --tau",
        )  # fmt: skip
    return {name: (curves["0"][name], curves["1"][name]) for name in curves["0"]}
