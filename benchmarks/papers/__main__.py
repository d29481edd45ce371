"""The experiments of the D²SD, DFlash and FlexDraft papers that need no training, on the drafters of one bundle.

    python -m benchmarks.papers bundles/smollm2-135m                   # the sets in data/eval, some 15 minutes
    python -m benchmarks.papers BUNDLE --prompts my.jsonl --check      # and compare the steps with the engine's

Both drafters are asked once at each position of plain answers, and every way to draft is played from what they say.
What each prompt gave is kept in --out: an interrupted run goes on.
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.papers.arms import Chain, Restarts
from benchmarks.papers.experiments import FIRST, regimes
from benchmarks.papers.measure import Player, PromptSet, Regime, Study, served_steps
from benchmarks.papers.report import draw, page
from d2sd.bench.provenance import provenance
from d2sd.bundle.load import load_bundle
from d2sd.cli.report import Reporting
from d2sd.errors import BundleError, D2SDError
from d2sd.io import write_text
from d2sd.policies import DrafterRole, PolicyName
from d2sd.prompts import read_prompts, read_rows

PUBLIC = Path("data/eval")
SETS = tuple(PUBLIC / f"{name}.jsonl" for name in ("gsm8k", "humaneval", "mbpp", "mt_bench"))
#: Where long prompts are, and their kinds there.
LONG_PROMPTS, LONG_KINDS = PUBLIC / "spec_bench.jsonl", ("rag", "summarization")
#: Steps that the engine takes too, to be compared: those of recipes, behind every boundary with the ban.
_SERVED: dict[PolicyName, Player] = {
    "chain": Player(Chain()),
    "reanchor": Player(Restarts(7, FIRST, banned=True)),
    "d2sd": Player(Restarts(7, banned=True)),
}


@click.command(cls=Reporting)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", multiple=True, type=click.Path(path_type=Path), help="JSONL files; the public sets if none.")
@click.option("--per-set", default=16, show_default=True, type=click.IntRange(1), help="Prompts of each file.")
@click.option("--max-new-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--longest", default=256, show_default=True, type=click.IntRange(1), help="Tokens of the long answers.")
@click.option("--check", is_flag=True, help="Compare each step of three policies with the engine's, and write nothing.")
@click.option("--out", type=click.Path(path_type=Path), default="build/papers", show_default=True)
def main(
    bundle: Path, prompts: tuple[Path, ...], per_set: int, max_new_tokens: int, longest: int, check: bool, out: Path
) -> None:
    """Play the papers' experiments with the two drafters of BUNDLE; write papers.md and papers.png to --out."""
    held = load_bundle(bundle)
    if missing := {DrafterRole.FIRST, DrafterRole.SECOND} - held.drafters.keys():
        raise BundleError(
            "The experiments are of two drafters.",
            where=bundle,
            found="no " + ", no ".join(role.key for role in sorted(missing)) + " drafter",
            fix="name a bundle with drafters.first and drafters.second",
        )
    study, wanted = Study(bundle, out), regimes(per_set, max_new_tokens, longest)
    files = prompts or SETS
    if repeated := {file for file in files if sum(file.stem == other.stem for other in files) > 1}:
        raise D2SDError(
            "Prompt files have one name.",
            where="--prompts",
            found=", ".join(sorted(map(str, repeated))),
            expected="a name for each, since results are kept by it",
            fix="rename one",
        )
    sets = [PromptSet(file.stem, read_prompts(file)) for file in files]
    if check:
        for own in sets:
            _check(study, own, wanted["greedy"])
        return
    more = [] if prompts else _long_sets()
    answers = {
        name: {own.name: study.answers(own, regime) for own in (*sets, *(more if name == "long" else ()))}
        for name, regime in wanted.items()
    }
    draw(answers, out / "papers.png")
    said = provenance({"name": held.recipe.name}, "cpu")
    count = f"{per_set} prompts of each set, of the long answers {wanted['long'].per_set}"
    closing = f"{said.date}, commit {said.commit}, {said.machine['processor']}; {count}."
    write_text(out / "papers.md", f"{page(answers, 'papers.png')}\n{closing}\n")
    click.echo(out / "papers.md")


def _long_sets() -> list[PromptSet]:
    """Prompts of several hundred tokens, by kind."""
    rows = [row for _, row in read_rows(LONG_PROMPTS)]
    return [
        PromptSet(kind, [(str(row["id"]), row["turns"][0]) for row in rows if row["category"] == kind])
        for kind in LONG_KINDS
    ]


def _check(study: Study, own: PromptSet, regime: Regime) -> None:
    """Raise D2SDError where a step of the engine commits other tokens than the played one."""
    players = {str(name): player for name, player in _SERVED.items()}
    checked = Study(study.path, study.out / "check")
    found = checked.answers(own, Regime("check", regime.temperature, regime.max_new_tokens, regime.per_set, players))
    for policy in _SERVED:
        served = served_steps(study.engine(policy), study.requests(own, regime))
        for answer, steps in zip(found, served, strict=True):
            played = answer.played[policy].accepted
            if played[:-1] != steps[:-1] or len(played) != len(steps):
                raise D2SDError(
                    "A played step differs.", where=f"{own.name}: {answer.id}, {policy}", found=played, expected=steps
                )
        click.echo(f"{own.name}, {policy}: {sum(map(len, served))} steps of {len(served)} answers are the engine's")


if __name__ == "__main__":
    main()
