"""`d2sd pull` against a server that speaks the hub's routes, whole and at fault."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from huggingface_hub import constants

from d2sd.build import hub as module
from d2sd.cli.build import build
from d2sd.cli.pull import pull as command
from d2sd.convert.formats.convert import convert
from d2sd.recipe import load_recipe
from tests.commands import passed, refused
from tests.convert.helpers import edit_yaml, write_project
from tests.d2sd.build.hub_server import COMMIT, LARGE, Hub, hub_server

MODELS = ("target", "first", "second")


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    write_project(folder)
    return folder


@pytest.fixture
def hub(published: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server() as hub:
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # another test may have read a checkpoint
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
        hub.repos = {f"maker/{name}": files_of(published / name) for name in MODELS}
        yield hub


def write_recipe(folder: Path, published: Path, **changes: Any) -> Path:
    """A recipe beside which nothing is: its models are on the hub."""
    values = yaml.safe_load((published / "recipe.yaml").read_text())
    values["target"] |= {"repo": "maker/target", "revision": COMMIT, "licence": "MIT"}
    for name in MODELS[1:]:
        values["drafters"][name] |= {"repo": f"maker/{name}", "licence": "MIT"}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    return path


@pytest.fixture
def recipe(tmp_path: Path, published: Path) -> Path:
    return write_recipe(tmp_path, published)


def run(recipe: Path, *options: str) -> Result:
    return CliRunner().invoke(command, [str(recipe), *options])


def names(folder: Path) -> set[str]:
    """Files that are not the library's own."""
    return {name for name in files_of(folder) if not name.startswith(".cache")} if folder.exists() else set()


def loads(hub: Hub) -> list[str]:
    """Files that were read, not only asked about."""
    return [path for method, path, _ in hub.asked if method == "GET" and "/resolve/" in path]


def test_what_is_fetched_is_what_was_published(hub: Hub, recipe: Path, published: Path) -> None:
    found = passed(run(recipe))
    assert found.stdout.split() == [str(recipe.parent / name) for name in MODELS]
    for name in MODELS:
        assert {one: (recipe.parent / name / one).read_bytes() for one in names(recipe.parent / name)} == files_of(
            published / name
        )
    hub.asked.clear()
    assert run(recipe).exit_code == 0
    assert not loads(hub), "a second time nothing is fetched"


def test_a_plan_writes_nothing(hub: Hub, recipe: Path) -> None:
    found = passed(run(recipe, "--plan"))
    for name in MODELS:
        assert f"maker/{name} at {COMMIT}, licence MIT" in found.output
        assert not (recipe.parent / name).exists()
    assert not loads(hub)
    assert run(recipe).exit_code == 0
    again = run(recipe, "--plan").output
    assert again.count("is here") == 3
    assert " 0 of " in again


def test_a_recipe_of_nothing_on_a_hub(hub: Hub, published: Path) -> None:
    assert "names no repository" in run(published / "recipe.yaml", "--plan").output
    assert not hub.asked


@pytest.mark.parametrize("fetched", [True, False])
def test_weights_in_a_makers_own_format_are_left_out_of_targets(hub: Hub, recipe: Path, fetched: bool) -> None:
    for name in MODELS:
        hub.repos[f"maker/{name}"] |= {"original/consolidated.pth": bytes(2000), "metal/model.bin": bytes(2000)}
    if fetched:
        assert run(recipe).exit_code == 0
        assert not names(recipe.parent / "target") & {"original/consolidated.pth", "metal/model.bin"}
        assert "original/consolidated.pth" in names(recipe.parent / "first")
    assert "original" not in str(module.plan_pulls(load_recipe(recipe))[0].sizes)


#: What goes wrong -> a part of the message, a part of the remedy.
FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown": ({"repos": {}}, "no such model", "check `repo`"),
    "gated": ({"token": "secret"}, "gated", "set HF_TOKEN"),
    "disabled": ({"errors": {"maker/target": (403, "")}}, "answers with an error", "run again"),
    "broken": ({"errors": {"maker/target": (500, "")}}, "answers with an error", "run again"),
    "missing": ({"errors": {"maker/target": (404, "")}}, "answers with an error", "run again"),
    "private": ({"errors": {"maker/target": (401, "")}}, "answers with an error", "check HF_TOKEN"),
    "another server": ({"errors": {"maker/target": (200, "")}}, "not a hub", "HF_ENDPOINT"),
    "no revision": ({"errors": {"maker/target": (404, "RevisionNotFound")}}, "no such revision", "`revision`"),
}


@pytest.mark.parametrize("plan", [True, False], ids=["plan", "pull"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_refusal_says_what_to_do(hub: Hub, recipe: Path, fault: str, plan: bool) -> None:
    changes, what, fix = FAULTS[fault]
    for name, value in changes.items():
        setattr(hub, name, value)
    refused(run(recipe, *(["--plan"] if plan else [])), what, fix, "maker/target")
    assert not names(recipe.parent / "target")


def test_a_recipe_of_another_revision_or_geometry(hub: Hub, tmp_path: Path, published: Path) -> None:
    recipe = write_recipe(tmp_path, published)
    refused(run(recipe, "--set", f"target.revision={'f' * 40}"), "no such revision")
    assert not (tmp_path / "target").exists()
    geometry = json.loads((published / "target" / "config.json").read_text()) | {"num_hidden_layers": 7}
    refused(run(recipe, "--set", f"target.geometry={json.dumps(geometry)}"), "geometry")


def test_a_token_opens_a_gated_model(hub: Hub, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "secret"
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert run(recipe).exit_code == 2
    monkeypatch.setenv("HF_TOKEN", "secret")
    passed(run(recipe))


def test_a_hub_that_is_not_there(hub: Hub, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    found = run(recipe)
    assert (found.exit_code, "cannot be reached" in found.stderr) == (2, True), found.stderr


def test_an_address_that_is_none(hub: Hub, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in ("http://a:b:c", "http://[::1", "a.b"):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        refused(run(recipe), "HF_ENDPOINT", "maker/target")


@pytest.mark.parametrize("after", [0, 1, 700])
def test_a_connection_that_ends_is_taken_up(hub: Hub, recipe: Path, published: Path, after: int) -> None:
    hub.cut = after
    passed(run(recipe))
    assert files_of(published / "target").items() <= files_of(recipe.parent / "target").items()


@pytest.mark.slow
def test_a_server_that_stalls(hub: Hub, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    hub.stall = 3.0
    refused(run(recipe), "cannot be reached")
    assert not any(name.endswith(".safetensors") for name in names(recipe.parent / "target"))
    hub.stall = 0.0
    assert run(recipe).exit_code == 0


def test_a_file_with_other_bytes_is_deleted(hub: Hub, recipe: Path) -> None:
    """Each of them, also one that a run which was killed had not hashed yet."""
    hub.wrong = True
    refused(run(recipe), "A file differs from the hub's.")
    large = {name for name, data in hub.repos["maker/target"].items() if len(data) >= LARGE}
    assert "model.safetensors" in large
    assert not large & names(recipe.parent / "target")
    hub.wrong = False
    assert run(recipe).exit_code == 0


def test_a_disk_without_room(hub: Hub, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(recipe.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    refused(run(recipe), "Not enough disk space for the download of maker/target.")
    assert not loads(hub)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up(hub: Hub, recipe: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.snapshot_download", full)
        found = run(recipe)
    assert found.exit_code == 2
    assert "The disk filled up during the download of maker/target." in found.stderr
    assert run(recipe).exit_code == 0


def test_offline(hub: Hub, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(run(recipe), "unset HF_HUB_OFFLINE")
    assert not hub.asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert run(recipe).exit_code == 0
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run(recipe).exit_code == 0
    assert "whose model is missing" in run(recipe, "--plan").output
    assert not hub.asked


@pytest.mark.parametrize("name", ["../evil.bin", "/tmp/evil.bin", "a/../../evil.bin"])
def test_a_name_that_leads_out_of_the_folder(hub: Hub, recipe: Path, name: str) -> None:
    hub.repos["maker/target"] |= {name: bytes(2000)}
    refused(run(recipe), "leads out of its folder")
    assert not (recipe.parent / "evil.bin").exists()
    assert not loads(hub)


def test_a_second_list_with_other_names(hub: Hub, recipe: Path) -> None:
    """The library asks for one of its own, in which a hub may name what the first did not."""
    hub.hidden = {"../evil.bin": bytes(2000), "more.bin": bytes(2000)}
    hub.repos["maker/target"]["odd [1].bin"] = bytes(2000)
    passed(run(recipe))
    assert not (recipe.parent / "evil.bin").exists()
    assert names(recipe.parent / "target") == set(hub.repos["maker/target"])


def test_a_drafter_in_another_layout_is_converted(hub: Hub, tmp_path: Path, published: Path) -> None:
    convert(published / "first", "speculators", tmp_path / "speculator", target=published / "target")
    hub.repos["maker/first"] = files_of(tmp_path / "speculator")
    recipe = write_recipe(tmp_path, published)
    edit_yaml(recipe, "drafters.first.converted", True)
    passed(run(recipe))
    assert (tmp_path / "first-published" / "config.json").exists()
    assert (tmp_path / "first" / "config.json").exists()
    hub.asked.clear()
    assert run(recipe).exit_code == 0
    assert not loads(hub)


@pytest.mark.slow
@pytest.mark.subprocess
def test_a_killed_run_goes_on(hub: Hub, recipe: Path) -> None:
    data = os.urandom(30 << 20)
    hub.repos["maker/target"]["other.bin"], hub.cut = data, 20 << 20
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    program = "from d2sd.cli.main import main; main()"
    child = subprocess.Popen([sys.executable, "-c", program, "pull", str(recipe)], env=environment)
    partial, deadline = recipe.parent / "target" / ".cache", time.monotonic() + 60
    while not any(file.stat().st_size > 1 << 20 for file in partial.rglob("*.incomplete")):
        assert time.monotonic() < deadline
        hub.stall = 0.0 if hub.cut else 30.0  # what the library asks for again does not come
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    here = names(recipe.parent / "target")
    assert "other.bin" not in here
    hub.stall = 0.0
    hub.asked.clear()
    passed(run(recipe))
    assert (recipe.parent / "target" / "other.bin").read_bytes() == data
    assert not list(partial.rglob("*.incomplete")), "what was left is gone"
    assert not {f"/maker/target/resolve/{COMMIT}/{name}" for name in here} & set(loads(hub)), "not again"


@pytest.mark.slow
def test_a_build_pulls_first(hub: Hub, recipe: Path, tmp_path: Path) -> None:
    refused(CliRunner().invoke(build, [str(recipe), "--out", str(tmp_path / "bundle")]), "d2sd pull")
    constants.HF_HUB_OFFLINE = False  # of a new process
    passed(CliRunner().invoke(build, [str(recipe), "--pull", "--out", str(tmp_path / "bundle")]))
    assert constants.HF_HUB_OFFLINE, "nothing else asks the hub"
    assert (tmp_path / "bundle" / "manifest.json").exists()
