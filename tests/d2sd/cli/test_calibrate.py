"""`d2sd calibrate` on a tiny bundle: what it finds, that the build takes it and `auto` serves by it, its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result

from d2sd.bundle.load import Bundle, load_bundle
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import make_engine, scores_of
from d2sd.calibration import load_calibration
from d2sd.convert.kinds import KINDS
from d2sd.plugins.lookup import LENGTHS, SUPPORT
from d2sd.policies import DrafterRole, DraftUse, PolicyName
from d2sd.prompts import read_prompts
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.speculation.policy import Off
from tests.commands import passed, refused, run_cli, succeeds
from tests.convert.helpers import add_calibration, edit_yaml, write_project

LENGTH = 8
TEXTS = ["w1 w5 w9", "w7", "w8 w3", "w4 w44"]


def calibrate(bundle: Path, out: Path, *arguments: object) -> Result:
    prompts = bundle.parent / "prompts.jsonl"
    return run_cli("calibrate", bundle, "--prompts", prompts, "--max-new-tokens", LENGTH, "--out", out, *arguments)


def built(recipe: Path, out: Path, *overrides: str) -> Path:
    succeeds("build", recipe, "--out", out, *(part for one in overrides for part in ("--set", one)))
    return out


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project, a bundle beside it, and prompts."""
    folder = tmp_path_factory.mktemp("calibrate")
    path = write_project(folder)
    lines = [json.dumps({"id": f"p{n}", "turns": [text]}) for n, text in enumerate(TEXTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    built(path, folder / "bundle")
    return path


@pytest.fixture(scope="module")
def bundle(recipe: Path) -> Path:
    return recipe.with_name("bundle")


@pytest.fixture(scope="module")
def ended(bundle: Path) -> Result:
    return calibrate(bundle, bundle.parent / "found.json")


def tokens_a_step(bundle: Bundle, policy: PolicyName, temperature: float) -> float:
    """Return tokens per step of a tree of 64 rows, over all steps of all prompts."""
    engine = make_engine(bundle, policy=policy, row_budget=64, calibrated=False, lookup=False)
    sequences = engine.generate(
        chat_request(bundle, text, SamplingParams(temperature, seed=seed), LENGTH)
        for seed, (_, text) in enumerate(read_prompts(bundle.path.parent / "prompts.jsonl"))
    )
    return sum(s.stats.tokens for s in sequences) / sum(s.stats.steps for s in sequences)


@pytest.mark.slow
def test_what_is_found(bundle: Path, ended: Result) -> None:
    """Gains at 64 rows are those of an engine that runs the same; fewer rows never gain more."""
    assert ended.exit_code == 0, ended.output + repr(ended.exception)
    found = load_calibration(bundle.parent / "found.json")
    loaded = load_bundle(bundle)
    assert found.drafters == {
        role.key: KINDS[drafter.config.kind].fingerprint(drafter) for role, drafter in loaded.drafters.items()
    }
    assert found.block_size == 4
    assert found.tau.keys() == {"0", "1"}
    for key, temperature in (("0", 0.0), ("1", 1.0)):
        curves = found.tau[key]  # type: ignore[index]
        assert curves.keys() == {"chain", "ddtree", "hybrid", "hybrid/1", "hybrid/2", "ddtree+lookup", "hybrid+lookup"}
        for curve in curves.values():
            assert len(curve) == 64
            assert curve[0] == 1
            assert curve == sorted(curve)
        assert len(set(curves["chain"][3:])) == 1, "a chain has no more rows than a block"
        trees: tuple[PolicyName, ...] = ("ddtree", "hybrid")
        for policy in trees:
            assert curves[policy][-1] == pytest.approx(tokens_a_step(loaded, policy, temperature), abs=1e-4)
            assert curves[policy][-1] > 1
    assert found.report.keys() == {
        "prompts",
        "max_new_tokens",
        *(
            f"calibration error of {name} at T = {t}, {when}"
            for name in ("first", "second", "chain", "reanchor", "d2sd")
            for t in (0, 1)
            for when in ("before", "after")
        ),
    }
    assert (found.report["prompts"], found.report["max_new_tokens"]) == (4, LENGTH)
    for name, value in found.report.items():
        if name.endswith("after"):  # random drafters say much and know nothing
            assert value < found.report[name.replace("after", "before")]
    assert found.uses.keys() == {"chain", "reanchor", "d2sd"}
    scores = scores_of(found)
    for use in (DraftUse.CHAIN, DraftUse.REANCHOR, DraftUse.D2SD):
        assert not torch.equal(scores.slope[:, use], scores.slope[:, use.like])
        torch.testing.assert_close(scores.offset[:, use, :, 0], torch.tensor(found.uses[use.key].offset))
    assert found.copies is not None
    assert {key: odds.slot for key, odds in found.copies.items()}.keys() == {"0", "1"}
    assert found.copies["0"] != found.copies["1"]
    assert len(found.copies["0"].length) == len(LENGTHS)
    assert len(found.copies["0"].support) == len(SUPPORT) + 2
    neutral = [value for table in (found.slope[0][0], found.slope[1][1]) for distance in table for value in distance]
    assert set(neutral) != {1.0}
    assert ended.stdout.splitlines()[-1] == str(bundle.parent / "found.json")
    assert len(ended.stdout.splitlines()) == 1 + len(found.report)


@pytest.mark.slow
def test_two_runs_find_the_same(bundle: Path, ended: Result, tmp_path: Path) -> None:
    assert calibrate(bundle, tmp_path / "again.json").stdout.count("\n") == ended.stdout.count("\n")
    assert (tmp_path / "again.json").read_bytes() == (bundle.parent / "found.json").read_bytes()


@pytest.mark.slow
def test_the_build_takes_it_and_auto_serves_by_it(
    recipe: Path, ended: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `auto` alone; what a policy writes is what it wrote before."""
    override = "drafters.calibration=found.json"
    calibrated = load_bundle(built(recipe, tmp_path / "calibrated", override))
    assert calibrated.calibration == load_calibration(recipe.with_name("found.json"))
    auto, pinned = make_engine(calibrated), make_engine(calibrated, policy="hybrid")
    assert auto.selector is not None
    assert isinstance(auto.selector.off, Off)
    assert {policy.num_nodes for policy in auto.selector.policies} == {1, 4, 8, 12, 16}  # the recipe's budget is 16
    assert {size for _, size in auto.selector.times.seconds} == {1, 2}
    with monkeypatch.context() as patch:
        patch.setattr("d2sd.bundle.step_times.measure_step_times", None)
        again = make_engine(calibrated).selector
    assert again is not None
    assert again.times == auto.selector.times, "measured once a machine"
    assert pinned.selector is None
    bare = make_engine(load_bundle(recipe.with_name("bundle")))
    assert bare.selector is None
    request = chat_request(calibrated, "w1 w5 w9", SamplingParams(), 12)
    answers = [engine.generate([request])[0].answer for engine in (auto, pinned, bare)]
    assert answers[0] == answers[1] == answers[2] == make_engine(calibrated, policy="off").generate([request])[0].answer


@pytest.mark.slow
def test_what_was_found_before_is_not_used_to_find_more(recipe: Path, ended: Result, tmp_path: Path) -> None:
    """A bundle that has a calibration is calibrated as one that has none."""
    add_calibration(recipe)
    try:
        (tmp_path / "prompts.jsonl").write_bytes(recipe.with_name("prompts.jsonl").read_bytes())
        path = built(recipe, tmp_path / "bundle")
    finally:
        edit_yaml(recipe, "drafters.calibration", ...)
    assert load_bundle(path).calibration is not None
    assert calibrate(path, tmp_path / "again.json").exit_code == 0
    assert (tmp_path / "again.json").read_bytes() == recipe.with_name("found.json").read_bytes()


@pytest.mark.slow
def test_without_a_second_drafter(recipe: Path, tmp_path: Path) -> None:
    """The first makes both passes: its second has rows and forecasts of its own, by which `auto` serves."""
    (tmp_path / "prompts.jsonl").write_bytes(recipe.with_name("prompts.jsonl").read_bytes())
    passed(calibrate(built(recipe, tmp_path / "one", "drafters.second=null"), tmp_path / "one.json"))
    found = load_calibration(tmp_path / "one.json")
    assert found.drafters.keys() == {"first"}
    curves = {"chain", "ddtree", "ddtree+lookup", "hybrid", "hybrid/1", "hybrid/2", "hybrid+lookup"}
    assert {*found.tau["0"], *found.tau["1"]} == curves
    assert sum("second pass" in name for name in found.report) == 4
    assert found.uses.keys() == {"chain", "reanchor"}
    assert found.slope[0][1] != [[1.0, 1.0]] * 3 != found.slope[0][0] != found.slope[0][1]
    found_by = f"drafters.calibration={tmp_path / 'one.json'}"
    bundle = load_bundle(built(recipe, tmp_path / "served", "drafters.second=null", found_by))
    assert bundle.calibration == found
    auto = make_engine(bundle)
    assert auto.selector is not None
    assert auto.runner.drafters.keys() == {DrafterRole.FIRST}
    names = {policy.name: policy.drafters for policy in auto.selector.policies}
    assert names == {"off": (), "lookup": (), **dict.fromkeys(("chain", "ddtree", "hybrid"), (DrafterRole.FIRST,))}
    request = chat_request(bundle, "w1 w5 w9", SamplingParams(), 12)
    plain = make_engine(bundle, policy="off").generate([request])[0].answer
    assert plain == auto.generate([request])[0].answer
    assert plain == make_engine(bundle, policy="hybrid").generate([request])[0].answer


@pytest.mark.slow
def test_a_build_calibrates(recipe: Path, tmp_path: Path) -> None:
    """In one command: what `d2sd calibrate` finds with the same prompts and tokens, proven with the bundle."""
    prompts, settings = recipe.with_name("prompts.jsonl"), ("--set", "drafters.second=null", "--set", "checks.count=1")
    plain = succeeds("build", recipe, "--out", tmp_path / "plain", *settings)
    assert f"not calibrated: `auto` serves its largest tree until d2sd-build {recipe} --calibrate" in plain.stderr
    assert plain.stdout.splitlines() == [str(tmp_path / "plain")]
    whole = succeeds("build", recipe, "--out", tmp_path / "whole", *settings, "--calibrate", "--prompts", prompts)
    assert "not calibrated" not in whole.stderr
    bundle = load_bundle(tmp_path / "whole")
    tokens = str(bundle.recipe.limits.max_context // 2)
    found = ("--prompts", prompts, "--max-new-tokens", tokens, "--out", tmp_path / "found.json")
    succeeds("calibrate", tmp_path / "plain", *found)
    assert bundle.calibration == load_calibration(tmp_path / "found.json")
    assert make_engine(bundle).selector is not None
    greedy = bundle.manifest.checks["greedy"]
    assert isinstance(greedy, dict)
    assert greedy.keys() == {"chain", "hybrid"}


def test_what_cannot_be_calibrated_is_refused_before_the_build(recipe: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out", "--calibrate")
    for override, told in (
        ("drafters={}", "no drafter"),
        ("precision=fp16", "fp16 rounds"),
        ("drafters.calibration=x.json", "names a calibration"),
    ):
        refused(run_cli("build", recipe, *out, "--set", override), told)
    refused(run_cli("build", recipe, *out, "--prompts", tmp_path / "none.jsonl"), "none.jsonl")
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_the_last_prompts_that_were_not_trained_on(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "seen.jsonl").write_text('{"id": "p3", "answer": 1}\n\n{"id": "x"}\n')
    seen: list[str] = []

    def watched(*arguments: object) -> object:
        seen.append(str(arguments[1]))
        return chat_request(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("d2sd.train.confidence.fit.chat_request", watched)
        ended = calibrate(bundle, tmp_path / "c.json", "--exclude", tmp_path / "seen.jsonl", "--count", 2)
    assert ended.exit_code == 0, ended.output + repr(ended.exception)
    assert load_calibration(tmp_path / "c.json").report["prompts"] == 2
    assert seen == [TEXTS[1], TEXTS[2]]


def test_errors(recipe: Path, bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    refused(run_cli("calibrate", bundle), "--out")
    refused(calibrate(bundle, out, "--prompts", tmp_path / "none.jsonl"), "none.jsonl")
    refused(calibrate(bundle, out, "--exclude", tmp_path / "none.jsonl"), "cannot be read", "none.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"name": "p1"}\n')
    refused(calibrate(bundle, out, "--exclude", tmp_path / "bad.jsonl"), "`id` must be a string", "bad.jsonl:1")
    refused(calibrate(bundle, out, "--exclude", bundle.parent / "prompts.jsonl"), "No prompt is left", "prompts.jsonl")
    refused(calibrate(bundle, out, "--max-new-tokens", 64), "maximum context length")
    for option, value in (("--count", 0), ("--count", -2), ("--max-new-tokens", 0)):
        refused(calibrate(bundle, out, option, value), option)
    (tmp_path / "prompts.jsonl").write_bytes(recipe.with_name("prompts.jsonl").read_bytes())
    plain = built(recipe, tmp_path / "none", "drafters={}")
    refused(calibrate(plain, out), "no drafter", "none")
    assert not out.exists()


def test_an_unwritable_path_is_refused_before_the_run(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("prompts were answered")

    monkeypatch.setattr("d2sd.train.confidence.fit.watch", refuse)
    refused(calibrate(bundle, tmp_path / "no" / "folder" / "c.json"), "folder")
