"""A bundle goes to a registry and comes back: only what is missing is sent, and it arrives complete or not at all."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from d2sd.bundle.registry import client
from d2sd.bundle.registry.pull import pull
from d2sd.bundle.registry.push import push
from d2sd.cli.main import main
from d2sd.errors import BuildError, BundleError, D2SDError, RegistryError
from tests.convert.helpers import tree_bytes
from tests.d2sd.bundle.registry.fake import Registry, digest_of

WEIGHTS = "target/model.safetensors"


def d2sd(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def layer(registry: Registry, name: str = WEIGHTS) -> str:
    """The digest of a file of the artifact."""
    layers = json.loads(registry.manifests["1"])["layers"]
    (found,) = (one["digest"] for one in layers if one["annotations"]["org.opencontainers.image.title"] == name)
    assert isinstance(found, str)
    return found


def leftovers(out: Path) -> list[str]:
    """Files of an unfinished pull."""
    work = out.with_name(f".{out.name}.pulling")
    return [path.relative_to(work).as_posix() for path in work.rglob("*") if path.is_file() and path.name != "lock"]


def test_what_is_pushed_is_pulled_by_tag_and_by_digest(bundle: Path, empty: Registry, tmp_path: Path) -> None:
    pushed = d2sd("push", bundle, empty.reference())
    assert pushed.exit_code == 0, pushed.output
    data = empty.manifests["1"]
    assert pushed.stdout.strip() == empty.reference(f"@{digest_of(data)}")
    assert json.loads(data)["annotations"].items() >= {
        "org.opencontainers.image.title": "tiny", "d2sd.version": "0.1.0", "d2sd.policy": "auto",
        "d2sd.target": "llama, 29920 parameters",
    }.items()  # fmt: skip
    for out, reference in (("tag", empty.reference()), ("digest", pushed.stdout.strip())):
        pulled = d2sd("pull", reference, "--out", tmp_path / out)
        assert pulled.exit_code == 0, pulled.output
        assert pulled.stdout == pushed.stdout
        assert tree_bytes(tmp_path / out) == tree_bytes(bundle)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digest", "tag"]


def test_a_blob_that_is_there_is_not_sent(bundle: Path, registry: Registry) -> None:
    gone = layer(registry)
    del registry.blobs[gone]
    push(bundle, registry.reference(":2"))
    assert registry.sent() == ["PUT blobs/uploads/7"]
    assert digest_of(registry.blobs[gone]) == gone
    assert registry.manifests["2"] == registry.manifests["1"], "equal bundles have equal digests"


def test_a_damaged_bundle_is_not_sent(bundle: Path, empty: Registry, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    (copy / WEIGHTS).write_bytes(b"other")
    with pytest.raises(BundleError, match="changed"):
        push(copy, empty.reference())
    assert empty.log == []


def test_an_upload_that_fails_is_sent_again_from_its_start(bundle: Path, empty: Registry) -> None:
    empty.blobs[digest_of(b"{}")] = b"{}"
    empty.statuses["PUT blobs/uploads/7"] = [503, 429]
    counted: dict[str, int] = {}

    @contextmanager
    def count(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        counted[what] = -(total or 0)
        yield lambda more: counted.update({what: counted[what] + more})

    push(bundle, empty.reference(), progress=count)
    assert counted["pushing bundle"] == 0, "the bar ends at its total"
    empty.statuses["PUT manifests/1"] = [503] * 9
    with pytest.raises(RegistryError, match=r"503 Service Unavailable: because"):
        push(bundle, empty.reference())


def test_a_dropped_connection_is_continued(registry: Registry, bundle: Path, tmp_path: Path) -> None:
    registry.drops[layer(registry)] = [1000, 500]
    pull(registry.reference(), tmp_path / "out")
    assert tree_bytes(tmp_path / "out") == tree_bytes(bundle)
    asked = [line for line in registry.sent() if layer(registry) in line]
    assert [line.partition("bytes=")[2] for line in asked] == ["", "1000-", "1500-"]


def test_a_registry_without_ranges_sends_it_all_again(registry: Registry, bundle: Path, tmp_path: Path) -> None:
    registry.ranges, registry.drops[layer(registry)] = False, [1000]
    pull(registry.reference(), tmp_path / "out")
    assert tree_bytes(tmp_path / "out") == tree_bytes(bundle)


def test_a_pull_continues_where_the_last_one_stopped(registry: Registry, bundle: Path, tmp_path: Path) -> None:
    out, weights = tmp_path / "out", layer(registry)
    registry.drops[weights] = [1000, 500, 250]
    ended = d2sd("pull", registry.reference(), "-o", out)
    assert ended.exit_code == 2
    assert "connection to the registry failed" in ended.stderr
    assert not out.exists()
    assert f"partial/{weights.removeprefix('sha256:')}" in leftovers(out)
    before = len(registry.log)
    pull(registry.reference(), out)
    assert tree_bytes(out) == tree_bytes(bundle)
    again = [line for line in registry.log[before:] if line.startswith("GET blobs/")]
    assert again[0] == f"GET blobs/{weights} bytes=1750-"
    assert not {line.split()[1] for line in again} & {line.split()[1] for line in registry.sent()[: -len(again) - 3]}
    assert not out.with_name(".out.pulling").exists()


def test_the_files_of_an_older_bundle_are_reused(registry: Registry, bundle: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(bundle, tmp_path / "out"))
    registry.edit_bundle(lambda values: values["checks"].update(newer=True))
    pull(registry.reference(), out)
    assert registry.sent() == [f"GET blobs/{layer(registry, 'manifest.json')}"]
    assert json.loads((out / "manifest.json").read_text())["checks"] == {"newer": True}
    assert (tree_bytes(out).items() ^ tree_bytes(bundle).items()) == {
        ("manifest.json", (one / "manifest.json").read_bytes()) for one in (out, bundle)
    }


def test_what_is_not_a_bundle_is_not_overwritten(registry: Registry, bundle: Path, tmp_path: Path) -> None:
    other, mixed = tmp_path / "other", Path(shutil.copytree(bundle, tmp_path / "mixed"))
    other.mkdir()
    for path in (other / "mine.txt", mixed / "mine.txt"):
        path.write_text("mine")
        with pytest.raises(BuildError, match=r"exists and is not a bundle|does not list"):
            pull(registry.reference(), path.parent)
        assert path.read_text() == "mine"
    assert registry.log == []


def test_a_full_disk_is_an_error(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    ended = d2sd("pull", registry.reference(), "-o", tmp_path / "out")
    assert ended.exit_code == 2
    assert "The disk filled up" in ended.stderr
    assert not (tmp_path / "out").exists()
    registry.edit(lambda values: values["layers"][-1].update(size=1 << 60))
    monkeypatch.undo()
    with pytest.raises(BuildError, match="Not enough disk space"):
        pull(registry.reference(), tmp_path / "out")


@pytest.mark.parametrize("command", ["pull", "push"])
def test_an_interrupt_leaves_no_bundle(
    command: str, registry: Registry, empty: Registry, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: object, *arguments: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    monkeypatch.setattr(client.RegistryClient, "download" if command == "pull" else "upload", interrupt)
    arguments = [registry.reference(), "-o", out] if command == "pull" else [bundle, empty.reference()]
    assert d2sd(command, *arguments).exit_code == 130
    assert list(tmp_path.iterdir()) == []
    assert empty.manifests == {}


def test_two_pulls_of_one_output_do_not_mix(registry: Registry, tmp_path: Path) -> None:
    @contextmanager
    def second(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        with pytest.raises(BuildError, match="Another command"):
            pull(registry.reference(), tmp_path / "out")
        yield lambda count: None

    pull(registry.reference(), tmp_path / "out", progress=second)
    assert (tmp_path / "out" / "manifest.json").is_file()


def script(folder: Path, text: str) -> str:
    path = folder / "a hook.py"
    path.write_text(f"import sys, pathlib\n{text}\n")
    return f"{sys.executable} '{path}'"


def test_the_signature_is_made_before_the_tag(bundle: Path, empty: Registry, tmp_path: Path) -> None:
    failing = script(tmp_path, "sys.exit(3)")
    with pytest.raises(RegistryError, match=r"--sign-command failed(.|\n)*: 3"):
        push(bundle, empty.reference(), sign_command=failing)
    assert set(empty.manifests) == {digest_of(*set(empty.manifests.values()))}
    told = tmp_path / "told"
    pinned = push(
        bundle,
        empty.reference(),
        sign_command=script(tmp_path, f"pathlib.Path({str(told)!r}).write_text(sys.argv[-1])"),
    )
    assert told.read_text() == pinned
    assert "1" in empty.manifests


@pytest.mark.parametrize("command", [None, "/nowhere/cosign verify", "'unclosed", " "])
def test_nothing_is_fetched_without_the_signature(command: str | None, registry: Registry, tmp_path: Path) -> None:
    verify = command or script(
        tmp_path, f"sys.exit(sys.argv[-1] == {registry.reference('@' + digest_of(registry.manifests['1']))!r})"
    )
    with pytest.raises(RegistryError, match="--verify-command failed"):
        pull(registry.reference(), tmp_path / "out", verify_command=verify)
    assert registry.sent() == []
    assert not (tmp_path / "out").exists()
    pull(registry.reference(), tmp_path / "out", verify_command=script(tmp_path, "sys.exit(0)"))


def test_a_push_needs_a_tag_and_the_extra(bundle: Path, empty: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RegistryError, match="to a tag"):
        push(bundle, empty.reference(f"@sha256:{'0' * 64}"))
    monkeypatch.setattr("d2sd.extras.find_spec", lambda name: None)
    with pytest.raises(D2SDError, match=r"pip install 'httpx"):
        push(bundle, empty.reference())
