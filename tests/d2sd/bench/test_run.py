"""`d2sd bench` on a tiny bundle: what it leaves, that it goes on where it stopped, and what it refuses."""

from __future__ import annotations

import gc
import json
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result as Ended

from d2sd.bench import run as bench_run
from d2sd.bench.estimate import duration
from d2sd.bench.measure import measure_cell
from d2sd.bench.result import Cell, Difference, Key, Result, load_result
from d2sd.build.pipeline import build
from d2sd.bundle.serving import make_engine
from d2sd.recipe import load_recipe
from d2sd.runtime.engine import Engine
from d2sd.runtime.policy_selector import PolicySelector
from tests.commands import passed, refused, run_cli
from tests.convert.helpers import add_calibration, write_project

SETS = {"one": ["w1 w5 w9", "w7", "w8 w3", "w4"], "two": ["w2 w40", "w61 w17 w3"]}
#: Quick, and of every kind: plain, a chain, two passes.
SMALL = ("--methods", "chain,hybrid:8", "--temperatures", "0", "--per-set", "2", "--max-new-tokens", "6")
METHODS = ("off", "chain", "hybrid")

Build = Callable[..., Path]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of both drafters with a calibration, and two sets of prompts."""
    folder = tmp_path_factory.mktemp("bench")
    recipe = write_project(folder / "project")
    add_calibration(recipe)
    write_sets(folder / "sets", SETS)
    for name, changes in {"bundle": [], "one": ["drafters.second=null"], "none": ["drafters={}"]}.items():
        build(load_recipe(recipe, changes), folder / name, validate=False)
    return folder


@pytest.fixture(scope="module")
def whole(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a run of `SMALL` leaves."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("d2sd.bench.run.write_plots", lambda result, folder: [])
        done(project, out, *SMALL)
    return out


@pytest.fixture
def left(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to go on in."""
    return Path(shutil.copytree(whole, tmp_path / "left"))


def write_sets(folder: Path, sets: dict[str, list[str]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, prompts in sets.items():
        lines = [json.dumps({"id": f"{name}-{n}", "turns": [text, "ignored"]}) for n, text in enumerate(prompts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def bench(project: Path, out: Path, *arguments: str, bundle: str = "bundle", prompts: str | None = "sets") -> Ended:
    chosen = () if prompts is None else ("--prompts", str(project / prompts))
    return run_cli("bench", project / bundle, "--out", out, *chosen, *arguments)


def done(project: Path, out: Path, *arguments: str, **options: Any) -> Result:
    passed(bench(project, out, *arguments, **options))
    return load_result(out / "result.json")


def counted(result: Result) -> list[Cell]:
    """Cells without their times."""
    return [cell.model_copy(update={"wall_seconds": 1.0, "stage_seconds": {}}) for cell in result.cells]


@pytest.fixture(autouse=True)
def without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one test looks at them: they take longer than all the measuring."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("d2sd.bench.run.write_plots", lambda result, folder: [])


@pytest.fixture
def pictures() -> None:
    pass


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> list[Key]:
    """The keys of the cells that are measured, as they begin."""
    keys: list[Key] = []

    def watched(engine: Any, key: Key, *rest: Any) -> Any:
        keys.append(key)
        return measure_cell(engine, key, *rest)

    monkeypatch.setattr("d2sd.bench.run.measure_cell", watched)
    return keys


# -- what it leaves ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_end_to_end(project: Path, tmp_path: Path) -> None:
    """All methods that two drafters can run, greedy and sampled, alone and together."""
    out = tmp_path / "deep" / "out"
    arguments = ("--rows", "8", "--per-set", "2", "--max-new-tokens", "6", "--concurrency", "1,2")
    ended = passed(bench(project, out, *arguments, prompts="sets/two.jsonl"))
    result = load_result(out / "result.json")
    trees = {("off", 1), ("lookup", 4), ("chain", 4)}
    trees |= {(name, 8) for name in ("reanchor", "d2sd", "ddtree", "hybrid")}
    trees |= {(name + "+lookup", 8) for name in ("auto", "ddtree", "hybrid")}
    assert {cell.key for cell in result.cells} == {
        Key(method, rows, "two", temperature, concurrency)
        for method, rows in trees
        for temperature in (0.0, 1.0)
        for concurrency in (1, 2)
    }
    for cell in result.cells:
        assert [one.id for one in cell.requests] == [f"{cell.set}-0", f"{cell.set}-1"]
        assert cell.differences == []
        assert all(sum(one.accepted) >= one.tokens > 0 for one in cell.requests)
        adaptive = {"off", "lookup", "chain", "ddtree+lookup", "hybrid+lookup"}
        served = {"auto+lookup": adaptive}.get(cell.method, {cell.method})
        assert {name.split(" of ")[0] for name in cell.policies} <= served
        assert cell.tau == 1 if cell.method == "off" else cell.tau >= 1
    written = {path.name for path in out.iterdir()}
    assert written >= {"result.json", "tables.md", "speedup.png"}
    assert "tau-by-rows.png" not in written, "one budget"
    names = ["tables.md", *_pictures(out)]
    assert ended.stdout.splitlines()[: len(names)] == [str(out / name) for name in names]
    table = ended.stdout.partition("T = 0, 1 in flight")[2]
    assert all(f"│ {name} " in table for name in ("off", "chain", "hybrid", "hybrid+lookup", "auto+lookup"))
    assert table.endswith("76 answers compared with plain decoding's: 0 differ.\n")
    for name in _pictures(out):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert "## Losslessness" in (out / "tables.md").read_text()
    assert not list(out.rglob("*.partial"))
    assert result.provenance.bundle["name"] == "tiny"
    assert result.settings.model_dump() == {
        "per_set": 2,
        "max_new_tokens": 6,
        "block_size": 4,
        "branches": 3,
        "seed": 0,
    }


def _pictures(out: Path) -> list[str]:
    from d2sd.bench.plots import PLOTS

    return [name for name in PLOTS if (out / name).exists()]


@pytest.mark.parametrize(("bundle", "without"), [("one", {"d2sd"}), ("none", None)])
def test_by_default_what_the_bundle_can_run(
    project: Path, tmp_path: Path, bundle: str, without: set[str] | None
) -> None:
    """Without a second drafter, in whose place the first drafts, and without any."""
    ended = bench(project, tmp_path, "--rows", "8", "--per-set", "1", "--plan", bundle=bundle)
    found = {line.partition(", ")[0] for line in ended.stdout.splitlines()[:-2]}
    everything = {"off", "lookup", "chain", "reanchor", "ddtree", "d2sd", "hybrid"}
    everything |= {"ddtree+lookup", "hybrid+lookup", "auto+lookup"}
    assert found == ({"off", "lookup"} if without is None else everything - without)


def test_our_own_prompts_and_a_folder_of_its_name(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neither --prompts nor --out is given."""
    monkeypatch.chdir(tmp_path)
    arguments = ["--methods", "chain", "--per-set", "1", "--max-new-tokens", "2", "--temperatures", "0"]
    passed(run_cli("bench", str(project / "bundle"), *arguments))
    assert {cell.set for cell in load_result(Path("build/bench/bundle/result.json")).cells} == {"prompts"}


@pytest.mark.slow
def test_two_bundles_of_one_recipe_leave_two_results(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In folders of their own names; of equal names, where --out is not given, the second is refused."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(project / "one", tmp_path / "other" / "bundle")

    def run(bundle: Path | str, *out: str) -> Ended:
        arguments = ["--methods", "off", "--per-set", "1", "--max-new-tokens", "2", "--temperatures", "0", *out]
        return run_cli("bench", str(bundle), "--prompts", str(project / "sets"), *arguments)

    for bundle in (project / "bundle", project / "one"):
        assert run(bundle).exit_code == 0
    results = {name: Path("build/bench", name, "result.json").read_bytes() for name in ("bundle", "one")}
    refused(run(tmp_path / "other" / "bundle"), "result of another bundle", "--out", "found: tiny, ")
    monkeypatch.chdir(tmp_path / "other" / "bundle")
    assert run(".", "--out", str(tmp_path / "build" / "bench" / "one")).exit_code == 0, "as asked for"
    monkeypatch.chdir(tmp_path)
    assert Path("build/bench/bundle/result.json").read_bytes() == results["bundle"]
    assert run(project / "bundle").exit_code == 0, "the same again"


# -- it goes on --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_run_measures_nothing(project: Path, left: Path, measuring: list[Key]) -> None:
    first = load_result(left / "result.json")
    (left / "result.json").unlink()
    (left / "tables.md").unlink()
    assert done(project, left, *SMALL).cells == first.cells
    assert (left / "tables.md").exists()
    assert not measuring


def test_files_of_the_user_are_not_replaced(project: Path, tmp_path: Path, measuring: list[Key]) -> None:
    (tmp_path / "result.json").write_text("mine")
    refused(bench(project, tmp_path, *SMALL), "holds files that this run did not write", "result.json")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert not measuring


@pytest.mark.slow
def test_an_interrupted_run_goes_on(
    project: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measuring: list[Key]
) -> None:
    """Interrupted while the second cell is written, and again while the fourth is measured."""
    replace = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if "chain" in self.name:
            raise KeyboardInterrupt
        return replace(self, target)

    def interrupted(engine: Any, key: Key, *rest: Any) -> Any:
        if key.set == "two":
            raise KeyboardInterrupt
        measuring.append(key)
        return measure_cell(engine, key, *rest)

    for owner, name, ends in ((Path, "replace", killed), (bench_run, "measure_cell", interrupted)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, ends)
            ended = bench(project, tmp_path, *SMALL)
        assert (ended.exit_code, ended.stdout) == (130, "")
        assert not (tmp_path / "result.json").exists()
    found, expected = counted(done(project, tmp_path, *SMALL)), counted(load_result(whole / "result.json"))
    assert found == expected
    assert [(key.method, key.set) for key in measuring] == [
        *(("off", "one"), ("chain", "one"), ("chain", "one"), ("hybrid", "one")),
        *((method, "two") for method in METHODS),
    ]


@pytest.mark.slow
def test_more_methods_and_runs_measure_what_is_new(project: Path, left: Path, measuring: list[Key]) -> None:
    for arguments, new in (
        (("--methods", "chain,hybrid:8,lookup"), 2),
        (("--methods", "chain", "--temperatures", "0,1"), 4),
        (("--methods", "chain", "--concurrency", "1,2"), 4),
        (("--methods", "chain", "--repeat", "2"), 4),
        (("--methods", "off"), 0),
    ):
        measuring.clear()
        result = done(project, left, *SMALL, *arguments)
        assert len(measuring) == new, arguments
    assert {cell.method for cell in result.cells} == {"off"}, "a result has what was asked for, not what lies there"


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("changed", "bundle"),
    [
        (("--seed", "1"), "bundle"),
        (("--max-new-tokens", "7"), "bundle"),
        (("--per-set", "1"), "bundle"),
        (("--methods", "chain"), "one"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_changed_settings_and_another_bundle_measure_again(
    project: Path, left: Path, measuring: list[Key], changed: tuple[str, str], bundle: str
) -> None:
    assert len(done(project, left, *SMALL, *changed, bundle=bundle).cells) == len(measuring)


@pytest.mark.slow
def test_other_prompts_of_the_same_name_measure_again(
    project: Path, left: Path, tmp_path: Path, measuring: list[Key]
) -> None:
    """Else a result would tell of prompts that nobody asked about."""
    sets = write_sets(tmp_path / "sets", SETS | {"two": ["w33 w34", "w35"]})
    again = done(project, left, *SMALL, prompts=str(sets))
    assert [key.set for key in measuring] == ["two"] * 3
    fresh = done(project, tmp_path / "fresh", *SMALL, prompts=str(sets))
    assert counted(again) == counted(fresh)


@pytest.mark.slow
def test_of_several_runs_the_median_counts(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs alternate between cells: what slows the machine for a while slows every method."""
    seen: list[Key] = []

    def timed(engine: Any, key: Key, *rest: Any) -> Any:
        cell, answers = measure_cell(engine, key, *rest)
        wall = [5.0, 1.0, 3.0][seen.count(key)]
        seen.append(key)
        return cell.model_copy(update={"wall_seconds": wall}), answers

    monkeypatch.setattr("d2sd.bench.run.measure_cell", timed)
    result = done(project, tmp_path, *SMALL, "--repeat", "3")
    assert [cell.wall_seconds for cell in result.cells] == [3.0] * 6
    assert seen[:6] == seen[6:12] == seen[12:]
    assert len(set(seen[:6])) == 6


# -- answers are compared ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_changed_answer_ends_with_an_error_and_a_whole_result(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lossy(engine: Any, key: Key, *rest: Any) -> Any:
        cell, answers = measure_cell(engine, key, *rest)
        wrong = [
            Difference(request=0, token=1, gap=1.0, excused=False),
            Difference(request=1, token=0, gap=0, excused=True),
        ]
        return cell.model_copy(update={"differences": wrong if key.method == "chain" else []}), answers

    monkeypatch.setattr("d2sd.bench.run.measure_cell", lossy)
    refused(bench(project, tmp_path, *SMALL), "speculation changed a response", "2 differences")
    assert len(load_result(tmp_path / "result.json").cells) == 6


@pytest.mark.slow
def test_every_answer_is_compared_with_plain_decoding_one_by_one(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds are the prompts' places, so that every method draws the same noise, and no two prompts do."""
    plain: dict[Key, Any] = {}

    def watched(engine: Any, key: Key, requests: Any, expected: Any, *rest: Any) -> Any:
        plain[key] = expected
        assert [request.seed for _, request in requests] == {"one": [7, 8, 9], "two": [7, 8]}[key.set]
        cell, answers = measure_cell(engine, key, requests, expected, *rest)
        return cell, [[ord(key.set[0]), key.concurrency]] * len(requests) if key.method == "off" else answers

    monkeypatch.setattr("d2sd.bench.run.measure_cell", watched)
    bench(project, tmp_path, *SMALL, "--concurrency", "1,2", "--seed", "7", "--per-set", "3")
    assert len(plain) == 12
    for key, expected in plain.items():
        first = key.method == "off" and key.concurrency == 1
        assert expected == (None if first else [[ord(key.set[0]), 1]] * {"one": 3, "two": 2}[key.set])


@pytest.mark.slow
def test_auto_measures_costs_once_a_size_and_learns_nothing_from_other_cells(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a result would depend on the order of the sets, and on whether the run was resumed. Requests in flight
    decide how many there can be in a step.
    """
    measured: list[int] = []
    seen: list[tuple[Key, PolicySelector]] = []
    enable_auto = Engine.enable_auto

    def enabled(self: Engine, *arguments: Any) -> None:
        measured.append(self.limits.max_batch)
        enable_auto(self, *arguments)

    def watched(engine: Any, key: Key, *rest: Any) -> Any:
        if key.method == "auto":
            made, known = engine.selector, [(other.concurrency, one) for other, one in seen]
            assert made == made.fresh(), "as one that has seen no step"
            assert all(made is not one for _, one in known)
            assert all((made.times is one.times) == (size == key.concurrency) for size, one in known)
            seen.append((key, made))
        return measure_cell(engine, key, *rest)

    monkeypatch.setattr(Engine, "enable_auto", enabled)
    monkeypatch.setattr("d2sd.bench.run.measure_cell", watched)
    arguments = (*SMALL, "--methods", "auto:8", "--temperatures", "0,1", "--concurrency", "1,2")
    result = done(project, tmp_path, *arguments, "--max-new-tokens", "3")
    assert measured == [1, 2]
    assert {(cell.method, cell.rows) for cell in result.cells} == {("off", 1), ("auto", 8)}
    assert len(seen) == 8
    assert any(one != one.fresh() for _, one in seen), "they learn"


@pytest.mark.slow
def test_one_engine_has_memory_at_a_time(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that refers to itself, as a captured step may: `kv_memory` can be a share of what is free."""
    made: list[weakref.ref[Any]] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        assert not any(one() for one in made), "the engine before is alive"
        engine: Any = make_engine(*arguments, **options)
        engine.runner.itself = engine
        made.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr("d2sd.bench.run.make_engine", watched)
    gc.disable()
    try:
        done(project, tmp_path, *SMALL)
    finally:
        gc.enable()
    assert len(made) == 6


# -- plan and compare --------------------------------------------------------------------------------------------------


def test_plan_measures_nothing(project: Path, tmp_path: Path, measuring: list[Key]) -> None:
    out = tmp_path / "out"
    ended = passed(bench(project, out, *SMALL, "--plan", "--repeat", "3", "--per-set", "3"))
    lines = ended.stdout.splitlines()
    assert lines[0] == "off, 1 rows, one, T = 0, 1 in flight: 3 prompts"
    assert "hybrid, 8 rows, two, T = 0, 1 in flight: 2 prompts" in lines
    assert lines[-2] == f"6 cells, {3 * (3 + 2) * 3} answers"
    assert re.match(r"about [1-9]\d* (s|min|h) to [1-9]\d* (s|min|h) on this machine", lines[-1])
    assert len(lines) == 8
    assert measuring == []
    assert not out.exists()


def test_the_estimate_spans_from_the_timed_tokens_a_step_to_one(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`one` has 4 prompts and `two` has 2: 60 tokens of each method, greedy and sampled, alone and in pairs."""
    seen: list[tuple[str, int]] = []

    def timed(bundle: object, method: str, rows: int, *rest: object) -> tuple[float, float]:
        seen.append((method, rows))
        return {"off": (1.0, 1.0), "chain": (3.0, 2.0), "hybrid": (8.0, 4.0)}[method]

    monkeypatch.setattr("d2sd.bench.estimate._timed", timed)
    arguments = ("--methods", "chain,hybrid:8,auto:8", "--concurrency", "1,2", "--repeat", "2")
    ended = bench(project, tmp_path, "--plan", "--max-new-tokens", "10", *arguments)
    assert seen == [("chain", 4), ("hybrid", 8), ("off", 1)]
    tokens = 2 * 2 * 60  # two temperatures, two runs
    least = tokens * (1 + 3 / 2 + 8 / 4 + 1) * (1 + 1 / 2)
    most = tokens * (1 + 3 + 8 + 1) * 2
    assert ended.stdout.splitlines()[-1].startswith(f"about {duration(least)} to {duration(most)} on this machine, ")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (119, "119 s"), (120, "2 min"), (3601, "61 min"), (7200, "2 h"), (9000, "3 h")]
)
def test_a_duration_is_rounded_up(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.slow
def test_quick_is_a_small_run_of_what_the_bundle_can_run(project: Path, tmp_path: Path) -> None:
    def planned(*arguments: str, **options: str) -> list[str]:
        return bench(project, tmp_path, "--quick", "--plan", *arguments, **options).stdout.splitlines()[:-2]

    end = "one, T = 0, 1 in flight: 4 prompts"
    trees = [
        f"{name}, 64 rows, {end}" for name in ("ddtree", "ddtree+lookup", "hybrid", "hybrid+lookup", "auto+lookup")
    ]
    alone = {"prompts": "sets/one.jsonl"}
    assert planned(**alone) == [f"off, 1 rows, {end}", f"chain, 4 rows, {end}", *trees]
    one = [line.split(",")[0] for line in planned(bundle="one", **alone)]
    assert one == ["off", "chain", "ddtree", "ddtree+lookup", "hybrid", "hybrid+lookup", "auto+lookup"]
    given = planned("--rows", "8", "--methods", "hybrid", "--temperatures", "1", "--per-set", "1", **alone)
    assert given[1:] == ["hybrid, 8 rows, one, T = 1, 1 in flight: 1 prompts"]


@pytest.mark.slow
def test_two_runs_count_the_same_and_are_compared(project: Path, tmp_path: Path) -> None:
    first, second = (done(project, tmp_path / name, *SMALL, "--temperatures", "1") for name in ("a", "b"))
    assert counted(first) == counted(second)
    files = [str(tmp_path / name / "result.json") for name in ("a", "b")]
    ended = passed(run_cli("bench", "--compare", *files))
    assert "## B against A" in ended.stdout
    assert ended.stdout.count("1.000") >= 6, "nothing but the clock differs"
    refused(run_cli("bench", "--compare", files[0], str(tmp_path / "none.json")), "none.json")


# -- what it refuses ---------------------------------------------------------------------------------------------------


def test_no_bundle_or_one_that_cannot_run_the_method(tmp_path: Path, project: Path) -> None:
    refused(run_cli("bench"), "bundle", "--compare")
    refused(run_cli("bench", str(tmp_path / "nowhere")), "nowhere")
    refused(bench(project, tmp_path, "--quick", "--methods", "d2sd", bundle="one"), "drafters.second")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--methods", "eagle"), ("--methods", "eagle")),
        (("--methods", "chain,,off"), ("--methods",)),
        (("--methods", "hybrid:1"), ("--methods", "1")),
        (("--methods", "hybrid:"), ("--methods",)),
        (("--methods", "hybrid:many"), ("--methods",)),
        (("--methods", "hybrid:\N{SUPERSCRIPT TWO}"), ("--methods",)),
        (("--methods", "hybrid:5000"), ("--methods", "4096")),
        (("--rows", "1"), ("--rows", "1")),
        (("--rows", "8,x"), ("--rows", "x")),
        (("--rows", ""), ("--rows",)),
        (("--temperatures", "-1"), ("--temperatures", "-1")),
        (("--temperatures", "nan"), ("temperature", "nan")),
        (("--concurrency", "0"), ("--concurrency", "0")),
        (("--max-new-tokens", "64"), ("maximum context length", "64")),
    ],
    ids=lambda value: "=".join(value) if value[0].startswith("--") else "",
)
def test_bad_values_are_a_message(
    project: Path, tmp_path: Path, arguments: tuple[str, ...], told: tuple[str, ...]
) -> None:
    refused(bench(project, tmp_path / "out", *SMALL, *arguments), *told)
    assert not (tmp_path / "out" / "result.json").exists()


def test_sets_need_names_and_prompts_of_their_own(project: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(bench(project, tmp_path, *SMALL, prompts=str(tmp_path / "empty")), "empty", "no *.jsonl")
    (tmp_path / "blank.jsonl").write_text("\n")
    refused(bench(project, tmp_path, *SMALL, prompts=str(tmp_path / "blank.jsonl")), "blank.jsonl: 0 prompts")
    other = shutil.copy(project / "sets" / "one.jsonl", tmp_path / "one.jsonl")
    refused(
        bench(project, tmp_path, *SMALL, "--prompts", str(other)), "Every prompt set needs a unique name", "one.jsonl"
    )
    refused(bench(project, tmp_path, *SMALL, prompts="none.jsonl"), "none.jsonl")


def test_two_prompts_of_one_id(project: Path, tmp_path: Path, measuring: list[Key]) -> None:
    """Answers are paired by id: this is seen before anything is measured."""
    line = json.dumps({"id": "a", "turns": ["w1"]})
    (tmp_path / "same.jsonl").write_text(f"{line}\n{line}\n")
    refused(bench(project, tmp_path / "out", *SMALL, prompts=str(tmp_path / "same.jsonl")), "same")
    assert measuring == []
