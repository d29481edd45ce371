"""The capacity sheet: what was computed, for whom, and what it assumes."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from pydantic import BaseModel

from d2sd.bench.capacity import UTILIZATION, Demand, Option, compute
from d2sd.bench.markdown import table
from d2sd.bench.measured import shares, steps
from d2sd.bench.roofline import EFFICIENCY, EXCHANGE_SECONDS, LAYER_SECONDS, LINK, PEAKS, Roofline
from d2sd.build.plan import GPUS, Plan
from d2sd.policies import parse_method
from d2sd.recipe import Method, Policy

#: By whether step times of the user's GPU are in a sheet.
LABELS = {False: "arithmetic, not measured", True: "arithmetic over measured step times"}


class Sheet(BaseModel):
    """The sheet as JSON. Figures are arithmetic, over step times of the user's GPU where an option has them."""

    label: str
    name: str  # of the recipe
    precision: str
    gpu: str
    max_batch: int
    ranks: int = 1  # GPUs that share the target
    efficiency: float  # share of the peaks that is assumed where `measured` has none
    measured: dict[str, list[float]] = {}  # shares of peaks that products reached on the user's GPU, by rows
    demand: Demand
    options: list[Option]

    def markdown(self) -> str:
        """The sheet as text."""
        demand, targets = self.demand, self.demand.targets
        load = f"{demand.rate:g} requests/s of {demand.prompt_tokens} prompt and {demand.output_tokens} output tokens"
        bounds = f"TTFT at most {1e3 * targets.ttft:g} ms and mean ITL at most {1e3 * targets.itl:g} ms"
        columns = [(option.policy, list(_rows(option).values())) for option in self.options]
        lines = [
            f"# Capacity: {self.name} on {self.gpu}",
            "",
            f"**This is arithmetic; {self._measured()}.** {load}; {bounds}.",
            "",
            table([("", list(_rows(self.options[0]))), *columns]),
            "",
            "What it assumes:",
            "",
            *(f"- {line}" for line in self._assumptions()),
            "",
        ]
        return "\n".join(lines)

    def _assumptions(self) -> list[str]:
        peaks = PEAKS[self.gpu]
        shared = (
            f"{self.ranks} GPUs share the target (--tensor-parallel): each figure of a GPU but their number is of the "
            f"{self.ranks} together, each byte of one. A sum over them takes {1e6 * EXCHANGE_SECONDS:.0f} µs and its "
            f"bytes at {LINK / 1e9:.0f} GB/s; a layer has two."
        )
        return [
            *([shared] if self.ranks > 1 else []),
            f"The {self.gpu}'s peaks are {peaks.bandwidth / 1e12:g} TB/s, and {peaks.half / 1e12:g} TFLOP/s in 16 bits "
            f"({peaks.fp8 / 1e12:g} in FP8, {peaks.fp32 / 1e12:g} in fp32). {self._efficiency()} "
            f"Each pass reads its weights once and the K/V of its context; a layer takes {1e6 * LAYER_SECONDS:.0f} µs "
            "more for small kernels. Host, network and tokenizer take no time.",
            f"Weights and K/V fill at most four fifths of {GPUS[self.gpu] // 10**9} GB; precision {self.precision}; at "
            f"most {self.max_batch} requests decode together (`limits.max_batch`).",
            "Tokens a step are the calibration's forecast, or the given ones. Other texts have other acceptance: see τ "
            "by prompt set in d2sd bench.",
            f"Lengths are fixed and prompts share no prefix. A GPU is given {UTILIZATION:g} of the rate it sustains: "
            "random arrivals queue. The queue itself is not computed, and TTFT is without one.",
        ]

    def _measured(self) -> str:
        """Where step times come from."""
        of_gpu = [option.policy for option in self.options if option.measured]
        return f"step times of {' and '.join(of_gpu)} were measured here" if of_gpu else "nothing was measured"

    def _efficiency(self) -> str:
        of_gpu = "".join(
            f"; on a GPU of yours {kind} reached {min(found):.2f} to {max(found):.2f}, by rows, which holds for these"
            for kind, found in self.measured.items()
        )
        return f"A step is assumed to reach {self.efficiency:g} of them (`--efficiency`){of_gpu}."


def make_sheet(
    plan: Plan,
    gpu: str,
    demand: Demand,
    max_batch: int | None,
    policy: Method | None,
    *,
    tau: float | None,
    efficiency: float | None = None,
) -> Sheet:
    """Compute plain decoding and `policy`, by default the recipe's; `tau` is the tokens a step of the latter.

    `efficiency` is the share of all peaks that a step reaches; None: what GPUs of the user have measured, and
    `EFFICIENCY` elsewhere.
    """
    recipe, given = plan.recipe, efficiency is not None
    named, copies = parse_method(policy or recipe.tree.policy)
    tree = recipe.tree.model_copy(update={"lookup": copies or recipe.tree.lookup})
    plan = replace(plan, recipe=recipe.model_copy(update={"tree": tree}))
    batch, chosen_policy = max_batch or recipe.limits.max_batch, cast("Policy", named)
    roofline = Roofline(plan, gpu, efficiency or EFFICIENCY, {} if given else shares(gpu))
    find = None if given else steps(plan, gpu)
    measured: dict[str, list[float]] = {}
    for (kind, _), share in roofline.measured.items():
        measured.setdefault(kind, []).append(share)
    options = [
        compute(roofline, name, demand, batch, tau if name == chosen_policy else None, find)
        for name in dict.fromkeys(("off", chosen_policy))
    ]
    return Sheet(
        label=LABELS[any(option.measured for option in options)],
        name=recipe.name,
        precision=recipe.precision + (" with FP8" if recipe.fp8 else ""),
        gpu=gpu,
        max_batch=batch,
        ranks=plan.ranks,
        efficiency=roofline.efficiency,
        measured=measured,
        demand=demand,
        options=options,
    )


def _rows(option: Option) -> dict[str, str]:
    """The values of one policy under their headings."""
    full = option.sustained
    return {
        "**GPUs**": f"**{option.gpus}**",
        "requests/s a GPU, at most": f"{option.most_rate:.2f}",
        "tokens a step": ", ".join(f"{tau:.2f} ({name})" for name, tau in option.tokens_per_step.items()),
        "served at a batch of": "; ".join(f"{size}: {name}" for size, name in option.served.items()),
        "weights": f"{option.weight_bytes / 1e9:.2f} GB",
        "K/V pages a GPU: needed of those that fit": f"{full.batch * option.request_pages:,} of {option.pages:,}",
        "at the most that a GPU sustains:": "",
        "requests/s": f"{full.rate:.2f}",
        "requests in a decode step": str(full.batch),
        "TTFT without a queue": f"{1e3 * full.ttft:.1f} ms",
        "ITL, mean": f"{1e3 * full.itl:.1f} ms",
    }
