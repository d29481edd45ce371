"""Is speculation lossless on real prompts?

Every prompt is answered by plain decoding at batch 1, then by every policy at batch 1 and in a shuffled in-flight
batch with staggered joins; all answers must be equal token for token. A difference is excused only where the two best
scores of plain decoding differ by less than `TIE_TOLERANCE`, and is listed. Each part is saved when it is done, so an
interrupted run resumes.

    python benchmarks/lossless.py bundles/smollm2-135m --prompts data/eval --out /tmp/lossless
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click

from d2sd.build.validate.near_ties import TIE_TOLERANCE, first_mismatch, top2_margin
from d2sd.bundle.load import Bundle, load_bundle
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import can_run, make_engine
from d2sd.cli.report import Reporting
from d2sd.errors import D2SDError
from d2sd.io import write_text
from d2sd.policies import NAMES, PolicyName
from d2sd.progress import bar
from d2sd.prompts import read_prompts
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams

SETS = ("gsm8k", "humaneval", "mbpp", "mt_bench")
#: name -> (sampling of the i-th prompt without its seed, share of the prompts used)
REGIMES: dict[str, tuple[SamplingParams, float]] = {
    "greedy": (SamplingParams(), 1.0),
    "T=0.7 top-p 0.95": (SamplingParams(temperature=0.7, top_p=0.95), 0.25),
    "T=1": (SamplingParams(temperature=1.0), 0.25),
}
IN_FLIGHT = 8


@dataclass(frozen=True)
class Part:
    """One policy and batch size on one prompt set."""

    prompt_set: str
    regime: str
    policy: PolicyName
    batch: int

    @property
    def file(self) -> str:
        return f"{self.prompt_set}-{self.regime.replace(' ', '_')}-{self.policy}-{self.batch}.json"


def parts(bundle: Bundle, prompt_set: str) -> list[Part]:
    """All parts of a bundle; plain decoding at batch 1 first, as the reference for the others."""
    modes = [(policy, batch) for batch in (1, IN_FLIGHT) for policy in NAMES if can_run(bundle.draft_configs, policy)]
    return [Part(prompt_set, regime, policy, batch) for regime in REGIMES for policy, batch in modes]


def requests_of(bundle: Bundle, folder: Path, part: Part, per_set: int, tokens: int) -> list[Request]:
    """The first prompts of a set; the seed is the prompt's index, so every policy draws the same noise."""
    sampling, share = REGIMES[part.regime]
    prompts = read_prompts(folder / f"{part.prompt_set}.jsonl")[: round(per_set * share)]
    return [chat_request(bundle, text, sampling.with_seed(seed), tokens) for seed, (_, text) in enumerate(prompts)]


def run(bundle: Bundle, part: Part, requests: list[Request], device: str) -> dict[str, Any]:
    """Answer all requests: one after the other, or shuffled into a running batch one to three steps apart."""
    engine = make_engine(bundle, policy=part.policy, device=device, max_batch=part.batch)
    order = list(range(len(requests)))
    random.Random(0).shuffle(order)
    sequences = {}
    joins = random.Random(1)
    with bar(f"{part.prompt_set} {part.regime} {part.policy} x{part.batch}", len(requests)) as advance:
        if part.batch == 1:
            for index, request in enumerate(requests):
                sequences[index] = engine.generate([request])[0]
                advance(1)
        else:
            for index in order:
                sequences[index] = engine.submit(requests[index])
                for _ in range(joins.randint(1, 3)):
                    engine.step()
                advance(1)
            while engine.busy:
                engine.step()
    done = [sequences[i] for i in range(len(requests))]
    return {"part": asdict(part), "answers": [s.answer for s in done], "tau": [s.stats.tau for s in done]}


def compare(
    bundle: Bundle, requests: list[Request], result: dict[str, Any], plain: dict[str, Any]
) -> list[dict[str, Any]]:
    """Every answer that differs from plain decoding's, with the gap of the two best scores at the first difference."""
    differences = []
    for index, (request, answer, expected) in enumerate(
        zip(requests, result["answers"], plain["answers"], strict=True)
    ):
        place = first_mismatch(answer, expected)
        if place is not None:
            gap = top2_margin(bundle.target, [*request.prompt, *expected[:place]], request.sampling)
            differences.append({"prompt": index, "token": place, "gap": gap, "excused": gap <= TIE_TOLERANCE})
    return differences


def summary(out: Path) -> str:
    """Markdown: the verdict, and every answer that differs."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*-*.json"))}
    compared = [r for r in results.values() if "differences" in r]
    different = [(key, d) for key, r in results.items() for d in r.get("differences", [])]
    beyond = sum(not d["excused"] for _, d in different)
    answers = sum(len(r["answers"]) for r in compared)
    lines = [
        f"{answers} answers compared in {len(compared)} parts: {len(different)} differ, "
        f"{beyond} beyond {TIE_TOLERANCE:g}."
    ]
    lines += [f"- {key}: prompt {d['prompt']}, token {d['token']}, gap {d['gap']:.1e}" for key, d in different]
    return "\n".join(lines)


@click.command(cls=Reporting)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", type=click.Path(path_type=Path), default=Path("data/eval"), show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the results.")
@click.option("--per-set", default=32, show_default=True)
@click.option("--tokens", default=64, show_default=True)
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--only", default="*", help="Run the parts whose names match, such as *-off-*; plain decoding first.")
def main(bundle: Path, prompts: Path, out: Path, per_set: int, tokens: int, only: str, device: str) -> None:
    """Compare every policy with plain decoding on real prompts."""
    loaded = load_bundle(bundle, progress=bar)
    out.mkdir(parents=True, exist_ok=True)
    unexcused = 0
    for part in (p for prompt_set in SETS for p in parts(loaded, prompt_set) if fnmatch(p.file, only)):
        path = out / part.file
        if not path.exists():
            requests = requests_of(loaded, prompts, part, per_set, tokens)
            result = run(loaded, part, requests, device)
            plain_path = out / Part(part.prompt_set, part.regime, "off", 1).file
            if path != plain_path:
                result["differences"] = compare(loaded, requests, result, json.loads(plain_path.read_text()))
            write_text(path, json.dumps(result))
            click.echo(
                f"{part.file}: tau {sum(result['tau']) / len(requests):.3f}, "
                f"differences {result.get('differences', [])}"
            )
        unexcused += sum(not d["excused"] for d in json.loads(path.read_text()).get("differences", []))
    if all((out / part.file).exists() for prompt_set in SETS for part in parts(loaded, prompt_set)):
        text = summary(out)
        (out / "summary.md").write_text(text + "\n")
        click.echo(text)
    if unexcused:
        raise D2SDError("speculation changed a response", where=out, found=f"{unexcused} differences beyond a tie")


if __name__ == "__main__":
    main()
