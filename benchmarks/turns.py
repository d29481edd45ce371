"""Does `auto` serve more tokens a second than plain decoding, whatever the load? Two engines in turns, set by set.

    python -m benchmarks.turns bundles/smollm2-135m --out build/turns.md

Groups of as many prompts as are in flight are answered by both engines, in one order and in the reverse; a group's time
is the median of its rounds, prompts included, so that a slow moment of the machine does not decide. Greedy answers of
both must be the same, before any figure is written. Nothing else should run on the machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import click

from d2sd.bundle.load import Bundle, load_bundle
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import make_engine
from d2sd.cli.options import FilePath
from d2sd.cli.report import Reporting
from d2sd.errors import D2SDError
from d2sd.io import write_text
from d2sd.option_types import Listed
from d2sd.progress import bar
from d2sd.prompts import read_rows
from d2sd.recipe import Method
from d2sd.runtime.engine import Engine
from d2sd.runtime.sampling_params import SamplingParams

POLICIES: tuple[Method, ...] = ("off", "auto")
#: Files of MT-Bench's kinds are one set; Spec-Bench's others are one each.
_OTHERS = ("translation", "summarization", "qa", "rag")


@dataclass
class Turns:
    """A measurement: who answers, how much, how often."""

    bundle: Bundle
    temperature: float
    max_tokens: int
    rounds: int

    def group(self, engines: dict[Method, Engine], texts: Sequence[str], turn: int) -> dict[Method, tuple[int, float]]:
        """Tokens and seconds of each engine, which answer `texts` together; `turn` decides who begins."""
        seconds = {name: list[float]() for name in engines}
        answers = dict[Method, list[list[int]]]()
        for number in range(self.rounds):
            for name in POLICIES[:: -1 if (number + turn) % 2 else 1]:
                params = [SamplingParams(self.temperature, seed=seed) for seed in range(len(texts))]
                requests = [
                    chat_request(self.bundle, text, own, self.max_tokens)
                    for text, own in zip(texts, params, strict=True)
                ]
                start = time.perf_counter()
                found = engines[name].generate(requests)
                seconds[name].append(time.perf_counter() - start)
                answers[name] = [one.answer for one in found]
        if answers["off"] != answers["auto"]:
            raise D2SDError("Answers differ from those of plain decoding.", where=f"{texts[0][:60]} …")
        return {name: (sum(map(len, answers[name])), median(seconds[name])) for name in POLICIES}


def sets_of(folder: Path) -> dict[str, list[str]]:
    """First turns of the prompts by kind."""
    found = dict[str, list[str]]()
    for file in sorted(folder.glob("*.jsonl")):
        for _, row in read_rows(file):
            name = row.get("category") if row.get("category") in _OTHERS else file.stem
            if name != "spec_bench":
                found.setdefault(str(name), []).append(row["turns"][0])
    if not found:
        raise D2SDError("There are no prompts.", where=folder, fix="d2sd data copies the public sets below data/")
    return found


def _spread(texts: Sequence[str], count: int) -> list[str]:
    return list(texts[:: max(1, len(texts) // count)][:count])


@click.command(cls=Reporting)
@click.argument("bundle", type=FilePath)
@click.option("--out", type=FilePath, required=True, help="Markdown file of the table.")
@click.option("--in-flight", type=Listed(click.IntRange(1)), default="1,2,4,8", show_default=True)
@click.option("--prompts", default=4, show_default=True, type=click.IntRange(1), help="Of each set, at least.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0))
@click.option("--data", default="data/eval", show_default=True, type=FilePath)
def main(
    bundle: Path,
    out: Path,
    in_flight: list[int],
    prompts: int,
    rounds: int,
    max_tokens: int,
    temperature: float,
    data: Path,
) -> None:
    """Measure `auto` of BUNDLE against plain decoding on a CPU."""
    turns = Turns(load_bundle(bundle, progress=bar), temperature, max_tokens, rounds)
    sets = sets_of(data)
    lines = ["| in flight | " + " | ".join(sets) + " | mean | least | tokens/s, plain and `auto` |"]
    lines.append("|---" * (len(sets) + 4) + "|")
    for size in in_flight:
        engines = {
            name: make_engine(turns.bundle, policy=name, max_batch=size, prefix_cache=False) for name in POLICIES
        }
        for engine in engines.values():
            engine.generate([chat_request(turns.bundle, "Say hello.", SamplingParams(), 16)])
        speeds = dict[str, dict[Method, float]]()
        with bar(f"{size} in flight", len(sets)) as advance:
            for name, texts in sets.items():
                some = _spread(texts, max(prompts, size))
                groups = [some[start : start + size] for start in range(0, len(some) - size + 1, size)]
                passed = [turns.group(engines, group, turn) for turn, group in enumerate(groups)]
                totals = {own: [sum(one[own][i] for one in passed) for i in range(2)] for own in POLICIES}
                speeds[name] = {own: tokens / seconds for own, (tokens, seconds) in totals.items()}
                advance(1)
        ratios = [speed["auto"] / speed["off"] for speed in speeds.values()]
        means = ", ".join(f"{fmean(speed[own] for speed in speeds.values()):.0f}" for own in POLICIES)
        cells = [*(f"{one:.2f}" for one in ratios), f"**{fmean(ratios):.2f}**", f"{min(ratios):.2f}", means]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
        click.echo(lines[-1])
        write_text(out, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
