"""Builds: contents of a bundle, bad input (no output is left), and a killed build (resumes to the same bytes)."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from d2sd import io as files
from d2sd.build.pipeline import build
from d2sd.bundle.load import Bundle
from d2sd.errors import BuildError, CheckpointError, D2SDError
from d2sd.recipe import load_recipe
from tests.convert.helpers import edit_json, edit_tensors, edit_yaml, tree_bytes, write_project
from tests.d2sd.build.helpers import Killed, killed_after, run

STAGES = ["fetch", "target", "drafter_first", "drafter_second", "check", "manifest"]


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_bundle_has_its_layout_and_nothing_beside_it(recipe: Path, out: Path) -> None:
    found = run(recipe, out / "tiny")
    assert sorted(found) == [
        *(f"drafter_{name}/{file}" for name in ("first", "second") for file in ("config.json", "model.safetensors")),
        "manifest.json",
        *(f"target/{name}" for name in ("config.json", "generation_config.json", "model.safetensors")),
        *(f"target/{name}" for name in ("tokenizer.json", "tokenizer_config.json")),
    ]
    manifest = json.loads(found["manifest.json"])
    assert manifest["checks"] == {}
    assert manifest["target"]["family"] == "llama"
    assert str(out) not in found["manifest.json"].decode()
    assert leftovers(out) == ["tiny"]


def test_a_build_validates_its_bundle_by_default(recipe: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(bundle: Bundle, progress: object) -> dict[str, Any]:
        return {"vocabulary": bundle.target.config.vocab_size}

    with pytest.raises(Killed):
        run(recipe, out / "tiny", finished=killed_after("check"))
    monkeypatch.setattr("d2sd.build.pipeline.check_bundle", check)
    build(load_recipe(recipe), out / "tiny")  # resumes; but a stage that checked nothing is not a check
    assert json.loads((out / "tiny" / "manifest.json").read_text())["checks"] == {"vocabulary": 64}


def test_the_same_inputs_give_the_same_bytes_anywhere(recipe: Path, out: Path, tmp_path: Path) -> None:
    first = run(recipe, out / "tiny")
    shutil.move(recipe.parent, tmp_path / "moved")
    assert run(tmp_path / "moved" / "recipe.yaml", out / "other") == first


class Bad(NamedTuple):
    """One kind of bad input: what is done to the project, and what the message must name."""

    damage: Callable[[Path], object]
    named: tuple[str, ...]


def on_json(file: str, key: str, value: Any) -> Callable[[Path], object]:
    return lambda project: edit_json(project / file, key, value)


def on_dflash(folder: str, key: str, value: Any) -> Callable[[Path], object]:
    return on_json(f"{folder}/config.json", f"dflash_config.{key}", value)


def on_both(folder: str, key: str, value: Any) -> Callable[[Path], object]:
    """Change a key that stands at the top level and in dflash_config."""
    return lambda project: [
        on_json(f"{folder}/config.json", key, value)(project),
        on_dflash(folder, key, value)(project),
    ]


def both_of_block(size: int) -> Callable[[Path], object]:
    """Give both drafters blocks of `size`."""
    return lambda project: [on_both(folder, "block_size", size)(project) for folder in ("first", "second")]


def on_tensors(file: str, **changes: torch.Tensor | None) -> Callable[[Path], object]:
    return lambda project: edit_tensors(project / file, **changes)


def truncate(file: str) -> Callable[[Path], object]:
    return lambda project: os.truncate(project / file, (project / file).stat().st_size - 7)


def pickled(folder: str, name: str) -> Callable[[Path], object]:
    def damage(project: Path) -> None:
        (project / folder / "model.safetensors").unlink()
        (project / folder / name).write_bytes(pickle.dumps({"a": 1}))

    return damage


def missing(path: str) -> Callable[[Path], object]:
    return lambda project: (project / path).rename(project / "gone")


NAN = torch.full((32,), float("nan"))
BAD = {
    "no target folder": Bad(missing("target"), ("target",)),
    "not a checkpoint": Bad(missing("target/config.json"), ("target", "config.json")),
    "unsupported architecture": Bad(on_json("target/config.json", "model_type", "mamba"), ("model_type", "mamba")),
    "quantised": Bad(on_json("target/config.json", "quantization_config", {}), ("quantization_config",)),
    "mlp bias": Bad(on_json("target/config.json", "mlp_bias", True), ("config.json: mlp_bias",)),
    "activation": Bad(on_json("target/config.json", "hidden_act", "gelu"), ("hidden_act", "gelu", "silu")),
    "window": Bad(on_json("target/config.json", "sliding_window", 8), ("sliding_window",)),
    "context too long": Bad(on_json("target/config.json", "max_position_embeddings", 32), ("max_context", "64", "32")),
    "no stop token": Bad(on_json("target/config.json", "eos_token_id", ...), ("eos_token_id",)),
    "no tokenizer": Bad(missing("target/tokenizer.json"), ("tokenizer.json",)),
    "no weights": Bad(missing("target/model.safetensors"), ("target", "model.safetensors")),
    "truncated": Bad(truncate("target/model.safetensors"), ("model.safetensors", "truncated")),
    "empty": Bad(lambda p: os.truncate(p / "first/model.safetensors", 0), ("first/model.safetensors", "truncated")),
    "pickle file": Bad(pickled("target", "pytorch_model.bin"), ("pytorch_model.bin", "ickle")),
    "pickle named safetensors": Bad(pickled("first", "model.safetensors"), ("first/model.safetensors", "ickle")),
    "missing tensor": Bad(on_tensors("target/model.safetensors", model__norm__weight=None), ("missing norm.weight",)),
    "unknown tensor": Bad(on_tensors("first/model.safetensors", extra=NAN), ("unknown extra",)),
    "misshaped": Bad(on_tensors("first/model.safetensors", norm__weight=torch.ones(31)), ("norm.weight", "31", "32")),
    "integers": Bad(on_tensors("first/model.safetensors", norm__weight=torch.ones(32).int()), ("norm.weight", "I32")),
    "NaN": Bad(on_tensors("target/model.safetensors", model__norm__weight=NAN), ("model.norm.weight", "NaN")),
    "NaN in a drafter": Bad(on_tensors("second/model.safetensors", norm__weight=NAN), ("second", "norm.weight")),
    "other hidden size": Bad(on_json("first/config.json", "hidden_size", 48), ("first", "hidden_size", "48", "32")),
    "other vocabulary": Bad(on_json("first/config.json", "vocab_size", 65), ("first", "vocab_size", "65", "64")),
    "other rope": Bad(on_json("first/config.json", "rope_theta", 5.0), ("first", "rope_theta", "5.0", "10000.0")),
    "other depth": Bad(on_both("first", "num_target_layers", 4), ("first", "num_target_layers", "4", "3")),
    "layer ids unsorted": Bad(on_dflash("first", "target_layer_ids", [1, 0]), ("ids", "[1, 0]")),
    "smaller blocks": Bad(both_of_block(3), ("tree.block_size", "4", "at most 3")),
    "second is a first": Bad(on_dflash("second", "training_mode", "dflash"), ("training_mode",)),
    "first is a second": Bad(on_dflash("first", "training_mode", "vp_drafter"), ("first",)),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_bad_input_is_named_and_leaves_nothing_at_the_output(recipe: Path, out: Path, bad: Bad) -> None:
    bad.damage(recipe.parent)
    with pytest.raises(D2SDError) as caught:
        run(recipe, out / "tiny")
    for part in bad.named:
        assert part in str(caught.value)
    # A fault found after a stage had finished keeps that stage for the next run, hidden; nothing else may stay.
    assert leftovers(out) in ([], [".tiny.building"])
    for path in out.rglob("*"):
        assert path.name not in ("drafter_second", "manifest.json", "scratch"), path


def test_a_second_drafter_without_a_marker_is_taken_at_the_recipes_word(recipe: Path, out: Path) -> None:
    expected = run(recipe, out / "tiny")
    for key in ("training_mode", "prefix_weight_base"):
        on_dflash("second", key, ...)(recipe.parent)
    with pytest.raises(CheckpointError, match="training_mode"):
        run(recipe, out / "refused")
    edit_yaml(recipe, "drafters.second.role", "variable_prefix")
    found = run(recipe, out / "tiny")
    assert json.loads(found["drafter_second/config.json"])["dflash_config"]["training_mode"] == "vp_drafter"
    assert found["drafter_second/model.safetensors"] == expected["drafter_second/model.safetensors"]
    edit_yaml(recipe, "drafters.first.role", "variable_prefix")
    with pytest.raises(D2SDError, match=r"drafters\.first\.role"):
        run(recipe, out / "tiny")


def test_a_half_precision_bundle_has_arguments_for_tensorrt_llm(tmp_path: Path, recipe: Path, out: Path) -> None:
    """An fp32 bundle has none: TensorRT-LLM's drafter attention takes no fp32."""
    found = run(write_project(tmp_path / "half", precision="bf16"), out / "half")
    assert {name for name in found if name.startswith("trtllm/")} == {
        "trtllm/llm_args.dflash.yaml",
        "trtllm/llm_args.d2sd_tree.yaml",
        "trtllm/d2sd_trtllm/__init__.py",
        "trtllm/triton/model.py",
        "trtllm/triton/model.yaml",
    }
    assert yaml.safe_load(found["trtllm/llm_args.dflash.yaml"])["speculative_config"]["max_draft_len"] == 3
    assert json.loads(found["manifest.json"])["files"].keys() >= {"trtllm/llm_args.dflash.yaml"}
    assert not [name for name in run(recipe, out / "full") if name.startswith("trtllm/")]


def test_a_fault_in_the_first_stage_leaves_nothing_at_all(recipe: Path, out: Path) -> None:
    BAD["NaN"].damage(recipe.parent)
    with pytest.raises(CheckpointError):
        run(recipe, out / "tiny")
    assert leftovers(out) == []


def test_values_that_overflow_fp16_are_named(tmp_path: Path, out: Path) -> None:
    recipe = write_project(tmp_path / "project", precision="fp16")
    edit_tensors(recipe.parent / "target/model.safetensors", model__norm__weight=torch.full((32,), 1e5))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight(.|\n)*float16"):
        run(recipe, out / "tiny")


def test_a_bundle_is_replaced_only_by_a_whole_one(recipe: Path, out: Path) -> None:
    before = run(recipe, out / "tiny")
    BAD["NaN in a drafter"].damage(recipe.parent)
    with pytest.raises(CheckpointError):
        run(recipe, out / "tiny")
    assert tree_bytes(out / "tiny") == before
    edit_tensors(recipe.parent / "second/model.safetensors", norm__weight=torch.ones(32))
    assert run(recipe, out / "tiny") != before
    assert leftovers(out) == ["tiny"]


def test_a_folder_that_is_not_ours_is_never_replaced(recipe: Path, out: Path) -> None:
    (out / "photos").mkdir()
    (out / "photos" / "a.jpg").touch()
    with pytest.raises(BuildError, match="photos"):
        run(recipe, out / "photos")
    assert (out / "photos" / "a.jpg").exists()
    folder = out / "work"
    folder.mkdir()
    (folder / "thesis").write_text("x")
    for text in ("{}", "[]", "{", '{"d2sd_bundle": 1}', '{"d2sd_bundle": 2}', '{"name": "an extension"}'):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(BuildError, match=r"not a bundle(.|\n)*work"):
            run(recipe, folder)
        assert leftovers(folder) == ["manifest.json", "thesis"], text
    assert leftovers(out) == ["photos", "work"]


@pytest.mark.parametrize("stray", ["thesis.txt", "target/notes.md", "link"])
def test_a_bundle_with_a_file_that_is_not_its_own_is_never_replaced(recipe: Path, out: Path, stray: str) -> None:
    run(recipe, out / "tiny")
    if stray == "link":
        (out / "tiny" / stray).symlink_to(recipe.parent, target_is_directory=True)
    else:
        (out / "tiny" / stray).write_text("mine")
    before = tree_bytes(out / "tiny")
    with pytest.raises(BuildError, match=rf"bundle(.|\n)*{stray}"):
        run(recipe, out / "tiny", finished=lambda stage: pytest.fail("refused before any work"))
    assert tree_bytes(out / "tiny") == before
    assert leftovers(out) == ["tiny"]


def test_files_that_come_to_the_output_during_a_build_are_kept(recipe: Path, out: Path) -> None:
    def interfere(stage: str) -> None:
        if stage == "check":
            (out / "tiny").mkdir()
            (out / "tiny" / "thesis.txt").write_text("mine")

    with pytest.raises(BuildError, match="not a bundle"):
        run(recipe, out / "tiny", finished=interfere)
    assert (out / "tiny" / "thesis.txt").read_text() == "mine"


def test_an_output_that_cannot_be_is_named(recipe: Path, out: Path) -> None:
    (out / "loop").symlink_to(out / "loop")
    for name in ("loop", "a\0b", "a\ud800"):
        with pytest.raises(BuildError, match="output path"):
            run(recipe, out / name)


@pytest.mark.parametrize("last", STAGES[:-1])
def test_a_build_stopped_after_any_stage_resumes_to_the_same_bytes(recipe: Path, out: Path, last: str) -> None:
    with pytest.raises(Killed):
        run(recipe, out / "tiny", finished=killed_after(last))
    assert not (out / "tiny").exists()
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("model.safetensors")}
    folder = out / ".tiny.building" / "bundle"
    assert len(stamps) == {"fetch": 0, "target": 1, "drafter_first": 2}.get(last, 3)
    moved = {out / "tiny" / path.relative_to(folder): stamp for path, stamp in stamps.items()}
    resumed = run(recipe, out / "tiny")
    assert {path: path.stat().st_mtime_ns for path in moved} == moved, "a finished stage was run again"
    assert resumed == run(recipe, out / "whole")


def test_a_stage_whose_input_or_output_changed_is_done_again(recipe: Path, out: Path) -> None:
    with pytest.raises(Killed):
        run(recipe, out / "tiny", finished=killed_after("check"))
    edit_tensors(recipe.parent / "first/model.safetensors", norm__weight=torch.ones(32))  # an input
    (out / ".tiny.building/bundle/target/config.json").write_text("{}")  # an output
    (out / ".tiny.building/bundle/drafter_second/stray").touch()
    assert run(recipe, out / "tiny") == run(recipe, out / "whole")


def test_a_build_killed_by_the_kernel_resumes_to_the_same_bytes(recipe: Path, out: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from d2sd.recipe import *\n"
        "from d2sd.build import pipeline as b\n"
        "from d2sd.convert.drafter_kind import DrafterKind\n"
        "def slow(kind, source, folder, *rest):\n"
        "    write(kind, source, folder, *rest); (folder / 'half').touch()\n"
        "    print('writing', flush=True); time.sleep(60)\n"
        "write, DrafterKind.copy = DrafterKind.copy, slow\n"
        "b.build(load_recipe(Path(sys.argv[1])), Path(sys.argv[2]), validate=False)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, recipe, out / "tiny"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    process.stdout.close()
    assert leftovers(out) == [".tiny.building"]
    assert run(recipe, out / "tiny") == run(recipe, out / "whole")
    assert leftovers(out) == ["tiny", "whole"]


def test_killed_between_the_renames_the_next_run_publishes(
    recipe: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(recipe, out / "tiny")
    replace = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if self.name == "bundle":
            raise Killed
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(Killed):
            run(recipe, out / "tiny")
    assert run(recipe, out / "tiny") == whole
    assert leftovers(out) == ["tiny"]


def test_two_builds_of_one_output_do_not_mix(recipe: Path, out: Path) -> None:
    files.claim(out / ".tiny.building", "build")
    with files.exclusive(out / ".tiny.building" / "lock", wait=False), pytest.raises(BuildError, match="running"):
        run(recipe, out / "tiny")


@pytest.mark.parametrize("below", ["", "bundle", "bundle/target", "lock"])
def test_links_and_folders_in_the_place_of_the_work_folder_are_not_touched(
    recipe: Path, out: Path, tmp_path: Path, below: str
) -> None:
    """In a shared folder others may have prepared them."""
    victim, work = tmp_path / "victim", out / ".tiny.building"
    (victim / "target").mkdir(parents=True)
    (victim / "target" / "config.json").write_text("mine")
    out.mkdir(exist_ok=True)
    if below:
        files.claim(work, "build")
        (work / below).parent.mkdir(exist_ok=True)
    (work / below).symlink_to(victim / "target" / "config.json" if below == "lock" else victim)
    with pytest.raises(BuildError, match=r"does not write into this folder(.|\n)*symbolic link"):
        run(recipe, out / "tiny")
    if not below:
        work.unlink()
        work.mkdir()
        (work / "notes").write_text("mine")
        with pytest.raises(BuildError, match="holds files that this run did not write"):
            run(recipe, out / "tiny")
        assert [path.name for path in work.iterdir()] == ["notes"]
    assert (victim / "target" / "config.json").read_text() == "mine"
    assert not (out / "tiny").exists()


def test_no_room_is_noticed_before_a_stage_and_in_it(recipe: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Path, tensors: object) -> None:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("d2sd.convert.checkpoint.weights.write_tensors", full)
        with pytest.raises(BuildError, match="filled up during stage drafter_first"):
            run(recipe, out / "tiny")
    assert leftovers(out / ".tiny.building" / "bundle") == ["target"], "a finished stage stays, a half-written one goes"
    monkeypatch.setattr("d2sd.convert.checkpoint.target.write_tensors", full)
    with pytest.raises(BuildError, match="filled up during stage target"):
        run(recipe, out / "other")
    assert leftovers(out) == [".tiny.building"]
    usage = shutil.disk_usage(out)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(BuildError, match=r"disk space for stage target(.|\n)*1,000 bytes free"):
        run(recipe, out / "third")
    assert leftovers(out) == [".tiny.building"]
