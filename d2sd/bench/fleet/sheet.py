"""The capacity sheet: what was computed, for whom, and what it assumes."""

from __future__ import annotations

from pydantic import BaseModel

from d2sd.bench.fleet.capacity import REQUESTS, SHARE, Demand, Option
from d2sd.bench.fleet.roofline import LAYER_SECONDS, PEAKS
from d2sd.bench.latency import Spread
from d2sd.bench.markdown import table
from d2sd.build.plan import GPUS


class Sheet(BaseModel):
    """The sheet as JSON. Every figure is arithmetic or simulated."""

    label: str = "arithmetic and simulation, not measured"
    name: str  # of the recipe
    precision: str
    gpu: str
    max_batch: int
    efficiency: float
    demand: Demand
    options: list[Option]

    def markdown(self) -> str:
        """The sheet as text."""
        demand, targets = self.demand, self.demand.targets
        load = f"{demand.rate:g} requests/s of {demand.prompt_tokens} prompt and {demand.output_tokens} output tokens"
        bounds = f"TTFT at most {1e3 * targets.ttft:g} ms and mean ITL at most {1e3 * targets.itl:g} ms"
        lines = [
            f"# Capacity: {self.name} on {self.gpu}", "",
            f"**This is arithmetic and simulation; nothing was measured.** {load}; {bounds}, for {SHARE:.0%}.", "",
            table([("", _rows(self.options[0])[0]), *((one.policy, _rows(one)[1]) for one in self.options)]), "",
            "What it assumes:", "", *(f"- {line}" for line in self._assumptions()), "",
        ]  # fmt: skip
        return "\n".join(lines)

    def _assumptions(self) -> list[str]:
        peaks = PEAKS[self.gpu]
        return [
            f"A step reaches {self.efficiency:g} of the {self.gpu}'s peaks: {peaks.bandwidth / 1e12:g} TB/s, and "
            f"{peaks.half / 1e12:g} TFLOP/s in 16 bits ({peaks.fp8 / 1e12:g} in FP8, {peaks.fp32 / 1e12:g} in fp32). "
            f"Each pass reads its weights once and the K/V of its context; a layer takes {1e6 * LAYER_SECONDS:.0f} µs "
            "more for small kernels. Host, network and tokenizer take no time.",
            f"Weights and K/V fill at most four fifths of {GPUS[self.gpu] // 10**9} GB; precision {self.precision}; at "
            f"most {self.max_batch} requests decode together (`limits.max_batch`).",
            "Tokens a step are the calibration's forecast, or the given ones; each further draft is accepted with the "
            "same probability. Other texts have other acceptance: see τ by prompt set in d2sd bench.",
            "Lengths are fixed, prompts share no prefix, and each GPU gets its share of Poisson arrivals from a router "
            "that chooses at random. Queueing is simulated with the runtime's own scheduler: "
            f"{REQUESTS} requests, so a p99 is of few of them.",
        ]


def _rows(option: Option) -> tuple[list[str], list[str]]:
    """Headings and values of one policy."""
    found = option.figures
    steps = ", ".join(f"{tau:.2f} ({name})" for name, tau in option.tokens_per_step.items())
    rows = {
        "**GPUs**": f"**{option.gpus}**",
        "requests/s a GPU, at most": f"{option.most_rate:.2f}",
        "tokens a step": steps,
        "served at a batch of": "; ".join(f"{size}: {name}" for size, name in option.served.items()),
        "weights": f"{option.weight_bytes / 1e9:.2f} GB",
        "K/V pages a GPU: needed (p99) of those that fit": f"{found.pages:.0f} of {option.pages:,}",
        "at the given rate, of each GPU:": "",
        "requests in a decode step, mean": f"{found.in_flight:.1f}",
        "tokens/s": f"{found.tokens_per_second:.0f}",
        "time in steps": f"{found.utilization:.0%}",
        "TTFT p50 / p99": _pair(found.ttft),
        "ITL p50 / p99": _pair(found.itl),
        "requests within the targets": f"{found.attainment:.1%}",
    }
    return list(rows), list(rows.values())


def _pair(latency: Spread) -> str:
    return f"{latency.p50:.1f} / {latency.p99:.1f} ms"
