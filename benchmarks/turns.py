"""Does `auto` serve more tokens a second than plain decoding, whatever the load? Two engines in turns, set by set.

    python -m benchmarks.turns bundles/smollm2-135m --out build/turns.md
    python -m benchmarks.turns bundles/smollm2-135m --out build/turns.md --parameters penalties,schema --temperature 0.8

Groups of as many prompts as are in flight are answered by both engines, in one order and in the reverse; a group's time
is the median of its rounds, prompts included, so that a slow moment of the machine does not decide. Greedy answers of
both must be the same, before any figure is written. Nothing else should run on the machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click

from d2sd.bench.markdown import line_table
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
from d2sd.runtime.grammar.forms import StructuredOutputsParams
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.serve.structured import GrammarCompiler

POLICIES: tuple[Method, ...] = ("off", "auto")
_SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 200}, "certain": {"type": "boolean"}},
    "required": ["answer", "certain"],
    "additionalProperties": False,
}
#: Sampling parameters by name.
PARAMETERS: dict[str, dict[str, Any]] = {
    "none": {},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    "top-p": {"top_p": 0.9, "top_k": 50},
    "schema": {"structured_outputs": StructuredOutputsParams(json=_SCHEMA)},
}
#: Files of MT-Bench's kinds are one set; Spec-Bench's others are one each.
_OTHERS = ("translation", "summarization", "qa", "rag")


@dataclass
class Turns:
    """A measurement: who answers, how much, how often."""

    bundle: Bundle
    temperature: float
    max_tokens: int
    rounds: int

    def group(
        self, engines: dict[Method, Engine], texts: Sequence[str], turn: int, parameters: str = "none"
    ) -> dict[Method, tuple[int, float]]:
        """Tokens and seconds of each engine, which answer `texts` together; `turn` decides who begins."""
        more = PARAMETERS[parameters]
        form = more.get("structured_outputs")
        grammar = None if form is None else GrammarCompiler(self.bundle).compile(form)
        seconds = {name: list[float]() for name in engines}
        answers = dict[Method, list[list[int]]]()
        for number in range(self.rounds):
            for name in POLICIES[:: -1 if (number + turn) % 2 else 1]:
                params = [SamplingParams(self.temperature, seed=seed, **more) for seed in range(len(texts))]
                asked = zip(texts, params, strict=True)
                requests = [
                    replace(chat_request(self.bundle, text, own, self.max_tokens), grammar=grammar)
                    for text, own in asked
                ]
                start = time.perf_counter()
                found = engines[name].generate(requests)
                seconds[name].append(time.perf_counter() - start)
                answers[name] = [one.answer for one in found]
        if answers["off"] != answers["auto"]:
            raise D2SDError("Answers differ from those of plain decoding.", where=f"{texts[0][:60]} …")
        return {name: (sum(map(len, answers[name])), median(seconds[name])) for name in POLICIES}

    def speeds(
        self, engines: dict[Method, Engine], sets: Mapping[str, Sequence[str]], size: int, least: int, parameters: str
    ) -> dict[str, dict[Method, float]]:
        """Tokens a second by set, of at least `least` prompts each, `size` in flight."""
        found = dict[str, dict[Method, float]]()
        with bar(f"{size} in flight, {parameters}", len(sets)) as advance:
            for name, texts in sets.items():
                some = _spread(texts, max(least, size))
                groups = [some[start : start + size] for start in range(0, len(some) - size + 1, size)]
                passed = [self.group(engines, group, turn, parameters) for turn, group in enumerate(groups)]
                totals = {own: [sum(one[own][i] for one in passed) for i in range(2)] for own in POLICIES}
                found[name] = {own: tokens / seconds for own, (tokens, seconds) in totals.items()}
                advance(1)
        return found


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
@click.option("--parameters", type=Listed(click.Choice(list(PARAMETERS))), default="none", show_default=True)
@click.option("--data", default="data/eval", show_default=True, type=FilePath)
def main(
    bundle: Path,
    out: Path,
    in_flight: list[int],
    prompts: int,
    rounds: int,
    max_tokens: int,
    temperature: float,
    parameters: list[str],
    data: Path,
) -> None:
    """Measure `auto` of BUNDLE against plain decoding on a CPU."""
    turns = Turns(load_bundle(bundle, progress=bar), temperature, max_tokens, rounds)
    sets, lines = sets_of(data), list[Sequence[str]]()
    for size in in_flight:
        engines = {
            name: make_engine(turns.bundle, policy=name, max_batch=size, prefix_cache=False) for name in POLICIES
        }
        for engine in engines.values():
            engine.generate([chat_request(turns.bundle, "Say hello.", SamplingParams(), 16)])
        for name in parameters:
            title = f"{size}" if parameters == ["none"] else f"{size}, {name}"
            lines.append([title, *_cells(turns.speeds(engines, sets, size, prompts, name))])
            headings = ["in flight", *sets, "mean", "least", "tokens/s, plain and `auto`"]
            write_text(out, line_table(headings, lines) + "\n")
            click.echo(", ".join(lines[-1]))


def _cells(speeds: Mapping[str, Mapping[Method, float]]) -> list[str]:
    """The line of a table: `auto` over plain decoding by set, their mean and least, and tokens a second of both."""
    ratios = [speed["auto"] / speed["off"] for speed in speeds.values()]
    means = ", ".join(f"{fmean(speed[own] for speed in speeds.values()):.0f}" for own in POLICIES)
    return [*(f"{one:.2f}" for one in ratios), f"**{fmean(ratios):.2f}**", f"{min(ratios):.2f}", means]


if __name__ == "__main__":
    main()
