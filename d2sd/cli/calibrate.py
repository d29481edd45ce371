"""`d2sd calibrate`: turn drafter probabilities into acceptance probabilities."""

from __future__ import annotations

from pathlib import Path

import click

from d2sd.calibration import write_calibration
from d2sd.cli.options import FilePath, bundle_argument, held_out_option
from d2sd.cli.report import Reporting
from d2sd.convert.bundle.load import load_bundle
from d2sd.convert.bundle.serving import chat_request
from d2sd.convert.checkpoint.drafter import fingerprint
from d2sd.errors import D2SDError
from d2sd.io import check_writable
from d2sd.progress import bar
from d2sd.prompts import OWN_PROMPTS, read_ids, read_prompts
from d2sd.runtime.request import SamplingParams
from d2sd.train.confidence.fit import fit_calibration


@click.command(cls=Reporting)
@bundle_argument
@held_out_option
@click.option("--exclude", type=FilePath, help="JSONL of {id}: prompts the drafters were trained on.")
@click.option(
    "--count", type=click.IntRange(1), default=24, show_default=True, help="Prompts of each file, the last ones."
)
@click.option("--max-new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--out", type=FilePath, required=True, help="File to write; the recipe names it in drafters.calibration.")
def calibrate(
    bundle: Path, prompts: tuple[Path, ...], exclude: Path | None, count: int, max_new_tokens: int, out: Path
) -> None:
    """Fit the drafters' confidence to what BUNDLE's target accepts.

    Fitted at T = 0 and T = 1; the tokens per step of every tree size are measured along with it.

    For example:

        d2sd calibrate bundles/smollm2-135m --prompts held_out.jsonl --out calibration.json
    """
    check_writable(out)
    loaded = load_bundle(bundle, progress=bar)
    if loaded.first is None:
        raise D2SDError("The bundle has no drafter to calibrate.", where=bundle)
    if loaded.recipe.precision == "fp16":
        raise D2SDError(
            "A calibration is tied to the drafters' weights, and fp16 rounds small ones.", where=f"{bundle}: precision",
            found="fp16", expected="fp32 or bf16", fix="build with --set precision=bf16 to calibrate",
        )  # fmt: skip
    if loaded.recipe.fp8 is not None and loaded.recipe.fp8.drafters:
        raise D2SDError(
            "A calibration is tied to the drafters' weights, and FP8 has rounded them.",
            where=f"{bundle}: fp8.drafters", fix="calibrate a bundle without fp8; the calibration serves both",
        )  # fmt: skip
    fingerprints = fingerprint(loaded.first), fingerprint(loaded.second) if loaded.second else None
    texts = [text for path in prompts or (OWN_PROMPTS,) for text in _prompts(path, exclude, count)]
    requests = [chat_request(loaded, text, SamplingParams(), max_new_tokens) for text in texts]
    found = fit_calibration(loaded, fingerprints, requests)
    write_calibration(out, found)
    for name, value in found.report.items():
        click.echo(f"{name:55}{value:g}")
    click.echo(out)


def _prompts(path: Path, exclude: Path | None, count: int) -> list[str]:
    seen = read_ids(exclude) if exclude else set()
    fresh = [text for name, text in read_prompts(path) if name not in seen][-count:]
    if not fresh:
        raise D2SDError("No prompt is left.", where=path, fix="name other prompts, or exclude fewer")
    return fresh
