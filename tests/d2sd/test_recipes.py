"""The shipped recipes of real targets: their figures, their paths, and that all of it works, on shrunken models.

A project of a test is laid out as the recipes' headers tell a user to: recipes, and checkpoints beside them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from d2sd.build.plan import GPUS, Plan, make_plan
from d2sd.build.sources import located, sources_of
from d2sd.bundle.load import load_bundle
from d2sd.errors import RecipeError
from d2sd.prompt_sets import prompt_sets
from d2sd.recipe import load_recipe
from d2sd.shipped import find_recipe, shipped_names
from d2sd.train_recipe import load_train_recipe
from tests.commands import refused, run_cli, succeeds
from tests.convert.shrunken import CHECKPOINTS, write_headers, write_shrunken

ROOT = Path(__file__).parents[2]
NAMES = sorted(CHECKPOINTS)
#: What a recipe's header tells to set for FP8, beside nothing at all. All of them are planned ...
PRECISIONS = {"bf16": "fp8=null", "fp8={}": "fp8={}", "fp8={kv: true}": "fp8={kv: true}"}
#: ... and these are built: FP8 joins them by its name, when a build quantizes.
BUILT = ["bf16", "fp8={}"]


def second(name: str) -> str:
    """Override that adds the trained second drafter, as in the recipe's header."""
    return f"drafters.second.path=../checkpoints/{name}-pair/second"


def lay_out(folder: Path) -> Path:
    """The shipped recipes, where their relative paths lead into `folder`."""
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    (folder / "training").mkdir()
    lines = [{"id": f"p{i}", "turns": [f"prompt {i}"]} for i in range(200)]
    (folder / "training" / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def run(*arguments: object) -> str:
    return succeeds(*arguments).stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All recipes and their checkpoints in true size, of which there are the headers alone."""
    folder = lay_out(tmp_path_factory.mktemp("project"))
    for name in NAMES:
        write_headers(folder / "checkpoints", name)
    return folder


@pytest.fixture(scope="module")
def plans(project: Path) -> dict[tuple[str, str], Plan]:
    """By name and precision, with both drafters."""
    return {
        (name, told): make_plan(load_recipe(project / "recipes" / f"{name}.yaml", [override, second(name)]))
        for name in NAMES
        for told, override in PRECISIONS.items()
    }


def header(path: Path) -> str:
    """The comment at the top of a recipe, without its marks."""
    lines = path.read_text("utf-8").splitlines()
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[: lines.index("")])


# --- What the headers say -------------------------------------------------------------------------------------------


def table(plans: list[Plan]) -> str:
    """The figures of a header: in decimal GB, plans of bf16, of FP8, and of FP8 with K/V."""
    rows = [f"{'':16}{'parameters':>13}{'bf16':>10}{'FP8':>10}{'K/V a token':>13}{'FP8 K/V':>11}"]
    for parts in zip(*(plan.parts for plan in plans), strict=True):
        sizes = "".join(f"{part.weight_bytes / 1e9:>7.2f} GB" for part in parts[:2])
        tokens = f"{parts[0].kv_token_bytes:>11,} B{parts[2].kv_token_bytes:>9,} B"
        rows.append(f"{parts[0].name:16}{parts[0].parameters:>13,}{sizes}{tokens}")
    rows.append("")
    gpus = (f"{name} {memory // 10**9} GB" for name, memory in GPUS.items())
    rows.append(f"{'max_batch':16}" + "".join(f"{gpu:>15}" for gpu in gpus))
    for told, plan in zip(PRECISIONS, plans, strict=True):
        rows.append(f"{told:16}" + "".join(f"{plan.requests_in(memory):>15}" for memory in GPUS.values()))
    return "\n".join(rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_figures_of_a_header_are_the_plans(plans: dict[tuple[str, str], Plan], name: str) -> None:
    said = header(ROOT / "recipes" / f"{name}.yaml")
    assert table([plans[name, told] for told in PRECISIONS]) in said
    bf16, _, kv = (plans[name, told].request_bytes / 1e9 for told in PRECISIONS)
    assert f"A request of 8,192 tokens takes {bf16:.2f} GB of K/V, or {kv:.2f} GB" in said


@pytest.mark.parametrize("name", NAMES)
def test_memory_of_a_training_is_what_its_header_says(plans: dict[tuple[str, str], Plan], name: str) -> None:
    target, first, _ = plans[name, "bf16"].parts
    # fp32: the trained drafter, its gradient and AdamW's two moments, and the first drafter; bf16: the target
    needed = 5 * 4 * first.parameters + target.weight_bytes
    assert f"{needed / 1e9:.1f} GB" in header(ROOT / "recipes" / "train" / f"{name}.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_every_path_is_one_that_the_headers_commands_fill(name: str) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml", [second(name)])
    trained = load_train_recipe(ROOT / "recipes" / "train" / f"{name}.yaml")
    drafters = recipe.drafters
    assert drafters.first is not None
    assert drafters.second is not None
    assert trained.ready_first is not None
    target, first = recipe.path(recipe.target.path or "").resolve(), recipe.path(drafters.first.path or "").resolve()
    assert (target, first) == tuple(ROOT / "checkpoints" / folder for folder in CHECKPOINTS[name].folders)
    assert trained.path(trained.target.path or "").resolve() == target
    assert trained.path(trained.ready_first.path or "").resolve() == first
    said = header(ROOT / "recipes" / f"{name}.yaml")
    downloads = re.findall(r"hf download (\S+/(\S+)) .*--local-dir checkpoints/(\S+)", said)
    assert [(repository, folder) for _, repository, folder in downloads] == [(f, f) for f in CHECKPOINTS[name].folders]
    for written in (recipe.target, drafters.first), (trained.target, trained.ready_first):
        assert [source.repo for source in written] == [repo for repo, _, _ in downloads]
    assert f"--set {second(name)}" in said
    assert f"--set drafters.calibration=../checkpoints/{name}-pair/calibration.json" in said
    assert f"d2sd train recipes/train/{name}.yaml --out checkpoints/{name}-pair" in said
    for text in (file.path for file in trained.data.prompts):
        assert trained.path(text).resolve() == ROOT / "training" / "prompts.jsonl"


#: What a recipe needs of these checkpoints has to be as the recipe says; shrunken ones are not.
UNDESCRIBED = ["target.geometry=null", "drafters.first.geometry=null"]
QWEN3_8B = [
    "hf download Qwen/Qwen3-8B --revision b968826d9c46dd6066d109eabc6255188de91218 --exclude 'original/*' "
    "--exclude 'metal/*' --local-dir checkpoints/Qwen3-8B",
    "hf download z-lab/Qwen3-8B-DFlash-b16 --revision 9b41424b7109f9c5413454f481b09a82b85333f4 "
    "--local-dir checkpoints/Qwen3-8B-DFlash-b16",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_alone_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plans: dict[tuple[str, str], Plan], name: str
) -> None:
    """The same sizes as with the files, and what would be downloaded."""
    monkeypatch.chdir(tmp_path)
    told = run("build", name, "--plan")
    assert not [*tmp_path.iterdir()]
    alone = make_plan(load_recipe(Path(name)), weights=False)
    whole = plans[name, "bf16"]
    for found, expected in zip(alone.parts, whole.parts, strict=False):  # without the second drafter
        for field in ("parameters", "weight_bytes", "kv_token_bytes", "stored_bytes"):
            assert getattr(found, field) == getattr(expected, field)
        assert f"about {found.stored_bytes / 1e9:.2f} GB of" in told
    assert len(re.findall("hf download .*", told)) == len(alone.missing) == 2
    assert re.search(r"H100 80 GB +[\d.]+ GB left", told)


def test_without_checkpoints_the_downloads_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    load = ["--gpu", "H100", "--prompt-tokens", "9", "--output-tokens", "9"]
    assert "H100" in run("capacity", "qwen3-8b", *load, "--policy", "ddtree", "--tau", "3")
    assert re.findall("hf download .*", run("build", "qwen3-8b", "--plan")) == QWEN3_8B
    whole = run_cli("build", "qwen3-8b")
    refused(whole)
    assert re.findall("hf download .*", whole.stderr) == QWEN3_8B
    undescribed = [word for override in UNDESCRIBED for word in ("--set", override)]
    planned = run_cli("build", "qwen3-8b", "--plan", *undescribed)
    refused(planned)
    assert [line.split(" --")[0] for line in re.findall("hf download .*", planned.stderr)] == [
        "hf download Qwen/Qwen3-8B",
        "hf download z-lab/Qwen3-8B-DFlash-b16",
    ]
    assert planned.stderr.count(" config.json --local-dir") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("target.geometry.hidden_size=5120", ["target.geometry", "body.hidden_size 4096", "body.hidden_size 5120"]),
        ("drafters.first.geometry.block_size=8", ["drafters.first.geometry", "block_size 16", "block_size 8"]),
        ("drafters.first.geometry.rope_theta=5.0", ["drafters.first.geometry", "rope.theta 5.0"]),
    ],
)
def test_a_checkpoint_is_the_one_of_the_recipe(project: Path, override: str, told: list[str]) -> None:
    recipe = project / "recipes" / "qwen3-8b.yaml"
    for plan in (["--plan"], []):  # before anything is built, too
        arguments = ["build", str(recipe), *plan, "--out", str(project / "out"), "--set", override]
        refused(run_cli(*arguments), "not the one that the recipe describes", "config.json and recipe: ", *told)
    assert not (project / "out").exists()


def test_a_geometry_that_is_refused_is_named_by_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for override, key in (
        ("target.geometry.num_hidden_layers=0", "recipe: target.geometry: num_hidden_layers"),
        ("drafters.first.geometry.is_causal=3", "recipe: drafters.first.geometry: is_causal"),
    ):
        planned = run_cli("build", "qwen3-8b", "--plan", "--set", override)
        refused(planned, f"where: {key}")
        assert "/tmp" not in planned.stderr


def test_config_json_is_enough_to_plan(project: Path, tmp_path: Path, plans: dict[tuple[str, str], Plan]) -> None:
    lay_out(tmp_path)
    for folder in CHECKPOINTS["qwen3-8b"].folders:
        (tmp_path / "checkpoints" / folder).mkdir(parents=True)
        shutil.copy(project / "checkpoints" / folder / "config.json", tmp_path / "checkpoints" / folder)
    recipe = tmp_path / "recipes" / "qwen3-8b.yaml"
    told = run("build", recipe, "--plan")
    assert told.count("its weights are not on this machine") == 2
    whole = plans["qwen3-8b", "bf16"].parts
    found = make_plan(load_recipe(recipe), weights=False).parts
    assert [(p.parameters, p.weight_bytes, p.kv_token_bytes) for p in found] == [
        (p.parameters, p.weight_bytes, p.kv_token_bytes) for p in whole[:2]
    ]
    load = ["--prompt-tokens", "512", "--output-tokens", "128"]
    assert "H100" in run("capacity", recipe, "--gpu", "H100", *load, "--policy", "chain", "--tau", "3")
    failed = run_cli("build", str(recipe), "--out", str(tmp_path / "out"))
    refused(failed, "hf download Qwen/Qwen3-8B --revision")
    assert "found" not in failed.stderr
    assert not (tmp_path / "out").exists()


# --- Arithmetic -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_by_hand(project: Path, plans: dict[tuple[str, str], Plan]) -> None:
    """Qwen3-8B: 36 layers of q, k, v, o and MLP; embedding and head apart; norms of 4096, and of 128 for q and k."""
    attention, mlp = 4096 * (4096 + 1024 + 1024 + 4096), 3 * 4096 * 12288
    target_rest = 2 * 151936 * 4096 + 36 * (2 * 4096 + 2 * 128) + 4096
    drafter_rest = 5 * (2 * 4096 + 2 * 128) + 2 * 4096
    drafter_fp8 = 4096 * 5 * 4096 + 5 * (attention + mlp)
    bf16, fp8, kv = (plans["qwen3-8b", told] for told in PRECISIONS)
    assert [part.parameters for part in fp8.parts] == [
        36 * (attention + mlp) + target_rest,
        *[drafter_fp8 + drafter_rest] * 2,
    ]
    assert [part.weight_bytes for part in bf16.parts] == [2 * part.parameters for part in fp8.parts]
    sizes = [36 * (attention + mlp) + 2 * target_rest, *[drafter_fp8 + 2 * drafter_rest] * 2]
    sizes = [size + 8 * layers for size, layers in zip(sizes, (36 * 7, 36, 36), strict=True)]  # and two scales a layer
    assert [part.weight_bytes for part in fp8.parts] == sizes
    scales = [part.weight_bytes - size for part, size in zip(kv.parts, sizes, strict=True)]
    assert scales == [4 * 2 * 36, 0, 0]  # of K and V
    token = 2 * 8 * 128  # K and V of a layer
    assert [part.kv_token_bytes for part in bf16.parts] == [72 * token, 10 * token, 10 * token]
    assert [part.kv_token_bytes for part in fp8.parts] == [72 * token, 10 * token, 10 * token]
    assert [part.kv_token_bytes for part in kv.parts] == [36 * token, 10 * token, 10 * token]
    pages = 1 + 16 * -(-(8192 + kv.recipe.tree.block_size) // 16)
    assert [kv.kv_bytes(part) for part in kv.parts] == [pages * 16 * part.kv_token_bytes for part in kv.parts]
    assert kv.request_bytes == 8192 * 56 * token
    assert kv.requests_in(80 * 10**9) == (64 * 10**9 - sum(sizes)) // (8192 * 56 * token)
    assert kv.requests_in(10**10) == 0
    parts = [f"fp8={{target: {a}, drafters: {b}}}" for a, b in (("true", "false"), ("false", "true"))]
    recipe = project / "recipes" / "qwen3-8b.yaml"
    alone, apart = (make_plan(load_recipe(recipe, [override, second("qwen3-8b")])) for override in parts)
    drafters = [part.weight_bytes for part in bf16.drafters.values()]
    assert [part.weight_bytes for part in alone.parts] == [sizes[0], *drafters]
    assert [part.weight_bytes for part in apart.parts] == [bf16.parts[0].weight_bytes, *sizes[1:]]


@pytest.mark.slow
def test_a_plan_tells_what_a_gpu_has_left(project: Path) -> None:
    told = run("build", project / "recipes" / "qwen3-8b.yaml", "--plan", "--set", "fp8={kv: true}")
    assert "precision      bf16, target in FP8, drafters in FP8, kv in FP8" in told
    for figure in ("8,190,735,360", "9.44 GB", "73,728 B", "9.68 GB", "1,048,626,432", "94,208 B", "12.37 GB"):
        assert figure in told, figure
    # 16 requests of 8,192 + 16 tokens fill 16 x 513 pages; 8,209 with page 0, x 16 x 94,208 B = 12.374 GB
    assert "8,208 pages of 16 tokens, 1,507,328 B each in all models; page 0 takes padding: 12.37 GB" in told
    assert "16 requests of 8192 + 16 tokens fill 8,208\n" in told
    # 80 - (9.436 + 1.049) of weights - 12.374 of K/V
    assert "a request      771.8 MB of K/V for 8,192 tokens" in told
    assert "H100 80 GB     57.14 GB left; four fifths of its memory hold the weights and 69 such requests" in told
    too_much = run("build", project / "recipes" / "qwen3-8b.yaml", "--plan", "--set", "limits.max_batch=100")
    # 18.479 + (100 x 513 + 1) x 16 x 167,936 B - 141
    assert "H200 141 GB    15.32 GB too much" in too_much
    overbooked = ["--set", "limits.max_batch=100", "--set", "limits.kv_memory=40GiB"]
    told = run("build", project / "recipes" / "qwen3-8b.yaml", "--plan", *overbooked)
    # 40 x 2^30 // (16 x 167,936) - 1
    assert "15,983 pages of 16 tokens" in told
    assert "fill 51,300; limits.kv_memory holds fewer" in told
    overbooked[-1] = "limits.kv_memory=0.5"
    told = run("build", project / "recipes" / "qwen3-8b.yaml", "--plan", *overbooked)
    assert "fill 51,300; at most 0.5 of the memory that is free" in told
    assert "H100 80 GB     30.76 GB left" in told  # half of what the weights leave


# --- That it works --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_training_is_planned(project: Path, name: str) -> None:
    folder = CHECKPOINTS[name].folders[1]
    told = run("train", project / "recipes" / "train" / f"{name}.yaml", "--out", project / "out", "--plan")
    assert f"first drafter   ready: {project}/recipes/train/../../checkpoints/{folder}" in told
    assert re.search(r"second drafter  0 of [\d,]+ steps; time unknown", told)
    assert "at most 200 prompts answered" in told


def test_trainings_differ_by_their_model_alone() -> None:
    """No recipe drifts away from the others."""
    own = {"name", "target", "drafter", "ready_first"}
    recipes = (load_train_recipe(ROOT / "recipes" / "train" / f"{name}.yaml") for name in NAMES)
    first, *others = (recipe.model_dump(exclude=own) for recipe in recipes)
    assert all(other == first for other in others)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("name", "drafters", "precision"),
    [
        pytest.param(
            name, drafters, precision, marks=[] if precision == "bf16" or name == NAMES[-1] else pytest.mark.slow
        )
        for precision in BUILT
        for name, drafters in [*((name, "first") for name in NAMES), ("llama-3.1-8b", "both")]
    ],
)
def test_build_and_generate(tmp_path: Path, name: str, drafters: str, precision: str) -> None:
    """Recipes run as shipped, with the first drafter alone, and with the second as in the header, on fewer tokens."""
    write_shrunken(lay_out(tmp_path) / "checkpoints", name)
    overrides = ["limits.max_batch=2", "limits.max_context=256", "sampling.max_new_tokens=8", "checks.count=1"]
    overrides += [PRECISIONS[precision], *UNDESCRIBED]
    overrides += ["fp8.count=2", "fp8.tokens=8"] if precision != "bf16" else []
    overrides += [second(name)] if drafters == "both" else []
    sets = [word for override in overrides for word in ("--set", override)]
    out = tmp_path / "bundle"
    run("build", tmp_path / "recipes" / f"{name}.yaml", "--out", out, *sets)
    bundle = load_bundle(out)
    assert [role.key for role in bundle.drafters] == ["first", "second"][: 1 if drafters == "first" else 2]
    answered = run("generate", out, "-p", "w3 w5 w7", "--stats")
    assert re.search(r"w\d", answered)


@pytest.mark.parametrize("kind", ["", "train"])
def test_every_recipe_is_addressed_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    names = shipped_names(kind)
    assert names == sorted(path.stem for path in (ROOT / "recipes" / kind).glob("*.yaml"))
    for name in names:
        file, folder = find_recipe(Path(name), kind)
        assert file.resolve() == ROOT / "recipes" / kind / f"{name}.yaml"
        assert folder == Path("recipes") / kind


def test_paths_of_a_named_recipe_start_where_a_checkouts_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, training = load_recipe(Path("qwen3-8b")), load_train_recipe(Path("qwen3-8b"))
    assert recipe.path(recipe.target.path or "") == Path("checkpoints/Qwen3-8B")
    assert training.path(training.target.path or "") == Path("checkpoints/Qwen3-8B")
    (tmp_path / "recipes" / "train").mkdir(parents=True)
    (tmp_path / "checkpoints" / "Qwen3-8B").mkdir(parents=True)
    assert recipe.path(recipe.target.path or "").samefile("checkpoints/Qwen3-8B")
    assert training.path(training.target.path or "").samefile("checkpoints/Qwen3-8B")


def test_a_file_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()  # such as a bundle
    assert find_recipe(Path("qwen3-8b"))[0].name == "qwen3-8b.yaml"
    Path("qwen3-4b").write_text("d2sd: 1")
    assert find_recipe(Path("qwen3-4b")) == (Path("qwen3-4b"), Path())


@pytest.mark.parametrize("written", ["smollm3", "recipes/smollm2-135m.yaml", "elsewhere/qwen3-8b"])
def test_an_unknown_recipe_is_answered_with_the_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="There is no such recipe") as raised:
        load_recipe(Path(written))
    assert ", ".join(shipped_names()) in str(raised.value)


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-flex"])
def test_shipped_drafters_are_found_in_any_folder_and_those_of_a_clone_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(Path(name))
    _, *drafters = sources_of(recipe)
    assert drafters
    for source in drafters:
        found, file = located(recipe, source), Path(source.path or "").name
        assert found == ROOT / "models" / name / file
        clone = tmp_path / "models" / name / file
        clone.mkdir(parents=True)
        found = located(recipe, source)
        assert found is not None
        assert found.resolve() == clone


def test_no_recipe_names_anything_outside_the_project() -> None:
    known = {Path("data") / wanted.file for wanted in prompt_sets()}
    for name in shipped_names("train"):
        recipe = load_train_recipe(ROOT / "recipes" / "train" / f"{name}.yaml")
        written = [file.path for file in recipe.data.prompts] + [kind.path for kind in recipe.data.documents]
        written += recipe.data.exclude
        paths = [Path(os.path.relpath(os.path.normpath(recipe.path(path)), ROOT)) for path in written]
        assert all(path in known or path == Path("training/prompts.jsonl") for path in paths), paths
    for name in shipped_names():
        loaded = load_recipe(ROOT / "recipes" / f"{name}.yaml")
        for source in sources_of(loaded):
            if source.path is not None:
                assert Path(os.path.normpath(loaded.path(source.path))).is_relative_to(ROOT)
