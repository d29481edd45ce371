"""Messages about missing packages name packages that an index has: d2sd itself is on none."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from d2sd.errors import D2SDError
from d2sd.extras import install_line, require

ROOT = Path(__file__).parents[2]
#: An argument `d2sd` or `d2sd[...]` of pip or uv; a path, an address and a wheel are none.
BY_NAME = re.compile(r"""install [^`\n]*?(?<![\w/.-])["']?d2sd(\[[\w,]+\])?["']?(?=[\s`,.;)]|$)(?! @)""", re.M)
WRITTEN = ("benchmarks", "convert", "d2sd", "deploy", "docs", "examples", "modeling", "plugins", "runtime", "train")
SUFFIXES = {".py", ".md", ".yaml", ".toml", ".sh", ".txt", ""}
DECLARED = [
    "numpy>=1.26",
    "triton>=3.7.1; platform_system == 'Linux' and extra == 'triton'",
    "winloop; platform_system == 'Windows' and extra == 'triton'",
    "llguidance<1.8,>=1.7; extra == 'structured'",
    "onnx>=1.20; extra == 'engines'",
    "tensorrt-rtx<1.8,>=1.7; extra == 'engines'",
]


def test_the_line_has_the_packages_of_the_extra_with_their_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d2sd.extras.requires", lambda name: DECLARED)
    assert install_line("triton") == "pip install 'triton>=3.7.1'"
    assert install_line("engines") == "pip install 'onnx>=1.20' 'tensorrt-rtx<1.8,>=1.7'"
    with pytest.raises(D2SDError, match=r"A thing needs not_there\.\n.*fix: pip install 'llguidance<1\.8,>=1\.7'"):
        require("structured", ("re", "not_there"), "A thing")


def test_a_clone_that_is_not_installed_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("d2sd.extras.requires", missing)
    assert install_line("fp8") == "pip install '.[fp8]' in a clone"


def test_no_file_installs_d2sd_from_an_index() -> None:
    """The owner of that name in the index would run code on the machines of those who paste the line."""
    written = [path for path in ROOT.iterdir() if path.is_file()]
    written += [path for folder in WRITTEN for path in (ROOT / folder).rglob("*") if path.is_file()]
    for path in written:
        if path.suffix in SUFFIXES:
            found = BY_NAME.search(path.read_text("utf-8"))
            assert not found, f"{path.relative_to(ROOT)}: {found.group()}"
