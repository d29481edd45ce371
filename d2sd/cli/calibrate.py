"""`d2sd calibrate`: turn drafter probabilities into acceptance probabilities."""

from __future__ import annotations

from pathlib import Path

import click

from d2sd.bundle.load import load_bundle
from d2sd.calibration import write_calibration
from d2sd.cli.options import FilePath, bundle_argument, device_option, held_out_option
from d2sd.cli.report import Reporting
from d2sd.io import check_writable
from d2sd.progress import bar
from d2sd.prompts import OWN_PROMPTS, last_prompts
from d2sd.train.confidence import fit as fitting
from d2sd.train.confidence.fit import PROMPTS, TOKENS


@click.command(cls=Reporting)
@bundle_argument
@held_out_option
@click.option("--exclude", type=FilePath, help="JSONL of {id}: prompts the drafters were trained on.")
@click.option(
    "--count", type=click.IntRange(1), default=PROMPTS, show_default=True, help="Prompts of each file, the last ones."
)
@click.option("--max-new-tokens", type=click.IntRange(1), default=TOKENS, show_default=True)
@device_option
@click.option("--out", type=FilePath, required=True, help="File to write; the recipe names it in drafters.calibration.")
def calibrate(
    bundle: Path, prompts: tuple[Path, ...], exclude: Path | None, count: int, max_new_tokens: int, device: str,
    out: Path,
) -> None:  # fmt: skip
    """Fit the drafters' confidence to what BUNDLE's target accepts.

    Fitted at T = 0 and T = 1; the tokens per step of every tree size are measured along with it.

    For example:

        d2sd calibrate bundles/smollm2-135m --prompts held_out.jsonl --out calibration.json
    """
    check_writable(out)
    loaded = load_bundle(bundle, progress=bar)
    texts = [text for path in prompts or (OWN_PROMPTS,) for text in last_prompts(path, exclude, count)]
    calibration = fitting.calibrate(loaded, texts, max_new_tokens, device)
    write_calibration(out, calibration)
    for name, value in calibration.report.items():
        click.echo(f"{name:55}{value:g}")
    click.echo(out)
