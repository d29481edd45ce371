"""`d2sd calibrate`: how far the drafters of a bundle may be believed."""

from __future__ import annotations

import json
from pathlib import Path

import click

from d2sd.cli.report import Reporting
from d2sd.errors import D2SDError
from d2sd.progress import bar


@click.command(cls=Reporting)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--prompts", type=click.Path(path_type=Path), multiple=True,
    help="JSONL of {id, turns}; repeatable. Held out: neither trained on nor evaluated.  [default: our own two dozen]",
)  # fmt: skip
@click.option("--exclude", type=click.Path(path_type=Path), help="JSONL of {id}: prompts the drafters were trained on.")
@click.option(
    "--count", type=click.IntRange(1), default=24, show_default=True, help="Prompts of each file, the last ones."
)
@click.option("--max-new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The calibration, for the recipe to name.")
def calibrate(
    bundle: Path, prompts: tuple[Path, ...], exclude: Path | None, count: int, max_new_tokens: int, out: Path
) -> None:
    """Fit the drafters' confidence to what BUNDLE's target accepts, at T = 0 and T = 1, and measure what trees gain.

    For example:

        d2sd calibrate bundles/smollm2-135m --prompts held_out.jsonl --out calibration.json
    """
    from d2sd.calibration import write_calibration
    from d2sd.convert.bundle.load import load_bundle
    from d2sd.convert.bundle.serving import chat_request
    from d2sd.convert.checkpoint.drafter import fingerprint
    from d2sd.io import check_writable
    from d2sd.prompts import OWN_PROMPTS
    from d2sd.runtime.request import SamplingParams
    from d2sd.train.confidence.fit import fit_calibration

    check_writable(out)
    loaded = load_bundle(bundle, progress=bar)
    if loaded.first is None:
        raise D2SDError("the bundle has no drafter to calibrate", where=bundle)
    if loaded.recipe.precision == "fp16":
        raise D2SDError(
            "fp16 rounds small weights, so these drafters could not be recognised again", where=f"{bundle}: precision",
            found="fp16", expected="fp32 or bf16", fix="build with --set precision=bf16 to calibrate",
        )  # fmt: skip
    if loaded.recipe.fp8 is not None and loaded.recipe.fp8.drafters:
        raise D2SDError(
            "a calibration is known by the drafters' own weights, which FP8 has rounded",
            where=f"{bundle}: fp8.drafters", fix="calibrate the bundle without fp8: it serves both",
        )  # fmt: skip
    marks = fingerprint(loaded.first), fingerprint(loaded.second) if loaded.second else None
    texts = [text for path in prompts or (OWN_PROMPTS,) for text in _prompts(path, exclude, count)]
    requests = [chat_request(loaded, text, SamplingParams(), max_new_tokens) for text in texts]
    found = fit_calibration(loaded, marks, requests)
    write_calibration(out, found)
    for name, value in found.report.items():
        click.echo(f"{name:55}{value:g}")
    click.echo(out)


def _prompts(path: Path, exclude: Path | None, count: int) -> list[str]:
    from d2sd.prompts import read_prompts

    try:
        lines = exclude.read_text("utf-8").split("\n") if exclude else []
        seen = {str(json.loads(line)["id"]) for line in lines if line.strip()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise D2SDError("the ids to leave out cannot be read", where=exclude, found=repr(error)) from None
    fresh = [text for name, text in read_prompts(path) if name not in seen][-count:]
    if not fresh:
        raise D2SDError("no prompt is left", where=path, fix="name other prompts, or exclude fewer")
    return fresh
