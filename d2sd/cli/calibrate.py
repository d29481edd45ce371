"""`d2sd calibrate`: how far the drafters of a bundle may be believed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from d2sd.cli.report import Reporting, bar
from d2sd.errors import D2SDError

if TYPE_CHECKING:
    from d2sd.convert.bundle import Bundle
    from d2sd.runtime.observe import Judged, Observation
    from d2sd.runtime.policy import PolicyName

#: The widest tree that is watched; narrower ones are its beginnings.
_ROWS = 64


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
    from d2sd.calibration import CalibrationFile, write_calibration
    from d2sd.cli.pictures.files import check_writable
    from d2sd.cli.serving import OWN_PROMPTS
    from d2sd.convert.bundle import load_bundle
    from d2sd.convert.drafter import fingerprint
    from d2sd.runtime.fitting import calibration_error, corrected, fit

    check_writable(out)
    loaded = load_bundle(bundle, progress=bar)
    if loaded.first is None:
        raise D2SDError("the bundle has no drafter to calibrate", where=bundle)
    if loaded.recipe.precision == "fp16":
        raise D2SDError(
            "fp16 rounds small weights, so these drafters could not be recognised again", where=f"{bundle}: precision",
            found="fp16", expected="fp32 or bf16", fix="build with --set precision=bf16 to calibrate",
        )  # fmt: skip
    marks = fingerprint(loaded.first), fingerprint(loaded.second) if loaded.second else None  # before they are packed
    texts = [text for path in prompts or (OWN_PROMPTS,) for text in _prompts(path, exclude, count)]
    judged: list[list[Judged]] = []
    tau: dict[Literal["0", "1"], dict[str, list[float]]] = {}
    regimes: tuple[tuple[Literal["0", "1"], float], ...] = (("0", 0.0), ("1", 1.0))
    for key, temperature in regimes:
        one = _run(loaded, "ddtree", texts, temperature, max_new_tokens)
        both = _run(loaded, "hybrid", texts, temperature, max_new_tokens) if loaded.second else []
        judged.append([*_all(one), *(node for node in _all(both) if node.drafter == 1)])
        tau[key] = {"chain": _chain_gain(one), "ddtree": _tree_gain(one)} | (
            {"hybrid": _tree_gain(both)} if both else {}
        )
    slots = loaded.first.config.block_size - 1
    fitted = fit(judged[0], judged[1], slots)
    report: dict[str, float] = {"prompts": len(texts), "max_new_tokens": max_new_tokens}
    for warm, nodes in enumerate(judged):
        for drafter in range(2 if loaded.second else 1):
            name = f"calibration error of {('first', 'second')[drafter]} at T = {warm}"
            report[f"{name}, before"] = round(calibration_error(nodes, drafter), 4)
            report[f"{name}, after"] = round(calibration_error(corrected(nodes, fitted, warm), drafter), 4)
    write_calibration(
        out,
        CalibrationFile(
            drafters=marks, block_size=slots + 1, tau=tau, report=report,
            slope=fitted.slope.double().round(decimals=4).tolist(),
            offset=fitted.offset.double().round(decimals=4).tolist(),
        ),
    )  # fmt: skip
    for name, value in report.items():
        click.echo(f"{name:55}{value:g}")
    click.echo(out)


def _prompts(path: Path, exclude: Path | None, count: int) -> list[str]:
    from d2sd.cli.serving import read_prompts

    try:
        lines = exclude.read_text("utf-8").split("\n") if exclude else []
        seen = {str(json.loads(line)["id"]) for line in lines if line.strip()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise D2SDError("the ids to leave out cannot be read", where=exclude, found=repr(error)) from None
    fresh = [text for name, text in read_prompts(path) if name not in seen][-count:]
    if not fresh:
        raise D2SDError("no prompt is left", where=path, fix="name other prompts, or exclude fewer")
    return fresh


def _run(
    bundle: Bundle, policy: PolicyName, texts: list[str], temperature: float, max_new_tokens: int
) -> list[Observation]:
    """Answer all prompts and observe every step."""
    from d2sd.cli.serving import chat_request, make_engine
    from d2sd.runtime.observe import observe
    from d2sd.runtime.request import SamplingParams

    engine = make_engine(bundle, policy=policy, row_budget=_ROWS, calibrated=False)
    found: list[Observation] = []
    with bar(f"{policy} at T = {temperature:g}", len(texts)) as advance:
        for seed, text in enumerate(texts):
            engine.submit(chat_request(bundle, text, SamplingParams(temperature, seed=seed), max_new_tokens))
        while engine.busy:
            outputs = engine.step()
            if outputs and engine.trace is not None:
                found += observe(engine.trace)
            advance(sum(output.finish is not None for output in outputs))
    return found


def _all(observations: Iterable[Observation]) -> list[Judged]:
    return [node for one in observations for node in one.judged]


def _gain(accepted: list[list[int]]) -> list[float]:
    """Mean tokens a step with 1, 2, … rows, from the rows of every step's accepted nodes, the root aside."""
    return [
        round(1 + sum(sum(index < rows for index in step) for step in accepted) / len(accepted), 4)
        for rows in range(1, _ROWS + 1)
    ]


def _chain_gain(observations: list[Observation]) -> list[float]:
    return _gain([list(range(1, one.chain + 1)) for one in observations])


def _tree_gain(observations: list[Observation]) -> list[float]:
    return _gain([[node.row for node in one.judged if node.right] for one in observations])
